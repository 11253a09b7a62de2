"""What goes to a terminal: tables, colours, wrapped text."""
