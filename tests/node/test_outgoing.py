"""How rows leave: what `auto` is told, and that a session never changes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.cache import SpanCache
from meshllm.model.draft import Drafting
from meshllm.model.runner import Runner
from meshllm.model.source import Source, resolve
from meshllm.names import SessionId, WireMode
from meshllm.node.outgoing import MAX_CHOSEN, PACKED, SHARE, Outgoing, settle
from meshllm.node.ring import RingOptions, open_ring
from meshllm.protocol.link import MEASURE
from meshllm.protocol.messages import DType
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.counting import CountingTransport
from meshllm.testing.models import tiny_model
from meshllm.testing.oracle import Oracle
from meshllm.transport.contract import Channel, Transport
from meshllm_loopback import LoopbackTransport, Shape

MBIT = 1e6 / 8
ROW = 2048  # bytes of 1024 bfloat16 values
CHUNK = 256 * ROW


@dataclass
class Known:
    """What is known of a link."""

    round_trip_us: int = 20_000
    bytes_per_s: float | None = 10 * MBIT


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def chooses_int8(outgoing: Outgoing, number: int = 0) -> bool:
    return outgoing.lane(session(number)).is_int8


def worked(way: Known | None, *, step_s: float = 0.0, chunk_s: float = 0.0) -> Outgoing:
    """Return a rank behind a few jobs that took so long; 0 is no such job."""
    outgoing = Outgoing(WireMode.AUTO, way)
    for _ in range(3):
        if step_s:
            outgoing.note(round(step_s * 1e6), ROW, is_step=True)
        if chunk_s:
            outgoing.note(round(chunk_s * 1e6), CHUNK, is_step=False)
    return outgoing


@pytest.mark.parametrize(
    ("mode", "is_int8"), [(WireMode.EXACT, False), (WireMode.PLAIN, False), (WireMode.INT8, True)]
)
def test_what_was_asked_for_needs_no_knowledge(mode: WireMode, is_int8: bool) -> None:
    assert chooses_int8(Outgoing(mode, None)) is is_int8


@pytest.mark.parametrize(
    ("round_trip_s", "mbit", "step_s", "is_int8"),
    [
        (0.020, 10, 0.005, False),  # 1.6 ms of 16.6
        (0.001, 10, 0.005, True),  # 1.6 ms of 7.1
        (0.001, 10, 0.007, False),  # 1.6 ms of 9.1
        (0.020, 1, 0.020, True),  # 16 ms of 46
        (0.020, 100, 0.001, False),
    ],
)
def test_a_step_is_rounded_where_bytes_take_a_fifth_of_its_hop(
    round_trip_s: float, mbit: float, step_s: float, is_int8: bool
) -> None:
    way = Known(round(round_trip_s * 1e6), mbit * MBIT)

    assert chooses_int8(worked(way, step_s=step_s)) is is_int8


@pytest.mark.parametrize(
    ("mbit", "chunk_s", "is_int8"),
    [(10, 0.5, True), (10, 2.0, False), (100, 0.5, False), (100, 0.1, True), (1000, 0.1, False)],
)
def test_many_rows_that_share_a_way_are_asked_too(
    mbit: float, chunk_s: float, is_int8: bool
) -> None:
    outgoing = worked(Known(bytes_per_s=mbit * MBIT), step_s=0.05, chunk_s=chunk_s)

    assert chooses_int8(outgoing) is is_int8


def test_the_share_is_the_one_that_is_written_down() -> None:
    bytes_s = ROW / (10 * MBIT)
    hop_s = bytes_s / SHARE

    assert chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s - 2e-5))
    assert not chooses_int8(worked(Known(2, 10 * MBIT), step_s=hop_s - bytes_s + 2e-5))


@pytest.mark.parametrize(
    "way", [None, Known(round_trip_us=0), Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))]
)
def test_rows_are_exact_where_the_link_is_not_known(way: Known | None) -> None:
    assert not chooses_int8(worked(way, step_s=0.001, chunk_s=0.1))


def test_a_rate_that_was_known_while_rows_were_many_is_remembered() -> None:
    way = Known(bytes_per_s=None)
    outgoing = Outgoing(WireMode.AUTO, way)
    outgoing.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = 10 * MBIT
    outgoing.note(100_000, CHUNK, is_step=False)
    way.bytes_per_s = None

    assert chooses_int8(outgoing)


def test_the_first_session_is_exact_and_a_later_one_need_not_be() -> None:
    way = Known()
    outgoing = Outgoing(WireMode.AUTO, way)

    first = chooses_int8(outgoing, 1)
    outgoing.note(100_000, CHUNK, is_step=False)

    assert (first, chooses_int8(outgoing, 2)) == (False, True)


def test_a_session_travels_to_its_end_as_it_began() -> None:
    way = Known()
    outgoing = worked(way, chunk_s=0.1)
    slow = outgoing.lane(session(1)).is_int8
    way.bytes_per_s = 1000 * MBIT
    fast = outgoing.lane(session(2)).is_int8

    again = [outgoing.lane(session(number)).is_int8 for number in (1, 2)]

    assert (slow, fast) == (True, False)
    assert again == [True, False]


def test_old_sessions_are_forgotten() -> None:
    way = Known()
    outgoing = worked(way, chunk_s=0.1)
    for number in range(MAX_CHOSEN + 1):
        outgoing.lane(session(number))
    way.bytes_per_s = 1000 * MBIT

    assert chooses_int8(outgoing, 1)
    assert not chooses_int8(outgoing, 0)


def test_older_jobs_fade() -> None:
    outgoing = worked(Known(), chunk_s=2.0)
    for _ in range(20):
        outgoing.note(500_000, CHUNK, is_step=False)

    assert chooses_int8(outgoing)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (WireMode.EXACT, DType.BFLOAT16),
        (WireMode.PLAIN, DType.BFLOAT16),
        (WireMode.INT8, DType.BFLOAT16_INT8),
    ],
)
def test_a_lane_seals_as_it_was_chosen(mode: WireMode, dtype: DType) -> None:
    lane = Outgoing(mode, None).lane(session(1))

    assert lane.seal(torch.ones(1, 2, 64).bfloat16(), 5, is_step=True).dtype is dtype


def sent_as(outgoing: Outgoing, rows: int, *, is_step: bool = False) -> DType:
    return (
        outgoing.lane(session(1))
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
def test_exact_rows_are_packed_where_that_saves_twice_what_it_takes(
    mbit: float, rows: int, *, is_packed: bool
) -> None:
    outgoing = Outgoing(WireMode.EXACT, Known(bytes_per_s=mbit * MBIT))

    assert sent_as(outgoing, rows) is (DType.BFLOAT16_PACKED if is_packed else DType.BFLOAT16)


@pytest.mark.parametrize("way", [None, Known(bytes_per_s=None), Known(bytes_per_s=float("inf"))])
@pytest.mark.parametrize("mode", [WireMode.EXACT, WireMode.AUTO])
def test_nothing_is_packed_where_the_rate_is_not_known(mode: WireMode, way: Known | None) -> None:
    assert sent_as(Outgoing(mode, way), 256) is DType.BFLOAT16


@pytest.mark.parametrize("mode", [WireMode.PLAIN, WireMode.INT8])
def test_who_asks_for_plain_or_8_bits_gets_nothing_packed(mode: WireMode) -> None:
    outgoing = Outgoing(mode, Known(bytes_per_s=MBIT))

    assert sent_as(outgoing, 256) is not DType.BFLOAT16_PACKED


def test_steps_go_by_the_rate_at_which_a_prompt_left() -> None:
    way = Known(bytes_per_s=MBIT)
    outgoing = Outgoing(WireMode.EXACT, way)

    before = sent_as(outgoing, 1, is_step=True)
    sent_as(outgoing, 256)
    way.bytes_per_s = 1000 * MBIT
    behind = sent_as(outgoing, 1, is_step=True)

    assert (before, behind) == (DType.BFLOAT16, DType.BFLOAT16_PACKED)
    assert sent_as(outgoing, 256) is DType.BFLOAT16


def test_auto_packs_a_session_that_it_does_not_round() -> None:
    way = Known()
    outgoing = Outgoing(WireMode.AUTO, way)

    assert sent_as(outgoing, 256) is DType.BFLOAT16_PACKED
    assert not outgoing.lane(session(1)).is_int8


def test_auto_reckons_with_what_packed_rows_take() -> None:
    bytes_s = CHUNK / (10 * MBIT)
    plain_s, packed_s = (part * bytes_s * (1 / SHARE - 1) for part in (1, PACKED))

    assert not chooses_int8(worked(Known(2), chunk_s=(plain_s + packed_s) / 2))
    assert chooses_int8(worked(Known(2), chunk_s=packed_s * 0.99))


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3", WireMode.AUTO), ("qwen3_moe", WireMode.EXACT)]
)
def test_a_mixture_of_experts_is_rounded_by_nobody_but_its_user(
    tmp_path: Path, name: str, mode: WireMode
) -> None:
    config = tiny_model(tmp_path, name).config

    assert settle(WireMode.AUTO, config, torch.float32) is mode
    assert settle(WireMode.INT8, config, torch.float32) is WireMode.INT8
    assert settle(WireMode.EXACT, config, torch.float32) is WireMode.EXACT


PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


async def answer(
    source: Source,
    mode: WireMode = WireMode.INT8,
    prompt: Sequence[int] = PROMPT,
    *,
    transport: Transport | None = None,
    drafting: Drafting | None = None,
    chunk: int = 256,
) -> list[int]:
    options = RingOptions(nodes=3, threads=1, drafting=drafting, chunk=chunk, wire=mode)
    async with open_ring(source, options, transport or LoopbackTransport()) as ring:
        return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]


def data_of(transport: CountingTransport) -> list[int]:
    return [size for channel, size in transport.sent if channel is Channel.DATA]


@pytest.fixture(scope="module")
def text(source: Source) -> list[int]:
    """What a ring says in 8 bits."""
    return asyncio.run(answer(source))


def test_8_bits_give_the_same_text_each_time_on_any_link(source: Source, text: list[int]) -> None:
    shape = Shape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=3)

    assert run_virtual(answer(source, transport=LoopbackTransport(shape))) == text


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_8_bits_give_the_same_text_with_good_and_bad_guesses(
    source: Source, text: list[int], acceptance: float
) -> None:
    oracle = Oracle((*PROMPT, *text), acceptance)

    assert asyncio.run(answer(source, drafting=oracle)) == text


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_8_bits_give_the_same_text_in_chunks(llama: Path, chunk: int) -> None:
    source = resolve(str(llama))

    assert asyncio.run(answer(source, chunk=chunk)) == asyncio.run(answer(source))


async def test_8_bits_give_the_same_text_in_company(source: Source, text: list[int]) -> None:
    options = RingOptions(nodes=3, threads=1, wire=WireMode.INT8)
    async with open_ring(source, options) as ring:

        async def one(prompt: Sequence[int]) -> list[int]:
            return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]

        together = await asyncio.gather(one(PROMPT), one(PROMPT[1:]), one(PROMPT[2:]))

    assert together[0] == text


async def test_a_hop_costs_a_byte_per_value_and_two_per_block(source: Source) -> None:
    transport = CountingTransport(LoopbackTransport())
    width, head = source.config.hidden_size, 85

    await answer(source, transport=transport)

    row = width + 2 * -(-width // 32)
    assert set(data_of(transport)) == {head + row, head + len(PROMPT) * row}


def test_exact_rows_on_a_slow_link_are_the_same_text_in_fewer_bytes(source: Source) -> None:
    answers, weights = [], []
    for mode in (WireMode.EXACT, WireMode.PLAIN):
        transport = CountingTransport(LoopbackTransport(Shape(bytes_per_s=1000)))
        answers.append(run_virtual(answer(source, mode, transport=transport)))
        weights.append(data_of(transport))

    exact, plain = weights
    width = source.config.hidden_size
    assert answers[0] == answers[1] == asyncio.run(answer(source, WireMode.EXACT))
    assert len(exact) == len(plain)
    assert set(plain) == {85 + 2 * width, 85 + 2 * len(PROMPT) * width}
    assert sum(exact) < 0.95 * sum(plain)  # of tiny rows, each with codes of its own


@pytest.mark.parametrize("chunk", [1, 4])
def test_packed_rows_give_the_same_text_with_guesses_in_chunks_and_when_late(
    source: Source, chunk: int
) -> None:
    text = asyncio.run(answer(source, WireMode.PLAIN, chunk=chunk))
    link = Shape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=3, bytes_per_s=20_000)
    oracle = Oracle((*PROMPT, *text), 0.6)
    asked = answer(
        source, WireMode.EXACT, transport=LoopbackTransport(link), drafting=oracle, chunk=chunk
    )

    assert run_virtual(asked) == text


def test_auto_learns_what_a_slow_link_is_and_changes_no_session_under_way(source: Source) -> None:
    transport = CountingTransport(LoopbackTransport(Shape(bytes_per_s=1000)))
    options = RingOptions(nodes=3, threads=1, drafting=None, wire=WireMode.AUTO)

    async def both() -> tuple[list[int], list[int]]:
        async with open_ring(source, options, transport) as ring:
            _ = [token async for token in ring.tokens(PROMPT, Sampling(), TOKENS)]
            first = data_of(transport)
            assert asyncio.get_running_loop().time() > 2 * MEASURE  # all is known by now
            _ = [token async for token in ring.tokens(PROMPT[1:], Sampling(), TOKENS)]
            return first, data_of(transport)[len(first) :]

    first, second = run_virtual(both())

    width = source.config.hidden_size
    assert max(second[3:]) == min(second) == 85 + width + 2 * -(-width // 32) < min(first)


def test_a_mixture_in_a_ring_stays_exact(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3_moe")
    transport = CountingTransport(LoopbackTransport(Shape(bytes_per_s=1000)))
    options = RingOptions(nodes=2, threads=1, drafting=None, wire=WireMode.AUTO)

    async def answers() -> None:
        async with open_ring(source, options, transport) as ring:
            for start in (0, 1):
                _ = [token async for token in ring.tokens(PROMPT[start:], Sampling(), 4)]
                await asyncio.sleep(2 * MEASURE)

    run_virtual(answers())

    assert min(data_of(transport)) > 85 + 3 * source.config.hidden_size  # packed is exact


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
async def test_a_state_that_is_not_finite_ends_the_session_with_a_reason(
    source: Source, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Runner.prefill

    def broken(self: Runner, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        output = step(self, x, cache, rows)
        return output if self.shard.embed else torch.full_like(output, value)

    monkeypatch.setattr(Runner, "prefill", broken)

    with pytest.raises(ModelError, match=r"rank 1: .* not finite"):
        await answer(source)
