"""Logits from the last rank never change the text, and never cost a long wait."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshllm.model.files.source import resolve
from meshllm.model.steps import lm_head as head
from meshllm.model.steps.runner import Runner
from meshllm.names import Digest, SessionId, WireMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session import stage
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.node.session.split_head import HeadParts, LogitsRequest, SplitStep
from meshllm.node.session.wire import sealed
from meshllm.protocol.planning.plan import Ends
from meshllm.protocol.session import split_head as control
from meshllm.protocol.session.blob import SessionKey, session_key
from meshllm.protocol.session.messages import Blob, Logits
from meshllm.protocol.session.split_head import PROOFS, RECHECKED, UNASKED
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
    """A split head: two outputs of the last rank, three of the entry."""

    def __init__(self) -> None:
        self.theirs, self.ours = Part(1.0, 2.0), Part(3.0, 4.0, 5.0)
        self.drawn = 1.0
        runners = cast("Runner", self.theirs), cast("Runner", self.ours)
        self.head = HeadParts(*runners, lambda: self.drawn)
        for _ in range(UNASKED):
            step = self.head.begin(None)
            assert self.head.finish(ROW, step, KEY).tolist() == WHOLE
            self.head.learn(step)
        self.theirs.calls = 0

    async def step(self, answer: Blob | None = None) -> list[Any]:
        """Compute the logits of a step; the answer, if any, has arrived."""
        request = LogitsRequest(0, 0)
        step = self.head.begin(request)
        self.head.compute(ROW, step)
        if answer:
            request.receive(logits_of(answer))
        done = asyncio.Event()
        self.head.wait(step, done.set)
        await done.wait()
        logits: list[Any] = self.head.finish(ROW, step, KEY).tolist()
        self.head.learn(step)
        return logits

    async def prove(self) -> None:
        for _ in range(PROOFS):
            assert await self.step(RIGHT) == WHOLE


WHOLE = [[[1.0, 2.0, 3.0, 4.0, 5.0]]]
RIGHT = sealed(KEY, torch.tensor([[[1.0, 2.0]]]))


async def test_what_is_proven_is_not_computed_again() -> None:
    asking = Asking()
    await asking.prove()
    assert asking.theirs.calls == PROOFS

    assert await asking.step(RIGHT) == WHOLE
    assert asking.theirs.calls == PROOFS
    assert not asking.head.control.is_disabled


async def test_answers_are_verified_at_random_after_the_proofs() -> None:
    asking, wrong = Asking(), sealed(KEY, torch.tensor([[[1.0, 2.5]]]))
    await asking.prove()
    asking.drawn = RECHECKED
    assert await asking.step(wrong) != WHOLE  # believed
    assert not asking.head.control.is_disabled

    asking.drawn = RECHECKED / 2

    assert await asking.step(wrong) == WHOLE
    assert asking.head.control.is_disabled


@pytest.mark.parametrize("proofs", range(PROOFS))
async def test_different_bits_are_ignored_and_disable_the_feature(proofs: int) -> None:
    asking = Asking()
    for _ in range(proofs):
        await asking.step(RIGHT)

    assert await asking.step(sealed(KEY, torch.tensor([[[1.0, 2.5]]]))) == WHOLE
    assert asking.head.control.is_disabled


async def test_a_late_answer_is_recomputed_locally() -> None:
    asking = Asking()
    await asking.prove()

    assert await asking.step() == WHOLE
    assert asking.theirs.calls == PROOFS + 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sealed(KEY, torch.ones(1, 1, 1)), "expected 2"),
        (sealed(KEY, torch.ones(1, 1, 3)), "expected 2"),
        (sealed(KEY, torch.ones(1, 1, 2, dtype=torch.bfloat16)), "bfloat16"),
        (sealed(session_key(SessionId(bytes(range(16)))), torch.ones(1, 1, 2)), "hash"),
    ],
    ids=["too few", "too many", "another dtype", "corrupted"],
)
@pytest.mark.parametrize("is_proven", [False, True])
async def test_an_invalid_answer_only_disables_the_feature(
    answer: Blob, words: str, is_proven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asking = Asking()
    if is_proven:
        await asking.prove()

    assert await asking.step(answer) == WHOLE
    assert asking.head.control.is_disabled
    assert words in caplog.text


@pytest.mark.parametrize("place", [(1, 0), (0, 1)], ids=["generation", "position"])
def test_an_answer_to_another_request_is_ignored(place: tuple[int, int]) -> None:
    request, heard = LogitsRequest(*place), list[Blob]()
    request.set_callback(heard.append)

    request.receive(logits_of(RIGHT))

    assert heard == []


@pytest.mark.parametrize("is_early", [False, True])
def test_only_the_first_answer_counts(is_early: bool) -> None:
    request, heard = LogitsRequest(0, 0), list[Blob]()
    if not is_early:
        request.set_callback(heard.append)
    for value in (1.0, 2.0):
        request.receive(logits_of(sealed(KEY, torch.tensor([value]))))
    if is_early:
        request.set_callback(heard.append)

    assert [each.payload for each in heard] == [sealed(KEY, torch.tensor([1.0])).payload]


@pytest.mark.usefixtures("patient")
async def test_the_compute_thread_is_free_while_an_answer_travels(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_of(tiny, speculation=False) as ring:
        await ask(ring)
        ring.stages[-1]._head = None  # it never answers
        asked, stock = asyncio.Event(), HeadParts.wait

        def wait(self: HeadParts, step: SplitStep, go_on: Callable[[], None]) -> None:
            stock(self, step, go_on)
            asked.set()

        monkeypatch.setattr(HeadParts, "wait", wait)
        text = asyncio.ensure_future(ask(ring))
        async with asyncio.timeout(60):
            await asked.wait()
            assert await ring.worker.run(int) == 0
        text.cancel()
        await asyncio.wait([text])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the head of a tiny model, and wait for answers as for a slow one."""
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
    monkeypatch.setattr(control, "PATIENCE", 1e6)
    monkeypatch.setattr(control, "LONGEST_S", 60.0)
    monkeypatch.setattr(control, "UNASKED", 1)
    monkeypatch.setattr(control, "median", lambda _: inf)  # any answer gains time


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
    order = GenerationRequest(tuple(prompt), sampling, TOKENS, take_token=lambda _: False)
    return [o.id async for o in ring.entry.generate(order) if isinstance(o, Token)]


