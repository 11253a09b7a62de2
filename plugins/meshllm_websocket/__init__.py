"""Links over WebSocket; knows nothing about who is at the other end."""

from meshllm_websocket.transport import WebsocketTransport

__all__ = ["WebsocketTransport"]
