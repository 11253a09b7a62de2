"""The prefix cache: a shared prefix is computed once, and the text does not change."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

from meshllm.errors import ModelError, UserError
from meshllm.model.files.source import resolve
from meshllm.model.split.kv_cache import SpanCache
from meshllm.names import NodeId
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.generation import GenerationRequest, Token
from meshllm.node.session.resume import ResumeKey, session_of
from meshllm.protocol.kv_cache.prefix_index import MAX_KEPT
from meshllm.protocol.kv_cache.prefix_matching import MIN_SHARED
from meshllm.protocol.kv_cache.prefix_scope import OWN, PrefixScope
from meshllm.protocol.session.messages import Close, Data, Resume
from meshllm.request import FinishReason, Resumable, Sampling
from meshllm.testing.clock import run_virtual
from meshllm.testing.counting import CountingTransport
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport
from tests.builders.prefixes import PROMPT, TOKENS, ask

MORE = (91, 92, 93)


@asynccontextmanager
async def ring_of(folder: Path, nodes: int = 2, **options: int | bool) -> AsyncIterator[LocalRing]:
    chosen = RingOptions(
        nodes=nodes,
        inference=InferenceConfig(threads=1, speculation=False, **options),  # type: ignore[arg-type]
    )
    async with open_local_ring(resolve(str(folder)), chosen) as ring:
        yield ring


async def fresh(folder: Path, prompt: Sequence[int]) -> list[int]:
    """Return the answer of one node without a cache: that of any ring. It is computed once."""
    key = folder, tuple(prompt)
    if key not in _FRESH:
        async with ring_of(folder, 1, prefix_bytes=0) as ring:
            _FRESH[key], reused = await ask(ring, prompt)
            assert reused == 0
    return _FRESH[key]


_FRESH: dict[tuple[Path, tuple[int, ...]], list[int]] = {}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a model of a family."""
    return cache(lambda name: tiny_model(tmp_path_factory.mktemp(name), name).folder)


FAMILIES = {"llama": 3, "gemma3_text": 1, "lfm2": 3, "qwen3_next": 1}
"""Full attention, sliding windows, and recurrent states, which cannot be rolled back; the size of
a ring for each, and the other one is slow."""


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        pytest.param(name, nodes, marks=[] if nodes == gated else [pytest.mark.slow])
        for name, gated in FAMILIES.items()
        for nodes in (1, 3)
    ],
)
async def test_a_chat_turn_prefills_only_its_new_tokens(
    model: Callable[[str], Path], name: str, nodes: int
) -> None:
    family = model(name)
    async with ring_of(family, nodes) as ring:
        first, _ = await ask(ring, PROMPT)
        turn = (*PROMPT, *first, *MORE)
        second, reused = await ask(ring, turn)

    assert reused == len(PROMPT) + TOKENS - 1  # the last token was never computed
    assert second == await fresh(family, turn)


async def test_who_asks_the_same_is_not_told_that_others_did(llama: Path) -> None:
    client = NodeId(bytes(32))
    requesters = [OWN, (None, "key"), (client, ""), (client, "key")]
    async with ring_of(llama) as ring:
        first = [(await ask(ring, PROMPT, scope=scope))[1] for scope in requesters]
        again = [(await ask(ring, PROMPT, scope=scope))[1] for scope in requesters]

    assert (first, again) == ([0] * 4, [len(PROMPT) - 1] * 4)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("other", [(NodeId(bytes(32)), ""), (None, "key")], ids=["client", "key"])
async def test_many_short_requests_of_others_leave_the_prefix_of_the_owner(
    llama: Path, nodes: int, other: PrefixScope
) -> None:
    async with ring_of(llama, nodes) as ring:
        await ask(ring, PROMPT)
        for number in range(MAX_KEPT + 1):
            await ask(ring, (number, *range(MIN_SHARED)), 1, scope=other)

        last = await ask(ring, (MAX_KEPT, *range(MIN_SHARED)), 1, scope=other)
        first = await ask(ring, (1, *range(MIN_SHARED)), 1, scope=other)
        assert (last[1], first[1]) == (MIN_SHARED, 0)  # theirs is cached, and evicted for theirs
        assert (await ask(ring, (*PROMPT, *MORE)))[1] == len(PROMPT)


