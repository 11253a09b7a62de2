"""What an attack is, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attack achieved."""

    effect: str
    bound: str
    """The limit that stops it."""
    held: bool
    """Whether the effect is within the bound."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack on real nodes."""

    name: str
    before: str
    """What it achieved before there was a bound."""
    run: Callable[[], Outcome]
