"""Several drafted steps in flight do not change the text: any ring, drafter, delay."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from meshllm.model.files.source import Source
from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import (
    Ended,
    Generation,
    GenerationRequest,
    PrefetchedStep,
    Token,
)
from meshllm.protocol.drafting.drafter import Drafting
from meshllm.protocol.drafting.window import DEPTHS, DRAFTS, DraftWindow, WindowChoice
from meshllm.protocol.session.actions import Embed
from meshllm.protocol.session.messages import Blob
from meshllm.request import FinishReason, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.oracle import Oracle

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 80
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, seed=3, repetition_penalty=1.1)
FAR = TrafficShape(delay_s=0.1)
ROUGH = TrafficShape(delay_s=0.01, jitter_s=0.05, loss=0.2)


class Liar:
    """Knows the text, and drafts it, half of it, or only wrong tokens, at random."""

    def __init__(self, text: Sequence[int], seed: int) -> None:
        self._text = text
        self._draw = Random(seed)

    def begin(self) -> "Liar":
        self._length = 0
        return self

    def keep(self, tokens: Sequence[int]) -> None:
        """Do nothing: it does not learn."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)

    def look(self) -> int:
        return self._draw.randrange(4)

    def draft(self, most: int) -> tuple[int, ...]:
        draw = self._draw
        told = list(self._text[self._length : self._length + most])
        told = told[: draw.choice((most, most, draw.randint(0, most)))]
        for lie in draw.choice(((), (), (draw.randrange(most),), range(most))):
            told[lie : lie + 1] = [draw.randrange(100)]
        return tuple(told)


