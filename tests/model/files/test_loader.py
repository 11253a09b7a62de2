"""Weights from files: only what is needed, as stock code reads it, and clear errors for damage."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from meshllm.errors import ModelError
from meshllm.model.files import loader
from meshllm.model.files.loader import SINGLE, first_dtype, list_weights, open_file
from meshllm.model.files.source import Source, needed_files, open_folder
from meshllm.model.locate import INDEX
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from meshllm.testing.models import stock_model, tiny_model


@pytest.fixture
def llama(tmp_path: Path) -> Source:
    return tiny_model(tmp_path / "llama")


@pytest.fixture
def split(tmp_path: Path) -> Source:
    return tiny_model(tmp_path / "split", file_bytes=60_000)


def load_all(source: Source) -> Shard:
    return load_shard(source, Span(0, 6), embed=True, head=True)


def rewrite(source: Source, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a model in a single file."""
    path = source.folder / SINGLE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_files_that_are_not_needed_may_be_absent(split: Source) -> None:
    span = Span(2, 4)
    needed = needed_files(split, span, embed=False, head=False)

    everything = set(list_weights(split.folder).values())
    assert 1 <= len(needed) < len(everything)
    for file in everything - set(needed):
        (split.folder / file).unlink()
    load_shard(split, span, embed=False, head=False)


def test_files_that_are_needed_are_named_when_absent(split: Source) -> None:
    file = needed_files(split, Span(0, 0), embed=True, head=False)[0]
    (split.folder / file).unlink()

    with pytest.raises(ModelError, match=f"{file}` is missing"):
        load_all(split)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_of_a_layer_are_merged_from_their_hub_names(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    source = tiny_model(tmp_path, "mixtral", dtype=torch.bfloat16)
    stored = list_weights(source.folder)

    shard = load_shard(source, Span(1, 2), embed=False, head=False, dtype=dtype)

    assert any(".experts.3." in name for name in stored)
    held = shard.model.model.layers[1].state_dict()
    expected = stock_model(source, dtype).get_submodule("model.layers.1").state_dict()
    assert held.keys() == expected.keys()
    assert {tensor.dtype for tensor in held.values()} == {dtype}
    assert all(torch.equal(held[name], expected[name]) for name in held)


def test_experts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "mixtral")

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        name = next(
            name
            for name in tensors
            if ".layers.1." in name and name.endswith("experts.3.w3.weight")
        )
        tensors[name] = tensors[name][:, :-1].contiguous()

    rewrite(source, widen)

    with pytest.raises(ModelError, match="cannot be converted: the experts have different shapes"):
        load_shard(source, Span(1, 2), embed=False, head=False)


def test_keys_without_the_prefix_of_the_base_model_are_found(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "gpt2")
    expected = load_all(source).model.state_dict()

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    rewrite(source, shorten)

    held = load_all(source).model.state_dict()
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_a_tie_may_be_stored_under_the_name_of_the_head(llama: Source) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(llama, swap)

    for span, embed in ((Span(0, 0), True), (Span(6, 6), False)):
        model = load_shard(llama, span, embed=embed, head=not embed).model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.std() > 0


def test_weights_stay_mapped_in_the_file_unless_the_dtype_changes(llama: Source) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")

    mapped = load_all(llama)
    widened = load_shard(llama, Span(0, 6), embed=True, head=True, dtype=torch.float64)

    regions = [
        [int(bound, 16) for bound in line.split(" ", 1)[0].split("-")]
        for line in maps.read_text().splitlines()
        if line.endswith(str(llama.folder / SINGLE))
    ]
    for shard, inside in ((mapped, True), (widened, False)):
        addresses = [parameter.data_ptr() for parameter in shard.model.parameters()]
        assert all(any(a <= at < b for a, b in regions) is inside for at in addresses)


