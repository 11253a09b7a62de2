"""Imports of heavy modules; what they hide from the garbage collector stays hidden."""

import gc
import linecache
import tempfile
from pathlib import Path

import pytest

from meshllm.cli.shared.local import import_heavy
from meshllm.errors import UserError


def test_modules_are_hidden_from_the_garbage_collector() -> None:
    before = gc.get_freeze_count()

    import_heavy("json")

    assert gc.get_freeze_count() > before


def test_sources_that_were_read_on_import_are_not_kept() -> None:
    assert linecache.getlines(__file__)

    import_heavy("json")

    assert linecache.cache == {}


def test_without_a_folder_for_temporary_files_there_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none() -> str:
        raise FileNotFoundError

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", none)

    with pytest.raises(UserError, match="There is no folder for temporary files: ") as raised:
        import_heavy("json")

    assert raised.value.hint == "set `TMPDIR` to one"
