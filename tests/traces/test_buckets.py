from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.traces import buckets
from meshllm.traces.buckets import BUCKET, Buckets

KEY, OTHER = b"k" * 32, b"o" * 32
TOKENS = st.lists(st.integers(0, 3), max_size=5 * BUCKET)


def ids(tokens: Sequence[int], key: bytes = KEY) -> list[str]:
    found = Buckets(key)
    found.add(tokens)
    return found.ids


@pytest.mark.property
@given(TOKENS, TOKENS, TOKENS)
def test_prompts_share_the_whole_buckets_of_their_common_prefix(
    prefix: list[int], one: list[int], other: list[int]
) -> None:
    first, second = prefix + one, prefix + other
    common = 0
    while first[: common + 1] == second[: common + 1] and common < min(len(first), len(second)):
        common += 1

    shared = set(ids(first)) & set(ids(second))

    assert shared == set(ids(first)[: common // BUCKET])
    assert len(shared) == common // BUCKET


@pytest.mark.property
@given(TOKENS)
def test_two_keys_share_nothing(tokens: list[int]) -> None:
    assert set(ids(tokens)).isdisjoint(ids(tokens, OTHER))


@pytest.mark.property
@given(TOKENS, st.lists(st.integers(1, BUCKET + 1), max_size=20))
def test_ids_do_not_depend_on_how_the_tokens_come(tokens: list[int], lengths: list[int]) -> None:
    found, at = Buckets(KEY), 0
    for length in lengths:
        found.add(tokens[at : at + length])
        at += length
    found.add(tokens[at:])

    assert found.ids == ids(tokens)
    assert found.count == len(tokens)


def test_an_id_has_64_bits_of_a_keyed_hash() -> None:
    assert ids(range(BUCKET)) == ["59224211a949e611"]


def test_the_ids_of_one_sequence_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_BUCKETS", 2)

    found = Buckets(KEY)
    found.add(range(40))
    found.add(range(40))

    assert (len(found.ids), found.count) == (2, 80)
