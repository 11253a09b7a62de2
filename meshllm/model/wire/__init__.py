"""Hidden states as bytes."""
