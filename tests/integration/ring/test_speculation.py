"""Speculative decoding does not change the text: any ring, drafter, delay, greedy or not."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.model.files.source import Source, resolve
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant, Span
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import Ended, GenerationRequest
from meshllm.protocol.drafting.drafter import Drafter, Drafting
from meshllm.protocol.drafting.window import STEPS, DraftWindow, WindowChoice
from meshllm.protocol.session.actions import SampleTokens
from meshllm.protocol.session.speculation import Speculator, Steps
from meshllm.request import FinishReason, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.oracle import Oracle

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
TOKENS = 32
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A model of the dtype that a test names."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=request.param)


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """For what depends on no dtype."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=torch.bfloat16)


class Changing:
    """Drafting that is changed between answers, as a ring takes a while to form."""

    def __init__(self, now: Drafting) -> None:
        self.now = now

    def begin(self) -> Drafter:
        return self.now.begin()

    def keep(self, tokens: Sequence[int]) -> None:
        self.now.keep(tokens)


@asynccontextmanager
async def opened(
    source: Source, drafting: Drafting | None, nodes: int, shape: TrafficShape | None = None
) -> AsyncIterator[LocalRing]:
    options = RingOptions(
        nodes=nodes,
        inference=InferenceConfig(threads=1, speculation=drafting is not None, drafting=drafting),
    )
    async with open_local_ring(source, options, LoopbackTransport(shape or TrafficShape())) as ring:
        yield ring


async def generated(ring: LocalRing, order: GenerationRequest) -> tuple[list[int], Ended]:
    outputs = [output async for output in ring.entry.generate(order)]
    ended = outputs[-1]
    assert isinstance(ended, Ended)
    return [output.id for output in outputs if hasattr(output, "id")], ended


def ordered(sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(PROMPT, sampling, TOKENS, take_token=lambda _: False)


async def answer(
    source: Source,
    drafting: Drafting | None,
    sampling: Sampling = SAMPLINGS[0],
    *,
    nodes: int = 1,
    shape: TrafficShape | None = None,
    order: GenerationRequest | None = None,
) -> tuple[list[int], Ended]:
    async with opened(source, drafting, nodes, shape) as ring:
        return await generated(ring, order or ordered(sampling))


async def answers(
    source: Source, draftings: Iterable[Drafting], sampling: Sampling, nodes: int
) -> list[tuple[list[int], Ended]]:
    """Answer once with each drafting, in one ring."""
    first, *others = draftings
    changing = Changing(first)
    async with opened(source, changing, nodes) as ring:
        found = [await generated(ring, ordered(sampling))]
        for changing.now in others:
            found.append(await generated(ring, ordered(sampling)))
    return found


@cache
def computes_together(folder: Path) -> bool:
    """Whether this processor computes rows of this model batch-invariantly."""
    shard = load_shard(resolve(str(folder)), Span(0, 6), embed=True, head=True)
    return Runner(shard, STEPS).is_row_invariant


def plain_text(source: Source, sampling: Sampling) -> list[int]:
    """Return the text of a ring of one without drafts."""
    return _plain_text(source.folder, sampling)


@cache
def _plain_text(folder: Path, sampling: Sampling) -> list[int]:
    return asyncio.run(answer(resolve(str(folder)), None, sampling))[0]


@pytest.mark.parametrize(
    ("source", "nodes", "sampling"),
    [
        (BFLOAT16, 1, SAMPLINGS[0]),
        (BFLOAT16, 3, SAMPLINGS[0]),
        (FLOAT32, 2, SAMPLINGS[1]),
        pytest.param(BFLOAT16, 2, SAMPLINGS[1], marks=pytest.mark.slow),
        pytest.param(BFLOAT16, 4, SAMPLINGS[1], marks=pytest.mark.slow),
        pytest.param(FLOAT32, 1, SAMPLINGS[0], marks=pytest.mark.slow),
        pytest.param(FLOAT32, 3, SAMPLINGS[0], marks=pytest.mark.slow),
        pytest.param(FLOAT32, 4, SAMPLINGS[1], marks=pytest.mark.slow),
    ],
    indirect=["source"],
)
def test_good_and_bad_drafts_give_the_same_text(
    source: Source, sampling: Sampling, nodes: int
) -> None:
    text = plain_text(source, sampling)
    oracles = [Oracle((*PROMPT, *text), acceptance) for acceptance in (1.0, 0.6, 0.0)]

    found = asyncio.run(answers(source, [*oracles, SuffixDrafting()], sampling, nodes))

    assert [tokens for tokens, _ in found] == [text] * 4
    if computes_together(source.folder):
        assert found[0][1].measured.tokens_per_step > 1


@pytest.mark.parametrize(
    "name",
    [
        *("gemma3_text", "gpt_neox", "mixtral", "lfm2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi3")),
    ],
)
def test_a_text_of_any_family_is_the_same(name: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, name, dtype=torch.bfloat16)
    text = plain_text(source, SAMPLINGS[1])
    oracle = Oracle((*PROMPT, *text), 0.7)

    assert asyncio.run(answer(source, oracle, SAMPLINGS[1], nodes=3))[0] == text


