"""Responses that later requests refer to, in memory, bounded, each for its own key only."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from meshllm.request import Turn

MAX_RESPONSES = 1024
MAX_CHARS = 16 << 20  # of all texts together


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the chat that continues from it."""

    owner: str
    """The name of the key; empty where none is needed."""
    body: dict[str, Any]
    turns: tuple[Turn, ...]
    """Without instructions, which hold for one response only."""

    @property
    def chars(self) -> int:
        """The length of its texts."""
        return sum(len(turn["content"]) for turn in self.turns)


@dataclass(slots=True)
class ResponseStore:
    """Keeps the latest responses; the oldest ones make room."""

    _kept: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _chars: int = 0

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep a response; one that is too long is not kept."""
        if response.chars > MAX_CHARS:
            return
        self._kept[name] = response
        self._chars += response.chars
        while len(self._kept) > MAX_RESPONSES or self._chars > MAX_CHARS:
            _, oldest = self._kept.popitem(last=False)
            self._chars -= oldest.chars

    def get(self, name: str, owner: str) -> StoredResponse | None:
        """Return a response to its owner; None if there is none."""
        found = self._kept.get(name)
        return found if found and found.owner == owner else None

    def drop(self, name: str, owner: str) -> bool:
        """Forget a response of its owner; return whether there was one."""
        if self.get(name, owner) is None:
            return False
        self._chars -= self._kept.pop(name).chars
        return True