@pytest.mark.parametrize("nodes", [1, 3])
async def test_many_turns_give_the_text_of_a_ring_without_a_cache(llama: Path, nodes: int) -> None:
    async with ring_of(llama, nodes) as keeping, ring_of(llama, nodes, prefix_bytes=0) as plain:
        text: list[int] = list(PROMPT)
        for number in range(6):
            text += [number, *MORE]
            answer, reused = await ask(keeping, text)
            assert answer == (await ask(plain, text))[0]
            assert len(text) - reused == (len(text) if number == 0 else 5)
            text += answer


async def test_a_repeated_prompt_runs_its_last_token_only(llama: Path) -> None:
    async with ring_of(llama) as ring:
        first, _ = await ask(ring, PROMPT)
        second, reused = await ask(ring, PROMPT)

    assert (second, reused) == (first, len(PROMPT) - 1)


async def test_a_shared_prefix_is_copied_and_kept(llama: Path) -> None:
    shared = PROMPT[:20]
    other, third = (*shared, *range(10, 50)), (*shared, *range(50, 90))
    async with ring_of(llama, 3) as ring:
        first, _ = await ask(ring, PROMPT)
        assert await ask(ring, other) == (await fresh(llama, other), 20)
        assert await ask(ring, third) == (await fresh(llama, third), 20)
        turn = (*PROMPT, *first, *MORE)
        assert await ask(ring, turn) == (await fresh(llama, turn), len(PROMPT) + TOKENS - 1)


async def test_concurrent_sessions_do_not_share_a_cache(llama: Path) -> None:
    prompts = [(*PROMPT[:20], *range(at, at + 9)) for at in (2, 24, 44, 64)]
    async with ring_of(llama, 3) as ring:
        await ask(ring, PROMPT)
        answers = await asyncio.gather(*(ask(ring, prompt) for prompt in prompts))

    assert [reused for _, reused in answers] == [20] * 4
    assert [text for text, _ in answers] == [await fresh(llama, each) for each in prompts]


async def test_a_sliding_window_that_has_moved_is_recomputed(model: Callable[[str], Path]) -> None:
    folder = model("gemma3_text")
    prompt = tuple((5 * i + 1) % 71 for i in range(100))
    shorter = (*prompt[:40], *MORE)
    async with ring_of(folder) as ring:
        await ask(ring, prompt)

        assert await ask(ring, shorter) == (await fresh(folder, shorter), 0)


async def test_a_cache_miss_on_one_rank_does_not_change_the_text(llama: Path) -> None:
    async with ring_of(llama, 3) as ring:
        first, _ = await ask(ring, PROMPT)
        ring.stages[1]._machine._index.expire(float("inf"))
        turn = (*PROMPT, *first, *MORE)

        assert await ask(ring, turn) == (await fresh(llama, turn), 0)
        assert (await ask(ring, turn))[1] == len(turn) - 1


async def test_a_cancelled_answer_can_be_continued(llama: Path) -> None:
    async with ring_of(llama, 3) as ring:
        outputs = ring.entry.generate(
            GenerationRequest(PROMPT, Sampling(), 50, take_token=lambda _: False)
        )
        seen = [each.id async for each in _first(outputs, 3)]
        await outputs.aclose()
        turn = (*PROMPT, *seen[:2], *MORE)

        assert await ask(ring, turn) == (await fresh(llama, turn), len(PROMPT) + 2)


async def _first(outputs: AsyncIterator[object], count: int) -> AsyncIterator[Token]:
    async for output in outputs:
        if isinstance(output, Token):
            yield output
            count -= 1
            if not count:
                return


async def test_a_ring_without_cache_memory_caches_nothing(llama: Path) -> None:
    async with ring_of(llama, exact=True) as ring:
        await ask(ring, PROMPT)

        assert (await ask(ring, PROMPT))[1] == 0


def test_one_message_precedes_the_rows(llama: Path) -> None:
    counting = CountingTransport(LoopbackTransport())
    options = RingOptions(nodes=2, inference=InferenceConfig(threads=1, speculation=False))

    async def sent() -> int:
        async with open_local_ring(resolve(str(llama)), options, counting) as ring:
            first, _ = await ask(ring, PROMPT)
            before = len(counting.sent)
            await ask(ring, (*PROMPT, *first, *MORE), tokens=1)
            return len(counting.sent) - before

    kinds = {Resume: 2, Data: 2, Close: 2}  # to the other rank and back
    assert run_virtual(sent()) == sum(kinds.values())  # no beat, however busy the machine is


