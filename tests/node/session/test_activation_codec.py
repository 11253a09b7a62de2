"""Encoding of hidden states: the mode of a session, and packing on slow links."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from meshllm.names import SessionId, WireMode
from meshllm.node.session.activation_codec import ActivationEncoder, resolve_wire_mode
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.handshake import ALL_FEATURES, Features
from meshllm.testing.models import tiny_model

MBIT = 1e6 / 8
ROW = 2048  # bytes of 1024 bfloat16 values
CHUNK = 256 * ROW


@dataclass
class Known:
    """Properties of a link."""

    round_trip_us: int = 20_000
    bytes_per_s: float | None = 10 * MBIT
    features: Features = ALL_FEATURES


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (WireMode.EXACT, DType.BFLOAT16),
        (WireMode.PLAIN, DType.BFLOAT16),
        (WireMode.INT8, DType.BFLOAT16_INT8),
    ],
)
def test_rows_are_sealed_in_the_chosen_mode(mode: WireMode, dtype: DType) -> None:
    encoder = ActivationEncoder(mode, None).for_session(session(1))

    assert encoder.seal(torch.ones(1, 2, 64).bfloat16(), 5, is_step=True).dtype is dtype


class Counted(Known):
    """A link that counts how often its rate is read."""

    reads = 0

    def __getattribute__(self, name: str) -> object:
        if name == "bytes_per_s":
            Counted.reads += 1
        return super().__getattribute__(name)


def test_a_step_does_not_read_the_rate_of_the_link() -> None:
    encoder = ActivationEncoder(WireMode.EXACT, Counted()).for_session(session(1))
    before = Counted.reads

    encoder.seal(torch.ones(1, 1, 64).bfloat16(), 5, is_step=True)
    assert Counted.reads == before

    encoder.seal(torch.ones(1, 2, 64).bfloat16(), 5, is_step=False)
    assert Counted.reads > before


def sent_as(encoder: ActivationEncoder, rows: int, *, is_step: bool = False) -> DType:
    return (
        encoder.for_session(session(1))
        .seal(torch.ones(1, rows, 1024).bfloat16(), 5, is_step=is_step)
        .dtype
    )


@pytest.mark.parametrize(
    ("mbit", "rows", "is_packed"),
    [
        (1000, 256, False),
        (200, 256, False),  # 7.0 ms saved for 4.5 ms of work
        (100, 256, True),  # 14 ms
        (100, 1, False),
        (10, 1, False),  # 0.55 ms saved for 0.32 ms of work
        (10, 4, True),
        (5, 1, True),
    ],
)
def test_exact_rows_are_packed_if_that_saves_twice_its_cost(
    mbit: float, rows: int, *, is_packed: bool
) -> None:
    encoder = ActivationEncoder(WireMode.EXACT, Known(bytes_per_s=mbit * MBIT))

    assert sent_as(encoder, rows) is (DType.BFLOAT16_PACKED if is_packed else DType.BFLOAT16)


@pytest.mark.parametrize("link", [None, Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))])
@pytest.mark.parametrize("mode", [WireMode.EXACT, WireMode.AUTO])
def test_nothing_is_packed_at_an_unknown_rate(mode: WireMode, link: Known | None) -> None:
    assert sent_as(ActivationEncoder(mode, link), 256) is DType.BFLOAT16


@pytest.mark.parametrize("mode", [WireMode.PLAIN, WireMode.INT8])
def test_plain_and_int8_modes_pack_nothing(mode: WireMode) -> None:
    encoder = ActivationEncoder(mode, Known(bytes_per_s=MBIT))

    assert sent_as(encoder, 256) is not DType.BFLOAT16_PACKED


@pytest.mark.parametrize("mode", [WireMode.EXACT, WireMode.INT8])
def test_rows_go_plain_to_a_rank_without_features(mode: WireMode) -> None:
    supported = ActivationEncoder(mode, Known(bytes_per_s=MBIT))
    unsupported = ActivationEncoder(mode, Known(bytes_per_s=MBIT, features=Features(0)))

    assert sent_as(supported, 256) in {DType.BFLOAT16_PACKED, DType.BFLOAT16_INT8}
    assert sent_as(unsupported, 256) is DType.BFLOAT16


def test_decode_steps_use_the_rate_of_the_last_prefill() -> None:
    link = Known(bytes_per_s=MBIT)
    encoder = ActivationEncoder(WireMode.EXACT, link)

    before = sent_as(encoder, 1, is_step=True)
    sent_as(encoder, 256)
    link.bytes_per_s = 1000 * MBIT
    behind = sent_as(encoder, 1, is_step=True)

    assert (before, behind) == (DType.BFLOAT16, DType.BFLOAT16_PACKED)
    assert sent_as(encoder, 256) is DType.BFLOAT16


def test_auto_packs_a_session_that_it_does_not_round() -> None:
    link = Known()
    encoder = ActivationEncoder(WireMode.AUTO, link)

    assert sent_as(encoder, 256) is DType.BFLOAT16_PACKED
    assert not encoder.for_session(session(1)).is_int8


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3", WireMode.AUTO), ("qwen3_moe", WireMode.EXACT)]
)
def test_auto_is_exact_for_a_mixture_of_experts(tmp_path: Path, name: str, mode: WireMode) -> None:
    config = tiny_model(tmp_path, name).config

    assert resolve_wire_mode(WireMode.AUTO, config, torch.float32) is mode
    assert resolve_wire_mode(WireMode.INT8, config, torch.float32) is WireMode.INT8
    assert resolve_wire_mode(WireMode.EXACT, config, torch.float32) is WireMode.EXACT
