"""Responses that later requests refer to, in memory, bounded, each for its own key only."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from sys import getsizeof

from meshllm.node.requests.held_bytes import size_of_turns
from meshllm.request import Turn

MAX_RESPONSES = 1024
MAX_BYTES = 32 << 20  # of memory, of all of them


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the chat that continues from it."""

    owner: str
    """The name of the key; empty where none is needed."""
    body: bytes
    turns: tuple[Turn, ...]
    """Without instructions, which hold for one response only."""
    items: Mapping[str, tuple[Turn, ...]] = field(default_factory=dict)
    """The turns of each item of its output, by its id."""

    @property
    def size(self) -> int:
        """Its bytes of memory; what it shares with other responses counts for each."""
        turns = chain(self.turns, *self.items.values())
        return getsizeof(self.body) + size_of_turns(turns)


@dataclass(slots=True)
class ResponseStore:
    """Keeps the latest responses; the oldest one of the key that has most makes room."""

    _kept: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _of_items: dict[str, str] = field(default_factory=dict)  # the response of each item
    _bytes: Counter[str] = field(default_factory=Counter)  # by key, as the next one
    _counts: Counter[str] = field(default_factory=Counter)

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep a response; one that is too large is not kept."""
        if response.size > MAX_BYTES:
            return
        self._kept[name] = response
        self._of_items.update(dict.fromkeys(response.items, name))
        self._bytes[response.owner] += response.size
        self._counts[response.owner] += 1
        while (is_large := self._bytes.total() > MAX_BYTES) or len(self._kept) > MAX_RESPONSES:
            ((most, _),) = (self._bytes if is_large else self._counts).most_common(1)
            self._forget(next(name for name, each in self._kept.items() if each.owner == most))

    def get(self, name: str, owner: str) -> StoredResponse | None:
        """Return a response to its owner; None if there is none."""
        found = self._kept.get(name)
        return found if found and found.owner == owner else None

    def item(self, name: str, owner: str) -> tuple[Turn, ...] | None:
        """Return the turns of an item of the output of a response; None if there is none."""
        found = self.get(self._of_items.get(name, ""), owner)
        return found.items[name] if found else None

    def drop(self, name: str, owner: str) -> bool:
        """Forget a response of its owner; return whether there was one."""
        if self.get(name, owner) is None:
            return False
        self._forget(name)
        return True

    def _forget(self, name: str) -> None:
        response = self._kept.pop(name)
        self._bytes[response.owner] -= response.size
        self._counts[response.owner] -= 1
        for item in response.items:
            self._of_items.pop(item, None)
