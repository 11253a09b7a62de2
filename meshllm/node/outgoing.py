"""How rows leave for the next rank: as they are, in fewer bytes, or in 8 bits for each value.

Knows nothing about messages and tokens.

Theory of operation
-------------------
The sender chooses, link by link; who receives reads any of it. 8 bits change a text slightly, and a
session that had both could not be repeated, so what was chosen for its first rows holds for all of
it, however often it is begun again.

Rows that travel exact are packed where that is worth it: where the bytes that are saved would take
the link twice as long as packing and unpacking them takes two processors. That changes no value, so
it is asked of every message, at the rate that the link was known to have before rows of a prompt
last left. Where nobody knows the rate, as before the first of them, nothing is packed; nor is it
with ``plain``.

``auto`` chooses 8 bits where bytes are what a hop waits for: where the exact bytes, as they would
travel, take more than `SHARE` of it. A hop is the computing of this rank, one way to the next (half
a round trip) and the bytes at the rate of the link. That is asked of decode steps, which mostly
wait for the way, and of the chunks of a prompt, many rows that share one way; one of the two is
enough. What was computed and what it weighed is remembered of the last jobs on this rank; round
trip and rate are what the link knew last. Until all of that is known, as for the first session of a
ring, rows travel exact.

A mixture of experts is rounded by ``int8`` only: what is lost in rounding can be the choice of
another expert.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshllm.model.runner import mixes
from meshllm.model.skeleton import build
from meshllm.names import SessionId, WireMode
from meshllm.node.wire import sealed
from meshllm.protocol.blob import SessionKey, session_key
from meshllm.protocol.messages import Blob

SHARE = 0.2
"""Of a hop; where bytes take less, half of them saves less than a tenth of it, and less than a
twentieth where they would have been packed."""
MAX_CHOSEN = 1024  # sessions remembered; a ring has eight at a time

PACKED = 2 / 3
"""Of exact bytes, packed; of bfloat16, or a little less. Of float32 half as much is saved, which is
no loss; of float16 a quarter, which is one where packing only just pays."""
PACKING_S = 0.0003
"""For rows of any size, on both ends."""
PACKING_S_PER_BYTE = 8e-9
"""On both ends; measured on a processor of 2023."""

_KEEP = 7 / 8  # of what is known about jobs, when one more is


class Way(Protocol):
    """What is known of the link to the next rank."""

    @property
    def round_trip_us(self) -> int:
        """Smoothed round trip; 0 until it is measured."""

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link; None where nobody knows it."""


@dataclass(slots=True)
class _Jobs:
    """The last jobs of one kind; older ones fade."""

    count: float = 0.0
    compute_s: float = 0.0
    size: float = 0.0
    """Bytes of the rows, exact."""

    def add(self, compute_s: float, size: int) -> None:
        self.count = self.count * _KEEP + 1
        self.compute_s = self.compute_s * _KEEP + compute_s
        self.size = self.size * _KEEP + size

    def share(self, latency_s: float, bytes_per_s: float) -> float:
        """Return which part of their hops is bytes; 0 of no jobs."""
        if not self.count:
            return 0.0
        part = PACKED if pays(self.size / self.count, bytes_per_s) else 1.0
        bytes_s = part * self.size / bytes_per_s
        return bytes_s / (self.compute_s + self.count * latency_s + bytes_s)


def pays(size: float, bytes_per_s: float) -> bool:
    """Tell whether packing rows of so many bytes is worth it."""
    saved_s = (1 - PACKED) * size / bytes_per_s
    return saved_s > 2 * (PACKING_S + size * PACKING_S_PER_BYTE)


def settle(mode: WireMode, config: Any, dtype: torch.dtype) -> WireMode:
    """Return the mode for a model: ``auto`` rounds no mixture of experts."""
    if mode is WireMode.AUTO and mixes(build(config, dtype).model):
        return WireMode.EXACT
    return mode


@dataclass(frozen=True, slots=True)
class Lane:
    """How the rows of one session leave."""

    key: SessionKey
    is_int8: bool
    _outgoing: "Outgoing"

    def seal(self, hidden: Tensor, compute_us: int, *, is_step: bool) -> Blob:
        """Seal a hidden state ``[1, T, D]`` that took so many microseconds to compute.

        Raises:
            ModelError: it cannot travel so.
        """
        self._outgoing.note(compute_us, hidden.nbytes, is_step=is_step)
        packed = not self.is_int8 and self._outgoing.packs(hidden.nbytes)
        return sealed(self.key, hidden, int8=self.is_int8, packed=packed)


class Outgoing:
    """The way from this rank to the next, for all sessions."""

    def __init__(self, mode: WireMode, way: Way | None) -> None:
        """Send over ``way``; None is a rank that sends nothing."""
        self._mode = mode
        self._way = way
        self._steps = _Jobs()
        self._chunks = _Jobs()
        self._chosen: dict[SessionId, bool] = {}
        self._bytes_per_s: float | None = None

    def lane(self, session: SessionId) -> Lane:
        """Return the lane of a session, the same each time."""
        if session not in self._chosen:
            self._chosen[session] = self._choose()
            if len(self._chosen) > MAX_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
        return Lane(session_key(session), self._chosen[session], self)

    def note(self, compute_us: int, size: int, *, is_step: bool) -> None:
        """Remember what rows took, and their bytes when exact."""
        if self._mode is WireMode.AUTO:
            (self._steps if is_step else self._chunks).add(compute_us / 1e6, size)
        if not is_step and self._mode in (WireMode.AUTO, WireMode.EXACT):
            self._look()

    def packs(self, size: int) -> bool:
        """Tell whether so many bytes that are to travel exact are packed."""
        rate = self._bytes_per_s
        return rate is not None and pays(size, rate)

    def _choose(self) -> bool:
        if self._mode is not WireMode.AUTO:
            return self._mode is WireMode.INT8
        self._look()
        round_trip_us, rate = self._way.round_trip_us if self._way else 0, self._bytes_per_s
        if not round_trip_us or not rate:
            return False
        jobs = self._steps, self._chunks
        return any(each.share(round_trip_us / 2e6, rate) > SHARE for each in jobs)

    def _look(self) -> None:
        """Remember the rate of the link: a transport may know it only while rows are many."""
        if self._way:
            self._bytes_per_s = self._way.bytes_per_s or self._bytes_per_s
