"""Pure decisions of the ring: no I/O, no clock, no randomness, no tensors."""

__all__ = ["binary"]