def test_only_what_is_not_mapped_is_read_in_threads(
    llama: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThreads(Exception): ...

    def refuse(**_: object) -> None:
        raise NoThreads

    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", refuse)

    load_all(llama)
    with pytest.raises(NoThreads):
        load_shard(llama, Span(0, 6), embed=True, head=True, dtype=torch.float64)


def test_the_dtype_is_read_from_the_weights_if_the_config_has_none(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_bytes())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert first_dtype(tmp_path) is torch.bfloat16
    shard = load_all(open_folder("x", tmp_path))
    assert next(shard.model.parameters()).dtype is torch.bfloat16
    assert source.config.dtype is torch.bfloat16


def test_the_dtype_is_read_from_the_files_that_are_here(split: Source) -> None:
    files = sorted(set(list_weights(split.folder).values()))
    for file in files[:-1]:
        (split.folder / file).unlink()

    assert first_dtype(split.folder) is torch.float32

    (split.folder / files[-1]).unlink()
    with pytest.raises(ModelError, match="is missing"):
        first_dtype(split.folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda _: b"", "is damaged"),
        (lambda _: b"\xff" * 4096, "is damaged"),
        (lambda data: data[:8] + b"{" * 64 + data[72:], "is damaged"),
    ],
    ids=["truncated", "empty", "garbage", "no header"],
)
def test_a_damaged_file_is_named(
    llama: Source, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = llama.folder / SINGLE
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ModelError, match=f"{SINGLE}` {message}"):
        load_all(llama)


def test_a_file_that_cannot_be_read_is_not_called_damaged(
    llama: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)

    with pytest.raises(
        ModelError, match=f"{SINGLE}` cannot be read: too many open files"
    ) as caught:
        open_file(llama.folder / SINGLE)
    assert caught.value.hint is None


def test_a_missing_tensor_is_named(llama: Source) -> None:
    rewrite(llama, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))

    with pytest.raises(ModelError, match=r"^1 tensors are missing .*2\.mlp\.up_proj\.weight"):
        load_all(llama)
    load_shard(llama, Span(3, 5), embed=False, head=False)


def test_a_tensor_of_another_shape_is_named(llama: Source) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(65)

    rewrite(llama, widen)

    with pytest.raises(ModelError, match=r"`model.norm.weight` .* has shape \[65\], not \[64\]"):
        load_all(llama)


def test_an_index_that_names_the_wrong_file_is_refused(split: Source) -> None:
    path = split.folder / INDEX
    index = json.loads(path.read_bytes())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = files[0]
    path.write_text(json.dumps(index))

    with pytest.raises(ModelError, match=r"`model.norm.weight` is not in the file"):
        load_all(split)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "\x00"])
def test_a_damaged_index_is_refused(split: Source, text: str) -> None:
    (split.folder / INDEX).write_text(text)

    with pytest.raises(ModelError, match="Invalid safetensors index"):
        list_weights(split.folder)


def test_more_tensors_than_a_model_has_are_refused(
    split: Source, llama: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "MAX_TENSORS", 3)

    for source in (split, llama):
        with pytest.raises(ModelError, match=r"tensors, more than 3"):
            list_weights(source.folder)


def test_a_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    length = loader.MAX_HEADER_BYTES + 1
    (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little"))

    with pytest.raises(ModelError, match=f"its header has {length} bytes"):
        list_weights(tmp_path)


def test_an_index_cannot_refer_outside_its_folder(split: Source) -> None:
    (split.folder / INDEX).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))

    with pytest.raises(ModelError, match="refers to a file outside its folder"):
        list_weights(split.folder)


def test_a_folder_without_weights_says_so(llama: Source) -> None:
    (llama.folder / SINGLE).unlink()

    with pytest.raises(ModelError, match=f"has neither `{SINGLE}` nor `{INDEX}`"):
        load_all(llama)


def test_pickled_weights_are_never_read(llama: Source) -> None:
    shutil.move(llama.folder / SINGLE, llama.folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"only `pytorch_model\.bin`") as caught:
        load_all(llama)
    assert "can run code" in str(caught.value.hint)


def test_weights_without_a_float_have_no_dtype(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1, dtype=torch.int64)}, tmp_path / SINGLE)

    with pytest.raises(ModelError, match="no tensor of a float type"):
        first_dtype(tmp_path)
