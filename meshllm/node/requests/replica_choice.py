"""The choice between the rings that serve a model: replicas, or one.

Theory of operation
-------------------
Requests that begin alike go to the same ring, whose prefix cache has their beginning: rendezvous
hashing ranks the rings for each beginning, so that a ring that comes or goes moves only its share.
If the first of them has `MARGIN` requests of this node more in progress than the second, the second
is chosen: the power of two choices. A node counts its own requests only, which is exact where one
node is the door, and close where the doors are used alike.

The ring that failed last is avoided while there is another one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blake3 import blake3

from meshllm.errors import MeshError
from meshllm.names import NodeId
from meshllm.request import Request

MARGIN = 2  # requests; a prefix is worth waiting for one that decodes beside it
BEGINNING_BYTES = 256  # of a prompt: a system prompt, or the first question of a conversation


class ReplicaChoice:
    """Chooses the entry for each request; counts the requests in progress of this node."""

    def __init__(self) -> None:
        self._active: Counter[NodeId] = Counter()

    def choose(
        self, entries: Sequence[NodeId], request: Request, failed: Sequence[NodeId] = ()
    ) -> NodeId:
        """Return the entry of one of the rings; there is at least one."""
        others = [entry for entry in entries if entry not in failed[-1:]]
        beginning = _beginning(request)
        ranked = sorted(others or entries, key=lambda entry: blake3(beginning + entry).digest())
        first, second = ranked[0], ranked[min(1, len(ranked) - 1)]
        return second if self._active[first] >= self._active[second] + MARGIN else first

    @contextmanager
    def asking(self, entry: NodeId, failed: list[NodeId]) -> Iterator[None]:
        """Count a request in progress; add the entry to ``failed`` if an error ends it."""
        self._active[entry] += 1
        try:
            yield
        except MeshError:
            failed.append(entry)
            raise
        finally:
            self._active[entry] -= 1
            if not self._active[entry]:
                del self._active[entry]


def _beginning(request: Request) -> bytes:
    """Return what requests with a common prefix have in common."""
    if request.ids:
        text = " ".join(map(str, request.ids[:BEGINNING_BYTES]))
    elif request.raw is not None:
        text = request.raw
    else:
        roles = [turn["role"] for turn in request.turns]
        first = roles.index("user") + 1 if "user" in roles else 1  # an answer may follow it
        text = "\n".join(turn["content"] for turn in request.turns[:first])
    return text[:BEGINNING_BYTES].encode(errors="surrogatepass")
