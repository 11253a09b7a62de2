"""Parameters of which only some are in the gate."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def each_of(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Return the parameters of a test; the slow ones resemble others, and are not in the gate."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]
