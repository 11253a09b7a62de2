"""Agreement: all nodes choose the same plan from what they know."""
