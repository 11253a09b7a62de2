"""Plans: who holds which layers, how fast that is, and why."""
