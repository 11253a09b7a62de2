"""Text to tokens, and back."""
