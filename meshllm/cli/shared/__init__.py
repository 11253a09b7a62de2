"""What several commands share: options, the client of a node, answers."""
