"""The result of a check of `meshllm doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""
    """How to fix it; empty if there is nothing to fix."""
