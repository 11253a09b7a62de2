"""Logits that the last rank computes for the entry; knows nothing about tokens.

Theory of operation
-------------------
The last rank has the rows that the head is for, and nothing to do until the next step. So an entry
may ask it for its part of the logits, in the step itself, and compute only the others. Nothing
depends on it: the entry has all of the head. Where the answer is not there half as long after its
own part as that took, it computes the rest, too. Where that happens often, as on a slow link, or
nothing is gained, as where both share the same cores, it does not ask for a while.

Bits of another processor may be others. So the first answers of a ring are compared with what the
entry computes itself, and where one is not the same, or is no answer to the question, none is asked
for any more: text does not depend on who was sooner. From then on the last rank is believed, as it
is with its layers.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from math import prod
from queue import Empty, SimpleQueue
from statistics import median

import torch
from torch import Tensor

from meshllm.errors import IntegrityFault, PeerFault
from meshllm.model.runner import Runner
from meshllm.node.wire import opened
from meshllm.protocol.blob import SessionKey
from meshllm.protocol.messages import Blob, Logits

UNASKED = 8
"""Steps without a question before the first one, to learn what the head takes; the last count."""
PROOFS = 2
"""Answers that are compared before one counts."""
CREDIT, MISS, MOST_CREDIT = 8, 2, 8
"""Of a ring: at first, what help that gains nothing costs, and the most; other help earns 1.

The first answers are late: the last rank records how it computes them."""
REST, MOST_REST = 64, 1 << 14
"""Steps without a question when there is no credit left; twice as many each time, and at most."""

_PATIENCE = 0.5  # of the time that the entry's own part took
_LONGEST_S = 1.0  # that anybody waits, as after a suspended night

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Wish:
    """What was asked for with one step; heard of on the event loop, awaited by who computes."""

    gen: int
    pos: int
    is_heard: bool = False
    _answers: SimpleQueue[Blob] = field(default_factory=SimpleQueue[Blob])

    def hear(self, logits: Logits) -> None:
        """Take the answer to this question; only the first one counts."""
        if not self.is_heard and (logits.gen, logits.pos) == (self.gen, self.pos):
            self.is_heard = True
            self._answers.put(logits.blob)

    def take(self, seconds: float) -> Blob | None:
        """Wait for the answer."""
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            return None


class Helper:
    """What an entry knows of the last rank's help.

    It is asked on the event loop and used on the compute thread. Only a session that is alone asks;
    where one has just been given up beside it, a credit may be lost.
    """

    def __init__(self, theirs: Runner, ours: Runner) -> None:
        """Take the parts of the head: the last rank's, and the other one."""
        self._theirs, self._ours = theirs, ours
        self._count = 0
        """Outputs of theirs."""
        self._unasked = deque[float](maxlen=UNASKED)
        """Seconds that all of the head took."""
        self._whole_s = 0.0
        self._credit = CREDIT
        self._proofs = 0
        self._rest, self._next_rest = 0, REST
        self._differs = False

    def asks(self) -> bool:
        """Tell whether to ask in the next step."""
        if self._differs or len(self._unasked) < UNASKED:
            return False
        if self._credit <= 0:
            self._credit, self._rest = CREDIT, self._next_rest
            self._next_rest = min(2 * self._rest, MOST_REST)
        self._rest -= self._rest > 0
        return not self._rest

    def logits(self, row: Tensor, wish: Wish | None, key: SessionKey) -> Tensor:
        """Compute the logits [1, 1, V] of a row [1, 1, D]; runs on the compute thread."""
        begin = time.perf_counter()
        if wish:
            theirs, ours = self._helped(row, wish, key)
        else:
            theirs, ours = self._theirs.step(row, None), self._ours.step(row, None)
            self._unasked.append(time.perf_counter() - begin)
            self._whole_s = median(self._unasked)
        return torch.cat([theirs, ours], -1)

    def _helped(self, row: Tensor, wish: Wish, key: SessionKey) -> tuple[Tensor, Tensor]:
        begin = time.perf_counter()
        ours = self._ours.step(row, None)
        theirs: Tensor | None = None
        if self._proofs < PROOFS:
            theirs = self._theirs.step(row, None)
            self._count = theirs.shape[-1]
        answer = wish.take(min((time.perf_counter() - begin) * _PATIENCE, _LONGEST_S))
        has_gained = theirs is not None or time.perf_counter() - begin < self._whole_s
        is_help = answer is not None and has_gained
        self._credit = min(self._credit + 1, MOST_CREDIT) if is_help else self._credit - MISS
        if self._credit == MOST_CREDIT:
            self._next_rest = REST
        given = self._opened(key, answer, ours) if answer else None
        if theirs is None:
            return self._theirs.step(row, None) if given is None else given, ours
        if given is not None:
            self._proofs += 1
            if not torch.equal(given, theirs):
                self._end("its logits are not those of this node")
        return theirs, ours

    def _opened(self, key: SessionKey, blob: Blob, ours: Tensor) -> Tensor | None:
        """Check the logits [1, 1, V'] that came; None where they are none."""
        if prod(blob.shape) != self._count:
            self._end(f"{list(blob.shape)} logits; {self._count} were asked for")
            return None
        try:
            given = opened(key, blob)
        except (PeerFault, IntegrityFault) as fault:
            self._end(str(fault))
            return None
        if given.dtype != ours.dtype:
            self._end(f"its logits are {given.dtype}, not {ours.dtype}")
            return None
        return given.view(1, 1, -1)

    def _end(self, reason: str) -> None:
        self._differs = True
        logger.warning("the last rank is not asked for logits any more: %s", reason)
