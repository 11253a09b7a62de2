"""Which finished text a prompt continues, and what that evicts."""

import pytest

from meshllm.names import NodeId, SessionId, Span
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget, KvCapacity
from meshllm.protocol.kv_cache.prefix_index import (
    IDLE_S,
    RESUME_S,
    Chunk,
    PrefixHit,
    PrefixIndex,
    crop_chunks,
)
from meshllm.protocol.kv_cache.prefix_matching import MIN_SHARED, PrefixCache
from meshllm.protocol.kv_cache.prefix_scope import OWN, PrefixScope

PROMPT = tuple((7 * i + 3) % 61 for i in range(40))
MORE = (91, 92, 93)


def index(blocks: int = 9) -> PrefixIndex:
    return PrefixIndex(KvBudget([KvCapacity(blocks * BLOCK, lambda tokens: (tokens, 0))]))


def kept(max_crop: int | None = None, *, prompt: int = 50) -> PrefixCache[str]:
    prefixes: PrefixCache[str] = PrefixCache(index(), max_crop)
    prefixes.keep(SessionId(b"a" * 16), PROMPT, prompt, "a", len(PROMPT), 0.0)
    return prefixes


@pytest.mark.parametrize(
    ("max_crop", "shared", "found"),
    [
        (None, MIN_SHARED - 1, 0),
        (None, MIN_SHARED, MIN_SHARED),
        (None, 40, 40),
        (8, 32, 32),
        (8, 31, 0),
        (0, 40, 40),
        (0, 39, 0),
    ],
)
def test_a_shared_prefix_must_be_long_and_croppable(
    max_crop: int | None, shared: int, found: int
) -> None:
    result = kept(max_crop).find((*PROMPT[:shared], *MORE), 1.0)

    assert (result[0].length if result else 0) == found


@pytest.mark.parametrize(
    ("shared", "prompt", "whole"),
    [(40, 30, True), (24, 30, True), (23, 30, False), (20, 20, True), (19, 20, False)],
    ids=["next turn", "thoughts dropped", "another question", "half of it", "a short beginning"],
)
def test_the_next_turn_takes_the_cache_and_another_chat_copies_it(
    shared: int, prompt: int, whole: bool
) -> None:
    prefixes = kept(prompt=prompt)

    found = prefixes.find((*PROMPT[:shared], *MORE), 1.0)

    assert found is not None
    assert found[0].whole is whole
    assert (prefixes.find((*PROMPT, *MORE), 1.0) is None) is whole


def test_a_text_that_several_prompts_continue_is_copied_for_each() -> None:
    prefixes = kept(prompt=30)

    found = [prefixes.find((*PROMPT, *MORE), 1.0, is_shared=True) for _ in range(2)]

    hit = PrefixHit(SessionId(b"a" * 16), 40, whole=False, capacity=len(PROMPT))
    assert found == [(hit, "a")] * 2


def test_unused_texts_are_dropped() -> None:
    prefixes = kept()

    prefixes.expire(IDLE_S)

    assert prefixes.find((*PROMPT, *MORE), IDLE_S) is None
    assert prefixes.index.deadline is None


def test_a_session_evicts_texts_in_its_way() -> None:
    prefixes = kept()
    assert prefixes.index.budget.reserve(SessionId(b"x" * 16), 9 * BLOCK)

    assert prefixes.find(MORE, 1.0) is None
    assert not prefixes._texts
    assert prefixes.index.budget.kept_bytes == 0


def test_a_session_that_was_counted_and_whose_cache_is_missing_is_gone() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    session = SessionId(b"a" * 16)
    prefixes.index.put(session, len(PROMPT), len(PROMPT), 0.0, is_lost=True)

    assert prefixes.resume(session, PROMPT, (), 1.0) is None
    assert prefixes.index.budget.kept_bytes == 0


def test_texts_make_room_for_layers_and_the_latest_used_stay() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(blocks=3), None)
    for name in "abc":
        session = SessionId(name.encode() * 16)
        prefixes.keep(session, (*PROMPT, ord(name)), 30, name, len(PROMPT) + 1, 0.0)

    prefixes.make_room(BLOCK)
    assert sorted(prefixes.caches.values()) == ["b", "c"]
    prefixes.make_room(9 * BLOCK)
    assert not prefixes.caches


def test_texts_that_do_not_fit_into_a_smaller_budget_are_dropped() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(blocks=2), None)
    for name in "ab":
        session = SessionId(name.encode() * 16)
        prefixes.keep(session, (*PROMPT, ord(name)), 30, name, len(PROMPT) + 1, 0.0)
    assert prefixes.index.budget.resize([BLOCK])

    prefixes.fit()

    assert list(prefixes.caches.values()) == ["b"]


def test_the_cache_is_taken_over_if_a_copy_does_not_fit() -> None:
    prefixes = kept()
    assert prefixes.index.budget.reserve(SessionId(b"x" * 16), 9 * BLOCK)

    assert prefixes.find((*PROMPT[:20], *MORE), 1.0) == (
        PrefixHit(SessionId(b"a" * 16), 20, whole=True, capacity=len(PROMPT)),
        "a",
    )
    assert not prefixes._texts


