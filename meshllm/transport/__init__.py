"""How bytes travel between two nodes; knows nothing about what they mean."""
