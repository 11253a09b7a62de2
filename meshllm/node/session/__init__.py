"""Sessions of a ring: generation on the entry, layer spans on the stages, and their links."""

__all__ = ["activation_codec", "entry", "generation", "ring_link", "stage", "text", "wire"]
