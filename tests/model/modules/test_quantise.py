"""A quantised model gives nearly the same logits, and packs nothing on its next start."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.errors import ModelError
from meshllm.model.files.source import Source
from meshllm.model.modules.quant_kernels import KERNELS
from meshllm.model.modules.quant_linear import QuantLinear
from meshllm.model.modules.quant_store import digest_weights
from meshllm.model.modules.quantise import QuantReport, quantise
from meshllm.model.split.meta_model import build
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.names import Quant, Span
from meshllm.testing.models import stock_model, tiny_model

BF16 = torch.bfloat16
IDS = torch.tensor([[5, 9, 20, 31, 7, 37, 23, 4, 8, 15]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A model with a head of its own."""
    return tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", dtype=BF16)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A model whose head is tied to the embedding."""
    return tiny_model(tmp_path_factory.mktemp("gemma"), "gemma", dtype=BF16)


def quantised(source: Source, kind: Quant, **options: Any) -> tuple[Any, QuantReport]:
    model = stock_model(source)
    return model, quantise(model, kind, **options)


def no_packing(kind: Quant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow only the packing that `kernel` does as its trial."""
    pack = KERNELS[kind].pack

    def refuse(weight: Tensor) -> Any:
        if not torch.equal(weight, torch.ones(64, 64)):
            raise AssertionError("packed again")
        return pack(weight)

    monkeypatch.setitem(KERNELS, kind, dataclasses.replace(KERNELS[kind], pack=refuse))


def log_probabilities(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(IDS).logits
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(("kind", "far"), [(Quant.INT8, 0.02), (Quant.INT4, 0.3)])
def test_the_logits_are_nearly_those_of_plain_weights(
    source: Source, kind: Quant, far: float
) -> None:
    plain = log_probabilities(stock_model(source))

    found = log_probabilities(quantised(source, kind)[0])

    assert not torch.equal(found, plain)
    assert float((found - plain).norm() / plain.norm()) < far


def test_none_changes_nothing(source: Source) -> None:
    model, report = quantised(source, Quant.NONE)

    assert report == QuantReport(Quant.NONE)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    assert torch.equal(log_probabilities(model), log_probabilities(stock_model(source)))


@pytest.mark.parametrize(
    ("kind", "modules", "ratio"), [(Quant.INT8, 6 * 7 + 1, 1.6), (Quant.INT4, 6 * 6 + 1, 3.5)]
)
def test_the_report_counts_modules_and_memory(
    source: Source, kind: Quant, modules: int, ratio: float
) -> None:
    model, report = quantised(source, kind)

    found = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert report.modules == len(found) == modules
    assert report.plain_bytes == sum(module.weight.nbytes for module in found)
    assert report.plain_bytes > ratio * report.bytes
    assert len(report.plain) == 6 * 7 + 1 - modules
    assert all("96 inputs are not a multiple of 64" in plain.reason for plain in report.plain)


def test_a_tied_head_is_packed_and_the_embedding_stays_plain(
    tied: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = stock_model(tied)
    digests = digest_weights(build(tied.config, BF16), tied.folder, tmp_path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight

    model, _ = quantised(tied, Quant.INT8, digests=digests, cache=tmp_path, mapped=False)

    assert isinstance(model.lm_head, QuantLinear)
    assert isinstance(model.model.embed_tokens, nn.Embedding)
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    no_packing(Quant.INT8, monkeypatch)
    quantised(tied, Quant.INT8, digests=digests, cache=tmp_path)


def test_skipped_modules_stay_plain(source: Source) -> None:
    model, report = quantised(source, Quant.INT8, skip=["lm_head"])

    assert type(model.lm_head) is nn.Linear
    assert report.modules == 6 * 7


def test_weights_that_are_not_mapped_are_freed(source: Source) -> None:
    model, _ = quantised(source, Quant.INT8, mapped=False)

    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert not model.model.embed_tokens.weight.is_meta
    assert torch.equal(
        log_probabilities(model), log_probabilities(quantised(source, Quant.INT8)[0])
    )


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_the_next_start_packs_nothing(
    source: Source, kind: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = digest_weights(build(source.config, BF16), source.folder, tmp_path)
    first, before = quantised(source, kind, digests=digests, cache=tmp_path)
    no_packing(kind, monkeypatch)

    second, after = quantised(source, kind, digests=digests, cache=tmp_path)

    assert before == after
    assert torch.equal(log_probabilities(second), log_probabilities(first))


def test_cached_matrices_are_of_these_weights_only(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = digest_weights(build(source.config, BF16), source.folder, tmp_path)
    quantised(source, Quant.INT8, digests=digests, cache=tmp_path)
    no_packing(Quant.INT8, monkeypatch)

    others = {name: digest[::-1] for name, digest in digests.items()}
    with pytest.raises(AssertionError, match="packed again"):
        quantised(source, Quant.INT8, digests=others, cache=tmp_path)


def test_cached_matrices_are_of_this_torch_only(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = digest_weights(build(source.config, BF16), source.folder, tmp_path)
    quantised(source, Quant.INT4, digests=digests, cache=tmp_path)
    no_packing(Quant.INT4, monkeypatch)

    monkeypatch.setattr(torch, "__version__", "2.99.0")

    with pytest.raises(AssertionError, match="packed again"):
        quantised(source, Quant.INT4, digests=digests, cache=tmp_path)


def test_a_damaged_file_is_replaced(source: Source, tmp_path: Path) -> None:
    digests = digest_weights(build(source.config, BF16), source.folder, tmp_path)
    first, _ = quantised(source, Quant.INT8, digests=digests, cache=tmp_path)
    kept = sorted(tmp_path.glob("*.safetensors"))
    contents = [path.read_bytes() for path in kept]
    for path in kept:
        path.unlink()  # the first model still reads the old one
        path.write_bytes(b"\x00" * 100)

    second, _ = quantised(source, Quant.INT8, digests=digests, cache=tmp_path)

    assert torch.equal(log_probabilities(second), log_probabilities(first))
    assert [path.read_bytes() for path in kept] == contents


def test_without_digests_nothing_is_cached(source: Source, tmp_path: Path) -> None:
    quantised(source, Quant.INT8, cache=tmp_path)

    assert not list(tmp_path.iterdir())


def test_a_module_with_too_large_an_error_stays_plain(
    source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = dataclasses.replace(KERNELS[Quant.INT8], limit=0.013)  # few inputs have small errors
    monkeypatch.setitem(KERNELS, Quant.INT8, strict)
    model = stock_model(source)
    bad = model.get_submodule("model.layers.3.self_attn.k_proj")
    with torch.no_grad():
        bad.get_parameter("weight")[:, 5] = 100  # the rest of the row is rounded away

    with caplog.at_level(logging.WARNING, "meshllm"):
        report = quantise(model, Quant.INT8)

    assert model.get_submodule("model.layers.3.self_attn.k_proj") is bad
    assert isinstance(model.get_submodule("model.layers.3.self_attn.q_proj"), QuantLinear)
    [plain] = report.plain
    assert (plain.name, plain.lossy) == ("model.layers.3.self_attn.k_proj", True)
    assert "`model.layers.3.self_attn.k_proj` [32, 64] stays plain: its error would" in caplog.text


def test_weights_with_nan_stay_plain(source: Source) -> None:
    model = stock_model(source)
    with torch.no_grad():
        model.get_submodule("model.layers.3.mlp.up_proj").get_parameter("weight")[0, 0] = torch.nan

    report = quantise(model, Quant.INT8)

    assert [plain.name for plain in report.plain] == ["model.layers.3.mlp.up_proj"]


def test_stacked_experts_are_reported(tmp_path: Path) -> None:
    _, report = quantised(tiny_model(tmp_path, "qwen3_moe", dtype=BF16), Quant.INT8)

    stacks = {plain.name.rpartition(".")[2] for plain in report.plain}
    assert {"gate_up_proj", "down_proj"} <= stacks
    assert report.modules >= 6 * 4


def test_without_a_kernel_the_model_is_unchanged(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_weight: Tensor) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(KERNELS, Quant.INT8, dataclasses.replace(KERNELS[Quant.INT8], pack=refuse))
    model = stock_model(source)

    with pytest.raises(ModelError, match="no such kernel"):
        quantise(model, Quant.INT8)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_shards_give_the_logits_of_the_whole(source: Source, kind: Quant) -> None:
    def part(start: int, stop: int) -> Shard:
        span = Span(start, stop)
        shard = load_shard(source, span, embed=start == 0, head=stop == 6, packed=False)
        quantise(shard.model, kind)
        return shard

    whole, parts = part(0, 6), [part(0, 2), part(2, 6)]
    caches = [shard.new_cache() for shard in parts]
    cache = whole.new_cache()

    for ids in (IDS, IDS[:, :1], IDS[:, 1:4]):
        x = ids
        for shard, own in zip(parts, caches, strict=True):
            x = shard.forward(x, own)
        assert torch.equal(x, whole.forward(ids, cache))


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_a_shard_is_loaded_quantised_and_packs_nothing_on_its_next_start(
    source: Source, kind: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Shard:
        return load_shard(source, Span(2, 6), embed=False, head=True, quant=kind, cache=tmp_path)

    x = torch.randn(1, 3, 64).to(BF16)
    before = load().forward(x, None)
    no_packing(kind, monkeypatch)

    assert torch.equal(load().forward(x, None), before)


def test_an_embedding_held_only_for_a_tie_is_not_packed(tied: Source) -> None:
    shard = load_shard(tied, Span(0, 2), embed=True, head=False, quant=Quant.INT8)

    assert type(shard.model.lm_head) is nn.Linear


def test_weights_that_were_cast_are_freed(source: Source) -> None:
    shard = load_shard(
        source, Span(0, 2), embed=False, head=False, dtype=torch.float32, quant=Quant.INT8
    )

    assert shard.model.get_submodule("model.layers.1.mlp.up_proj").weight.is_meta
    assert shard.forward(torch.randn(1, 3, 64), None).dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "granitemoehybrid", "jamba"])
@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_models_with_recurrent_layers_are_quantised_too(
    tmp_path: Path, name: str, kind: Quant
) -> None:
    source = tiny_model(tmp_path, name, dtype=BF16)
    layers = source.config.get_text_config(decoder=True).num_hidden_layers
    shard = load_shard(source, Span(0, layers), embed=True, head=True, quant=kind)
    cache = shard.new_cache()

    shard.forward(torch.arange(3, 20)[None], cache)
    logits = shard.forward(torch.tensor([[5]]), cache)

    assert logits.isfinite().all()
