"""Digests of the weights on this machine."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from meshllm.errors import DamagedFile, ModelError
from meshllm.model import json_cache
from meshllm.model.files import manifest as module
from meshllm.model.files.loader import MAX_HEADER_BYTES
from meshllm.model.files.manifest import (
    PART_BYTES,
    config_digest,
    file_digests,
    hash_tensors,
    manifest,
)
from meshllm.model.files.source import Source, open_folder
from meshllm.model.pauses import pausing
from meshllm.testing.models import tiny_model

LAYERS = 6
EMBED, HEAD, CONFIG = LAYERS, LAYERS + 1, LAYERS + 2
ABSENT = bytes(PART_BYTES)


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Source:
    """A copy that a test may change."""
    return open_folder("llama", Path(shutil.copytree(llama, tmp_path / "llama")))


def changed(before: tuple[bytes, ...], after: tuple[bytes, ...]) -> list[int]:
    return [at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]


def alter(source: Source, name: str, tensor: torch.Tensor) -> None:
    file = source.folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file)


def test_every_part_has_its_own_digest(source: Source, tmp_path: Path) -> None:
    found = manifest(source, tmp_path / "cache")

    assert len(found) == len(set(found)) == LAYERS + 3
    assert {len(digest) for digest in found} == {PART_BYTES}
    assert found[CONFIG] == config_digest(source)[:PART_BYTES]
    assert found == manifest(source, tmp_path / "other")


def test_hashing_pauses_before_each_tensor(source: Source) -> None:
    file, pauses = source.folder / "model.safetensors", list[int]()

    with pausing(lambda: pauses.append(1)):
        found = hash_tensors(file)

    assert len(pauses) == len(found) == len(load_file(file))


def test_waiting_for_another_process_that_hashes_pauses(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cache, "try_lock", lambda _: False)
    monkeypatch.setattr(json_cache, "WAIT_S", 0.01)
    monkeypatch.setattr(module, "hash_tensors", lambda _: {})
    pauses = list[int]()

    with pausing(lambda: pauses.append(1)):
        file_digests(source.folder / "model.safetensors", tmp_path)

    assert pauses


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.2.mlp.up_proj.weight", 2),
        ("model.embed_tokens.weight", EMBED),
        ("model.norm.weight", HEAD),
    ],
)
def test_one_value_changes_the_digest_of_its_part_only(
    source: Source, tmp_path: Path, name: str, part: int
) -> None:
    before = manifest(source, tmp_path)
    tensor = load_file(source.folder / "model.safetensors")[name].clone()
    tensor.view(-1)[-1] += 1

    alter(source, name, tensor)

    assert changed(before, manifest(source, tmp_path)) == [part]


def test_the_dtype_changes_the_digest(source: Source, tmp_path: Path) -> None:
    before = manifest(source, tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = load_file(source.folder / "model.safetensors")[name]

    alter(source, name, tensor.view(torch.int32))

    assert changed(before, manifest(source, tmp_path)) == [0]


def test_the_division_over_files_does_not_matter(tmp_path: Path) -> None:
    whole = tiny_model(tmp_path / "whole")
    split = tiny_model(tmp_path / "split", file_bytes=40_000)

    assert len(list(split.folder.glob("*.safetensors"))) > 2
    assert manifest(whole, tmp_path / "a") == manifest(split, tmp_path / "b")


def test_missing_parts_are_zeros(tmp_path: Path) -> None:
    split = tiny_model(tmp_path / "split", file_bytes=40_000)
    whole = manifest(split, tmp_path / "cache")
    index = json.loads((split.folder / "model.safetensors.index.json").read_text())
    last = index["weight_map"]["model.layers.5.mlp.up_proj.weight"]
    (split.folder / last).unlink()

    found = manifest(split, tmp_path / "cache")

    assert found[5] == ABSENT
    assert found[0] == whole[0] != ABSENT
    assert all(found[at] == ABSENT for at in changed(whole, found))


def test_a_second_call_reads_no_weights(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = manifest(source, tmp_path)
    monkeypatch.setattr(module, "hash_tensors", None)

    assert manifest(source, tmp_path) == before


def test_a_changed_file_is_hashed_again(source: Source, tmp_path: Path) -> None:
    before = manifest(source, tmp_path)
    file = source.folder / "model.safetensors"
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))

    assert len(changed(before, manifest(source, tmp_path))) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff\xff",
        b"\x21" + b"\0" * 7 + b'{"a":{"data_offsets":[0,1],"x":1}}'[:33],
        b"\x40" + b"\0" * 7 + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64),
        (1 << 18).to_bytes(8, "little") + b"[" * (1 << 18),
    ],
    ids=["empty", "nothing", "long", "list", "text", "cut", "outside", "deep"],
)
def test_a_damaged_file_is_named(source: Source, tmp_path: Path, data: bytes) -> None:
    (source.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors"}})
    )
    (source.folder / "model.safetensors").write_bytes(data)

    with pytest.raises(DamagedFile, match=r"model\.safetensors` is damaged"):
        manifest(source, tmp_path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({}, b"\0"),
        ({"a": (0, 4)}, bytes(5)),
        ({"a": (1, 5)}, bytes(5)),
        ({"a": (0, 4), "b": (5, 9)}, bytes(9)),
        ({"a": (0, 4), "b": (3, 7)}, bytes(7)),
    ],
    ids=["nothing", "behind", "before", "gap", "overlap"],
)
def test_a_file_that_safetensors_refuses_is_damaged(
    tmp_path: Path, header: dict[str, tuple[int, int]], data: bytes
) -> None:
    tensors = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in header.items()
    }
    text = json.dumps(tensors)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)

    with pytest.raises(SafetensorError):
        load_file(file)
    with pytest.raises(DamagedFile):
        hash_tensors(file)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: file name too long") as caught:
        file_digests(tmp_path / ("long" * 100), tmp_path)
    assert not isinstance(caught.value, DamagedFile)


def test_a_pipe_is_not_hashed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ModelError, match="not a regular file"):
        file_digests(tmp_path / "pipe", tmp_path / "cache")


def test_an_index_that_names_the_wrong_file_is_refused(source: Source, tmp_path: Path) -> None:
    (source.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.9.mlp.up_proj.weight": "model.safetensors"}})
    )
    assert manifest(source, tmp_path)  # no part of this model
    (source.folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.layers.0.mlp.up_proj.weight": "model.safetensors"}})
    )
    alone = {"model.norm.weight": torch.ones(4)}
    save_file(alone, source.folder / "model.safetensors")

    with pytest.raises(ModelError, match=r"up_proj\.weight` is not in"):
        manifest(source, tmp_path)


def test_the_origin_of_a_config_does_not_matter(source: Source) -> None:
    before = config_digest(source)
    path = source.folder / "config.json"
    raw = json.loads(path.read_text())
    incidental = {"_name_or_path": "x", "transformers_version": "4", "dtype": "bfloat16"}
    path.write_text(json.dumps(raw | incidental))

    assert config_digest(open_folder("llama", source.folder)) == before
    path.write_text(json.dumps(raw | {"rms_norm_eps": 0.5}))
    assert config_digest(open_folder("llama", source.folder)) != before
