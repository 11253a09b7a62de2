"""Links over WebSocket."""

from meshllm_websocket.transport import WebsocketTransport

__all__ = ["WebsocketTransport"]
