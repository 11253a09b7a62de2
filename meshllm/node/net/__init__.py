"""Links to other nodes: found, dialled, encrypted."""
