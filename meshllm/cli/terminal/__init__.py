"""Terminal output: tables, colours, wrapped text."""
