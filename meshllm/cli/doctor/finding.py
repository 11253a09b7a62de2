"""What a check of `meshllm doctor` tells; checks nothing itself."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""
    """What to do; empty when nothing need be done."""
