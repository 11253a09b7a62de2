"""The persistent state of a node: key, membership, invitations, saved records.

All files are in one folder of mode 0700, with mode 0600. They are replaced atomically: after a
crash, a file has its old or its new content.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Self, TypeAlias

from blake3 import blake3

from meshllm.errors import NotAuthorised, PeerFault, UserError
from meshllm.local_files import make_private, open_own, read_own, try_lock
from meshllm.names import MeshId, NodeId
from meshllm.protocol.trust.credential import (
    NO_LIMITS,
    ClientLimits,
    Credential,
    Role,
    founder_credential,
)
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import MAX_ADDRESSES, SECRET_BYTES, Ticket

SALT_BYTES = 16
SEED_BYTES = 32
MAX_FILE_BYTES = 64 << 20  # thousands of members with every record
MAX_INCARNATION = 1 << 63
MAX_GUESTS = 1024  # of one ticket; more than a mesh has members and clients
MAX_INVITATIONS = 256  # more than a mesh has members; then expired ones go, full ones, old ones

Content: TypeAlias = dict[str, Any]
"""The JSON fields of the file; fields unknown to this module are bytes in hexadecimal."""

FILE = "mesh.json"
_Stamp: TypeAlias = tuple[int, int, int]
_Held: TypeAlias = tuple[_Stamp | None, Content]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """A ticket as stored by its inviter."""

    secret: bytes
    role: Role
    expires_s: int
    """Unix time; 0 is never."""
    uses: int | None
    """Maximum keys that it admits; None means `MAX_GUESTS`."""
    guests: tuple[NodeId, ...] = ()
    """The admitted keys. They may retry, for example after a lost reply."""
    limits: ClientLimits = NO_LIMITS
    """Of each client that it admits."""

    def is_expired(self, now_s: float) -> bool:
        """Return whether the ticket has expired."""
        return 0 < self.expires_s <= now_s

    @property
    def is_full(self) -> bool:
        """Return whether the ticket admits no new key."""
        return len(self.guests) >= (MAX_GUESTS if self.uses is None else self.uses)

    def is_open(self, now_s: float, guest: NodeId | None = None) -> bool:
        """Return whether the ticket still admits this key; None is any new key."""
        return (not self.is_full or guest in self.guests) and not self.is_expired(now_s)


class StateStore:
    """The state folder of one node.

    `refresh` and the methods that write block on the disk; call them off the event loop. The others
    read a copy in memory.
    """

    def __init__(self, folder: Path, key: NodeKey, content: Content) -> None:
        self.folder = folder
        self.key = key
        self._held: _Held = None, content  # one attribute, so that threads replace it atomically
        self._holding = Lock()
        self._changing = Lock()  # threads share a draft, and not every file system has locks

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the folder; create it, with a new key, on first use.

        Raises:
            UserError: the folder belongs to another user, or a file in it is invalid.
        """
        try:
            make_private(folder)
            seed = _seed(folder / "node.key")
            content = _read(folder / FILE) or {}
        except OSError as error:
            raise _unusable(folder, error) from None
        store = cls(folder, NodeKey(seed), content)
        if (credential := store.credential) and not credential.is_of(store.key.node):
            raise UserError(
                f"`{FILE}` in `{folder}` is not that of the key in `node.key`",
                hint=f"put the earlier key back, or move `{FILE}` away and join with a ticket",
            )
        return store

    @property
    def _content(self) -> Content:
        return self._held[1]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one node; raise `UserError` if another node has locked it."""
        with self._open_lock("lock") as file:
            if not try_lock(file.fileno()):
                raise UserError(
                    f"A node is already running with the key in `{self.folder}`",
                    hint="give each node its own folder: `--state FOLDER`",
                )
            yield

    @property
    def credential(self) -> Credential | None:
        """The credential of this node; None while it is not a member of a mesh."""
        text = self._content.get("credential")
        return None if text is None else Credential.decode(bytes.fromhex(text))

    @property
    def mesh(self) -> MeshId | None:
        """The mesh of which this node is a member."""
        credential = self.credential
        return credential.mesh if credential else None

    def create_mesh(self) -> Credential:
        """Found a mesh with this node as its only member."""
        return self.join(founder_credential(self.key, secrets.token_bytes(SALT_BYTES)))

    def join(self, credential: Credential, ticket: Ticket | None = None) -> Credential:
        """Store a credential and the ticket that it was issued for; drop data of another mesh."""
        is_other = self.mesh != credential.mesh
        used = {"ticket": _tag(ticket)} if ticket else {}

        def change(content: Content) -> Content:
            kept = {"incarnation": content.get("incarnation", 0)} if is_other else content
            return {**kept, "credential": credential.encode().hex(), **used}

        self._change(change)
        return credential

    def has_used(self, ticket: Ticket) -> bool:
        """Return whether the credential was issued for this ticket."""
        return self._content.get("ticket") == _tag(ticket)

    def next_incarnation(self) -> int:
        """Increment and return the incarnation, which orders the records of this node's runs."""
        self._change(lambda content: {**content, "incarnation": content.get("incarnation", 0) + 1})
        incarnation: int = self._content["incarnation"]
        return incarnation

    def load(self, name: str) -> bytes:
        """Return the bytes stored under a name; empty if there are none."""
        return bytes.fromhex(self._content.get(name, ""))

    def save(self, name: str, data: bytes) -> None:
        """Store bytes under a name."""
        if self.load(name) != data:
            self._change(lambda content: {**content, name: data.hex()})

    @property
    def peers(self) -> dict[NodeId, tuple[str, ...]]:
        """The last known addresses of other members."""
        known = self._content.get("peers", {})
        return {NodeId(bytes.fromhex(node)): tuple(at) for node, at in known.items()}

    @peers.setter
    def peers(self, peers: Mapping[NodeId, Sequence[str]]) -> None:
        known = {node.hex(): list(at) for node, at in sorted(peers.items())}
        if known != self._content.get("peers", {}):
            self._change(lambda content: {**content, "peers": known})

    def invite(
        self,
        addresses: Sequence[str],
        role: Role,
        *,
        lasts_s: float | None,
        uses: int | None,
        limits: ClientLimits = NO_LIMITS,
    ) -> Ticket:
        """Create a ticket of the mesh and store it.

        Raises:
            NotAuthorised: this node is not a member of a mesh.
        """
        if self.mesh is None:
            raise NotAuthorised("This node is in no mesh", hint="start it: `meshllm node`")
        now = time.time()
        expires = 0 if lasts_s is None else int(now + lasts_s)
        secret = secrets.token_bytes(SECRET_BYTES)
        invitation = Invitation(secret, role, expires, uses, limits=limits)

        def change(content: Content) -> Content:
            known = [_invitation(each) for each in content.get("invitations", [])]
            # Dropped only for want of space: the clock may be wrong now, so that none has expired,
            # and the guests of one that is full may retry.
            closed_first = sorted(
                known, key=lambda each: (not each.is_expired(now), not each.is_full)
            )
            dropped = closed_first[: max(0, len(known) + 1 - MAX_INVITATIONS)]
            left = [each for each in known if each not in dropped]
            return {**content, "invitations": _lines([*left, invitation])}

        self._change(change)
        places = tuple(addresses[:MAX_ADDRESSES])
        return Ticket(self.key.node, places, role, expires, invitation.secret)

    def invitations(self) -> list[Invitation]:
        """List the invitations, the oldest first; `refresh` adds those of another process."""
        return [_invitation(each) for each in self._content.get("invitations", [])]

    def refresh(self) -> None:
        """Read the file if another process has changed it; keep the content if it is invalid."""
        held = stamp, content = self._held
        path = self.folder / FILE
        if (now := _stamp(path)) not in (stamp, None):
            try:
                content = _read(path) or content
            except (UserError, NotAuthorised, OSError) as error:
                logger.warning("%s", error)
            with self._holding:
                if self._held is held:  # else another thread has written, perhaps since the reading
                    self._held = now, content

    def use(self, invitation: Invitation, guest: NodeId) -> bool:
        """Record a use of an invitation; return whether it is still open, also after races."""
        if guest in invitation.guests:
            return True
        is_open = False

        def change(content: Content) -> Content:
            nonlocal is_open
            known = [_invitation(each) for each in content.get("invitations", [])]
            for place, each in enumerate(known):
                if each.secret == invitation.secret and each.is_open(time.time(), guest):
                    is_open = True
                    guests = dict.fromkeys((*each.guests, guest))
                    known[place] = replace(each, guests=tuple(guests))
            return {**content, "invitations": _lines(known)}

        self._change(change)
        return is_open

    def _open_lock(self, name: str) -> BinaryIO:
        """Open a file for locking only; its content is never changed."""
        try:
            return os.fdopen(open_own(self.folder / name, 0), "wb")
        except OSError as error:
            raise _unusable(self.folder, error) from None

    def _change(self, change: Callable[[Content], Content]) -> None:
        """Update the file under a lock, from its current content on disk.

        A deleted file is restored from memory, since it holds the membership.
        """
        path = self.folder / FILE
        try:
            with self._changing, self._open_lock("mesh.lock") as file:
                with suppress(OSError):  # the file system has no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                before = _read(path)
                content = change(self._content if before is None else before)
                _draft(path, json.dumps(content, indent=2).encode()).replace(path)
                _sync(self.folder)
                with self._holding:
                    self._held = _stamp(path), content
        except OSError as error:
            raise _unusable(self.folder, error) from None