@pytest.mark.parametrize("length", [30, 40])
def test_the_last_token_of_a_prompt_is_computed_even_if_it_is_known(length: int) -> None:
    found = kept().find(PROMPT[:length], 1.0)

    assert found is not None
    assert found[0].length == length - 1


def test_the_longest_prefix_is_found() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    for name, length in (("a", 20), ("b", 35), ("c", 25)):
        session = SessionId(name.encode() * 16)
        prefixes.keep(session, PROMPT[:length], 40, name, length, 0.0)

    found = prefixes.find(PROMPT, 1.0)

    assert found is not None
    assert found[1] == "b"


def test_a_prefix_that_another_rank_has_lost_is_dropped() -> None:
    prefixes = kept()

    prefixes.forget(SessionId(b"a" * 16))
    prefixes.forget(SessionId(b"a" * 16))

    assert prefixes.index.budget.kept_bytes == 0
    assert not prefixes.index.holds(SessionId(b"a" * 16))
    assert prefixes.find((*PROMPT, *MORE), 1.0) is None


def test_texts_move_to_the_budget_of_the_next_ring() -> None:
    prefixes = kept()

    assert prefixes.move(KvBudget([KvCapacity(9 * BLOCK, lambda tokens: (tokens, 0))])) == []
    found = prefixes.find((*PROMPT, *MORE), 1.0)
    assert found
    assert found[0].length == len(PROMPT)

    prefixes = kept()
    assert prefixes.move(KvBudget([KvCapacity(0, lambda tokens: (tokens, 0))])) == [
        SessionId(b"a" * 16)
    ]
    assert prefixes.find((*PROMPT, *MORE), 1.0) is None


A = SessionId(b"a" * 16)


CHUNKS = (Chunk(30, is_step=False), Chunk(40, is_step=True))


def test_a_resumed_answer_takes_over_the_cache_of_its_session() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.keep(A, PROMPT, 30, "a", 40, 0.0, chunks=CHUNKS)

    for session, tokens in (
        (SessionId(b"x" * 16), PROMPT), (A, (*PROMPT, 1)), (A, MORE), (A, ()),
    ):  # fmt: skip
        assert prefixes.resume(session, tokens, (), 1.0) is None
    found = prefixes.resume(A, PROMPT[:2], (Chunk(9, is_step=False),), 1.0)
    assert found == (PrefixHit(A, 2, True, 40, (Chunk(2, is_step=False),)), "a")
    assert (prefixes.caches, prefixes.index.holds(A)) == ({}, False)


def test_a_stage_that_becomes_the_entry_resumes_as_it_is_told() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.index.put(A, 40, 40, 0.0, is_lost=True)
    prefixes.caches[A] = "a"  # as a stage does
    prefixes.lose([0, 1])

    found = prefixes.resume(A, PROMPT[:35], CHUNKS, 1.0)

    chunks = (Chunk(30, is_step=False), Chunk(35, is_step=True))
    assert found == (PrefixHit(A, 35, True, 40, chunks, (Span(0, 2),), is_claimed=True), "a")


def test_no_prompt_matches_tokens_that_were_only_claimed() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.keep(A, PROMPT, 30, "a", 40, 0.0, is_lost=True, is_claimed=True)

    assert prefixes.find((*PROMPT, *MORE), 1.0) is None
    found = prefixes.resume(A, PROMPT, CHUNKS, 1.0)
    assert found is not None
    assert found[0].is_claimed


def test_lost_layers_are_named_with_every_hit() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.keep(A, PROMPT, 30, "a", 40, 0.0, chunks=CHUNKS, lost=(Span(0, 1),))
    prefixes.lose([4, 5, 7])
    prefixes.lose([5])

    found = prefixes.find((*PROMPT[:35], *MORE), 1.0)

    assert found is not None
    assert found[0].lost == (Span(0, 1), Span(4, 6), Span(7, 8))
    assert found[0].chunks == (Chunk(30, is_step=False), Chunk(35, is_step=True))


def test_caches_outlive_their_texts() -> None:
    prefixes = kept()

    prefixes.change_entry(is_entry=True)
    assert prefixes.find((*PROMPT, *MORE), 1.0, is_shared=True)
    prefixes.change_entry(is_entry=False)
    assert prefixes.find((*PROMPT, *MORE), 1.0) is None
    assert prefixes.index.holds(A)
    assert prefixes.caches == {A: "a"}


def test_a_session_of_a_lost_ring_is_kept_without_a_prefix_cache() -> None:
    none = PrefixIndex(KvBudget([KvCapacity(9 * BLOCK, lambda tokens: (tokens, 0))]), 0)
    prefixes: PrefixCache[str] = PrefixCache(none, None)
    prefixes.keep(SessionId(b"b" * 16), PROMPT, 30, "b", 40, 0.0)
    prefixes.keep(A, PROMPT, 30, "a", 40, 0.0, is_lost=True)

    assert prefixes.caches == {A: "a"}
    prefixes.expire(RESUME_S)
    assert prefixes.caches == {}


