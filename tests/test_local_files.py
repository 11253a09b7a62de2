"""Files that others prepared: pipes, devices, links, wrong owners and modes."""

import errno
import os
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from meshllm.local_files import (
    check_regular,
    check_within,
    hint_of,
    is_own,
    keep_temporary_files,
    make_private,
    open_own,
    read_own,
    read_regular,
    reason_of,
    replacing,
    stat_all,
)

SOMEBODY = 4242


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"text")
    path.chmod(0o600)
    return path


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another user than the one who owns the files."""
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def test_a_file_that_is_removed_while_a_folder_is_read_is_left_out(file: Path) -> None:
    (file.parent / "gone").symlink_to("nothing")

    assert [each.st_size for each in stat_all(file.parent)] == [4]


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_of_this_user_is_read(file: Path) -> None:
    assert (read_regular(file, 4), read_own(file, 4), is_own(file)) == (b"text", b"text", True)


@pytest.mark.parametrize("read", [read_regular, read_own, check_regular])
def test_a_file_over_the_limit_is_refused(file: Path, read: type) -> None:
    with pytest.raises(OSError, match="more than 3"):
        read(file, 3)


@pytest.mark.parametrize("read", [read_regular, read_own, check_regular])
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, read: type) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path / "pipe", 9)

    assert not is_own(tmp_path / "pipe")


@pytest.mark.parametrize("read", [read_regular, check_regular])
def test_a_device_is_refused(tmp_path: Path, read: type) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")

    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path / "endless", 9)


def test_a_link_is_followed_only_where_others_may_write(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)

    assert read_regular(link, 9) == b"text"
    assert not is_own(link)
    for use in (lambda: read_own(link, 9), lambda: open_own(link, os.O_TRUNC)):
        with pytest.raises(OSError, match="symbolic"):
            use()
    assert file.read_bytes() == b"text"


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    assert not is_own(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read_own(tmp_path / "none", 9)


@pytest.mark.parametrize("writable", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_not_own(file: Path, writable: int) -> None:
    file.chmod(writable)

    assert not is_own(file)
    with pytest.raises(OSError, match="another user"):
        read_own(file, 9)


@pytest.mark.usefixtures("somebody")
def test_a_file_of_another_user_is_not_own(file: Path) -> None:
    assert not is_own(file)
    for use in (lambda: read_own(file, 9), lambda: open_own(file, os.O_TRUNC)):
        with pytest.raises(OSError, match="another user"):
            use()


@pytest.mark.usefixtures("no_umask")
def test_new_files_and_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    make_private(tmp_path / "deep" / "state")
    os.close(open_own(tmp_path / "deep" / "state" / "lock", 0))

    modes = [mode(each) for each in sorted((tmp_path / "deep").rglob("*"))]
    assert [mode(tmp_path / "deep"), *modes] == [0o700, 0o700, 0o600]


def test_the_mode_of_a_folder_is_restored(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    make_private(tmp_path)

    assert mode(tmp_path) == 0o700


@pytest.mark.usefixtures("somebody")
def test_a_folder_of_another_user_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    with pytest.raises(OSError, match="belongs to another user"):
        make_private(tmp_path)

    assert mode(tmp_path) == 0o755


def test_a_link_of_another_user_to_an_own_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, link = tmp_path / "documents", tmp_path / "state"
    documents.mkdir(mode=0o755)
    link.symlink_to(documents)
    make_private(link)
    documents.chmod(0o755)
    of_somebody = os.stat_result([0o120777, 0, 0, 1, SOMEBODY, 0, 0, 0, 0, 0])
    monkeypatch.setattr(Path, "lstat", lambda _: of_somebody)

    with pytest.raises(OSError, match="belongs to another user"):
        make_private(link)

    assert mode(documents) == 0o755


def test_a_file_in_place_of_a_folder_is_refused(file: Path) -> None:
    with pytest.raises(NotADirectoryError):
        make_private(file)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "No such file or directory", "keys"), "no such file or directory"),
        (ssl.SSLError(336445449, "[SSL] PEM lib (_ssl.c:3895)"), "PEM lib"),
        (
            ssl.SSLError(116, "[X509: KEY_VALUES_MISMATCH] key values mismatch (_ssl.c:3931)"),
            "key values mismatch",
        ),
        (UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal not in range"), "it is not text"),
        (ValueError("the key is encrypted"), "the key is encrypted"),
        (OSError("odd"), "odd"),
    ],
)
def test_a_reason_is_for_people(error: OSError | ValueError, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (FileNotFoundError(2, "No such file or directory", "keys"), "check the path"),
        (OSError(errno.EROFS, "Read-only file system"), "choose a path on a disk that can be"),
        (OSError(errno.ENOSPC, "No space left on device"), "free space on the disk"),
        (UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal not in range"), "check the file"),
        (OSError("odd"), "check the file"),
    ],
)
def test_a_hint_says_what_to_do_about_a_file(error: OSError | ValueError, hint: str) -> None:
    assert hint_of(error).startswith(hint)


SNAPSHOT = "models--org--name/snapshots/0123"


@pytest.mark.parametrize(
    ("model", "target", "is_within"),
    [
        ("model", "model/config.json", True),
        ("model", "model/deeper/template", True),
        ("model", "model-secrets/key", False),
        ("model", "models--org--name/blobs/0f", False),
        ("home/snapshots/model", "home/blobs/secret", False),
        (SNAPSHOT, "models--org--name/blobs/0f", True),
        (SNAPSHOT, f"{SNAPSHOT}/1_Pooling/config.json", True),
        (SNAPSHOT, "models--org--name/snapshots/4567/config.json", False),
        (SNAPSHOT, "models--org--name/refs/main", False),
        (SNAPSHOT, "models--org--private/blobs/0f", False),
        (SNAPSHOT, "home/blobs/secret", False),
    ],
)
def test_a_link_leads_out_of_a_folder_only_to_files_of_its_repository_in_the_hub_s_cache(
    tmp_path: Path, model: str, target: str, is_within: bool
) -> None:
    folder, file = tmp_path / model, tmp_path / target
    folder.mkdir(parents=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    (folder / "link").symlink_to(file)

    with nullcontext() if is_within else pytest.raises(OSError, match="outside the folder"):
        check_within(folder / "link", folder)


@pytest.mark.parametrize(
    ("blobs", "is_within"),
    [
        ("disk/models--org--name/blobs", True),
        ("disk/models--org--private/blobs", False),
        ("disk/models--org--name/keys", False),
        ("disk/blobs", False),
    ],
)
def test_the_files_of_a_repository_may_be_on_another_disk(
    tmp_path: Path, blobs: str, is_within: bool
) -> None:
    folder, elsewhere = tmp_path / SNAPSHOT, tmp_path / blobs
    folder.mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    (elsewhere / "0f").write_text("{}")
    (tmp_path / "models--org--name" / "blobs").symlink_to(elsewhere)
    (folder / "config.json").symlink_to("../../blobs/0f")

    with nullcontext() if is_within else pytest.raises(OSError, match="outside the folder"):
        check_within(folder / "config.json", folder)


def test_files_of_a_repository_that_are_elsewhere_are_outside(tmp_path: Path) -> None:
    folder, secrets = tmp_path / SNAPSHOT, tmp_path / "secrets"
    folder.mkdir(parents=True)
    secrets.mkdir()
    (secrets / "key").write_text("{}")
    (tmp_path / "models--org--name" / "blobs").symlink_to(secrets)
    (folder / "config.json").symlink_to("../../blobs/key")

    with pytest.raises(OSError, match="outside the folder"):
        check_within(folder / "config.json", folder)


def test_what_lies_in_a_linked_folder_is_outside(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "config.json").write_text("{}")
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "secrets")

    with pytest.raises(OSError, match="outside the folder"):
        check_within(tmp_path / "model" / "1_Pooling" / "config.json", tmp_path / "model")


def test_a_file_is_replaced_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with replacing(path, prefix=".file.") as draft:
        draft.write(b"new")
        draft.flush()
        (hidden,) = {*tmp_path.iterdir()} - {path}
        assert path.read_text() == "old"

    assert hidden.name.startswith(".file.")
    assert [*tmp_path.iterdir()] == [path]
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_a_file_that_cannot_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()

    with pytest.raises(IsADirectoryError), replacing(path) as draft:
        draft.write(b"new")

    assert [*tmp_path.iterdir()] == [path]


def test_temporary_files_are_kept_in_a_folder_if_no_usual_one_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    keep_temporary_files(folder)
    assert tempfile.gettempdir() != str(folder)

    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "tempdir", None)
    with monkeypatch.context() as full:
        full.setattr(tempfile, "_get_default_tempdir", none)
        keep_temporary_files(folder)

    assert tempfile.gettempdir() == str(folder)
    assert folder.is_dir()
