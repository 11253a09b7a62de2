import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from meshllm.model import json_cache
from meshllm.model.json_cache import hash_code, load_cached, locked, store_cached


def test_a_value_is_found_by_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    store_cached(folder, {"a": [1, 2.5]}, "name", 7)

    assert load_cached(folder, "name", 7) == {"a": [1, 2.5]}
    assert load_cached(folder, "name", 8) is None
    assert len(list(folder.iterdir())) == 1


def test_the_last_value_counts(tmp_path: Path) -> None:
    store_cached(tmp_path, 1, "key")
    store_cached(tmp_path, 2, "key")

    assert load_cached(tmp_path, "key") == 2


@pytest.mark.parametrize(
    ("name", "is_hashed"),
    [("a.py", True), ("inner/a.json", True), ("inner/a.toml", True), ("a.pyc", False)],
)
def test_modules_and_tables_are_hashed(tmp_path: Path, name: str, *, is_hashed: bool) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / name).write_text("1")
    before = hash_code.__wrapped__(tmp_path)

    (tmp_path / name).write_text("2")

    assert (hash_code.__wrapped__(tmp_path) != before) is is_hashed


def test_unused_records_are_evicted(tmp_path: Path) -> None:
    foreign = tmp_path / "else.json"
    foreign.write_text("1")
    for key in ("old", "read again"):
        store_cached(tmp_path, 1, key)
    (tmp_path / "tmp_of_a_crash.part").touch()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert load_cached(tmp_path, "read again") == 1

    json_cache._prune.cache_clear()
    store_cached(tmp_path, 1, "new")

    assert foreign.exists()
    assert len(list(tmp_path.iterdir())) == 3
    assert load_cached(tmp_path, "old") is None
    assert load_cached(tmp_path, "read again") == load_cached(tmp_path, "new") == 1


def test_the_least_recently_used_records_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cache, "MOST", 3)
    for key in range(9):
        store_cached(tmp_path, key, key)
        os.utime(json_cache._record(tmp_path, (key,)), (key, key))
    monkeypatch.setattr(json_cache, "UNUSED_S", 1e12)

    json_cache._prune.cache_clear()
    store_cached(tmp_path, 9, 9)

    assert [key for key in range(10) if load_cached(tmp_path, key) is not None] == [6, 7, 8, 9]


def test_a_value_that_is_not_json_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        store_cached(tmp_path, {1, 2}, "key")

    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", fail)

    store_cached(tmp_path, 1, "key")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"\xff{", b"[" * 100_000])
def test_a_damaged_record_is_none(tmp_path: Path, data: bytes) -> None:
    store_cached(tmp_path, 1, "key")
    (record,) = tmp_path.iterdir()
    record.write_bytes(data)

    assert load_cached(tmp_path, "key") is None


def test_a_record_that_others_may_write_to_is_none(tmp_path: Path) -> None:
    store_cached(tmp_path, 7, "key")
    [record] = tmp_path.glob("*.json")
    record.chmod(0o666)

    assert load_cached(tmp_path, "key") is None


def test_an_unwritable_folder_stores_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    store_cached(tmp_path / "file", 1, "key")

    assert load_cached(tmp_path / "file", "key") is None


def test_two_processes_compute_a_value_once(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from meshllm.model.json_cache import locked, load_cached, store_cached
        folder = Path(sys.argv[1])
        folder.with_name(sys.argv[2]).touch()
        with locked(folder, "key"):
            if (known := load_cached(folder, "key")) is None:
                while not all(folder.with_name(each).exists() for each in "ab"):
                    time.sleep(0.01)
                store_cached(folder, known := sys.argv[2], "key")
        print(known)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "new")]
    running = [
        subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    found = [each.communicate(timeout=60)[0].strip() for each in running]

    assert found[0] == found[1]
    assert found[0] in {"a", "b"}


def test_waiting_for_another_process_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cache, "WAIT_S", 0.05)
    with locked(tmp_path, "key"), locked(tmp_path, "other"), locked(tmp_path, "key"):
        store_cached(tmp_path, 1, "key")

    assert load_cached(tmp_path, "key") == 1


def test_something_else_is_done_while_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_cache, "WAIT_S", 0.05)
    done = list[int]()

    with locked(tmp_path, "key", meanwhile=lambda: done.append(1)):
        assert not done
        with locked(tmp_path, "key", meanwhile=lambda: done.append(1)):
            assert done


def test_an_unwritable_folder_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with locked(tmp_path / "file" / "folder", "key"):
        pass


def test_unused_locks_are_evicted(tmp_path: Path) -> None:
    with locked(tmp_path, "old"):
        pass
    (lock,) = tmp_path.glob("*.lock")
    os.utime(lock, (0, 0))

    json_cache._prune.cache_clear()
    store_cached(tmp_path, 1, "new")

    assert not lock.exists()