@pytest.mark.parametrize("error", [ModelError("too far"), RuntimeError("out of memory")], ids=repr)
async def test_a_failed_copy_does_not_change_the_text(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_: SpanCache, length: int) -> SpanCache:
        raise error

    other = (*PROMPT[:20], *MORE)
    async with ring_of(llama, 3) as ring:
        await ask(ring, PROMPT)
        monkeypatch.setattr(SpanCache, "branch", refuse)

        assert await ask(ring, other) == (await fresh(llama, other), 0)
        assert await ask(ring, PROMPT[::-1]) == (await fresh(llama, PROMPT[::-1]), 0)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TypeError("a bug")], ids=repr)
async def test_a_single_rank_that_cannot_copy_requests_all_rows(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    branch = SpanCache.branch

    def at_the_entry(cache: SpanCache, length: int) -> SpanCache:
        if not cache.span.start:
            return branch(cache, length)
        raise error

    other = (*PROMPT[:20], *MORE)
    async with ring_of(llama) as ring:
        await ask(ring, PROMPT)
        monkeypatch.setattr(SpanCache, "branch", at_the_entry)

        assert await ask(ring, other) == (await fresh(llama, other), 0)
        assert (await ask(ring, (*PROMPT, *MORE)))[1] == 20  # of `other`; the lost one is dropped


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
async def test_windows_rolled_back_too_often_are_recomputed(
    name: str, model: Callable[[str], Path]
) -> None:
    folder = model(name)
    text = [(5 * i + 1) % 71 for i in range(100)]
    async with ring_of(folder, chunk=10) as ring, ring_of(folder, 1, prefix_bytes=0) as plain:
        for turn in range(5):
            answer, _ = await ask(ring, text)
            assert (answer, 0) == await ask(plain, text)
            text = [*text[:-20], turn]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ["llama", "lfm2", "qwen3_next"])
async def test_a_stop_during_the_next_step_does_not_corrupt_the_cache(
    name: str, nodes: int, model: Callable[[str], Path]
) -> None:
    folder = model(name)
    async with ring_of(folder, nodes) as ring:
        text = list(PROMPT)
        for _ in range(2):
            seen: list[int] = []

            def take_token(token: int, seen: list[int] = seen) -> bool:
                seen.append(token)
                return len(seen) == 3

            async for _output in ring.entry.generate(
                GenerationRequest(tuple(text), Sampling(), 50, take_token)
            ):
                pass
            text += [*seen, *MORE]
            assert (await ask(ring, text))[0] == await fresh(folder, text)


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_cancel_before_the_first_row_keeps_the_loop_free(
    llama: Path, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ring_of(llama, nodes) as ring:
        await ask(ring, PROMPT)
        branch, threads = SpanCache.branch, []

        def watched(cache: SpanCache, length: int) -> SpanCache:
            threads.append(threading.current_thread())
            return branch(cache, length)

        monkeypatch.setattr(SpanCache, "branch", watched)
        order = GenerationRequest((*PROMPT[:20], *MORE), Sampling(), 5, take_token=lambda _: False)
        key = ResumeKey(b"c" * 16)
        task = ring.entry._task(session_of(key), order)
        generation = ring.entry._open(task, order, key, 0.0)
        ring.entry._act(task.session, generation.machine.finish(FinishReason.CANCELLED, 0.0))
        await generation.closed.wait()

        assert threading.main_thread() not in threads
        assert (await ask(ring, (*PROMPT, *MORE)))[1] == len(PROMPT)  # and it is still there


async def test_a_refused_prompt_takes_nothing_from_the_cache(llama: Path) -> None:
    async with ring_of(llama) as ring:
        await ask(ring, PROMPT)
        with pytest.raises(UserError):
            await ask(ring, PROMPT * 10)

        assert (await ask(ring, (*PROMPT, *MORE)))[1] == len(PROMPT)


async def test_a_key_makes_no_other_prompt_continue_from_a_session(llama: Path) -> None:
    other = tuple(token + 1 for token in PROMPT)
    async with ring_of(llama, 3) as ring:
        told: list[Resumable] = []
        await ask(ring, PROMPT, told=told)
        for prompt in (other, other[:1], PROMPT[:1]):  # the last ones would resume no position
            answer, reused = await ask(ring, prompt, resume=told[0])
            assert (answer, reused) == (await fresh(llama, prompt), 0)

        assert (await ask(ring, (*other, *MORE)))[0] == await fresh(llama, (*other, *MORE))
