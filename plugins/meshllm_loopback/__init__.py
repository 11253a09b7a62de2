"""In-process transport, for tests and for rings within one process."""

from meshllm_loopback.shaper import TrafficShape
from meshllm_loopback.transport import LoopbackTransport

__all__ = ["LoopbackTransport", "TrafficShape"]