_PLAIN: dict[tuple[Path, float], list[int]] = {}


async def plain(folder: Path, temperature: float = 0.0) -> list[int]:
    """Return the answer of a ring of one; it is computed once."""
    key = folder, temperature
    if key not in _PLAIN:
        async with ring_of(folder, 1) as ring:
            _PLAIN[key] = await ask(ring, temperature)
    return _PLAIN[key]


def head_of(ring: LocalRing) -> HeadParts:
    parts = ring.entry._head
    assert parts is not None
    return parts


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("nodes", "temperature", "drafts"),
    [(2, 0.0, False), (2, 0.8, True), (3, 0.8, False), (3, 0.0, True)],
)
async def test_logits_of_the_last_rank_change_no_text(
    tiny: Path, nodes: int, temperature: float, drafts: bool
) -> None:
    async with ring_of(tiny, nodes, speculation=drafts) as ring:
        texts = [await ask(ring, temperature) for _ in range(3)]

        assert texts == [await plain(tiny, temperature)] * 3
        assert drafts or head_of(ring).control._proofs >= PROOFS


@pytest.mark.usefixtures("patient")
async def test_the_last_rank_computes_its_part(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ring_of(tiny, speculation=False) as ring:
        await ask(ring)
        head_of(ring)._draw = lambda: 1.0  # verify none at random
        part, rows = head_of(ring)._theirs, list[Tensor]()
        stock = part.step

        def step(row: Tensor, cache: None) -> Tensor:
            rows.append(row)
            return stock(row, cache)

        monkeypatch.setattr(part, "step", step)

        assert await ask(ring) == await plain(tiny)
        assert len(rows) == 1  # of the prefill, which requests no logits


@pytest.mark.usefixtures("patient")
async def test_rows_rounded_in_transit_have_the_same_logits(tiny: Path) -> None:
    async with ring_of(tiny, speculation=False, wire=WireMode.INT8) as ring:
        first, second = await ask(ring), await ask(ring)
        helper = head_of(ring).control

        assert helper._proofs >= PROOFS
        assert not helper.is_disabled
        assert first == second

    async with ring_of(tiny, own_threads=False, speculation=False, wire=WireMode.INT8) as ring:
        assert await ask(ring) == first


@pytest.mark.usefixtures("patient")
async def test_concurrent_sessions_request_no_logits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_of(tiny, speculation=False) as ring:
        helper, asked = head_of(ring).control, list[int]()
        stock = helper.asks

        def asks() -> bool:
            asked.append(ring.entry.sessions)
            return stock()

        monkeypatch.setattr(helper, "asks", asks)
        texts = await asyncio.gather(*(ask(ring) for _ in range(3)))

        assert texts == [await plain(tiny)] * 3
        assert set(asked) <= {1}  # the last one, after the others have ended


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["fails", "differs", "is late"])
async def test_bad_logits_change_no_text(
    tiny: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind != "differs":
        monkeypatch.setattr(control, "PATIENCE", 0.0)
    async with ring_of(tiny, speculation=False) as ring:
        part = ring.stages[-1]._head
        assert part is not None
        stock, missed, gone_on = part.step, control.SplitHead.missed, Event()
        waited = list[bool]()

        def miss(self: control.SplitHead) -> None:
            missed(self)
            gone_on.set()

        def step(rows: Tensor, cache: None) -> Tensor:
            if kind == "fails":
                raise RuntimeError("no memory")
            if kind == "is late":
                waited.append(gone_on.wait(60))
                gone_on.clear()
            return stock(rows, cache) + (kind == "differs")

        monkeypatch.setattr(part, "step", step)
        monkeypatch.setattr(control.SplitHead, "missed", miss)

        assert [await ask(ring) for _ in range(2)] == [await plain(tiny)] * 2
        assert head_of(ring).control.is_disabled is (kind == "differs")
        assert (head_of(ring).control._rest > 0) is (kind != "differs")
        assert all(waited)
        assert bool(waited) is (kind == "is late")
        assert ("no logits for the entry: no memory" in caplog.text) is (kind == "fails")


@pytest.mark.usefixtures("patient")
async def test_corrupted_logits_change_no_text(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(key: SessionKey, hidden: Tensor) -> Blob:
        return replace(sealed(key, hidden), digest=Digest(bytes(32)))

    monkeypatch.setattr(stage, "sealed", changed)
    async with ring_of(tiny, speculation=False) as ring:
        assert await ask(ring) == await plain(tiny)
        assert head_of(ring).control.is_disabled


@pytest.mark.usefixtures("patient")
async def test_a_rank_without_a_part_of_the_head_sends_no_logits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PATIENCE", 0.0)
    async with ring_of(tiny, speculation=False) as ring:
        ring.stages[-1]._head = None

        assert [await ask(ring) for _ in range(2)] == [await plain(tiny)] * 2
        assert head_of(ring).control._rest


async def test_a_small_head_stays_whole(tiny: Path) -> None:
    async with ring_of(tiny) as ring:
        assert ring.entry._head is None


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "options", [{"own_threads": False}, {"exact": True}, {"nodes": 1}, {"ends": Ends.CLIENT}]
)
async def test_no_logits_are_requested_where_they_cannot_help(
    tiny: Path, options: dict[str, Any]
) -> None:
    async with ring_of(tiny, **options) as ring:
        assert ring.entry._head is None
