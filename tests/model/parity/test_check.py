import errno
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    CTRLConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    Qwen3Config,
    Zamba2Config,
)

from meshllm.errors import ModelError, UserError
from meshllm.model import json_cache
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity import check as module
from meshllm.model.parity.cases import TOLERANCE, RingSession
from meshllm.model.parity.check import Outcome, ParityReport, Split, check, verify
from meshllm.model.parity.compare import Depth, random_model
from meshllm.model.parity.families import read_table, tiny_config
from meshllm.model.parity.verdict import Verdict
from meshllm.model.pauses import pausing
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from meshllm.testing.models import tiny_model
from tests.builders.small_tokenizers import byte_level

PROMPT = [5, 17, 80, 3, 44]
KNOWN = Verdict("llama", equal=True, reason="", whole=True, chunkable=True, croppable=True)


@pytest.fixture(scope="module")
def llama() -> Iterator[Source]:
    with random_model(tiny_config("llama", read_table()), torch.float32) as (_, source):
        yield source


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the measurement by one that records the types."""
    calls: list[str] = []

    def measured(config: LlamaConfig, depth: Depth | None = None) -> Verdict:
        calls.append(config.model_type)
        return KNOWN

    monkeypatch.setattr(module, "measure", measured)
    return calls


def test_a_real_config_is_checked_in_its_own_shape(tmp_path: Path) -> None:
    verdict = check(Qwen3Config(), folder=tmp_path)

    assert verdict == replace(KNOWN, model_type="qwen3", transformers=transformers.__version__)


def test_a_type_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    verdict = check(Zamba2Config(), folder=tmp_path)

    with pytest.raises(ModelError, match="Model type `zamba2` cannot be split: "):
        verdict.require(2)


def test_a_verdict_is_measured_once(tmp_path: Path, counted: list[str]) -> None:
    first = check(LlamaConfig(), folder=tmp_path)
    second = check(LlamaConfig(), folder=tmp_path)

    assert first == second == KNOWN
    assert counted == ["llama"]


@pytest.mark.usefixtures("counted")
def test_waiting_for_another_process_that_checks_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cache, "try_lock", lambda _: False)
    monkeypatch.setattr(json_cache, "WAIT_S", 0.01)
    pauses = list[int]()

    with pausing(lambda: pauses.append(1)):
        check(LlamaConfig(), folder=tmp_path)

    assert pauses


def test_a_model_that_runs_whole_is_compared_in_parts_only_once_it_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = list[tuple[str, ...]]()

    def measured(config: LlamaConfig, depth: Depth) -> Verdict:
        layouts.append(depth.layouts)
        return KNOWN

    monkeypatch.setattr(module, "measure", measured)

    whole = [check(LlamaConfig(), folder=tmp_path, is_whole=True) for _ in range(2)]
    full = check(LlamaConfig(), folder=tmp_path)
    after = check(LlamaConfig(), folder=tmp_path, is_whole=True)

    assert whole == [replace(KNOWN, equal=False, reason="it was not compared in parts")] * 2
    whole[0].require(1)
    with pytest.raises(ModelError, match="cannot be split: it was not compared in parts"):
        whole[0].require(2)
    assert full == after == KNOWN
    assert layouts == [("1",), ("1", "ends")]


def test_a_whole_model_has_the_traits_of_its_parts(tmp_path: Path) -> None:
    config = tiny_config("qwen3", read_table())

    whole = check(config, folder=tmp_path, is_whole=True)

    assert replace(whole, equal=True, reason="") == check(config, folder=tmp_path)


def test_other_switches_are_measured_again(tmp_path: Path, counted: list[str]) -> None:
    check(LlamaConfig(), folder=tmp_path)
    check(LlamaConfig(attention_bias=True), folder=tmp_path)

    assert counted == ["llama", "llama"]


def test_another_version_of_transformers_is_measured_again(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(LlamaConfig(), folder=tmp_path)
    monkeypatch.setattr(module.transformers, "__version__", "5.99.0")  # type: ignore[attr-defined]  # imported
    check(LlamaConfig(), folder=tmp_path)

    assert len(counted) == 2


def test_another_processor_is_measured_again(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(LlamaConfig(), folder=tmp_path)
    monkeypatch.setattr(module, "machine", lambda: ("other", "+feature"))
    check(LlamaConfig(), folder=tmp_path)

    assert len(counted) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model_type": 1}', "\udcff"])
def test_a_damaged_record_is_measured_again(
    tmp_path: Path, counted: list[str], damage: str
) -> None:
    check(LlamaConfig(), folder=tmp_path)
    (record,) = tmp_path.glob("*.json")
    record.write_bytes(damage.encode(errors="surrogateescape"))

    assert check(LlamaConfig(), folder=tmp_path) == KNOWN
    assert len(counted) == 2
    assert json.loads(record.read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    "error", [SafetensorError("No space left on device"), OSError(errno.ENOSPC, "No space left")]
)
def test_no_space_for_a_tiny_model_is_reported_and_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)

    with pytest.raises(UserError, match="cannot be saved to check the split: ") as raised:
        check(LlamaConfig(), folder=tmp_path)

    assert raised.value.hint == "free some space, or set `TMPDIR`"
    assert not list(tmp_path.glob("*.json"))


def test_a_folder_that_cannot_be_written_only_costs_time(
    tmp_path: Path, counted: list[str]
) -> None:
    (tmp_path / "file").touch()

    assert check(LlamaConfig(), folder=tmp_path / "file") == KNOWN


def test_a_wrapper_is_refused_with_its_reason(tmp_path: Path, counted: list[str]) -> None:
    verdict = check(CONFIG_MAPPING["mllama"](), folder=tmp_path)

    assert verdict.reason == "multimodal wrapper"
    assert not counted
    assert not list(tmp_path.glob("*.json"))


def test_a_wrapper_of_a_text_model_is_checked_as_that(tmp_path: Path, counted: list[str]) -> None:
    check(CONFIG_MAPPING["gemma3"](), folder=tmp_path)

    assert counted == ["gemma3_text"]


def test_switches_that_do_not_shrink_fall_back_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(config: CTRLConfig, depth: Depth) -> Verdict:
        asked.append(config.n_layer)
        if len(asked) == 1:
            raise RuntimeError("shapes do not match")
        return KNOWN

    monkeypatch.setattr(module, "measure", measured)

    assert check(CTRLConfig(), folder=tmp_path) == KNOWN
    assert asked == [6, 6]


def test_a_size_that_shrinking_does_not_know_takes_no_memory(
    tmp_path: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, measured = list[int](), module.__dict__["measure"]

    def measure(config: MambaConfig, depth: Depth) -> Verdict:
        sizes.append(config.conv_kernel)
        known: Verdict = measured(config, depth)
        return known

    monkeypatch.setattr(module, "measure", measure)

    assert check(MambaConfig(conv_kernel=10_000_000), folder=tmp_path) == KNOWN
    assert sizes == [4]


def test_a_type_that_does_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(_: LlamaConfig, depth: Depth) -> Verdict:
        raise RuntimeError("shapes do not match\nat all")

    monkeypatch.setattr(module, "measure", measured)

    verdict = check(LlamaConfig(), folder=tmp_path)

    assert not verdict.equal
    assert verdict.reason.endswith("in a tiny size: RuntimeError: shapes do not match")


def test_a_model_is_verified_against_generate(llama: Source) -> None:
    stages: list[str] = []

    report = verify(llama, prompt=PROMPT, progress=stages.append)

    assert report.outcome is Outcome.EQUAL
    assert report.prompt == tuple(PROMPT)
    assert len(report.tokens) == 16
    assert [[part.span for part in split.parts] for split in report.splits] == [
        [Span(0, 3), Span(3, 6)],
        [Span(0, 2), Span(2, 4), Span(4, 6)],
    ]
    assert all(split.gap == 0 for split in report.splits)
    assert stages == [
        "run the whole model, 6 layers in float32",
        "run it in 2 parts: 0:3 3:6",
        "run it in 3 parts: 0:2 2:4 4:6",
    ]


def test_the_generation_config_of_the_model_is_ignored(llama: Source) -> None:
    greedy = verify(llama, splits=(2,), prompt=PROMPT)
    settings = llama.folder / "generation_config.json"
    before = settings.read_text()

    settings.write_text(json.dumps({"eos_token_id": greedy.tokens[0], "repetition_penalty": 2.0}))
    again = verify(llama, splits=(2,), prompt=PROMPT)
    settings.write_text(before)

    assert again == greedy


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_the_attention_that_a_config_names_is_not_verified(tmp_path: Path, attention: str) -> None:
    tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"attn_implementation": attention}))

    assert verify(open_folder("x", tmp_path), splits=(2,), prompt=PROMPT).equal


def test_a_damaged_part_is_not_verified(llama: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_worn(source: Source, span: Span, **options: Any) -> Shard:
        shard = load_shard(source, span, **options)
        for weight in shard.model.parameters():
            if not weight.is_meta:
                weight.add_(0.1 * torch.randn(weight.shape))
        return shard

    monkeypatch.setattr(module, "load_shard", load_worn)

    report = verify(llama, splits=(2,), prompt=PROMPT)

    assert report.outcome is Outcome.DIFFERENT
    assert report.relative > TOLERANCE
    assert not report.splits[0].same_tokens
    assert report.splits[0].gap > 0


@pytest.mark.parametrize(("size", "outcome"), [(2e-7, Outcome.ROUNDING), (1e-2, Outcome.DIFFERENT)])
def test_rounding_is_not_an_error(
    llama: Source, monkeypatch: pytest.MonkeyPatch, size: float, outcome: Outcome
) -> None:
    class Rounding(RingSession):
        def write(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            rows = super().write(ids, mask)
            return rows + size * rows.abs().max()  # no greedy choice changes

    monkeypatch.setattr(module, "RingSession", Rounding)

    report = verify(llama, splits=(2,), prompt=PROMPT)

    assert report.outcome is outcome
    assert report.relative == pytest.approx(size, abs=1e-7)


def test_nan_is_an_error() -> None:
    part = Split((), equal=False, same_tokens=True, gap=math.nan, relative=math.nan)
    other = replace(part, gap=1e-7, relative=1e-7)

    report = ParityReport("llama", "float32", (), (), (other, part))

    assert report.outcome is Outcome.DIFFERENT
    assert math.isnan(report.relative)


def test_more_parts_than_layers_are_refused(llama: Source) -> None:
    with pytest.raises(ModelError, match="has 6 layers, too few for 7 parts"):
        verify(llama, splits=(7,), prompt=PROMPT)


def test_a_text_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    source = tiny_model(tmp_path)
    context = source.config.max_position_embeddings

    with pytest.raises(ModelError, match=f"{context} \\+ 1 tokens exceed the context of {context}"):
        verify(source, splits=(2,), prompt=[3] * context, tokens=1)


def test_a_model_without_a_tokenizer_is_compared_on_ids(llama: Source) -> None:
    report = verify(llama, splits=(2,))

    assert report.equal
    assert report.prompt == tuple(range(1, 11))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = tiny_model(tmp_path)
    byte_level().save_pretrained(source.folder)

    with pytest.raises(ModelError, match=r"tokenizer of the model gives token [0-9]+, and its"):
        verify(source, splits=(2,), prompt="the ring passes a blob")


def test_damaged_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    source = tiny_model(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ModelError, match="is damaged"):
        verify(source, splits=(2,))
