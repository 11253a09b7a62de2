"""Sessions on a ring: messages, links, entry and stages as pure state machines."""

__all__ = [
    "actions",
    "blob",
    "codec",
    "compression",
    "entry",
    "link",
    "messages",
    "pace",
    "speculation",
    "split_head",
    "stage",
    "waiting",
]