@pytest.mark.parametrize(
    ("source", "seed"),
    [
        (BFLOAT16, 0),
        (FLOAT32, 1),
        pytest.param(BFLOAT16, 1, marks=pytest.mark.slow),
        pytest.param(BFLOAT16, 2, marks=pytest.mark.slow),
        pytest.param(FLOAT32, 0, marks=pytest.mark.slow),
        pytest.param(FLOAT32, 2, marks=pytest.mark.slow),
    ],
    indirect=["source"],
)
def test_delays_change_no_token(source: Source, seed: int) -> None:
    shape = TrafficShape(delay_s=0.01, jitter_s=0.05, loss=0.2, seed=seed)
    text = plain_text(source, SAMPLINGS[1])
    oracle = Oracle((*PROMPT, *text), 0.7, seed)
    tokens, _ = run_virtual(answer(source, oracle, SAMPLINGS[1], nodes=3, shape=shape))
    assert tokens == text


FAR = TrafficShape(delay_s=0.1)


@cache
def plain_answer(folder: Path) -> tuple[list[int], Ended]:
    """Return the answer of a ring of three far nodes without drafts."""
    return run_virtual(answer(resolve(str(folder)), None, nodes=3, shape=FAR))


def test_good_drafts_save_steps(bfloat16: Source) -> None:
    text, plain = plain_answer(bfloat16.folder)
    oracle = Oracle((*PROMPT, *text), 1.0)
    _, fast = run_virtual(answer(bfloat16, oracle, nodes=3, shape=FAR))

    assert plain.measured.tokens_per_step == 1
    assert fast.measured.token_s < plain.measured.token_s / 3


def test_useless_drafts_cost_no_step(bfloat16: Source) -> None:
    text, plain = plain_answer(bfloat16.folder)
    oracle = Oracle((*PROMPT, *text), 0.0)
    _, slow = run_virtual(answer(bfloat16, oracle, nodes=3, shape=FAR))

    assert slow.measured.token_s < plain.measured.token_s * 1.02


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_answer_ends_where_it_does_without_drafts(bfloat16: Source, nodes: int) -> None:
    text = plain_text(bfloat16, SAMPLINGS[0])
    places = (0, 1, 7, 20)
    seen: dict[int, list[int]] = {place: [] for place in places}

    def take_token(place: int, token: int) -> bool:
        seen[place].append(token)
        return len(seen[place]) > place

    async def all_answers() -> list[tuple[list[int], Ended]]:
        async with opened(bfloat16, Oracle((*PROMPT, *text), 1.0), nodes) as ring:
            ends = [partial(take_token, place) for place in places]
            orders = [GenerationRequest(PROMPT, SAMPLINGS[0], TOKENS, each) for each in ends]
            return [await generated(ring, order) for order in orders]

    for place, (tokens, ended) in zip(places, asyncio.run(all_answers()), strict=True):
        assert (tokens, ended.reason) == (text[: place + 1], FinishReason.STOP)
        assert seen[place] == tokens


def test_an_answer_is_as_long_as_asked(bfloat16: Source) -> None:
    text, sizes = plain_text(bfloat16, SAMPLINGS[0]), (1, 2, 18)

    async def all_answers() -> list[tuple[list[int], Ended]]:
        async with opened(bfloat16, Oracle((*PROMPT, *text), 1.0), nodes=2) as ring:
            orders = [
                GenerationRequest(PROMPT, SAMPLINGS[0], most, lambda _: False) for most in sizes
            ]
            return [await generated(ring, order) for order in orders]

    found = [(tokens, ended.reason) for tokens, ended in asyncio.run(all_answers())]
    assert found == [(text[:most], FinishReason.LENGTH) for most in sizes]


def test_an_end_token_among_the_drafts_is_the_last(bfloat16: Source) -> None:
    text = plain_text(bfloat16, SAMPLINGS[0])
    end = text[10]
    cut = text[: text.index(end) + 1]
    order = GenerationRequest(PROMPT, SAMPLINGS[0], TOKENS, lambda token: token == end)
    oracle = Oracle((*PROMPT, *text), 1.0)
    tokens, _ = asyncio.run(answer(bfloat16, oracle, nodes=2, order=order))

    assert tokens == cut


def test_two_sessions_share_what_they_learn_and_nothing_else(bfloat16: Source) -> None:
    async def both() -> list[list[int]]:
        options = RingOptions(nodes=2, inference=InferenceConfig(threads=1))
        async with open_local_ring(bfloat16, options) as ring:

            async def one(prompt: Sequence[int]) -> list[int]:
                return [token async for token in ring.tokens(prompt, SAMPLINGS[1], TOKENS)]

            return list(await asyncio.gather(one(PROMPT), one(PROMPT[::-1]), one(PROMPT)))

    first, other, again = asyncio.run(both())
    text = plain_text(bfloat16, SAMPLINGS[1])
    assert first == again == text
    assert other != text


