"""Sessions on a ring: messages, links, entry and stages as pure machines."""
