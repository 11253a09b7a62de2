"""Sessions on a ring: messages, links, entry and stages as pure state machines."""
