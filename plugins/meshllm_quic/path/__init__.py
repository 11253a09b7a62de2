"""Ways to a peer: candidates, probes, and which one is taken."""
