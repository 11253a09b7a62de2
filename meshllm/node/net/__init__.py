"""Links to other nodes: discovery, dialling, encryption."""
