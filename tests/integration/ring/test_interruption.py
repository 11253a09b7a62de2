"""A ring that breaks and forms again continues its sessions from the caches that it had."""

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from meshllm.api.v1.embeddings import numbers
from meshllm.errors import LinkLost
from meshllm.model.files.source import resolve
from meshllm.model.text.pooling import Pooling, PoolingMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.session.embedding import embed
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.protocol.kv_cache.prefix_scope import OWN
from meshllm.request import Answer, Resumable, Sampling
from meshllm.testing.models import tiny_model
from tests.builders.tampering import Tampering

PROMPT = tuple((7 * i + 3) % 61 for i in range(40))
TOKENS = 48
SAMPLING = Sampling(temperature=0.9, seed=5, repetition_penalty=1.1, presence_penalty=0.2)


class Cut:
    """Closes a link of the ring once, at the message that a test chooses."""

    def __init__(self) -> None:
        self.at: int | None = None

    def __call__(self, number: int, message: bytes) -> bytes | None:
        if self.at is None or number < self.at:
            return message
        self.at = None
        return None


class Tokens(list[int]):
    """Tokens of an answer, and how it can be resumed."""

    resume: Resumable | None = None


NONE = Tokens()


async def attempt(
    ring: LocalRing, given: Tokens, on_token: Callable[[int], None] = lambda _: None
) -> tuple[Tokens, Ended | None]:
    """Continue the answer behind ``given``; return the new tokens, and the end if it is reached."""
    order = GenerationRequest(
        PROMPT, SAMPLING, TOKENS, lambda _: False, given=tuple(given), resume=given.resume
    )
    tokens = Tokens()
    try:
        async for output in ring.entry.generate(order):
            if isinstance(output, Token):
                tokens.append(output.id)
                on_token(len(tokens))
            elif isinstance(output, Resumable):
                tokens.resume = output
            elif isinstance(output, Ended):
                return tokens, output
    except LinkLost:
        pass
    return tokens, None


async def formed_again(ring: LocalRing) -> None:
    while True:  # the ranks notice one after the other
        for _ in range(100):
            await asyncio.sleep(0)
        await ring.formed()
        if all(rank.runtime.entry or rank.runtime.stage for rank in ring._ranks):
            return


@cache
def plain(folder: Path, *, speculation: bool) -> list[int]:
    """Return the answer of a ring that does not break; called in a thread."""
    config = InferenceConfig(threads=1, speculation=speculation)

    async def answer() -> list[int]:
        async with open_local_ring(resolve(str(folder)), RingOptions(3, inference=config)) as ring:
            return (await attempt(ring, NONE))[0]

    return asyncio.run(answer())


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the family that a test names."""
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_model(folder, request.param, dtype=torch.bfloat16).folder


@pytest.mark.parametrize(
    ("folder", "at", "speculation"),
    [
        ("llama", 1, False),
        ("llama", 2, True),
        ("qwen3", 30, True),
        pytest.param("llama", 30, False, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, True, marks=pytest.mark.slow),
        pytest.param("qwen3", 2, False, marks=pytest.mark.slow),
    ],
    indirect=["folder"],
)
async def test_a_broken_link_costs_no_computed_row(
    folder: Path, at: int, speculation: bool
) -> None:
    whole = await asyncio.to_thread(plain, folder, speculation=speculation)
    config = InferenceConfig(threads=1, speculation=speculation)
    cut = Cut()
    transport = Tampering(cut)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), transport
    ) as ring:

        def on_token(count: int) -> None:
            if count == at:
                cut.at = 0

        first, ended = await attempt(ring, NONE, on_token)
        assert ended is None
        await formed_again(ring)
        rest, ended = await attempt(ring, first)

        assert first + rest == whole
        assert ended is not None
        assert ended.measured.reused == len(PROMPT) + len(first) - 1
        assert ring.entry.budget.live_bytes == 0
        assert [stage.budget.live_bytes for stage in ring.stages] == [0, 0]


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
async def test_a_prompt_that_is_interrupted_continues_behind_its_finished_chunks(
    folder: Path,
) -> None:
    config = InferenceConfig(threads=1, speculation=False, chunk=8)
    cut = Cut()
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:
        whole, _ = await attempt(ring, NONE)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:
        cut.at = 11
        first, ended = await attempt(ring, NONE)
        assert (first, ended) == ([], None)
        await formed_again(ring)

        tokens, ended = await attempt(ring, NONE)

        assert tokens == whole
        assert ended is not None
        assert 16 <= ended.measured.reused < len(PROMPT)


@pytest.mark.parametrize(
    ("folder", "resumes"), [("llama", True), ("qwen3", False)], indirect=["folder"]
)
async def test_without_a_prefix_cache_the_answer_goes_on_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, resumes: bool
) -> None:
    """With the caches of the lost ring, or if they cannot be resumed, with all rows again."""
    monkeypatch.setattr(ModelRuntime, "resumes", resumes)
    config = InferenceConfig(threads=1, speculation=False, prefix_bytes=0)
    cut = Cut()
    whole = await asyncio.to_thread(plain, folder, speculation=False)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:

        def on_token(count: int) -> None:
            if count == 9:
                cut.at = 0

        first, _ = await attempt(ring, NONE, on_token)
        await formed_again(ring)
        rest, ended = await attempt(ring, first)

        assert first + rest == whole
        assert ended is not None
        assert (ended.measured.reused > 0) is resumes


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
async def test_a_request_that_waits_for_a_place_is_interrupted_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.node.ring.runtime.MAX_SESSIONS", 1)
    config = InferenceConfig(threads=1, speculation=False)
    cut = Cut()
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:

        def on_token(count: int) -> None:
            if count == 3:
                cut.at = 0

        first, second = await asyncio.gather(attempt(ring, NONE, on_token), attempt(ring, NONE))

        assert len(first[0]) >= 3
        assert (first[1], second) == (None, ([], None))


@pytest.mark.parametrize(
    ("folder", "mode"),
    [("llama", PoolingMode.LAST), ("qwen3", PoolingMode.MEAN)],
    indirect=["folder"],
)
async def test_an_embedding_that_is_interrupted_can_be_asked_for_again(
    folder: Path, mode: PoolingMode
) -> None:
    cut, config = Cut(), InferenceConfig(threads=1, dtype="float32", chunk=8)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:
        whole = await embedding(ring, mode)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), Tampering(cut)
    ) as ring:
        cut.at = 3
        with pytest.raises(LinkLost):
            await embedding(ring, mode)
        await formed_again(ring)

        assert await embedding(ring, mode) == pytest.approx(whole, abs=1e-5)
        assert ring.entry.budget.live_bytes == 0


async def embedding(ring: LocalRing, mode: PoolingMode) -> list[float]:
    *_, answer = [event async for event in embed(ring.entry, Pooling(mode), PROMPT, None, OWN)]
    assert isinstance(answer, Answer)
    return numbers(answer.embedding)
