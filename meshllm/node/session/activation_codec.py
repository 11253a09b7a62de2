"""Encodes hidden states for the next rank: exact, packed or int8; drives `protocol.compression`."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshllm.model.split.meta_model import build
from meshllm.model.steps.execution import mixes
from meshllm.names import SessionId, WireMode
from meshllm.node.session.wire import sealed
from meshllm.protocol.session.blob import SessionKey, session_key
from meshllm.protocol.session.compression import Compression
from meshllm.protocol.session.messages import Blob
from meshllm.protocol.trust.handshake import Features


class NextLink(Protocol):
    """Properties of the link to the next rank."""

    @property
    def round_trip_us(self) -> int:
        """Smoothed round trip; 0 until it is measured."""

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the link; None if unknown."""

    @property
    def features(self) -> Features:
        """Features that the next rank supports."""


def resolve_wire_mode(mode: WireMode, config: Any, dtype: torch.dtype) -> WireMode:
    """Return the wire mode for a model: ``auto`` means exact for a mixture of experts.

    A rounding error could change which experts are chosen.
    """
    if mode is WireMode.AUTO and mixes(build(config, dtype).model):
        return WireMode.EXACT
    return mode


@dataclass(frozen=True, slots=True)
class SessionEncoder:
    """Encodes the hidden states of one session."""

    key: SessionKey
    is_int8: bool
    _encoder: "ActivationEncoder"

    def seal(self, hidden: Tensor, compute_us: int, *, is_step: bool) -> Blob:
        """Seal a hidden state ``[1, T, D]`` that took ``compute_us`` to compute.

        Raises:
            ModelError: it cannot be encoded.
        """
        packed = self._encoder.packs(hidden.nbytes, compute_us, is_step=is_step)
        return sealed(self.key, hidden, int8=self.is_int8, packed=packed and not self.is_int8)


class ActivationEncoder:
    """Encodes hidden states for the next rank, for all sessions."""

    def __init__(self, mode: WireMode, link: NextLink | None) -> None:
        """Encode for ``link``; None if this rank sends nothing."""
        self._link = link
        self._compression = Compression(mode)

    def for_session(self, session: SessionId) -> SessionEncoder:
        """Return the encoder of a session, with the same mode each time."""
        round_trip_us = self._link.round_trip_us if self._link else 0
        is_int8 = self._compression.is_int8(session, round_trip_us, self._rate)
        return SessionEncoder(session_key(session), is_int8 and self._supports(Features.INT8), self)

    def packs(self, size: int, compute_us: int, *, is_step: bool) -> bool:
        """Record the compute time of rows; return whether their ``size`` bytes are packed."""
        rate = None if is_step else self._rate  # of no use for a step, and many calls
        self._compression.note(compute_us, size, rate, is_step=is_step)
        return self._compression.packs(size) and self._supports(Features.PACKED)

    @property
    def _rate(self) -> float | None:
        return self._link.bytes_per_s if self._link else None

    def _supports(self, feature: Features) -> bool:
        return self._link is None or bool(self._link.features & feature)
