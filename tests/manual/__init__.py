"""What is generated: man pages, completions and the table of the fields of the API."""
