"""LM head split over the vocabulary between the entry and the last rank.

Drives `protocol.split_head`: the event loop requests logits and waits for them, the compute thread
multiplies and compares. The compute thread never waits for the network.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshllm.errors import IntegrityFault, PeerFault
from meshllm.model.steps.runner import Runner
from meshllm.node.session.wire import opened
from meshllm.protocol.session.blob import SessionKey
from meshllm.protocol.session.messages import Blob, Logits
from meshllm.protocol.session.split_head import RECHECKED, SplitHead

logger = logging.getLogger(__name__)


class LogitsRequest:
    """Logits requested from the last rank with one step; used on the event loop."""

    def __init__(self, gen: int, pos: int) -> None:
        self.gen = gen
        self.pos = pos
        self._answer: Blob | None = None
        self._callback: Callable[[Blob], None] | None = None

    def receive(self, logits: Logits) -> None:
        """Take the answer to this request; only the first one counts."""
        if self._answer is None and (logits.gen, logits.pos) == (self.gen, self.pos):
            self._answer = logits.blob
            if self._callback:
                self._callback(self._answer)

    def set_callback(self, callback: Callable[[Blob], None]) -> None:
        """Call ``callback`` with the answer, at once if it is known."""
        self._callback = callback
        if self._answer is not None:
            callback(self._answer)


@dataclass(frozen=True, slots=True)
class PartialLogits:
    """Logits of one row that the entry has computed."""

    ours: Tensor  # [1, 1, V - V']
    theirs: Tensor | None  # [1, 1, V'], computed to verify the answer
    begin_s: float
    end_s: float
    """Start and end of that, by `time.perf_counter`."""


@dataclass(slots=True)
class SplitStep:
    """One row at the LM head, handed from the event loop to the compute thread and back."""

    request: LogitsRequest | None
    prove: bool
    """Compute all logits, to compare them with the answer."""
    part: PartialLogits | None = None
    answer: Blob | None = None
    whole_s: float | None = None
    """Time of the whole head, if no logits were requested."""
    is_proved: bool = False
    fault: str = ""
    """Why the feature must be disabled."""


class HeadParts:
    """The entry's LM head in two parts, of which the last rank may compute the first."""

    def __init__(self, theirs: Runner, ours: Runner, draw: Callable[[], float]) -> None:
        """Divide a head; ``draw`` returns a number from 0 to 1 that nobody can foresee."""
        self._draw = draw
        self.control = SplitHead()
        """Used on the event loop only."""
        self._theirs, self._ours = theirs, ours
        self._count = 0  # of their logits

    # On the event loop.

    def begin(self, request: LogitsRequest | None) -> SplitStep:
        """Prepare a step; ``request`` is None if no logits were requested."""
        return SplitStep(request, self.control.is_proving or self._draw() < RECHECKED)

    def wait(self, step: SplitStep, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` once, when the answer arrives or its time is up."""
        part, request = step.part, step.request
        if part is None or request is None:
            go_on()
            return

        def resume(answer: Blob | None) -> None:
            timer.cancel()
            request.set_callback(_ignore)
            step.answer = answer
            if answer is None:
                self.control.missed()
            else:
                self.control.answered(time.perf_counter() - part.begin_s)
            go_on()

        latest = part.end_s + self.control.patience(part.end_s - part.begin_s)
        left = max(0.0, latest - time.perf_counter())
        timer = asyncio.get_running_loop().call_later(left, resume, None)
        request.set_callback(resume)

    def learn(self, step: SplitStep) -> None:
        """Record the outcome of a step."""
        if step.whole_s is not None:
            self.control.unaided(step.whole_s)
        if step.is_proved:
            self.control.proved()
        if step.fault:
            self.control.disable()
            logger.warning("logits from the last rank disabled: %s", step.fault)

    # On the compute thread.

    def compute(self, row: Tensor, step: SplitStep) -> None:
        """Compute the entry's part for a row [1, 1, D]; the other too if it is to be verified."""
        begin = time.perf_counter()
        ours = self._ours.step(row, None)
        theirs = self._theirs.step(row, None) if step.prove else None
        step.part = PartialLogits(ours, theirs, begin, time.perf_counter())

    def finish(self, row: Tensor, step: SplitStep, key: SessionKey) -> Tensor:
        """Return the logits [1, 1, V] of a row; compute those that are missing or invalid."""
        if (part := step.part) is None:
            begin = time.perf_counter()
            theirs, ours = self._theirs.step(row, None), self._ours.step(row, None)
            self._count = theirs.shape[-1]
            step.whole_s = time.perf_counter() - begin
            return torch.cat([theirs, ours], -1)
        given = None if step.answer is None else self._opened(step, part.ours, key)
        own = part.theirs
        if own is not None and given is not None:
            step.is_proved = torch.equal(given, own)
            step.fault = "" if step.is_proved else "its logits differ from the entry's"
        elif own is None:
            own = self._theirs.step(row, None) if given is None else given
        return torch.cat([own, part.ours], -1)

    def _opened(self, step: SplitStep, ours: Tensor, key: SessionKey) -> Tensor | None:
        """Return the received logits [1, 1, V']; None if they are invalid."""
        blob = step.answer
        assert blob is not None  # checked by the caller
        if prod(blob.shape) != self._count:
            step.fault = f"its logits have the shape {list(blob.shape)}, expected {self._count}"
            return None
        try:
            given = opened(key, blob)
        except (PeerFault, IntegrityFault) as fault:
            step.fault = str(fault)
            return None
        if given.dtype != ours.dtype:
            step.fault = f"its logits are {given.dtype}, not {ours.dtype}"
            return None
        return given.view(1, 1, -1)


def _ignore(_: Blob) -> None:
    """Ignore an answer that came too late."""
