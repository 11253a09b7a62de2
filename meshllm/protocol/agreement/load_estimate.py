"""How long a model that no ring serves yet may still take to load."""

from dataclasses import dataclass
from math import ceil

MIN_S, MAX_S = 1, 600  # of an estimate; a client asks at least every 10 minutes


@dataclass(frozen=True, slots=True)
class PastModelLoad:
    """A model that was loaded on request: from its first plan until a ring served it."""

    span_bytes: int
    """Weights of its largest span; more than 0."""
    seconds: float


def retry_s(
    waited_s: float, loading_s: float = 0.0, span_bytes: int = 0, last: PastModelLoad | None = None
) -> int:
    """Return after how many seconds a request for a model that was not served may be repeated.

    ``loading_s`` is for how long it has had a plan, and ``span_bytes`` are those of the largest
    span that is not loaded yet, 0 if unknown. They take as long as those of the last load. Without
    one, or if that time has passed, the wait is doubled.
    """
    expected_s = last.seconds * span_bytes / last.span_bytes if last else 0.0
    left_s = expected_s - loading_s if expected_s > loading_s else waited_s
    return ceil(min(max(left_s, MIN_S), MAX_S))
