"""What a command computed of a model is kept while nothing changes that it depends on."""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from meshllm.cli.shared import model_record
from meshllm.cli.shared.model_record import KEPT_S, ModelRecord
from meshllm.config import Settings
from meshllm.errors import ModelError
from meshllm.model import hardware
from meshllm.model.locate import find_folder


@dataclass(frozen=True, slots=True)
class Found:
    digits: tuple[int, ...]


FOUND = Found((1, 2))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model with files in a folder of it, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: False)
    folder = tmp_path / "model"
    shutil.copytree(find_folder("builtin"), folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "model-2.safetensors").symlink_to("nothing")
    return folder


def record(folder: Path, **settings: object) -> ModelRecord:
    return ModelRecord("doctor", str(folder), Settings(**settings))  # type: ignore[arg-type]


def test_a_record_is_read_again(folder: Path) -> None:
    assert record(folder).read(Found) is None

    record(folder).write(FOUND)

    assert record(folder).read(Found) == FOUND
    assert ModelRecord("model show", str(folder), Settings()).read(Found) is None


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float32"}, {"quant": "int8"}, {"threads": 3}, {"exact": True}, {"device": "cpu"}],
)
def test_other_settings_have_another_record(folder: Path, change: dict[str, object]) -> None:
    record(folder).write(FOUND)

    assert record(folder, **change).read(Found) is None
    assert record(folder, max_tokens=7).read(Found) == FOUND


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "1_Pooling/config.json", "model-2.safetensors"]
)
def test_a_file_that_changes_ends_a_record(folder: Path, name: str) -> None:
    record(folder).write(FOUND)

    (folder / name).unlink()
    (folder / name).write_bytes(b"{}")

    assert record(folder).read(Found) is None


def test_a_file_that_changes_without_its_size_ends_a_record(folder: Path) -> None:
    record(folder).write(FOUND)

    os.utime(folder / "config.json", ns=(1, 1))

    assert record(folder).read(Found) is None


def test_a_file_that_cannot_be_read_any_more_ends_a_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder).write(FOUND)

    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "model.safetensors")

    assert record(folder).read(Found) is None


def test_a_file_that_is_replaced_by_one_as_old_and_as_large_ends_a_record(folder: Path) -> None:
    record(folder).write(FOUND)
    file = folder / "config.json"
    before, text = file.stat(), file.read_bytes()

    file.unlink()
    file.write_bytes(text[::-1])
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # its clock has steps of milliseconds
        file.chmod(0o600)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert record(folder).read(Found) is None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installed torch, which has been imported."""
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    origin = tmp_path / "torch" / "__init__.py"
    for path in (origin, origin.parent / "_C.so", origin.parent / "lib" / "libtorch.so"):
        path.touch()
    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None, origin=str(origin))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return origin.parent


@pytest.mark.parametrize("name", ["__init__.py", "_C.so", "lib/libtorch.so"])
def test_a_library_that_changes_ends_a_record(folder: Path, library: Path, name: str) -> None:
    record(folder).write(FOUND)
    assert record(folder).read(Found) == FOUND

    (library / name).unlink()

    assert record(folder).read(Found) is None


def test_a_library_that_is_no_longer_found_ends_a_record(
    folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder).write(FOUND)

    monkeypatch.setattr(sys.modules["torch"], "__spec__", ModuleSpec("torch", None))

    assert record(folder).read(Found) is None


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("version", lambda _: "99"),
        ("hash_code", lambda _: "other"),
        ("fingerprint", lambda: ("other",)),
    ],
)
def test_other_code_and_another_machine_have_another_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, changed: object
) -> None:
    record(folder).write(FOUND)

    monkeypatch.setattr(model_record, name, changed)

    assert record(folder).read(Found) is None


@pytest.mark.parametrize(
    ("later_s", "is_kept"), [(KEPT_S - 60, True), (KEPT_S, False), (-9, False)]
)
def test_a_record_is_kept_for_a_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch, later_s: float, is_kept: bool
) -> None:
    record(folder).write(FOUND)
    now = time.time() + later_s

    monkeypatch.setattr(time, "time", lambda: now)

    assert (record(folder).read(Found) is not None) is is_kept


def test_nothing_is_kept_where_a_gpu_may_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record(folder).write(FOUND)
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: True)
    assert record(folder).read(Found) is None
    shutil.rmtree(tmp_path / "cache")

    record(folder).write(FOUND)

    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"at_s": 1}', '{"at_s": 9e99, "value": {"digits": 1}}']
)
def test_a_damaged_record_counts_as_none(folder: Path, tmp_path: Path, text: str) -> None:
    record(folder).write(FOUND)
    (file,) = (tmp_path / "cache" / "meshllm").glob("*.json")

    file.write_text(text)

    assert record(folder).read(Found) is None


def test_a_record_of_another_form_counts_as_none(folder: Path) -> None:
    record(folder).write({"digits": "many"})

    assert record(folder).read(Found) is None


def test_a_model_that_is_missing_has_no_record(folder: Path) -> None:
    with pytest.raises(ModelError):
        record(folder / "nothing")
