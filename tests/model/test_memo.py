from pathlib import Path

from meshllm.model.memo import recall, remember


def test_what_was_remembered_is_recalled_by_its_key(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    remember(folder, {"a": [1, 2.5]}, "name", 7)

    assert recall(folder, "name", 7) == {"a": [1, 2.5]}
    assert recall(folder, "name", 8) is None
    assert len(list(folder.iterdir())) == 1


def test_the_last_value_counts(tmp_path: Path) -> None:
    remember(tmp_path, 1, "key")
    remember(tmp_path, 2, "key")

    assert recall(tmp_path, "key") == 2


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    remember(tmp_path, 1, "key")
    (record,) = tmp_path.iterdir()
    record.write_bytes(b"\xff{")

    assert recall(tmp_path, "key") is None


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    remember(tmp_path / "file", 1, "key")

    assert recall(tmp_path / "file", "key") is None
