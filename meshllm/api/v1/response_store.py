"""Responses that later requests refer to, in memory, bounded, each for its own key only."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshllm.request import Turn

MAX_RESPONSES = 1024
MAX_BYTES = 16 << 20  # of all of them
TURN_BYTES = 256  # of a turn or a call besides its text, about


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
        """Its bytes, about; texts that it shares with other responses count for each."""
        texts = [turn["content"] for turn in self.turns]
        texts += [call.arguments for turn in self.turns for call in turn.get("tool_calls", ())]
        return len(self.body) + sum(map(len, texts)) + TURN_BYTES * len(texts)


@dataclass(slots=True)
class ResponseStore:
    """Keeps the latest responses; the oldest ones make room."""

    _kept: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep a response; one that is too large is not kept."""
        if response.size > MAX_BYTES:
            return
        self._kept[name] = response
        self._bytes += response.size
        while len(self._kept) > MAX_RESPONSES or self._bytes > MAX_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, name: str, owner: str) -> StoredResponse | None:
        """Return a response to its owner; None if there is none."""
        found = self._kept.get(name)
        return found if found and found.owner == owner else None

    def item(self, name: str, owner: str) -> tuple[Turn, ...] | None:
        """Return the turns of an item of the output of a response; None if there is none."""
        alike = (each.items.get(name) for each in self._kept.values() if each.owner == owner)
        return next((turns for turns in alike if turns is not None), None)

    def drop(self, name: str, owner: str) -> bool:
        """Forget a response of its owner; return whether there was one."""
        if self.get(name, owner) is None:
            return False
        self._bytes -= self._kept.pop(name).size
        return True