def _lines(invitations: Sequence[Invitation]) -> list[Content]:
    return [
        {
            "secret": each.secret.hex(),
            "role": each.role,
            "expires_s": each.expires_s,
            "uses": each.uses,
            "guests": [guest.hex() for guest in each.guests],
            "limits": list(astuple(each.limits)),
        }
        for each in invitations
    ]


def _stamp(path: Path) -> _Stamp | None:
    """Return a value that differs after the file was replaced; None if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _tag(ticket: Ticket) -> str:
    """Return an identifier of a ticket that does not reveal its secret."""
    return blake3(ticket.psk).hexdigest(16)


def _seed(path: Path) -> bytes:
    try:
        seed = bytes.fromhex(read_own(path, MAX_FILE_BYTES).decode("ascii").strip())
    except FileNotFoundError:
        seed = _first_seed(path)
    except ValueError:
        seed = b""
    if len(seed) != SEED_BYTES:
        raise UserError(f"Invalid key file `{path}`", hint="move it away to create a new key")
    path.chmod(0o600)
    return seed


def _first_seed(path: Path) -> bytes:
    """Create a key; concurrent processes get the same one."""
    draft = _draft(path, secrets.token_hex(SEED_BYTES).encode() + b"\n")
    try:
        path.hardlink_to(draft)
        _sync(path.parent)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return bytes.fromhex(read_own(path, MAX_FILE_BYTES).decode("ascii").strip())


def _read(path: Path) -> Content | None:
    """Read the file; return None if there is none."""
    try:
        content: Content = json.loads(read_own(path, MAX_FILE_BYTES))
        _check(content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PeerFault):
        raise UserError(
            f"Invalid state file `{path}`", hint="move it away to begin a new mesh"
        ) from None
    return content


def _check(content: Content) -> None:
    """Decode every field once; raise its decoding error, or `ValueError`."""
    kinds = {"incarnation": int, "peers": dict, "invitations": list}
    for name, value in content.items():
        if type(value) is not kinds.get(name, str):
            raise ValueError(name)
        if isinstance(value, str):
            bytes.fromhex(value)
    if content.get("incarnation", 0) not in range(MAX_INCARNATION):
        raise ValueError("incarnation")
    if "credential" in content:
        Credential.decode(bytes.fromhex(content["credential"]))
    _check_peers(content.get("peers", {}))
    for each in content.get("invitations", []):
        _invitation(each)


def _check_peers(peers: Mapping[str, Any]) -> None:
    for node, addresses in peers.items():
        texts = [bytes.fromhex(node).hex(), *addresses]
        if type(addresses) is not list or not all(isinstance(text, str) for text in texts):
            raise ValueError(node)


def _invitation(fields: Content) -> Invitation:
    expires_s, uses = fields["expires_s"], fields["uses"]
    limits = fields.get("limits", [0, 0])  # of earlier versions without
    if type(expires_s) is not int or type(uses) not in {int, type(None)}:
        raise ValueError(fields)
    if [type(each) for each in limits] != [int, int]:
        raise ValueError(fields)
    return Invitation(
        bytes.fromhex(fields["secret"]),
        Role(fields["role"]),
        expires_s,
        uses,
        tuple(NodeId(bytes.fromhex(guest)) for guest in fields["guests"]),
        ClientLimits(*limits),
    )


def _draft(path: Path, data: bytes) -> Path:
    """Write a private temporary file next to ``path``."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(open_own(draft, os.O_TRUNC), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _sync(folder: Path) -> None:
    """Write a new name in a folder to the disk."""
    with suppress(OSError):  # the file system syncs no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unusable(folder: Path, error: OSError) -> UserError:
    is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    return UserError(
        f"State folder `{folder}` cannot be used: {error.strerror}",
        hint="free space on its disk, or choose another folder: `--state FOLDER`"
        if is_full
        else "choose a folder that only you can write to: `--state FOLDER`",
    )
