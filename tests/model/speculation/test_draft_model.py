"""A draft model: what it drafts, what it reads again, and when there is no draft."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, open_folder
from meshllm.model.speculation import draft_model
from meshllm.model.speculation.draft_model import (
    CHUNK,
    MIN_CACHED,
    STRIDE,
    Draft,
    ModelDrafter,
    ModelDrafting,
    find_draft,
)
from meshllm.testing.models import stock_model, tiny_model
from tests.builders.small_tokenizers import byte_fallback, byte_level

PROMPT = (5, 9, 13, 5, 9, 13, 7, 5, 9)
SCALE = 64  # scales the logits of random weights; a power of two, so greedy text is unchanged


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A tiny Qwen3 with confident logits."""
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_model(folder, "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= SCALE
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return open_folder("tiny", folder)


@pytest.fixture(scope="module")
def draft(source: Source) -> Draft:
    return find_draft(source, source)


@pytest.fixture(scope="module")
def drafting(draft: Draft) -> ModelDrafting:
    return draft.load()


def test_how_a_draft_model_runs_is_told(drafting: ModelDrafting) -> None:
    assert "--dtype bfloat16" in drafting.execution.reason


class Watched:
    """Records what a draft model reads."""

    def __init__(self, drafting: ModelDrafting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[list[int]] = []
        self.drafting = drafting
        self._read = drafting.read
        monkeypatch.setattr(drafting, "read", self.read)
        self.drafter = drafting.begin()

    def read(self, tokens: Sequence[int], cache: Any) -> tuple[int, float]:
        self.reads.append(list(tokens))
        return self._read(tokens, cache)

    def taken(self) -> list[list[int]]:
        """Return what was read since the last call."""
        reads, self.reads = self.reads, []
        return reads


@pytest.fixture
def watched(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(draft.load(), monkeypatch)


def after(drafting: ModelDrafting, *tokens: int) -> ModelDrafter:
    drafter = drafting.begin()
    drafter.extend(tokens)
    return drafter


def drafted(drafter: ModelDrafter, most: int) -> tuple[int, ...]:
    assert drafter.look() is not None
    return drafter.draft(most)


def looked(drafter: ModelDrafter, most: int) -> tuple[int | None, tuple[int, ...]]:
    """Look until all is read, and draft."""
    looks = (drafter.look() for _ in range(9))
    confidence = next(look for look in looks if look is not None)
    return confidence, drafter.draft(most)


def test_the_draft_is_the_greedy_text_of_the_stock_model(
    source: Source, drafting: ModelDrafting
) -> None:
    stock: Any = stock_model(source)
    ids = torch.tensor([PROMPT])
    written = stock.generate(
        ids, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1
    )

    draft = drafted(after(drafting, *PROMPT), 6)

    assert len(draft) > 1
    assert draft == tuple(written[0, len(PROMPT) :].tolist())[: len(draft)]


def test_accepted_tokens_are_not_read_again(watched: Watched) -> None:
    drafter = watched.drafter
    drafter.extend(PROMPT)
    draft = drafted(drafter, 3)
    watched.taken()

    drafter.extend((*draft, 1))
    drafter.look()

    assert watched.taken() == [[draft[-1], 1]]


def test_after_a_rejected_token_only_new_tokens_are_read(watched: Watched) -> None:
    drafter = watched.drafter
    drafter.extend(PROMPT)
    draft = drafted(drafter, 4)
    watched.taken()

    drafter.extend((draft[0], draft[1] ^ 1))
    drafter.look()

    assert watched.taken() == [[draft[1] ^ 1]]


def test_an_unused_draft_does_no_harm(drafting: ModelDrafting) -> None:
    drafter = after(drafting, *PROMPT)
    draft = drafted(drafter, 4)

    drafter.extend(draft[:2])

    assert drafted(drafter, 2) == draft[2:]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5))
def test_a_draft_does_not_depend_on_earlier_drafts(
    drafting: ModelDrafting, steps: list[tuple[int, int]]
) -> None:
    drafter, text = after(drafting, *PROMPT), list(PROMPT)
    for most, right in steps:
        draft = drafted(drafter, most)
        tokens = [*draft[:right], (text[-1] + right) % 100]
        drafter.extend(tokens)
        text += tokens

    assert looked(drafter, 3) == looked(after(drafting, *text), 3)


def test_a_long_text_is_prefilled_in_chunks_before_the_first_draft(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "CHUNK", 40)
    drafter, text = watched.drafter, [token % 100 for token in range(100)]
    drafter.extend(text)

    looks = [drafter.look() for _ in range(4)]

    assert [len(read) for read in watched.taken()] == [40, 40, 20, 1]
    assert looks[:2] == [None, None]
    assert looks[2] == looks[3] is not None


def test_a_chunk_leaves_a_token_to_draft_from(watched: Watched) -> None:
    watched.drafter.extend(range(STRIDE + 1))

    assert watched.drafter.look() is None
    assert watched.drafter.look() is not None
    assert [len(read) for read in watched.taken()] == [STRIDE, 1]
    assert CHUNK > STRIDE


def test_without_a_text_there_is_no_draft(drafting: ModelDrafting) -> None:
    assert drafting.begin().look() is None


@pytest.mark.parametrize(
    ("probability", "confidence"), [(0.1, 0), (0.4, 1), (0.7, 2), (0.75, 3), (1.0, 3)]
)
def test_confidence_follows_the_probability(
    drafting: ModelDrafting,
    monkeypatch: pytest.MonkeyPatch,
    probability: float,
    confidence: int,
) -> None:
    monkeypatch.setattr(drafting, "read", lambda *_: (1, probability))

    assert after(drafting, 1).look() == confidence


@pytest.mark.parametrize(("probability", "count"), [(0.1, 1), (0.5, 3), (0.7, 4), (1.0, 16)])
def test_an_unlikely_token_ends_the_draft(
    drafting: ModelDrafting, monkeypatch: pytest.MonkeyPatch, probability: float, count: int
) -> None:
    monkeypatch.setattr(drafting, "read", lambda *_: (1, probability))
    monkeypatch.setattr(draft_model, "LEAST", 0.25)

    assert drafted(after(drafting, 1), 16) == (1,) * count


def test_it_never_reads_beyond_its_context(draft: Draft) -> None:
    shape = replace(draft.shape, context=12)
    drafter = after(replace(draft, shape=shape).load(), *PROMPT)

    assert len(drafted(drafter, 16)) <= 3
    drafter.extend((1, 2))
    assert len(drafted(drafter, 16)) == 1
    drafter.extend((3,))
    assert drafter.look() is None


def test_only_tokens_of_both_models_are_drafted_and_read(draft: Draft) -> None:
    likeliest = drafted(after(draft.load(), *PROMPT), 1)[0]
    few = replace(draft, vocabulary=likeliest).load()
    drafter = after(few, *PROMPT)

    assert max(PROMPT) < likeliest
    assert all(draft < likeliest for draft in drafted(drafter, 8))
    drafter.extend((likeliest,))
    assert drafter.look() is None


def test_its_weights_are_counted(source: Source, draft: Draft) -> None:
    weights = sum(each.nbytes for each in stock_model(source).state_dict().values())
    assert draft.weight_bytes == weights


def test_its_caches_take_as_much_as_the_weights_at_most(draft: Draft) -> None:
    large = replace(draft, shape=replace(draft.shape, embed_bytes=1 << 30))
    most, some = large.bytes - large.weight_bytes, draft.bytes - draft.weight_bytes

    assert 0 <= large.weight_bytes - most < large.token_bytes
    assert some == MIN_CACHED * draft.token_bytes


def test_a_text_without_room_goes_on_without_drafts(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Draft, "most_cached", 50)
    drafting, finished = draft.load(), [1] * 30
    looked(after(drafting, *finished), 1)
    drafting.keep(finished)
    first = after(drafting, *[3] * 30)
    looked(first, 1)
    assert drafting.bytes == draft.weight_bytes + 30 * draft.token_bytes  # the finished one is gone
    second = after(drafting, *[2] * 25)

    assert second.look() is None
    assert second.cached == 0
    first.extend([4])
    assert drafted(first, 1)
    second.extend([4])
    assert second.look() is None
    drafting.keep([2] * 25 + [4])
    assert drafting._spare is None  # nothing of it


def test_a_text_that_is_too_long_is_not_read_at_all(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Draft, "most_cached", 2 * CHUNK)
    watched.drafter.extend([3] * (2 * CHUNK + 1))
    watched.taken()

    assert watched.drafter.look() is None
    assert watched.taken() == []


def test_the_next_turn_reuses_the_cache_of_the_last(watched: Watched) -> None:
    first, second = watched.drafter, watched.drafting.begin()
    turn = [token % 100 for token in range(60)]
    first.extend(turn)
    assert (first.look(), first.look() is None) == (None, False)
    first.draft(4)
    first.extend((1, 2, 3))
    watched.drafting.keep([*turn, 1, 2, 3])
    watched.taken()

    second.extend((*turn[:-5], 7, 7, 7))
    confidence = second.look()

    assert watched.taken() == [[7, 7, 7]]
    fresh = after(watched.drafting, *turn[:-5], 7, 7, 7)
    assert looked(fresh, 4) == (confidence, second.draft(4))
    assert max(map(len, watched.taken())) > STRIDE  # a cache is handed out once


@pytest.mark.parametrize("shared", [0, STRIDE, STRIDE + 1])
def test_only_a_text_with_the_same_prefix_reuses_the_cache(watched: Watched, shared: int) -> None:
    text = list(range(60))
    watched.drafter.extend(text)
    looked(watched.drafter, 1)
    watched.drafting.keep(text)
    watched.taken()

    looked(after(watched.drafting, *text[:shared], 99, 98), 1)

    read = sum(map(len, watched.taken()))
    assert read == (2 if shared > STRIDE else shared + 2)


def test_only_a_text_of_the_same_scope_reuses_the_cache(watched: Watched) -> None:
    text, read = list(range(60)), []
    for scope in ("key", "other", "other"):
        drafter = watched.drafting.begin(scope)
        drafter.extend(text)
        looked(drafter, 1)
        read.append(sum(map(len, watched.taken())))
        watched.drafting.keep(text, "third")
        watched.drafting.keep(text, scope)

    assert read[0] == read[1] > read[2]


def test_two_texts_never_share_a_cache(drafting: ModelDrafting) -> None:
    text = list(range(60))
    finished = after(drafting, *text)
    looked(finished, 1)
    drafting.keep(text)
    one, other = (after(drafting, *text, token) for token in (7, 8))
    looked(one, 4)

    drafting.keep(text)  # as if another session had written the same
    looked(other, 4)

    assert one.release_cache()[1] is not other.release_cache()[1]


def test_a_text_that_another_one_equals_goes_on_when_that_ends(drafting: ModelDrafting) -> None:
    text = list(range(60))
    going_on, finished = after(drafting, *text), after(drafting, *text)
    looked(going_on, 4)
    looked(finished, 4)
    drafting.keep(text)
    looked(after(drafting, *text[:40], 7), 4)

    going_on.extend((1, 2, 3))

    assert looked(going_on, 4) == looked(after(drafting, *text, 1, 2, 3), 4)


def test_a_sliding_window_that_moved_on_is_read_again(tmp_path: Path) -> None:
    changes = {"sliding_window": 8, "max_position_embeddings": 1024}
    window = other(tiny_model(tmp_path / "m", "mistral"), tmp_path / "w", **changes)
    drafting = find_draft(window, window).load()
    text = [token % 100 for token in range(600)]
    again = looked(after(drafting, *text[:40], 7), 4)

    first = after(drafting, *text)
    draft = looked(first, 4)
    drafting.keep(text)
    assert looked(after(drafting, *text[:40], 7), 4) == again
    assert looked(after(drafting, *text), 4) == draft


def test_each_text_is_its_own(drafting: ModelDrafting) -> None:
    first = drafted(after(drafting, *PROMPT), 4)
    drafting.keep([1, 2, 3])
    drafted(after(drafting, 1, 2, 3), 4)

    assert drafted(after(drafting, *PROMPT), 4) == first


def other(source: Source, folder: Path, **changes: Any) -> Source:
    """Copy a model with changes to its config."""
    shutil.copytree(source.folder, folder)
    config = open_folder("other", folder).config
    config.update(changes)
    config.save_pretrained(folder)
    return open_folder("other", folder)


def test_a_vocabulary_of_another_size_is_refused(source: Source, tmp_path: Path) -> None:
    large = other(source, tmp_path / "large", vocab_size=160)

    with pytest.raises(
        ModelError, match="`tiny` cannot draft for `other`: it has 128 tokens, not 160"
    ):
        find_draft(source, large)


def test_padding_does_not_matter_if_the_vocabularies_agree(source: Source, tmp_path: Path) -> None:
    large = other(source, tmp_path / "large", vocab_size=160)
    small = other(source, tmp_path / "small")
    for each in (large, small):
        byte_level().save_pretrained(each.folder)

    assert find_draft(small, large).vocabulary == find_draft(large, small).vocabulary == 128


def test_another_vocabulary_is_refused(source: Source, tmp_path: Path) -> None:
    one, two = other(source, tmp_path / "one"), other(source, tmp_path / "two")
    byte_level().save_pretrained(one.folder)
    byte_fallback().save_pretrained(two.folder)

    with pytest.raises(ModelError, match=r"its token 0 is '<\|end\|>', not '<unk>'") as refusal:
        find_draft(one, two)
    assert "same family" in str(refusal.value.hint)


@pytest.mark.parametrize("is_draft", [True, False])
def test_a_model_that_cannot_be_cropped_neither_drafts_nor_is_drafted_for(
    source: Source, tmp_path: Path, is_draft: bool
) -> None:
    mamba = tiny_model(tmp_path / "mamba", "mamba")

    with pytest.raises(ModelError, match="the cache of a `mamba` cannot be cropped"):
        find_draft(*((mamba, source) if is_draft else (source, mamba)))
