"""Prompt lookup: what followed an earlier occurrence is drafted."""

from hypothesis import given
from hypothesis import strategies as st

from meshllm.model.speculation import prompt_lookup
from meshllm.model.speculation.prompt_lookup import KEY, MAX_STORE, SuffixDrafter, SuffixDrafting


def after(*tokens: int, drafting: SuffixDrafting | None = None) -> SuffixDrafter:
    drafter = (drafting or SuffixDrafting()).begin()
    drafter.extend(tokens)
    return drafter


def looked(drafter: SuffixDrafter, most: int = 4) -> tuple[int | None, tuple[int, ...]]:
    confidence = drafter.look()
    return confidence, drafter.draft(most)


def test_a_text_without_repetition_has_no_draft() -> None:
    assert looked(after(1, 2, 3, 4, 5)) == (None, ())
    assert looked(after()) == (None, ())
    assert looked(after(1)) == (None, ())


def test_the_continuation_of_the_match_is_drafted() -> None:
    assert looked(after(1, 2, 3, 4, 5, 9, 9, 1, 2)) == (0, (3, 4, 5, 9))


def test_the_longest_match_wins_over_the_last() -> None:
    assert looked(after(5, 1, 2, 3, 9, 1, 2, 7, 0, 5, 1, 2), 1) == (0, (3,))


def test_the_last_of_equal_matches_wins() -> None:
    assert looked(after(8, 1, 2, 3, 9, 1, 2, 7, 0, 1, 2), 1) == (0, (7,))


def test_longer_matches_have_more_confidence() -> None:
    def confidence(length: int) -> int | None:
        words = range(100, 100 + length)
        return looked(after(*words, 1, 2, *words))[0]

    assert [confidence(length) for length in (2, 4, 8, 16, 40)] == [0, 1, 2, 3, 3]


def test_a_periodic_text_is_drafted_to_any_length() -> None:
    assert looked(after(1, 2, 3, 1, 2, 3, 1, 2), 7) == (1, (3, 1, 2, 3, 1, 2, 3))


def test_earlier_texts_are_looked_up_too() -> None:
    drafting = SuffixDrafting()
    drafting.keep([1, 2, 3, 4, 5])

    assert looked(after(9, 2, 3, drafting=drafting)) == (0, (4, 5))


def test_a_draft_does_not_cross_into_the_next_text() -> None:
    drafting = SuffixDrafting()
    drafting.keep([1, 2, 3])
    drafting.keep([7, 8])

    assert looked(after(1, 2, drafting=drafting)) == (0, (3,))
    assert looked(after(2, 3, drafting=drafting)) == (0, ())


def test_the_own_text_wins_over_others() -> None:
    drafting = SuffixDrafting()
    drafting.keep([1, 2, 3])

    assert looked(after(1, 2, 4, 1, 2, drafting=drafting), 1) == (0, (4,))


def test_the_store_is_bounded_and_keeps_the_newest() -> None:
    drafting = SuffixDrafting()
    for text in range(40):
        drafting.keep(range(text * 10_000, (text + 1) * 10_000))

    assert len(drafting.store().tokens) <= MAX_STORE
    assert looked(after(390_001, 390_002, drafting=drafting), 1) == (0, (390_003,))
    assert looked(after(1, 2, drafting=drafting), 1) == (None, ())


def test_the_stores_of_all_scopes_are_bounded_together() -> None:
    drafting = SuffixDrafting()
    for scope in range(40):
        drafting.keep(range(10_000), scope)

    sizes = [len(drafting.store(scope).tokens) for scope in range(40)]
    assert sum(sizes) <= MAX_STORE
    assert [bool(size) for size in sizes] == [False] * 27 + [True] * 13


def test_a_huge_text_does_not_fill_the_store() -> None:
    drafting = SuffixDrafting()

    drafting.keep(range(2 * MAX_STORE))

    assert len(drafting.store().tokens) <= MAX_STORE


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20))
def test_a_draft_is_what_followed_the_longest_match(tokens: list[int], most: int) -> None:
    drafter = after(*tokens)

    confidence, draft = looked(drafter, most)

    best = max(
        (
            length
            for end in range(len(tokens))
            for length in range(KEY, min(end, prompt_lookup.MAX_MATCH) + 1)
            if tokens[end - length : end] == tokens[len(tokens) - length :]
        ),
        default=0,
    )
    assert (confidence is None) == (best == 0)
    if best and len(tokens) < prompt_lookup.MAX_CHAIN:
        places = [
            end
            for end in range(best, len(tokens))
            if tokens[end - best : end] == tokens[len(tokens) - best :]
        ]
        whole = tokens + list(draft)
        assert len(draft) == most
        assert any(list(draft) == whole[end : end + most] for end in places)


def test_the_index_of_a_huge_prompt_is_bounded() -> None:
    drafter = SuffixDrafting().begin()

    drafter.extend(range(MAX_STORE + 9))
    drafter.extend((MAX_STORE, MAX_STORE + 1))

    assert len(drafter._own.tokens) == MAX_STORE + 2
    assert looked(drafter, 2) == (0, (MAX_STORE + 2, MAX_STORE + 3))
