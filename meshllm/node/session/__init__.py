"""Sessions of a ring: generation on the entry, layer spans on the stages, and their links."""
