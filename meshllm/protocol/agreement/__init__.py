"""Agreement: every node derives the same plan from the gossiped records."""

__all__ = [
    "advice",
    "agreement",
    "candidates",
    "grouping",
    "groups",
    "load_estimate",
    "takeover",
    "trial",
]