@pytest.fixture
def bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose any allowed number of drafts, at random."""
    draw = Random(7)

    def choose(
        _: WindowChoice,
        __: int,
        room: int,
        *,
        depth: int = 1,
        max_drafts: float = inf,
        sessions: int = 1,
    ) -> DraftWindow:
        assert sessions >= 1
        windows = [
            DraftWindow(drafts, steps)
            for drafts in DRAFTS
            for steps in DEPTHS
            if drafts <= room and steps <= depth and (drafts or steps == 1)
        ]
        return draw.choice(
            [each for each in windows if each.depth == 1 or each.length <= max_drafts]
        )

    monkeypatch.setattr(WindowChoice, "choose", choose)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


async def generated(ring: LocalRing, order: GenerationRequest) -> tuple[list[int], Ended]:
    outputs = [output async for output in ring.entry.generate(order)]
    ended = outputs[-1]
    assert isinstance(ended, Ended)
    return [output.id for output in outputs if isinstance(output, Token)], ended


def is_over(count: Iterator[int], _: int) -> bool:
    return next(count, None) is None


def ordered(
    sampling: Sampling = GREEDY,
    prompt: Sequence[int] = PROMPT,
    take_token: Callable[[int], bool] = lambda _: False,
) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), sampling, TOKENS, take_token)


async def answers(
    source: Source,
    drafting: Drafting | None,
    *orders: GenerationRequest,
    nodes: int = 3,
    depth: int = 8,
    shape: TrafficShape = ROUGH,
    at_once: bool = False,
) -> list[tuple[list[int], Ended]]:
    options = RingOptions(
        nodes=nodes,
        inference=InferenceConfig(threads=1, speculation=drafting is not None, drafting=drafting),
    )
    async with open_local_ring(source, options, LoopbackTransport(shape)) as ring:
        if ring.entry._speculation:
            ring.entry._speculation = replace(ring.entry._speculation, depth=depth)
        asked = [generated(ring, order) for order in orders]
        return list(await asyncio.gather(*asked)) if at_once else [await each for each in asked]


@pytest.fixture(scope="module")
def texts(source: Source) -> list[list[int]]:
    """The answers without drafts, greedy and sampled."""
    orders = ordered(GREEDY), ordered(SAMPLED)
    return [text for text, _ in asyncio.run(answers(source, None, *orders, nodes=1))]


@pytest.mark.parametrize(
    ("nodes", "depth"),
    [
        *((1, 8), (4, 8), (3, 1)),
        *(pytest.param(nodes, 8, marks=pytest.mark.slow) for nodes in (2, 3)),
    ],
)
@pytest.mark.usefixtures("bold")
def test_every_drafter_gives_the_same_text(
    source: Source, texts: list[list[int]], nodes: int, depth: int
) -> None:
    greedy, sampled = ((*PROMPT, *text) for text in texts)
    cases: list[tuple[Sampling, Drafting]] = [
        (GREEDY, Oracle(greedy, 0.95)),
        (SAMPLED, Oracle(sampled, 0.6)),
        (SAMPLED, Liar(sampled, 1)),
    ]
    for seed, (sampling, drafting) in enumerate(cases):
        shape = replace(ROUGH, seed=seed)
        ask = partial(answers, nodes=nodes, depth=depth, shape=shape)
        ((tokens, _),) = run_virtual(ask(source, drafting, ordered(sampling)))
        assert tokens == texts[sampling == SAMPLED], drafting


@pytest.mark.parametrize(
    "name", ["gemma3_text", pytest.param("mistral", marks=pytest.mark.slow), "lfm2"]
)
@pytest.mark.usefixtures("bold")
def test_windows_and_recurrent_states_give_the_same_text(name: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, name, dtype=torch.bfloat16)
    ((text, _),) = run_virtual(answers(source, None, ordered(SAMPLED), nodes=1))

    ((tokens, _),) = run_virtual(answers(source, Liar((*PROMPT, *text), 2), ordered(SAMPLED)))

    assert tokens == text


@pytest.mark.usefixtures("bold")
def test_a_session_continues_after_steps_in_flight(source: Source, texts: list[list[int]]) -> None:
    text = texts[0]
    for place in (20, 33):
        count = iter(range(place))
        ends = ordered(take_token=partial(is_over, count))
        first, second = run_virtual(
            answers(
                source,
                Oracle((*PROMPT, *text), 1.0),
                ends,
                ordered(prompt=(*PROMPT, *text[:place])),
                shape=FAR,  # else the position to continue from may arrive too late
            )
        )
        assert first[0] == text[: place + 1]
        assert first[1].reason is FinishReason.STOP
        assert second[0][: TOKENS - place] == text[place:]
        assert second[1].measured.reused > len(PROMPT) + place - 3


@pytest.mark.usefixtures("bold")
def test_two_concurrent_sessions_have_their_own_texts(
    source: Source, texts: list[list[int]]
) -> None:
    drafting = Oracle((*PROMPT, *texts[0]), 0.9)
    orders = ordered(GREEDY), ordered(SAMPLED), ordered(GREEDY)

    found = run_virtual(answers(source, drafting, *orders, at_once=True))

    assert [tokens for tokens, _ in found] == [texts[0], texts[1], texts[0]]


def test_several_steps_in_flight_save_time(source: Source, texts: list[list[int]]) -> None:
    drafting = Oracle((*PROMPT, *texts[0]), 1.0)
    seconds = []
    for depth in (1, 8):
        orders = [ordered()] * 3
        found = run_virtual(answers(source, drafting, *orders, depth=depth, shape=FAR))
        assert [tokens for tokens, _ in found] == [texts[0]] * 3
        seconds.append(found[-1][1].measured.token_s)

    assert seconds[1] < 0.6 * seconds[0]


def test_a_step_at_the_end_of_a_flight_is_embedded_ahead(
    source: Source, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Embed] = []
    embed, take_ahead = Generation.embed, Generation.take_ahead
    ready: list[Embed] = []

    def noted(self: Generation, job: Embed, watch: Stopwatch) -> Blob | None:
        asked.append(job)
        return embed(self, job, watch)

    def taken(self: Generation, job: Embed | None) -> PrefetchedStep | None:
        ahead = take_ahead(self, job)
        if ahead and job:
            ready.append(job)
        return ahead

    monkeypatch.setattr(Generation, "embed", noted)
    monkeypatch.setattr(Generation, "take_ahead", taken)
    monkeypatch.setattr(WindowChoice, "choose", lambda *_, **__: DraftWindow(4, 4))

    drafting = Oracle((*PROMPT, *texts[0]), 1.0)
    run_virtual(answers(source, drafting, ordered(), shape=FAR))

    assert len(asked) == 4  # the prompt, and the steps sent together except the first
    assert len(ready) > 10
    assert {job.drafts for job in ready[:10]} == {4}


def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the allowed number of steps at each query."""
    asked, choose = [], WindowChoice.choose

    def noted(
        self: WindowChoice, confidence: int, room: int, *, depth: int = 1, **limits: Any
    ) -> DraftWindow:
        asked.append(depth)
        return choose(self, confidence, room, depth=depth, **limits)

    monkeypatch.setattr(WindowChoice, "choose", noted)
    return asked


@pytest.mark.parametrize(("nodes", "asked"), [(1, {1}), (2, {8})])
def test_a_ring_of_one_has_one_step_in_flight(
    source: Source,
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    asked: set[int],
) -> None:
    seen = depths(monkeypatch)

    run_virtual(answers(source, Oracle((*PROMPT, *texts[0]), 1.0), ordered(), nodes=nodes))

    assert set(seen) == asked


def test_concurrent_sessions_have_one_step_in_flight(
    source: Source, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = depths(monkeypatch)

    drafting = Oracle((*PROMPT, *texts[0]), 0.0)
    run_virtual(answers(source, drafting, ordered(), ordered(), at_once=True))

    assert seen.count(8) < seen.count(1) / 10