def test_what_others_keep_evicts_nothing_of_the_owner_until_the_entry_changes() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(2), None)
    for name, scope in (("a", OWN), ("b", (None, "key")), ("c", (None, "key"))):
        prefixes.keep(SessionId(name.encode() * 16), PROMPT, 30, name, 40, 0.0, scope=scope)

    assert set(prefixes.caches.values()) == {"a", "c"}
    prefixes.change_entry(is_entry=False)
    prefixes.keep(SessionId(b"d" * 16), PROMPT, 30, "d", 40, 0.0, scope=(None, "key"))
    assert set(prefixes.caches.values()) == {"c", "d"}


@pytest.mark.parametrize("other", [(None, "key"), (NodeId(bytes(32)), ""), OWN])
def test_a_prompt_continues_texts_of_its_scope_only(other: PrefixScope) -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    scope = (NodeId(bytes(32)), "key")
    prefixes.keep(SessionId(b"a" * 16), PROMPT, 30, "a", 40, 0.0, scope=scope)
    prefixes.keep(SessionId(b"b" * 16), PROMPT[:20], 20, "b", 20, 0.0, scope=other)

    found = [
        prefixes.find((*PROMPT, *MORE), 1.0, scope=each, is_shared=True)
        for each in (scope, other, (NodeId(bytes(32)), "other"))
    ]

    assert [hit[0].length if hit else 0 for hit in found] == [40, 20, 0]


def test_an_entry_whose_layers_have_just_moved_here_continues_with_nothing() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.lose([7])
    prefixes.forget_moves()  # that was long ago
    prefixes.lose([0, 1])
    prefixes.lose([5])  # another plan, before anything has resumed

    found = prefixes.resume_empty(A, 3, CHUNKS, Span(0, 2))

    lost = Span(0, 2), Span(5, 6)
    cropped = tuple(crop_chunks(CHUNKS, 3))
    assert found == (PrefixHit(A, 3, True, 3, cropped, lost, is_claimed=True), None)


def test_an_entry_continues_with_what_was_handed_over() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.lose([0, 1])
    prefixes.keep_begun(A, 2, 2, "a", Span(0, 2), 1.0)
    assert prefixes.index.holds(A)

    found = prefixes.resume_empty(A, 3, CHUNKS, Span(0, 2))

    assert found is not None
    assert (found[0].length, found[0].lost, found[1]) == (3, (Span(0, 2),), "a")
    assert not prefixes.caches
    assert prefixes.index.budget.kept_bytes == 0


def test_what_was_handed_over_whole_names_the_other_layers_that_moved() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    prefixes.lose([0, 1, 5])
    prefixes.keep_begun(A, 4, 4, "a", Span(0, 2), 1.0)

    found = prefixes.resume(A, PROMPT[:3], CHUNKS, 2.0)

    assert found is not None
    assert (found[0].length, found[0].lost, found[1]) == (3, (Span(5, 6),), "a")


def test_what_was_handed_over_is_dropped_if_there_is_no_room() -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(blocks=0), None)

    prefixes.keep_begun(A, 2, 2, "a", Span(0, 2), 1.0)

    assert not prefixes.caches


@pytest.mark.parametrize(
    ("length", "span", "resumes"),
    [(0, Span(0, 2), True), (3, Span(0, 3), True), (3, Span(0, 0), True), (3, Span(0, 2), False)],
    ids=["no rows", "a layer was here", "no layers", "nothing can be resumed"],
)
def test_another_entry_does_not(length: int, span: Span, resumes: bool) -> None:
    held = PrefixIndex(index().budget, resumes=resumes)
    prefixes: PrefixCache[str] = PrefixCache(held, None)
    prefixes.lose([0, 1])

    assert prefixes.resume_empty(A, length, CHUNKS, span) is None


def test_an_entry_that_knows_other_tokens_does_not_continue_with_nothing() -> None:
    prefixes = kept()
    prefixes.lose([0, 1])

    assert prefixes.resume_empty(A, 3, CHUNKS, Span(0, 2)) is None


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_answer_of_a_lost_ring_goes_on_by_the_name_of_what_it_took_over(is_lost: bool) -> None:
    prefixes: PrefixCache[str] = PrefixCache(index(), None)
    other = SessionId(b"b" * 16)
    prefixes.keep(other, [1, 2, 3, 4], 2, "b", 4, 0.0, is_lost=is_lost, base=(A, 3))

    assert prefixes.resume(A, [1, 2, 3, 4], [], 1.0) is None  # behind what it took over
    found = prefixes.resume(A, [1, 2, 3], [], 1.0)

    assert bool(found) is is_lost
    assert not found or (found[0].session, found[1]) == (A, "b")


def test_all_that_is_kept_can_be_dropped() -> None:
    prefixes = kept()

    prefixes.clear()

    assert not prefixes.caches
    assert prefixes.index.budget.kept_bytes == 0
    assert prefixes.find((*PROMPT, *MORE), 1.0) is None
