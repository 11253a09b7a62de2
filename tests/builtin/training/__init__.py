"""The embedded demonstration model's corpus, and how to train it again."""
