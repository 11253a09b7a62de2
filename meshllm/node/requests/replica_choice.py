"""The choice between the rings that serve a model: replicas, or one.

Theory of operation
-------------------
Requests that begin alike go to the same ring, whose prefix cache has their beginning: rendezvous
hashing ranks the rings for each beginning, so that a ring that comes or goes moves only its share.
The first of them is chosen that has less than `MARGIN` requests of this node more in progress than
the least busy ring. A node counts its own requests only, which is exact where one node is the door,
and close where the doors are used alike.

The beginning of a chat is all up to its first question, so that its turns go to one ring even if
many chats have a system prompt in common, whose cache all rings have then.

The ring that failed last is avoided while there is another one, and so are those that failed more
often than others. A request that no ring has accepted yet is refused once each of them was asked.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from blake3 import blake3

from meshllm.errors import MeshError
from meshllm.names import NodeId
from meshllm.request import Request

MARGIN = 4  # requests; with 2, a third of the hits is lost, see `tests.bench.replicas`
BEGINNING_BYTES = 256  # of a prompt without turns, which may go on with an answer and more


@dataclass(slots=True)
class Tried:
    """The rings that failed to serve a request, and those that could."""

    failed: list[NodeId] = field(default_factory=list)
    """Entries, once for each failure, the last one at the end."""
    entries: Sequence[NodeId] = ()
    """Of the rings of the latest choice."""
    entry: NodeId | None = None
    """Of the ring that was asked last."""

    @property
    def has_other(self) -> bool:
        """Return whether a ring has not failed yet."""
        return not set(self.entries) <= set(self.failed)


class ReplicaChoice:
    """Chooses the entry for each request; counts the requests in progress of this node."""

    def __init__(self) -> None:
        self._active: Counter[NodeId] = Counter()

    def choose(self, entries: Sequence[NodeId], request: Request, tried: Tried) -> NodeId:
        """Return the entry of one of the rings; there is at least one."""
        tried.entries = entries
        others = [entry for entry in entries if entry not in tried.failed[-1:]] or entries
        failures = Counter(tried.failed)
        least = min(failures[entry] for entry in others)
        others = [entry for entry in others if failures[entry] == least]
        beginning = _beginning(request)
        ranked = sorted(others, key=lambda entry: blake3(beginning + entry).digest())
        most = min(self._active[entry] for entry in ranked) + MARGIN
        return next(entry for entry in ranked if self._active[entry] < most)

    @contextmanager
    def asking(self, entry: NodeId, tried: Tried) -> Iterator[None]:
        """Count a request in progress; note the entry if an error ends it."""
        self._active[entry] += 1
        tried.entry = entry
        try:
            yield
        except MeshError:
            tried.failed.append(entry)
            raise
        finally:
            self._active[entry] -= 1
            if not self._active[entry]:
                del self._active[entry]


def _beginning(request: Request) -> bytes:
    """Return a hash of what requests with a common prefix have in common."""
    if request.ids:
        text = " ".join(map(str, request.ids[: BEGINNING_BYTES // 4]))  # bytes of a token
    elif request.raw is not None:
        text = request.raw[:BEGINNING_BYTES]
    else:
        roles = [turn["role"] for turn in request.turns]
        first = roles.index("user") + 1 if "user" in roles else 1  # an answer may follow it
        text = "\n".join(turn["content"] for turn in request.turns[:first])
    return blake3(text.encode(errors="surrogatepass")).digest()
