"""A model in parts: the same bytes from any files, checked before they take their place."""

import errno
import fcntl
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshllm.errors import ModelError, PeerFault
from meshllm.model.files.loader import MAX_HEADER_BYTES, list_weights
from meshllm.model.files.manifest import manifest
from meshllm.model.files.parts import (
    FREE_BYTES,
    KEPT_S,
    LISTING,
    MAX_SENT_BYTES,
    Listing,
    ModelParts,
    PartFolder,
    check_parts,
    limit_of,
    most_bytes,
    part_name,
)
from meshllm.model.files.source import Source, open_folder, resolve
from meshllm.model.locate import INDEX
from meshllm.model.steps.load import load_shard
from meshllm.model.text.pooling import LAST_ROW, MODULES, Pooling, PoolingMode, read_pooling
from meshllm.names import Span

LAYERS = 6
POOLING = "1_Pooling/config.json"
OTHER = b"o" * 16
"""A digest that no part has."""


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Source:
    """A copy that a test may change."""
    return open_folder("llama", Path(shutil.copytree(llama, tmp_path / "llama")))


@pytest.fixture
def place(source: Source, tmp_path: Path) -> PartFolder:
    """A folder with the description of the model, and none of its weights."""
    return described(ModelParts(source), tmp_path / "fetched")


def described(parts: ModelParts, folder: Path) -> PartFolder:
    place = PartFolder(folder)
    place.prepare()
    listing = Listing.parse(parts.open(LISTING).read(0, 1 << 20))
    for name in listing.files:
        (folder / name).write_bytes(parts.open(name).read(0, 1 << 20))
    place.describe("llama", listing)
    return place


def give(place: PartFolder, parts: ModelParts, part: int) -> None:
    """Collect a part, as it comes from another node."""
    place.partial(part_name(part)).write_bytes(parts.open(part_name(part)).read(0, 1 << 30))


