"""Transport over WebSocket (RFC 6455)."""

from meshllm_websocket.transport import WebsocketTransport

__all__ = ["WebsocketTransport"]