class Alternating:
    """Drafts four wrong tokens for every other step of texts that begin with 5."""

    def __init__(self) -> None:
        self.steps, self.drafts = 0, False

    def begin(self) -> "Alternating":
        return Alternating()

    def keep(self, tokens: Sequence[int]) -> None:
        """Forget it."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.drafts = tokens[0] == 5 if not self.steps else self.drafts
        self.steps += 1

    def look(self) -> int | None:
        return 3 if self.drafts and self.steps % 2 else None

    def draft(self, most: int) -> tuple[int, ...]:
        return (1,) * min(4, most)


@pytest.mark.parametrize("nodes", [1, 2])
def test_drafts_are_judged_beside_the_steps_that_run_with_them(
    bfloat16: Source, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    taken, seen = Speculator.after, list[tuple[int, int, int, int]]()

    def after(
        self: Speculator, tokens: Sequence[int], job: SampleTokens, now: float, **ring: Any
    ) -> Steps:
        seen.append((id(self), 1 + len(job.drafts), ring["sessions"], ring["beside"]))
        return taken(self, tokens, job, now, **ring)

    monkeypatch.setattr(Speculator, "after", after)
    monkeypatch.setattr(WindowChoice, "choose", lambda *_, **__: DraftWindow(4))

    async def run() -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
        async with opened(bfloat16, Alternating(), nodes) as ring:

            async def one(*prompt: int) -> list[int]:
                return [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]

            await one(5, 6)
            alone = seen.copy()
            seen.clear()
            await asyncio.gather(one(5, 6), one(7, 8))
            return alone, seen.copy()

    alone, together = asyncio.run(run())

    assert {rows for _, rows, _, _ in alone} >= {1, 5}
    assert {(sessions, beside) for _, _, sessions, beside in alone} == {(1, 0)}
    pairs = [
        (one, other)
        for one, other in pairwise(together)
        if one[0] != other[0] and one[2] == other[2] == 2
    ]
    right = [(one[1], one[3]) == (other[3], other[1]) for one, other in pairs]
    assert max(one[1] for one, _ in pairs) == 5
    each = (right[start::2] for start in range(2))  # every other pair is of two batches
    assert max(sum(found) / len(found) for found in each) > 0.9


@pytest.mark.parametrize(
    ("source", "nodes"),
    [
        (BFLOAT16, 3),
        (FLOAT32, 1),
        pytest.param(BFLOAT16, 1, marks=pytest.mark.slow),
        pytest.param(FLOAT32, 3, marks=pytest.mark.slow),
    ],
    indirect=["source"],
)
def test_batched_sessions_each_have_their_own_text(source: Source, nodes: int) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:2], (*PROMPT, *PROMPT), (1,), (2, 2), (3,), (4, 1)]

    async def texts(*, at_once: bool) -> list[list[int]]:
        async with open_local_ring(
            source, RingOptions(nodes=nodes, inference=InferenceConfig(threads=1))
        ) as ring:

            async def one(prompt: Sequence[int], seed: int) -> list[int]:
                sampling = Sampling(temperature=seed % 2 * 0.8, seed=seed)
                return [token async for token in ring.tokens(prompt, sampling, TOKENS)]

            asked = [one(prompt, seed) for seed, prompt in enumerate(prompts)]
            return list(await asyncio.gather(*asked)) if at_once else [await each for each in asked]

    assert asyncio.run(texts(at_once=True)) == asyncio.run(texts(at_once=False))


@pytest.mark.parametrize("quant", [Quant.INT8, Quant.INT4])
def test_a_quantised_text_is_the_same_on_every_ring(tmp_path: Path, quant: Quant) -> None:
    source = tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)

    async def texts(nodes: int, *draftings: Drafting) -> list[list[int]]:
        changing = Changing(draftings[0]) if draftings else None
        inference = InferenceConfig(
            threads=1,
            quant=quant,
            cache=tmp_path / "cache",
            speculation=bool(draftings),
            drafting=changing,
        )
        found = []
        async with open_local_ring(source, RingOptions(nodes, inference=inference)) as ring:
            for drafting in draftings or (None,):
                if changing and drafting:
                    changing.now = drafting
                found.append([token async for token in ring.tokens(PROMPT, SAMPLINGS[1], TOKENS)])
        return found

    (alone,) = asyncio.run(texts(1))

    assert asyncio.run(texts(1, SuffixDrafting())) == [alone]
    oracle = Oracle((*PROMPT, *alone), 0.7)
    assert asyncio.run(texts(3, SuffixDrafting(), oracle)) == [alone] * 2
