"""Logits that the last rank computes: never another text, and never a long wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshllm.model import head
from meshllm.model.draft import SuffixDrafting
from meshllm.model.runner import Runner
from meshllm.model.source import resolve
from meshllm.names import Digest, SessionId, WireMode
from meshllm.node import helper as module
from meshllm.node import stage
from meshllm.node.helper import CREDIT, MISS, PROOFS, REST, UNASKED, Helper, Wish
from meshllm.node.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.options import InferenceConfig
from meshllm.node.session import Order, Token
from meshllm.node.wire import sealed
from meshllm.protocol.blob import SessionKey, session_key
from meshllm.protocol.messages import Blob, Logits
from meshllm.protocol.plan import Ends
from meshllm.request import Sampling
from meshllm.testing.models import tiny_model

KEY = session_key(SessionId(bytes(16)))
ROW = torch.ones(1, 1, 4)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
TOKENS = 12


def logits_of(blob: Blob) -> Logits:
    return Logits(KEY.session, 1, 0, 0, blob)


class Part:
    """Gives the same logits for any row, and counts how often."""

    def __init__(self, *logits: float) -> None:
        self.given = torch.tensor([[logits]])
        self.calls = 0

    def step(self, _row: Tensor, _cache: None) -> Tensor:
        self.calls += 1
        return self.given


class Asking:
    """A helper for two tokens, beside an entry with three."""

    def __init__(self) -> None:
        self.theirs, self.ours = Part(1.0, 2.0), Part(3.0, 4.0, 5.0)
        self.helper = Helper(cast("Runner", self.theirs), cast("Runner", self.ours))
        for _ in range(UNASKED):
            assert not self.helper.asks()
            assert self.helper.logits(ROW, None, KEY).tolist() == [[[1.0, 2.0, 3.0, 4.0, 5.0]]]
        self.helper._whole_s = inf  # any answer gains time
        self.theirs.calls = 0

    def step(self, *answer: float) -> list[float]:
        """Compute the logits of a step, with an answer that has come if there is one."""
        wish = Wish(0, 0)
        if answer:
            wish.hear(logits_of(sealed(KEY, torch.tensor([[answer]]))))
        logits: list[float] = self.helper.logits(ROW, wish, KEY)[0, 0].tolist()
        return logits

    def prove(self) -> None:
        for _ in range(PROOFS):
            assert self.step(1.0, 2.0) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_proven_is_not_computed_again() -> None:
    asking = Asking()
    asking.prove()
    assert asking.theirs.calls == PROOFS

    assert asking.step(1.0, 2.0) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert asking.theirs.calls == PROOFS
    assert asking.helper.asks()


@pytest.mark.parametrize("proofs", range(PROOFS))
def test_other_bits_count_for_nothing_and_end_the_asking(proofs: int) -> None:
    asking = Asking()
    for _ in range(proofs):
        asking.step(1.0, 2.0)

    assert asking.step(1.0, 2.5) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert not any(asking.helper.asks() for _ in range(2 * REST))


def test_an_answer_that_is_late_is_done_without() -> None:
    asking = Asking()
    asking.prove()

    assert asking.step() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert asking.theirs.calls == PROOFS + 1


def test_who_is_late_too_often_is_asked_again_after_a_while() -> None:
    asking = Asking()
    for _ in range(-(-CREDIT // MISS)):
        assert asking.helper.asks()
        asking.step()

    assert [asking.helper.asks() for _ in range(REST)] == [False] * (REST - 1) + [True]


def test_answers_in_time_make_up_for_one_that_is_late() -> None:
    asking = Asking()
    for number in range(4 * REST):
        assert asking.helper.asks()
        asking.step(*(() if number % (MISS + 1) == MISS else (1.0, 2.0)))


def test_who_is_in_time_and_gains_nothing_is_asked_again_after_a_while() -> None:
    asking = Asking()
    asking.prove()
    asking.helper._whole_s = 0.0
    while asking.helper.asks():
        assert asking.step(1.0, 2.0) == [1.0, 2.0, 3.0, 4.0, 5.0]

    assert asking.theirs.calls == PROOFS
    assert [asking.helper.asks() for _ in range(REST - 1)] == [False] * (REST - 2) + [True]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sealed(KEY, torch.ones(1, 1, 1)), "2 were asked for"),
        (sealed(KEY, torch.ones(1, 1, 3)), "2 were asked for"),
        (sealed(KEY, torch.ones(1, 1, 2, dtype=torch.bfloat16)), "bfloat16"),
        (sealed(session_key(SessionId(bytes(range(16)))), torch.ones(1, 1, 2)), "hash"),
    ],
    ids=["too few", "too many", "another dtype", "changed on the way"],
)
@pytest.mark.parametrize("is_proven", [False, True])
def test_what_is_no_answer_ends_the_asking_and_nothing_else(
    answer: Blob, words: str, is_proven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asking = Asking()
    if is_proven:
        asking.prove()
    wish = Wish(0, 0)
    wish.hear(logits_of(answer))

    given = asking.helper.logits(ROW, wish, KEY)

    assert given.tolist() == [[[1.0, 2.0, 3.0, 4.0, 5.0]]]
    assert not asking.helper.asks()
    assert words in caplog.text


@pytest.mark.parametrize("place", [(1, 0), (0, 1)], ids=["generation", "position"])
def test_an_answer_to_another_question_is_not_heard(place: tuple[int, int]) -> None:
    wish = Wish(*place)
    wish.hear(logits_of(sealed(KEY, ROW)))

    assert wish.take(0.0) is None


def test_only_the_first_answer_counts() -> None:
    wish = Wish(0, 0)
    for value in (1.0, 2.0):
        wish.hear(logits_of(sealed(KEY, torch.tensor([value]))))

    first = wish.take(0.0)
    assert first is not None
    assert first.payload == sealed(KEY, torch.tensor([1.0])).payload
    assert wish.take(0.0) is None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the head of a tiny model, and wait for answers as if it took long."""
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(module, "_PATIENCE", 1e6)
    monkeypatch.setattr(module, "_LONGEST_S", 60.0)
    monkeypatch.setattr(module, "UNASKED", 1)
    monkeypatch.setattr(module, "median", lambda _: inf)  # any answer gains time


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of bfloat16 are computed together, those of float32 one row at a time."""
    return tiny_model(tmp_path_factory.mktemp("help"), dtype=request.param).folder


@asynccontextmanager
async def ring_of(folder: Path, nodes: int = 2, **options: Any) -> AsyncIterator[LocalRing]:
    own_threads = options.pop("own_threads", True)
    ends = options.pop("ends", Ends.ENTRY)
    config = InferenceConfig(threads=1, **options)
    chosen = RingOptions(nodes, ends=ends, own_threads=own_threads, inference=config)
    async with open_local_ring(resolve(str(folder)), chosen) as ring:
        yield ring


async def ask(
    ring: LocalRing, temperature: float = 0.0, prompt: Sequence[int] = PROMPT
) -> list[int]:
    sampling = Sampling(temperature=temperature, seed=1)
    order = Order(tuple(prompt), sampling, TOKENS, is_last=lambda _: False)
    return [o.id async for o in ring.entry.generate(order) if isinstance(o, Token)]


async def plain(folder: Path, temperature: float = 0.0) -> list[int]:
    async with ring_of(folder, 1) as ring:
        return await ask(ring, temperature)


def helper_of(ring: LocalRing) -> Helper:
    helper = ring.entry._helper
    assert helper is not None
    return helper


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guesses"])
async def test_help_changes_no_text(
    tiny: Path, nodes: int, temperature: float, guesses: bool
) -> None:
    async with ring_of(tiny, nodes, drafting=SuffixDrafting() if guesses else None) as ring:
        texts = [await ask(ring, temperature) for _ in range(3)]

        assert texts == [await plain(tiny, temperature)] * 3
        assert guesses or helper_of(ring)._proofs == PROOFS


@pytest.mark.usefixtures("patient")
async def test_the_last_rank_computes_what_it_was_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_of(tiny, drafting=None) as ring:
        await ask(ring)
        part, rows = helper_of(ring)._theirs, list[Tensor]()
        stock = part.step

        def step(row: Tensor, cache: None) -> Tensor:
            rows.append(row)
            return stock(row, cache)

        monkeypatch.setattr(part, "step", step)

        assert await ask(ring) == await plain(tiny)
        assert len(rows) == 1  # of the prompt, which asks for nothing


@pytest.mark.usefixtures("patient")
async def test_rows_that_are_rounded_on_their_way_have_the_same_logits(tiny: Path) -> None:
    async with ring_of(tiny, drafting=None, wire=WireMode.INT8) as ring:
        first, second = await ask(ring), await ask(ring)
        helper = helper_of(ring)

        assert (helper._proofs, helper._differs) == (PROOFS, False)
        assert first == second

    async with ring_of(tiny, own_threads=False, drafting=None, wire=WireMode.INT8) as ring:
        assert await ask(ring) == first


@pytest.mark.usefixtures("patient")
async def test_sessions_at_once_ask_for_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_of(tiny, drafting=None) as ring:
        helper, asked = helper_of(ring), list[int]()
        stock = helper.asks

        def asks() -> bool:
            asked.append(ring.entry.sessions)
            return stock()

        monkeypatch.setattr(helper, "asks", asks)
        texts = await asyncio.gather(*(ask(ring) for _ in range(3)))

        assert texts == [await plain(tiny)] * 3
        assert set(asked) <= {1}  # the last one of them, when the others are through


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["fails", "differs", "is late"])
async def test_bad_help_changes_no_text(
    tiny: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind != "differs":
        monkeypatch.setattr(module, "_PATIENCE", 0.0)
    async with ring_of(tiny, drafting=None) as ring:
        part = ring.stages[-1]._head
        assert part is not None
        stock = part.step

        def step(rows: Tensor, cache: None) -> Tensor:
            if kind == "fails":
                raise RuntimeError("no memory")
            if kind == "is late":
                time.sleep(0.02)  # on the compute thread
            return stock(rows, cache) + (kind == "differs")

        monkeypatch.setattr(part, "step", step)

        assert [await ask(ring) for _ in range(2)] == [await plain(tiny)] * 2
        assert helper_of(ring)._differs is (kind == "differs")
        assert (helper_of(ring)._rest > 0) is (kind != "differs")
        assert ("no logits for the entry: no memory" in caplog.text) is (kind == "fails")


@pytest.mark.usefixtures("patient")
async def test_logits_that_were_changed_on_their_way_change_no_text(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(key: SessionKey, hidden: Tensor) -> Blob:
        return replace(sealed(key, hidden), digest=Digest(bytes(32)))

    monkeypatch.setattr(stage, "sealed", changed)
    async with ring_of(tiny, drafting=None) as ring:
        assert await ask(ring) == await plain(tiny)
        assert helper_of(ring)._differs


@pytest.mark.usefixtures("patient")
async def test_who_has_no_part_of_the_head_is_asked_in_vain(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    async with ring_of(tiny, drafting=None) as ring:
        ring.stages[-1]._head = None

        assert [await ask(ring) for _ in range(2)] == [await plain(tiny)] * 2
        assert helper_of(ring)._rest


async def test_a_small_head_stays_whole(tiny: Path) -> None:
    async with ring_of(tiny) as ring:
        assert ring.entry._helper is None


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "options", [{"own_threads": False}, {"exact": True}, {"nodes": 1}, {"ends": Ends.CLIENT}]
)
async def test_who_could_not_gain_by_it_asks_for_nothing(
    tiny: Path, options: dict[str, Any]
) -> None:
    async with ring_of(tiny, **options) as ring:
        assert ring.entry._helper is None
