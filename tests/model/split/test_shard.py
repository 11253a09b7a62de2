"""Shards of a model give its logits, bit for bit; see test_families for every type."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from meshllm.errors import ModelError
from meshllm.model.files.source import Source
from meshllm.model.split.meta_model import Part
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.names import Quant, Span
from meshllm.testing.models import stock_model, tiny_model

FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "mixtral", "opt", "bloom"]
LAYERS = 6
SPLITS = {
    "one part": [Part(Span(0, 6), embed=True, head=True)],
    "two parts": [Part(Span(0, 2), embed=True, head=False), Part(Span(2, 6), False, True)],
    "ends apart": [
        Part(Span(0, 0), embed=True, head=False),
        Part(Span(0, 3), embed=False, head=False),
        Part(Span(3, 6), embed=False, head=False),
        Part(Span(6, 6), embed=False, head=True),
    ],
    "a part per layer": [Part(Span(n, n + 1), n == 0, n == LAYERS - 1) for n in range(LAYERS)],
}


@dataclass
class Model:
    """A tiny model, whole and in parts; a part is loaded once."""

    source: Source
    stock: nn.Module
    parts: dict[Part, Shard] = field(default_factory=dict)

    def shard(self, part: Part) -> Shard:
        if part not in self.parts:
            self.parts[part] = load_shard(self.source, part.span, embed=part.embed, head=part.head)
        return self.parts[part]

    def whole(self, **options: Any) -> Callable[..., Tensor]:
        """Return a generation on the stock model with the stock cache."""
        cache = DynamicCache(config=self.stock.config)

        @torch.no_grad()
        def write(ids: Tensor, **more: Any) -> Tensor:
            logits: Tensor = self.stock(ids, past_key_values=cache, **options, **more).logits
            return logits

        return write


class Ring:
    """A generation through shards."""

    def __init__(self, model: Model, parts: list[Part]) -> None:
        self.shards = [model.shard(part) for part in parts]
        self.caches = [shard.new_cache() for shard in self.shards]

    def write(self, x: Tensor, **options: Any) -> Tensor:
        for shard, cache in zip(self.shards, self.caches, strict=True):
            x = shard.forward(x, cache, **options)
        return x

    def crop(self, length: int) -> None:
        for cache in self.caches:
            cache.crop(length)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    source = tiny_model(tmp_path_factory.mktemp(request.param), request.param, file_bytes=60_000)
    return Model(source, stock_model(source))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Model:
    source = tiny_model(tmp_path_factory.mktemp("tied"))
    return Model(source, stock_model(source))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))


def chunks(ids: Tensor, *sizes: int) -> Iterator[Tensor]:
    """Split into prefill, a prefill chunk, decode steps and rows of a draft."""
    yield from torch.split(ids[:, : sum(sizes)], list(sizes), dim=1)


@pytest.mark.parametrize("split", SPLITS)
def test_shards_give_the_logits_of_the_whole(model: Model, split: str, ids: Tensor) -> None:
    ring, whole = Ring(model, SPLITS[split]), model.whole()

    for chunk in chunks(ids, 7, 5, 1, 1, 4, 1):
        assert torch.equal(ring.write(chunk), whole(chunk))


def test_shards_in_bfloat16_give_the_logits_of_the_whole(model: Model, ids: Tensor) -> None:
    dtype = torch.bfloat16
    halved = Model(model.source, stock_model(model.source, dtype))
    load = partial(load_shard, model.source, dtype=dtype)
    halved.parts = {p: load(p.span, embed=p.embed, head=p.head) for p in SPLITS["two parts"]}
    ring, whole = Ring(halved, SPLITS["two parts"]), halved.whole()

    for chunk in chunks(ids, 7, 5, 1, 4, 1):
        assert torch.equal(ring.write(chunk), whole(chunk))


@pytest.mark.parametrize("split", ["two parts", "ends apart"])
def test_a_left_padded_batch_gives_the_logits_of_the_whole(
    model: Model, split: str, ids: Tensor
) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = model.shard(SPLITS[split][0])._call.position_ids
    ring, whole = Ring(model, SPLITS[split]), model.whole()

    for start, stop in ((0, 7), (7, 8), (8, 9)):
        chunk, seen, at = ids[:, start:stop], mask[:, :stop], positions[:, start:stop]
        more = {"position_ids": at} if takes_positions else {}
        expected = whole(chunk, attention_mask=seen, **more)
        assert torch.equal(ring.write(chunk, attention_mask=seen, position_ids=at), expected)


@pytest.mark.parametrize("split", ["two parts", "ends apart"])
def test_cropped_tokens_leave_no_trace(model: Model, split: str, ids: Tensor) -> None:
    ring, whole = Ring(model, SPLITS[split]), model.whole()
    expected = [whole(chunk) for chunk in chunks(ids, 9, 3)]

    assert torch.equal(ring.write(ids[:, :9]), expected[0])
    for taken in range(1, 9):
        for wrong in chunks(ids[:, 20:], 1, taken - 1) if taken > 1 else [ids[:, 20:21]]:
            ring.write(wrong)
        ring.crop(9)
        assert torch.equal(ring.write(ids[:, 9:12]), expected[1])
        ring.crop(9)


def test_a_sequence_without_a_cache_gives_the_logits_of_the_whole(
    model: Model, ids: Tensor
) -> None:
    hidden = ids
    for part in SPLITS["ends apart"]:
        hidden = model.shard(part).forward(hidden, None)

    with torch.no_grad():
        assert torch.equal(hidden, model.stock(ids).logits)


def test_sequences_without_a_cache_do_not_see_each_other(tied: Model, ids: Tensor) -> None:
    shard = tied.shard(SPLITS["one part"][0])

    once, again = (shard.forward(ids, None) for _ in range(2))

    assert torch.equal(once, again)


def test_a_family_may_pass_the_hidden_state_by_keyword(tmp_path: Path, ids: Tensor) -> None:
    source = tiny_model(tmp_path, "inkling_text")
    inkling = Model(source, stock_model(source))
    ring, whole = Ring(inkling, SPLITS["ends apart"]), inkling.whole()

    for chunk in chunks(ids, 7, 1):
        assert torch.equal(ring.write(chunk), whole(chunk))


def test_a_family_may_scale_its_embeddings_in_place(tmp_path: Path, ids: Tensor) -> None:
    source = tiny_model(tmp_path, "ctrl")
    ctrl = Model(source, stock_model(source))
    front, back = Ring(ctrl, [Part(Span(0, 1), True, False), Part(Span(1, 6), False, True)]).shards
    hidden = front.forward(ids, None)
    before = hidden.clone()

    logits = back.forward(hidden, None)

    assert torch.equal(logits, ctrl.whole()(ids))
    assert torch.equal(hidden, before)


def test_only_the_requested_rows_are_returned(model: Model, ids: Tensor) -> None:
    for split in ("one part", "ends apart"):
        ring = Ring(model, SPLITS[split])

        last = ring.write(ids[:, :7], rows=1)

        everything = Ring(model, SPLITS[split]).write(ids[:, :7])
        assert last.shape == (2, 1, everything.shape[-1])
        assert torch.allclose(last, everything[:, -1:], atol=1e-6)
        assert [cache.length for cache in ring.caches] == [7] * len(ring.caches)


def test_a_part_in_the_middle_holds_its_layers_only(tied: Model) -> None:
    middle = tied.shard(Part(Span(2, 4), embed=False, head=False))

    names = {name.removeprefix("model.layers.")[0] for name, _ in middle.model.named_parameters()}
    assert names == {"2", "3"}
    assert not any(tensor.is_meta for tensor in middle.model.state_dict().values())


def test_a_shard_says_what_its_model_is_and_how_it_is_stored(tied: Model) -> None:
    shard = tied.shard(SPLITS["one part"][0])

    assert shard.outputs == {"model.norm", "lm_head"}
    assert shard.arity == 0
    assert (shard.device, shard.quant) == (torch.device("cpu"), Quant.NONE)


def test_tied_embeddings_are_one_tensor_in_both_ends(tied: Model) -> None:
    front = tied.shard(Part(Span(0, 3), embed=True, head=False))

    head = load_shard(tied.source, Span(6, 6), embed=False, head=True, share=front)

    assert head.model.lm_head.weight is front.model.model.embed_tokens.weight


def test_a_head_that_shares_all_weights_needs_no_file(tied: Model, ids: Tensor) -> None:
    whole = tied.shard(SPLITS["one part"][0])

    head = load_shard(tied.source, Span(6, 6), embed=False, head=True, share=whole)

    assert head.model.model.norm.weight is whole.model.model.norm.weight
    assert head.forward(torch.zeros(1, 2, 64), None).shape[:2] == (1, 2)


@pytest.mark.parametrize(
    ("part", "takes"),
    [
        (Part(Span(0, 0), embed=True, head=False), True),
        (Part(Span(0, 3), embed=False, head=False), True),
        (Part(Span(6, 6), embed=False, head=True), False),
    ],
)
def test_parts_that_attend_or_embed_get_the_mask_of_a_batch(
    tied: Model, ids: Tensor, part: Part, *, takes: bool
) -> None:
    shard = tied.shard(part)
    x = ids if part.embed else torch.zeros(*ids.shape, shard.row_format.width)
    options = [shard._options(x, None, None, mask) for mask in (torch.ones_like(ids), None)]

    assert ["attention_mask" in each for each in options] == [takes, False]


def test_stock_code_gets_the_cache_and_the_positions_after_it(tied: Model, ids: Tensor) -> None:
    shard, given = tied.shard(SPLITS["one part"][0]), list[dict[str, Any]]()
    cache = shard.new_cache()
    note = shard.model.register_forward_pre_hook(
        lambda _model, _args, options: given.append(options), with_kwargs=True
    )
    with ExitStack() as hooks:
        hooks.callback(note.remove)
        for rows, held in ((ids[:1, :3], cache), (ids[:1, 3:5], cache), (ids[:1, :2], None)):
            shard.forward(rows, held)

    positions = [options["position_ids"].tolist() for options in given]
    assert positions == [[[0, 1, 2]], [[3, 4]], [[0, 1]]]
    assert [options["use_cache"] for options in given] == [True, True, False]


def test_sessions_do_not_see_each_other(tied: Model, ids: Tensor) -> None:
    part = SPLITS["one part"][0]
    shard = tied.shard(part)
    first, second = shard.new_cache(), shard.new_cache()
    alone = Ring(tied, [part])

    shard.forward(ids[:1, :5], first)
    shard.forward(ids[:1, 9:20], second)
    mixed = shard.forward(ids[:1, 5:6], first)

    alone.write(ids[:1, :5])
    assert torch.equal(mixed, alone.write(ids[:1, 5:6]))


def test_a_hidden_state_is_not_kept_after_the_step(tied: Model) -> None:
    tail = tied.shard(Part(Span(6, 6), embed=False, head=True))

    tail.forward(torch.zeros(1, 1, 64), None)

    assert tail._input is None
    assert tail._entry_stub is not None
    assert tail._entry_stub.hidden is None


def test_attention_can_be_chosen(tied: Model, ids: Tensor) -> None:
    part = SPLITS["one part"][0]
    eager = load_shard(tied.source, part.span, embed=True, head=True, attention="eager")

    logits = eager.forward(ids, None)

    assert eager.model.config._attn_implementation == "eager"
    assert torch.allclose(logits, tied.shard(part).forward(ids, None), atol=1e-5)


@pytest.mark.parametrize(
    ("span", "embed", "head", "message"),
    [
        (Span(2, 9), False, False, "`2:9` is beyond the 6 layers"),
        (Span(1, 3), True, False, "`1:3` of 6 layers does not reach the ends"),
        (Span(1, 3), False, True, "`1:3` of 6 layers does not reach the ends"),
        (Span(3, 3), False, False, "Empty span `3:3` without embedding or head"),
    ],
)
def test_a_part_that_is_not_in_the_model_is_refused(
    tied: Model, span: Span, embed: bool, head: bool, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_shard(tied.source, span, embed=embed, head=head)


def test_an_unknown_attention_is_refused(tied: Model) -> None:
    with pytest.raises(ModelError, match="cannot be built"):
        load_shard(tied.source, Span(0, 6), embed=True, head=True, attention="wishful")


def test_a_model_that_is_not_a_causal_lm_is_refused(tied: Model, tmp_path: Path) -> None:
    from transformers import T5Config

    with pytest.raises(ModelError, match="`t5` is not a causal language model"):
        load_shard(
            Source("t5", tmp_path, T5Config()),
            Span(0, 1),
            embed=True,
            head=False,
            dtype=torch.float32,
        )


@pytest.mark.parametrize("family", [*FAMILIES, "llama4_text", "minicpm3"])
@pytest.mark.parametrize("start", [0, LAYERS])
def test_without_a_head_the_last_hidden_state_comes_out(
    tmp_path: Path, family: str, start: int
) -> None:
    source = tiny_model(tmp_path, family)
    stock, tokens = stock_model(source), torch.tensor([[5, 9, 3, 17]])
    front = load_shard(source, Span(0, LAYERS), embed=True, head=False)
    part = load_shard(source, Span(start, LAYERS), embed=not start, head=True)
    x = front.forward(tokens, front.new_cache()) if start else tokens
    logits = part.forward(x, part.new_cache())

    with part.without_head():
        rows = part.forward(x, part.new_cache())

    base: Any = {"llama4_text": "model", "opt": "model.decoder"}.get(
        family, stock.base_model_prefix
    )
    with torch.no_grad():
        assert torch.equal(rows, stock.get_submodule(base)(tokens).last_hidden_state)
    assert torch.equal(part.forward(x, part.new_cache()), logits)


def test_a_model_that_hides_its_head_has_no_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = load_shard(tiny_model(tmp_path), Span(0, LAYERS), embed=True, head=True)
    monkeypatch.setattr(shard.model, "get_output_embeddings", lambda: None)

    with pytest.raises(ModelError, match="no hidden states"), shard.without_head():
        pass
