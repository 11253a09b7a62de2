"""The state folder with crashes, invalid files and concurrent processes."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.membership import state_store as module
from meshllm.node.membership.state_store import Invitation, StateStore
from meshllm.protocol.trust.credential import (
    NO_LIMITS,
    ClientLimits,
    Role,
    founder_credential,
    issue,
)
from meshllm.protocol.trust.ticket import MAX_ADDRESSES
from tests.builders.handshakes import FOUNDED, GUEST, HOST, OTHER

SOMEBODY = OTHER.node


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore.open(tmp_path / "state")


def again(store: StateStore) -> StateStore:
    return StateStore.open(store.folder)


def damage(store: StateStore, content: object) -> None:
    (store.folder / "mesh.json").write_text(json.dumps(content))


def test_all_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "state"
    folder.mkdir(parents=True, mode=0o777)
    store = StateStore.open(folder)
    store.create_mesh()
    with store.locked():
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {"node.key", "mesh.json", "lock"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_the_mode_of_a_readable_key_is_restored(store: StateStore) -> None:
    (store.folder / "node.key").chmod(0o644)

    again(store)

    assert stat.S_IMODE((store.folder / "node.key").stat().st_mode) == 0o600


def test_the_key_is_created_once(store: StateStore) -> None:
    assert again(store).key.node == store.key.node


def test_concurrent_processes_create_one_key(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from meshllm.node.membership.state_store import StateStore;"
        "input(); print(StateStore.open(Path(sys.argv[1])).key.node.hex())"
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
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.folder / "node.key"

    seed = module._first_seed(path)

    assert seed.hex() == path.read_text().strip()
    assert again(store).key.node == store.key.node


@pytest.mark.parametrize("data", [b"", b"ab" * 31, b"zz" * 32, b"\xff" * 64, b"ab" * 33])
def test_a_damaged_key_is_reported_and_kept(store: StateStore, data: bytes) -> None:
    path = store.folder / "node.key"
    path.write_bytes(data)

    with pytest.raises(UserError, match="Invalid key file") as raised:
        again(store)

    assert raised.value.hint
    assert path.read_bytes() == data


@pytest.mark.parametrize("is_founder", [True, False])
def test_a_key_of_another_node_is_refused(store: StateStore, *, is_founder: bool) -> None:
    store.create_mesh()
    if not is_founder:
        store.join(issue(OTHER, founder_credential(OTHER, bytes(16)), store.key.node, Role.NODE))
    assert again(store).credential
    (store.folder / "node.key").unlink()

    with pytest.raises(UserError, match=r"`mesh.json` in .* is not that of the key") as raised:
        again(store)

    assert raised.value.hint
    assert "put the earlier key back" in raised.value.hint


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
        {"incarnation": -1},
        {"incarnation": 1 << 64},
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
def test_json_that_is_not_ours_is_one_clear_error(store: StateStore, content: object) -> None:
    damage(store, content)

    with pytest.raises(UserError, match=r"Invalid state file `.*mesh\.json`") as raised:
        again(store)

    assert raised.value.hint


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_no_json_is_one_clear_error(store: StateStore, data: bytes) -> None:
    (store.folder / "mesh.json").write_bytes(data)

    with pytest.raises(UserError, match=r"Invalid state file `.*mesh\.json`"):
        again(store)


def test_a_file_instead_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")

    with pytest.raises(UserError, match="cannot be used"):
        StateStore.open(tmp_path / "state")


def test_a_folder_of_another_user_is_refused(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)

    with pytest.raises(UserError, match="belongs to another user"):
        again(store)

    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["lock", "mesh.lock", "mesh.json", "node.key"])
def test_a_planted_link_is_not_followed(store: StateStore, tmp_path: Path, name: str) -> None:
    store.create_mesh()
    precious = tmp_path / "precious"
    precious.write_text("text")
    (store.folder / name).unlink(missing_ok=True)
    (store.folder / name).symlink_to(precious)

    def use() -> None:
        opened = again(store)
        with opened.locked():
            opened.next_incarnation()

    with pytest.raises(UserError, match=r"cannot be used: .*symbolic"):
        use()

    assert precious.read_text() == "text"


def test_a_key_that_others_could_have_written_is_refused(store: StateStore) -> None:
    (store.folder / "node.key").chmod(0o622)

    with pytest.raises(UserError, match="may write to it"):
        again(store)


def test_a_lock_file_is_not_truncated(store: StateStore) -> None:
    (store.folder / "lock").write_text("kept")

    with store.locked():
        pass

    assert (store.folder / "lock").read_text() == "kept"


def test_one_folder_is_for_one_node_at_a_time(store: StateStore) -> None:
    with (
        store.locked(),
        pytest.raises(UserError, match="already running"),
        again(store).locked(),
    ):
        pass

    with again(store).locked():
        pass


def test_a_file_system_needs_no_locks(monkeypatch: pytest.MonkeyPatch, store: StateStore) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    with store.locked():
        founded = store.create_mesh()

    assert again(store).credential == founded


def test_threads_lose_no_ticket_without_locks(
    monkeypatch: pytest.MonkeyPatch, store: StateStore
) -> None:
    store.create_mesh()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    with ThreadPoolExecutor(8) as threads:
        made = [
            threads.submit(store.invite, [], Role.NODE, lasts_s=None, uses=1) for _ in range(40)
        ]

    kept = {each.secret for each in again(store).invitations()}
    assert {each.result().secret for each in made} == kept


def test_a_new_folder_has_no_mesh(store: StateStore) -> None:
    assert (store.credential, store.mesh) == (None, None)


def test_a_founded_mesh_is_saved(store: StateStore) -> None:
    founded = store.create_mesh()

    assert again(store).credential == founded
    assert again(store).mesh == founded.mesh


def test_concurrent_starts_are_all_counted(store: StateStore) -> None:
    other = again(store)

    assert [ring.next_incarnation() for ring in (store, other, store)] == [1, 2, 3]


def test_another_mesh_drops_the_data_of_the_last(store: StateStore) -> None:
    store.next_incarnation()
    store.create_mesh()
    store.save("records", b"x")
    store.peers = {SOMEBODY: ["loopback:a"]}
    store.invite([], Role.NODE, lasts_s=None, uses=None)

    store.join(FOUNDED)

    assert store.mesh == FOUNDED.mesh
    assert (store.peers, store.invitations(), store.load("records")) == ({}, [], b"")
    assert store.next_incarnation() == 2


def test_another_credential_of_the_mesh_drops_nothing(store: StateStore) -> None:
    store.join(FOUNDED)
    store.save("records", b"x")

    store.join(FOUNDED)

    assert store.load("records") == b"x"


def test_peers_and_bytes_are_saved(store: StateStore) -> None:
    store.peers = {SOMEBODY: ["loopback:a", "loopback:b"]}
    store.save("records", b"\x00\xff")

    assert again(store).peers == {SOMEBODY: ("loopback:a", "loopback:b")}
    assert again(store).load("records") == b"\x00\xff"
    assert again(store).load("else") == b""


def test_unchanged_data_is_not_written(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.peers = {SOMEBODY: ["loopback:a"]}
    store.save("records", b"x")
    before = (store.folder / "mesh.json").stat().st_ino

    store.peers = {SOMEBODY: ("loopback:a",)}
    store.save("records", b"x")

    assert (store.folder / "mesh.json").stat().st_ino == before


def test_writes_of_another_process_are_kept(store: StateStore) -> None:
    store.create_mesh()
    other = again(store)
    store.invite([], Role.NODE, lasts_s=None, uses=1)
    (invitation,) = store.invitations()
    store.use(invitation, SOMEBODY)

    other.save("client", b"x")

    (kept,) = store.invitations()
    assert kept.guests == (SOMEBODY,)
    assert not kept.is_open(0)


def test_a_crash_while_writing_leaves_the_old_file(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    founded = store.create_mesh()

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(UserError, match="No space left") as caught:
        store.join(founder_credential(HOST, bytes(16)))

    assert again(store).credential == founded
    assert str(caught.value.hint).startswith("free space on its disk")
    assert not list(store.folder.glob(f".*.{os.getpid()}"))


def test_only_a_member_can_invite(store: StateStore) -> None:
    with pytest.raises(NotAuthorised, match="is in no mesh"):
        store.invite([], Role.NODE, lasts_s=None, uses=None)


def test_a_ticket_matches_the_saved_invitation(store: StateStore) -> None:
    store.create_mesh()

    ticket = store.invite(["loopback:a"], Role.CLIENT, lasts_s=60, uses=2)

    (invitation,) = again(store).invitations()
    assert (ticket.secret, ticket.role) == (invitation.secret, invitation.role)
    assert ticket.expires_s == invitation.expires_s > 0
    assert ticket.inviter == store.key.node
    assert (ticket.addresses, invitation.uses) == (("loopback:a",), 2)


def test_an_invitation_keeps_the_limits_of_its_clients(store: StateStore) -> None:
    store.create_mesh()
    limits = ClientLimits(1, 5000)
    store.invite([], Role.CLIENT, lasts_s=60, uses=2, limits=limits)
    store.invite([], Role.CLIENT, lasts_s=60, uses=2)

    assert [each.limits for each in again(store).invitations()] == [limits, NO_LIMITS]


@pytest.mark.parametrize("limits", [[1], [1, 2, 3], [None, 1], [1.5, 1], "12"])
def test_invalid_limits_of_an_invitation_are_refused(store: StateStore, limits: object) -> None:
    store.create_mesh()
    store.invite([], Role.CLIENT, lasts_s=60, uses=2)
    path = store.folder / "mesh.json"
    content = json.loads(path.read_text())
    content["invitations"][0]["limits"] = limits
    path.write_text(json.dumps(content))

    with pytest.raises(UserError, match="Invalid state file"):
        again(store)


def test_an_invitation_of_an_earlier_version_has_no_limits(store: StateStore) -> None:
    store.create_mesh()
    store.invite([], Role.CLIENT, lasts_s=60, uses=2)
    path = store.folder / "mesh.json"
    content = json.loads(path.read_text())
    del content["invitations"][0]["limits"]
    path.write_text(json.dumps(content))

    assert [each.limits for each in again(store).invitations()] == [NO_LIMITS]


def test_a_ticket_has_a_limited_number_of_addresses(store: StateStore) -> None:
    store.create_mesh()

    ticket = store.invite([f"loopback:{n}" for n in range(99)], Role.NODE, lasts_s=1, uses=1)

    assert ticket.addresses == tuple(f"loopback:{n}" for n in range(MAX_ADDRESSES))


def test_closed_invitations_are_dropped(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_mesh()
    monkeypatch.setattr(module, "MAX_INVITATIONS", 3)
    store.invite([], Role.NODE, lasts_s=99, uses=0)
    tickets = [store.invite([], Role.NODE, lasts_s=99, uses=None) for _ in range(4)]

    kept = [invitation.secret for invitation in store.invitations()]

    assert kept == [ticket.secret for ticket in tickets[1:]]


def test_a_ticket_that_has_expired_is_dropped_before_an_older_one(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_mesh()
    monkeypatch.setattr(module, "MAX_INVITATIONS", 3)
    lasts_s = [99, -5, 99, 99]
    tickets = [store.invite([], Role.NODE, lasts_s=each, uses=None) for each in lasts_s]

    kept = [invitation.secret for invitation in store.invitations()]

    assert kept == [tickets[at].secret for at in (0, 2, 3)]


def test_the_guest_of_a_full_ticket_may_retry_after_another_ticket_was_made(
    store: StateStore,
) -> None:
    store.create_mesh()
    store.invite([], Role.NODE, lasts_s=99, uses=1)
    store.use(store.invitations()[0], GUEST.node)

    store.invite([], Role.NODE, lasts_s=99, uses=1)

    full, _ = store.invitations()
    assert full.is_open(time.time(), GUEST.node)
    assert store.use(full, GUEST.node)


def test_a_full_ticket_is_dropped_before_an_open_one_but_after_one_that_has_expired(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_mesh()
    monkeypatch.setattr(module, "MAX_INVITATIONS", 4)
    wishes = [(99, None), (99, 0), (-5, None), (99, 0), (99, None), (99, None)]
    tickets = [store.invite([], Role.NODE, lasts_s=each, uses=uses) for each, uses in wishes]

    kept = [invitation.secret for invitation in store.invitations()]

    assert kept == [tickets[at].secret for at in (0, 3, 4, 5)]


def test_a_clock_that_was_ahead_for_a_while_closes_no_ticket(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_mesh()
    now = time.time()
    ticket = store.invite([], Role.NODE, lasts_s=99, uses=1)
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now + 1e6)
        assert not store.invitations()[0].is_open(time.time())
        store.invite([], Role.NODE, lasts_s=99, uses=1)

    first, _ = store.invitations()

    assert first.secret == ticket.secret
    assert first.is_open(time.time())
    assert store.use(first, GUEST.node)


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


def test_a_guest_counts_once(store: StateStore) -> None:
    store.create_mesh()
    store.invite([], Role.NODE, lasts_s=None, uses=2)
    store.invite([], Role.NODE, lasts_s=None, uses=None)

    for _ in range(2):
        for each in store.invitations():
            store.use(each, SOMEBODY)

    limited, free = store.invitations()
    assert (limited.guests, free.guests) == ((SOMEBODY,), (SOMEBODY,))


def test_a_file_deleted_while_the_node_runs_is_restored(store: StateStore) -> None:
    credential = store.create_mesh()
    ticket = store.invite([], Role.NODE, lasts_s=None, uses=1)
    (store.folder / "mesh.json").unlink()

    store.refresh()
    (invitation,) = store.invitations()
    assert store.use(invitation, GUEST.node)

    (kept,) = again(store).invitations()
    assert (kept.secret, kept.guests) == (ticket.secret, (GUEST.node,))
    assert again(store).credential == credential


def test_a_file_damaged_while_the_node_runs_is_reported_once(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.create_mesh()
    store.invite([], Role.NODE, lasts_s=None, uses=1)
    before = store.invitations()

    damage(store, "text")

    for _ in range(2):
        store.refresh()
        assert store.invitations() == before
    assert caplog.text.count("Invalid state file") == 1


def test_a_write_while_the_file_is_read_is_not_forgotten(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_mesh()
    again(store).save("records", b"x")
    read = module._read

    def late(path: Path) -> Any:
        monkeypatch.setattr(module, "_read", read)
        content = read(path)
        store.invite([], Role.NODE, lasts_s=None, uses=1)  # on another thread
        return content

    monkeypatch.setattr(module, "_read", late)
    store.refresh()

    assert len(store.invitations()) == 1
