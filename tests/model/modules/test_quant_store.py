"""Cached packed matrices are loaded unchanged, or not at all."""

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.files.source import open_folder
from meshllm.model.modules import quant_store
from meshllm.model.modules.quant_matrix import Form
from meshllm.model.modules.quant_store import (
    ALIGNMENT,
    UNUSED_S,
    digest_weights,
    evict,
    load,
    save,
)
from meshllm.model.split.meta_model import Part, build, strip
from meshllm.names import Span
from meshllm.testing.models import tiny_model

KEY = "int8\ntorch 1.0\nabcdef"
PACKED: dict[str, Tensor] = {
    "data": torch.arange(1001, dtype=torch.int32).to(torch.uint8),
    "scale": torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(0)).bfloat16(),
}
FORM: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    name: (tuple(tensor.shape), tensor.dtype) for name, tensor in PACKED.items()
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The one file of a store that holds one matrix."""
    save(tmp_path, KEY, PACKED)
    [path] = tmp_path.iterdir()
    return path


def test_a_cached_matrix_is_found(file: Path) -> None:
    found = load(file.parent, KEY, FORM)

    assert found is not None
    for name, tensor in PACKED.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_mapped_tensors_are_aligned(file: Path) -> None:
    found = load(file.parent, KEY, FORM)

    assert found is not None
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in found.values())


def test_the_file_is_a_safetensors_file(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        assert sorted(opened.keys()) == ["data", "scale"]
        assert opened.metadata()["key"] == KEY


def test_no_temporary_file_is_left(file: Path) -> None:
    assert [path.suffix for path in file.parent.iterdir()] == [".safetensors"]


def test_an_uncached_matrix_is_not_found(tmp_path: Path) -> None:
    assert load(tmp_path, KEY, FORM) is None
    assert load(tmp_path / "nowhere", KEY, FORM) is None


def test_another_key_finds_nothing(file: Path) -> None:
    assert load(file.parent, KEY + "0", FORM) is None


@pytest.mark.parametrize("where", [0.0, 0.02, 0.3, 0.5, 0.9])
def test_a_changed_byte_is_detected(file: Path, where: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= 1
    file.write_bytes(content)

    assert load(file.parent, KEY, FORM) is None


def test_a_file_that_was_verified_is_mapped_without_reading_it(file: Path) -> None:
    first = load(file.parent, KEY, FORM)
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1  # of the padding or a tensor: a hash would show it

    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    unread = load(file.parent, KEY, FORM)
    os.utime(file)

    assert first is not None
    assert unread is not None
    assert load(file.parent, KEY, FORM) is None


def test_a_recently_changed_file_is_verified_again(file: Path) -> None:
    os.utime(file)
    assert load(file.parent, KEY, FORM) is not None
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1

    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert load(file.parent, KEY, FORM) is None


@pytest.mark.parametrize("size", [0, 7, 100, 500, -1])
def test_a_truncated_file_is_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])

    assert load(file.parent, KEY, FORM) is None


def test_a_file_that_others_may_write_to_is_not_mapped(file: Path) -> None:
    file.chmod(0o606)

    assert load(file.parent, KEY, FORM) is None


def test_a_link_is_not_mapped(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))

    assert load(file.parent, KEY, FORM) is None


def test_a_renamed_file_is_refused(file: Path) -> None:
    file.replace(quant_store._path(file.parent, "another"))

    assert load(file.parent, "another", FORM) is None


@pytest.mark.parametrize(
    "form",
    [
        FORM | {"data": ((1025,), torch.uint8)},
        FORM | {"data": ((900,), torch.uint8)},
        FORM | {"scale": ((3, 7, 2), torch.float64)},
        FORM | {"more": ((1,), torch.uint8)},
    ],
)
def test_a_file_of_another_form_is_refused(file: Path, form: Form) -> None:
    assert load(file.parent, KEY, form) is None


def test_tensors_of_another_dtype_are_refused(file: Path) -> None:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["data"]["dtype"] = "I8"
    file.write_bytes(
        content[:8] + json.dumps(header).ljust(length).encode() + content[8 + length :]
    )

    assert load(file.parent, KEY, FORM) is None


def test_a_pickle_is_not_opened(file: Path) -> None:
    torch.save(PACKED, file)

    assert load(file.parent, KEY, FORM) is None


def test_an_unwritable_folder_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    with caplog.at_level(logging.INFO, "meshllm"):
        save(tmp_path / "file", KEY, PACKED)

    assert "is not cached" in caplog.text


def test_a_file_that_cannot_be_finished_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", fail)

    save(tmp_path, KEY, PACKED)

    assert not list(tmp_path.iterdir())


def test_unused_files_are_evicted(file: Path) -> None:
    other = file.parent / "speed.safetensors"
    other.write_text("not ours")
    long_ago = time.time() - UNUSED_S - 1
    for path in (file, other):
        os.utime(path, (long_ago, long_ago))

    evict(file.parent)

    assert list(file.parent.iterdir()) == [other]


def test_a_file_in_use_is_not_evicted(file: Path) -> None:
    long_ago = time.time() - UNUSED_S - 1
    os.utime(file, (long_ago, long_ago))

    assert load(file.parent, KEY, FORM) is not None
    evict(file.parent)

    assert file.exists()


def test_every_weight_of_a_part_has_a_digest(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "qwen3")
    meta_model = build(source.config, torch.float32)
    strip(meta_model, Part(Span(1, 3), embed=False, head=False))

    digests = digest_weights(meta_model, source.folder, tmp_path)

    assert set(digests) == {name for name, _ in meta_model.model.named_parameters()}
    assert len(set(digests.values())) == len(digests)


def test_merged_experts_have_one_digest(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "qwen3_moe")
    meta_model = build(source.config, torch.float32)

    digests = digest_weights(meta_model, source.folder, tmp_path)

    stacks = [d for name, d in digests.items() if name.endswith("experts.gate_up_proj")]
    assert stacks
    assert all(len(digest) > 32 for digest in stacks)


def test_digests_do_not_need_the_weights_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path / "model")
    meta_model = build(source.config, torch.float32)
    first = digest_weights(meta_model, source.folder, tmp_path)

    monkeypatch.setattr("meshllm.model.files.manifest.hash_tensors", None)

    assert digest_weights(meta_model, source.folder, tmp_path) == first


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model")
    meta_model = build(source.config, torch.float32)
    path = source.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ModelError, match="damaged"):
        digest_weights(meta_model, open_folder("model", source.folder).folder, tmp_path)
