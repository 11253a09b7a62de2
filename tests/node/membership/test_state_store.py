"""The state folder with crashes, invalid files and concurrent processes."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.membership import state_store as module
from meshllm.node.membership.state_store import Invitation, Keyring
from meshllm.protocol.trust.credential import Role, found
from meshllm.protocol.trust.ticket import MAX_ADDRESSES
from tests.builders.handshakes import FOUNDED, GUEST, HOST, OTHER

SOMEBODY = OTHER.node


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring.open(tmp_path / "state")


def again(keyring: Keyring) -> Keyring:
    return Keyring.open(keyring.folder)


def damage(keyring: Keyring, content: object) -> None:
    (keyring.folder / "mesh.json").write_text(json.dumps(content))


def test_all_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    folder.mkdir(parents=True, mode=0o777)
    keyring = Keyring.open(folder)
    keyring.found()
    with keyring.locked():
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {"node.key", "mesh.json", "lock"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_the_mode_of_a_readable_key_is_restored(keyring: Keyring) -> None:
    (keyring.folder / "node.key").chmod(0o644)

    again(keyring)

    assert stat.S_IMODE((keyring.folder / "node.key").stat().st_mode) == 0o600


def test_the_key_is_created_once(keyring: Keyring) -> None:
    assert again(keyring).key.node == keyring.key.node


def test_concurrent_processes_create_one_key(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from meshllm.node.membership.state_store import Keyring;"
        "input(); print(Keyring.open(Path(sys.argv[1])).key.node.hex())"
    )

    def begin() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, str(tmp_path / "state")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with begin() as one, begin() as other, ThreadPoolExecutor() as pool:
        outputs = pool.map(lambda process: process.communicate("\n")[0], (one, other))
        keys = set(outputs)

    assert len(keys) == 1
    assert len(keys.pop().strip()) == 64
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["node.key"]


def test_the_second_process_uses_the_key_of_the_first(
    keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keyring.folder / "node.key"

    seed = module._first_seed(path)

    assert seed.hex() == path.read_text().strip()
    assert again(keyring).key.node == keyring.key.node


@pytest.mark.parametrize("data", [b"", b"ab" * 31, b"zz" * 32, b"\xff" * 64, b"ab" * 33])
def test_a_damaged_key_is_reported_and_kept(keyring: Keyring, data: bytes) -> None:
    path = keyring.folder / "node.key"
    path.write_bytes(data)

    with pytest.raises(UserError, match="Invalid key file") as raised:
        again(keyring)

    assert raised.value.hint
    assert path.read_bytes() == data


INVITATION = {"secret": "ab" * 16, "role": "node", "expires_s": 0, "uses": None, "guests": []}


@pytest.mark.parametrize(
    "content",
    [
        [],
        "text",
        None,
        7,
        {"credential": 1},
        {"credential": "xy"},
        {"credential": "abcd"},
        {"incarnation": "one"},
        {"incarnation": 1.5},
        {"incarnation": True},
        {"records": None},
        {"records": "xy"},
        {"peers": []},
        {"peers": {"xy": []}},
        {"peers": {"ab": "loopback:a"}},
        {"peers": {"ab": [1]}},
        {"peers": {"ab": None}},
        {"invitations": {}},
        {"invitations": [1]},
        {"invitations": [{}]},
        *(
            {"invitations": [INVITATION | odd]}
            for odd in (
                {"secret": 1},
                {"role": "king"},
                {"expires_s": "never"},
                {"uses": "2"},
                {"uses": False},
                {"guests": 1},
                {"guests": [1]},
            )
        ),
    ],
)
def test_json_that_is_not_ours_is_one_clear_error(keyring: Keyring, content: object) -> None:
    damage(keyring, content)

    with pytest.raises(UserError, match=r"Invalid state file `.*mesh\.json`") as raised:
        again(keyring)

    assert raised.value.hint


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_no_json_is_one_clear_error(keyring: Keyring, data: bytes) -> None:
    (keyring.folder / "mesh.json").write_bytes(data)

    with pytest.raises(UserError, match=r"Invalid state file `.*mesh\.json`"):
        again(keyring)


def test_a_file_instead_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")

    with pytest.raises(UserError, match="cannot be used"):
        Keyring.open(tmp_path / "state")


def test_a_folder_of_another_user_is_refused(
    keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyring.folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    with pytest.raises(UserError, match="belongs to another user"):
        again(keyring)

    assert stat.S_IMODE(keyring.folder.stat().st_mode) == 0o755


def test_one_folder_is_for_one_node_at_a_time(keyring: Keyring) -> None:
    with (
        keyring.locked(),
        pytest.raises(UserError, match="already running"),
        again(keyring).locked(),
    ):
        pass

    with again(keyring).locked():
        pass


def test_a_new_folder_has_no_mesh(keyring: Keyring) -> None:
    assert (keyring.credential, keyring.mesh) == (None, None)


def test_a_founded_mesh_is_saved(keyring: Keyring) -> None:
    founded = keyring.found()

    assert again(keyring).credential == founded
    assert again(keyring).mesh == founded.mesh


def test_concurrent_starts_are_all_counted(keyring: Keyring) -> None:
    other = again(keyring)

    assert [ring.next_incarnation() for ring in (keyring, other, keyring)] == [1, 2, 3]


def test_another_mesh_drops_the_data_of_the_last(keyring: Keyring) -> None:
    keyring.next_incarnation()
    keyring.found()
    keyring.remember("records", b"x")
    keyring.peers = {SOMEBODY: ["loopback:a"]}
    keyring.invite([], Role.NODE, lasts_s=None, uses=None)

    keyring.join(FOUNDED)

    assert keyring.mesh == FOUNDED.mesh
    assert (keyring.peers, keyring.invitations(), keyring.recall("records")) == ({}, [], b"")
    assert keyring.next_incarnation() == 2


def test_another_credential_of_the_mesh_drops_nothing(keyring: Keyring) -> None:
    keyring.join(FOUNDED)
    keyring.remember("records", b"x")

    keyring.join(FOUNDED)

    assert keyring.recall("records") == b"x"


def test_peers_and_bytes_are_saved(keyring: Keyring) -> None:
    keyring.peers = {SOMEBODY: ["loopback:a", "loopback:b"]}
    keyring.remember("records", b"\x00\xff")

    assert again(keyring).peers == {SOMEBODY: ("loopback:a", "loopback:b")}
    assert again(keyring).recall("records") == b"\x00\xff"
    assert again(keyring).recall("else") == b""


def test_unchanged_data_is_not_written(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring.peers = {SOMEBODY: ["loopback:a"]}
    keyring.remember("records", b"x")
    before = (keyring.folder / "mesh.json").stat().st_ino

    keyring.peers = {SOMEBODY: ("loopback:a",)}
    keyring.remember("records", b"x")

    assert (keyring.folder / "mesh.json").stat().st_ino == before


def test_writes_of_another_process_are_kept(keyring: Keyring) -> None:
    keyring.found()
    other = again(keyring)
    keyring.invite([], Role.NODE, lasts_s=None, uses=1)
    (invitation,) = keyring.invitations()
    keyring.use(invitation, SOMEBODY)

    other.remember("client", b"x")

    (kept,) = keyring.invitations()
    assert kept.guests == (SOMEBODY,)
    assert not kept.is_open(0)


def test_a_crash_while_writing_leaves_the_old_file(
    keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = keyring.found()

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(UserError, match="No space left"):
        keyring.join(found(HOST, bytes(16)))

    assert again(keyring).credential == founded


def test_only_a_member_can_invite(keyring: Keyring) -> None:
    with pytest.raises(NotAuthorised, match="is in no mesh"):
        keyring.invite([], Role.NODE, lasts_s=None, uses=None)


def test_a_ticket_matches_the_saved_invitation(keyring: Keyring) -> None:
    keyring.found()

    ticket = keyring.invite(["loopback:a"], Role.CLIENT, lasts_s=60, uses=2)

    (invitation,) = again(keyring).invitations()
    assert (ticket.secret, ticket.role) == (invitation.secret, invitation.role)
    assert ticket.expires_s == invitation.expires_s > 0
    assert ticket.inviter == keyring.key.node
    assert (ticket.addresses, invitation.uses) == (("loopback:a",), 2)


def test_a_ticket_has_a_limited_number_of_addresses(keyring: Keyring) -> None:
    keyring.found()

    ticket = keyring.invite([f"loopback:{n}" for n in range(99)], Role.NODE, lasts_s=1, uses=1)

    assert ticket.addresses == tuple(f"loopback:{n}" for n in range(MAX_ADDRESSES))


def test_closed_invitations_are_dropped(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring.found()
    monkeypatch.setattr(module, "MAX_INVITATIONS", 3)
    keyring.invite([], Role.NODE, lasts_s=-5, uses=None)
    tickets = [keyring.invite([], Role.NODE, lasts_s=99, uses=None) for _ in range(4)]

    kept = [invitation.secret for invitation in keyring.invitations()]

    assert kept == [ticket.secret for ticket in tickets[1:]]


@pytest.mark.parametrize(
    ("fields", "guest", "is_open"),
    [
        ({}, None, True),
        ({"expires_s": 101}, None, True),
        ({"expires_s": 100}, None, False),
        ({"expires_s": 99}, SOMEBODY, False),
        ({"uses": 1}, None, True),
        ({"uses": 1, "guests": (SOMEBODY,)}, None, False),
        ({"uses": 1, "guests": (SOMEBODY,)}, GUEST.node, False),
        ({"uses": 1, "guests": (SOMEBODY,)}, SOMEBODY, True),
        ({"uses": 2, "guests": (SOMEBODY,)}, GUEST.node, True),
    ],
)
def test_an_invitation_closes(fields: dict[str, Any], guest: NodeId | None, is_open: bool) -> None:
    invitation = replace(Invitation(b"", Role.NODE, 0, None), **fields)

    assert invitation.is_open(100.0, guest) is is_open


def test_a_guest_counts_once_and_not_without_a_limit(keyring: Keyring) -> None:
    keyring.found()
    keyring.invite([], Role.NODE, lasts_s=None, uses=2)
    keyring.invite([], Role.NODE, lasts_s=None, uses=None)

    for _ in range(2):
        for each in keyring.invitations():
            keyring.use(each, SOMEBODY)

    limited, free = keyring.invitations()
    assert (limited.guests, free.guests) == ((SOMEBODY,), ())


def test_a_file_deleted_while_the_node_runs_is_restored(keyring: Keyring) -> None:
    credential = keyring.found()
    ticket = keyring.invite([], Role.NODE, lasts_s=None, uses=1)
    (keyring.folder / "mesh.json").unlink()

    (invitation,) = keyring.invitations()
    assert keyring.use(invitation, GUEST.node)

    (kept,) = again(keyring).invitations()
    assert (kept.secret, kept.guests) == (ticket.secret, (GUEST.node,))
    assert again(keyring).credential == credential


def test_a_file_damaged_while_the_node_runs_is_reported_once(
    keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    keyring.found()
    keyring.invite([], Role.NODE, lasts_s=None, uses=1)
    before = keyring.invitations()

    damage(keyring, "text")

    assert keyring.invitations() == keyring.invitations() == before
    assert caplog.text.count("Invalid state file") == 1
