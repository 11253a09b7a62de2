"""How bytes travel between two nodes."""
