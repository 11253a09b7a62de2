"""One request of the mesh behind every dialect: its fields, limits, tools, and its reply."""
