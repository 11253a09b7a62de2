"""Sessions: generations on the entry, stages behind it, in tensors."""