def in_two_files(source: Source) -> None:
    """Divide the weights over two files."""
    tensors = load_file(source.folder / "model.safetensors")
    names = sorted(tensors, reverse=True)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: tensors[name] for name in own}, source.folder / file)
    index = {name: file for file, own in halves.items() for name in own}
    (source.folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (source.folder / "model.safetensors").unlink()


def test_a_part_has_the_same_bytes_whatever_files_it_is_stored_in(source: Source) -> None:
    before = ModelParts(source)
    whole = [before.open(part_name(part)).read(0, 1 << 30) for part in range(LAYERS + 2)]

    in_two_files(source)
    after = ModelParts(source)

    assert [after.open(part_name(part)).read(0, 1 << 30) for part in range(LAYERS + 2)] == whole


def test_a_file_can_be_read_from_any_offset_in_any_pieces(source: Source) -> None:
    file = ModelParts(source).open(part_name(3))
    whole = file.read(0, file.size)

    assert len(whole) == file.size
    for step in (1000, 4096, 77777):
        pieces = [file.read(at, step) for at in range(0, file.size, step)]
        assert b"".join(pieces) == whole
    assert file.read(file.size, 10) == b""


def test_fetched_parts_are_those_of_the_model_and_load(
    source: Source, place: PartFolder, tmp_path: Path
) -> None:
    digests, parts = manifest(source, tmp_path), ModelParts(source)
    for part in (2, 3, LAYERS + 1):
        give(place, parts, part)
        place.verify(part, digests[part])

    own = open_folder("llama", place.folder)
    found = manifest(own, tmp_path)
    shards = [
        load_shard(each, Span(2, 4), embed=False, head=False, dtype=torch.float32)
        for each in (source, own)
    ]

    assert [at for at, digest in enumerate(found) if digest == bytes(16)] == [0, 1, 4, 5, LAYERS]
    assert all(found[part] == digests[part] for part in (2, 3, LAYERS + 1, LAYERS + 2))
    states = [shard.model.state_dict() for shard in shards]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_part_that_is_not_here_is_not_sent(
    source: Source, place: PartFolder, tmp_path: Path
) -> None:
    give(place, ModelParts(source), 1)
    place.verify(1, manifest(source, tmp_path)[1])
    parts = ModelParts(open_folder("llama", place.folder))

    assert parts.open(part_name(1)).size > 0
    for name in (part_name(0), part_name(99), "../llama/config.json", "notes.txt", "vocab.txt"):
        with pytest.raises(ModelError):
            parts.open(name)


def test_a_file_that_shrinks_is_not_sent(source: Source) -> None:
    file = ModelParts(source).open(part_name(LAYERS))
    (source.folder / "model.safetensors").write_bytes(b"short")

    with pytest.raises(ModelError, match="ends too early"):
        file.read(0, file.size)
    (source.folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        file.read(0, file.size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: b"\xff" * len(data),
    ],
    ids=["bit", "short", "empty", "noise"],
)
def test_a_part_with_another_digest_is_deleted(
    source: Source, place: PartFolder, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    give(place, ModelParts(source), 1)
    path = place.partial(part_name(1))
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(PeerFault, match="lack the digest of the mesh"):
        place.verify(1, manifest(source, tmp_path)[1])
    assert not path.exists()
    assert not (place.folder / part_name(1)).exists()


def test_damaged_parts_are_removed_from_their_place_and_the_others_stay(
    source: Source, place: PartFolder, tmp_path: Path
) -> None:
    parts = ModelParts(source)
    digests = manifest(source, tmp_path / "cache")
    for part in range(4):
        give(place, parts, part)
        place.verify(part, digests[part])
    cut, _, empty, bare = [place.folder / part_name(part) for part in range(4)]
    cut.write_bytes(cut.read_bytes()[:-1])
    empty.write_bytes(b"")
    bare.write_bytes((2).to_bytes(8, "little") + b"{}")  # a whole file, without a tensor

    assert place.remove_damaged(tmp_path / "cache") == [cut.name, empty.name, bare.name]
    assert [place.has(part) for part in range(4)] == [False, True, False, False]
    assert place.remove_damaged(tmp_path / "cache") == []


def test_a_part_that_was_set_aside_is_put_back_when_it_is_in_force_again(
    source: Source, place: PartFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ModelParts(source)
    digests = manifest(source, tmp_path / "cache")
    give(place, parts, 1)
    place.verify(1, digests[1])

    place.set_aside({0: OTHER, 1: OTHER})
    assert not place.has(1)
    with monkeypatch.context() as full:
        full.setattr(mmap, "mmap", no_memory)
        place.restore(1, digests[1])
    place.restore(1, digests[2])
    place.restore(0, digests[0])
    assert not any(map(place.has, range(LAYERS)))

    place.restore(1, digests[1])
    assert place.has(1)
    assert place.damaged(tmp_path / "cache") == []
    place.set_aside({1: OTHER})
    give(place, parts, 1)
    place.verify(1, digests[1])  # fetched meanwhile
    place.restore(1, digests[1])
    assert place.has(1)


def test_of_several_changes_the_weights_before_the_first_are_kept_for_a_week(
    place: PartFolder,
) -> None:
    path = place.folder / part_name(1)
    kept = path.with_name(f"{path.name}.kept")
    for content in ("good", "damaged", "damaged more"):
        path.write_text(content)
        place.set_aside({1: OTHER})
        assert not path.exists()
        assert kept.read_text() == "good"

    os.utime(kept, (time.time() - KEPT_S - 60,) * 2)
    path.write_text("of another month")
    place.set_aside({1: OTHER})
    assert kept.read_text() == "of another month"


def test_a_kept_part_that_is_in_force_again_is_never_replaced(
    source: Source, place: PartFolder, tmp_path: Path
) -> None:
    path = place.folder / part_name(1)
    kept = path.with_name(f"{path.name}.kept")
    digest = manifest(source, tmp_path / "cache")[1]
    give(place, ModelParts(source), 1)
    place.verify(1, digest)
    place.set_aside({1: OTHER})
    path.write_text("damaged")
    os.utime(kept, (time.time() - KEPT_S - 60,) * 2)

    place.set_aside({1: digest})

    assert place.damaged(tmp_path / "cache") == []
    assert place.has(1)
    assert not kept.exists()


def test_parts_that_were_set_aside_make_room(
    place: PartFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = PartFolder(place.folder.parent / "another")
    another.prepare()
    for at, (each, part) in enumerate([(place, 1), (another, 2), (place, 0)]):
        path = each.folder / part_name(part)
        path.write_bytes(b"old")
        each.set_aside({part: OTHER})
        os.utime(path.with_name(f"{path.name}.kept"), (at, at))

    def kept() -> list[str]:
        return sorted(path.name[:10] for path in place.folder.parent.glob("*/*.kept"))

    def disk_usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=FREE_BYTES + 12 - 3 * len(kept()))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    place.check_space(3)
    with pytest.raises(ModelError, match="3 bytes left, but 13 are needed"):
        place.check_space(13)  # deletes nothing, as it would not be enough
    assert kept() == ["part-00000", "part-00001", "part-00002"]
    place.check_space(7)
    assert kept() == ["part-00000"]
    place.check_space(12)
    assert kept() == []


def test_parts_that_cannot_be_read_now_stay(
    source: Source, place: PartFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = manifest(source, tmp_path / "cache")[1]
    give(place, ModelParts(source), 1)
    place.verify(1, digest)
    give(place, ModelParts(source), 1)

    with monkeypatch.context() as full:
        full.setattr(mmap, "mmap", no_memory)
        with pytest.raises(ModelError, match="cannot be read: cannot allocate memory"):
            place.remove_damaged(tmp_path / "cache")
        with pytest.raises(ModelError, match="cannot be read: cannot allocate memory"):
            place.verify(1, digest)

    assert place.has(1)
    assert place.has_begun(part_name(1))
    assert place.remove_damaged(tmp_path / "cache") == []


def no_memory(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_what_takes_its_place_is_on_the_disk_before(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[int]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    place = described(ModelParts(source), tmp_path / "fetched")
    give(place, ModelParts(source), 1)
    place.verify(1, manifest(source, tmp_path / "cache")[1])

    files = [path for path in place.folder.iterdir() if path.is_file()]
    assert {path.stat().st_ino for path in files} == synced
    assert len(files) > 3


def test_a_config_without_a_dtype_gets_that_of_the_weights(source: Source, tmp_path: Path) -> None:
    path = source.folder / "config.json"
    config = json.loads(path.read_text())
    dtype = config.pop("dtype", None) or config.pop("torch_dtype")
    path.write_text(json.dumps(config))

    place = described(ModelParts(open_folder("llama", source.folder)), tmp_path / "fetched")

    assert json.loads((place.folder / "config.json").read_text())["dtype"] == dtype
    assert (
        manifest(open_folder("llama", place.folder), tmp_path)[-1]
        == (manifest(source, tmp_path)[-1])
    )


def test_how_a_model_embeds_texts_comes_along(source: Source, tmp_path: Path) -> None:
    modules = [{"type": "models.Pooling", "path": "1_Pooling"}]
    (source.folder / "modules.json").write_text(json.dumps(modules))
    (source.folder / "1_Pooling").mkdir()
    (source.folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')

    place = described(ModelParts(source), tmp_path / "fetched")

    assert read_pooling(place.folder) == read_pooling(source.folder) != LAST_ROW


def test_a_description_is_complete_when_its_index_is_there(place: PartFolder) -> None:
    assert place.is_described
    assert set(list_weights(place.folder).values()) == {
        part_name(part) for part in range(LAYERS + 2)
    }
    assert not PartFolder(place.folder / "none").is_described

    index = place.folder / INDEX
    whole = index.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"{}"):
        index.write_bytes(damaged)
        assert not place.is_described
    index.write_bytes(whole)
    assert place.is_described


GOOD = {"files": ["config.json"], "weights": {"a": 0}, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "found",
    [
        [],
        {},
        GOOD | {"files": ["tokenizer.json"]},
        GOOD | {"files": ["config.json", "../key"]},
        GOOD | {"files": ["config.json", ".bashrc"]},
        GOOD | {"files": [["config.json"]]},
        GOOD | {"weights": {"a": -1}},
        GOOD | {"weights": {"a": "0"}},
        GOOD | {"weights": {"a": True}},
        GOOD | {"weights": ["a"]},
        GOOD | {"dtype": "object"},
        GOOD | {"dtype": []},
        GOOD | {"more": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]},
    ],
)
def test_a_malformed_listing_is_refused(found: object) -> None:
    with pytest.raises(PeerFault, match="malformed"):
        Listing.parse(json.dumps(found).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_listing_that_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFault, match="malformed"):
        Listing.parse(data)


def test_every_file_has_a_limit(source: Source) -> None:
    sizes = most_bytes(source)

    assert len(sizes) == LAYERS + 2
    for part in range(LAYERS + 2):
        assert ModelParts(source).open(part_name(part)).size < limit_of(part_name(part), sizes)
    assert max(sizes) < 2 * MAX_HEADER_BYTES
    assert limit_of("tokenizer.json", sizes) == MAX_SENT_BYTES


def test_a_full_disk_is_refused_with_a_hint(
    place: PartFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.model.files.parts.FREE_BYTES", 1 << 60)

    with pytest.raises(ModelError, match="0 bytes left, but 5 are needed"):
        place.check_space(5)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ModelError, match="cannot be written"):
        PartFolder(tmp_path / "file" / "models").prepare()


def test_one_node_at_a_time_has_the_lock_of_a_folder(place: PartFolder) -> None:
    place.prepare()
    other = PartFolder(place.folder)

    with place.locked() as is_first, other.locked() as is_second:
        assert (is_first, is_second) == (True, False)
    with other.locked() as is_second:
        assert is_second


def test_a_folder_without_locks_or_that_is_gone(
    place: PartFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    place.prepare()
    monkeypatch.setattr(fcntl, "flock", flock)
    with place.locked() as is_locked:
        assert is_locked

    shutil.rmtree(place.folder)
    with pytest.raises(ModelError, match="cannot be written"), place.locked():
        pass


def test_a_listing_names_every_layer_and_the_right_part_of_each_tensor(source: Source) -> None:
    right = json.loads(ModelParts(source).listing().header)["weights"]
    check_parts(source, right)

    for wrong in (
        {name: part for name, part in right.items() if part != 2},
        {name: max(0, part - 1) for name, part in right.items()},
        {**right, "model.layers.0.surprise": 0},
        {},
    ):
        with pytest.raises(PeerFault, match="does not match the tensors of the model"):
            check_parts(source, wrong)


def test_a_file_behind_a_link_out_of_the_folder_is_not_sent(source: Source, tmp_path: Path) -> None:
    parts = ModelParts(source)
    (tmp_path / "config.json").write_text("{}")
    (source.folder / "1_Pooling").symlink_to(tmp_path)

    with pytest.raises(ModelError, match="There is no file"):
        parts.open(POOLING)
    assert POOLING not in Listing.parse(parts.listing().header).files


def test_a_snapshot_of_the_hub_s_cache_is_sent_with_its_pooling(
    source: Source, tmp_path: Path
) -> None:
    repository = tmp_path / "models--org--name"
    folder, blobs = repository / "snapshots" / "0123", repository / "blobs"
    (folder / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    files = {each.name: each.read_bytes() for each in source.folder.iterdir()}
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    files[MODULES] = json.dumps(modules).encode()
    files[POOLING] = json.dumps({"pooling_mode_mean_tokens": True}).encode()
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(content)
        above = "../" * (name.count("/") + 2)
        (folder / name).symlink_to(f"{above}blobs/{number}")

    parts = ModelParts(resolve(str(folder)))

    assert {MODULES, POOLING} < set(Listing.parse(parts.listing().header).files)
    assert parts.open(POOLING).read(0, 1 << 10) == files[POOLING]
    assert read_pooling(folder) == Pooling(PoolingMode.MEAN, normalises=False)
