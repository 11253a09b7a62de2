"""What a node keeps between its runs: key, mesh, invitations.

Everything lies in one folder that only its owner can open (0700), in files of 0600. Files are
replaced whole, so that a crash leaves the old one or the new one.
"""

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

from blake3 import blake3

from meshllm.errors import NotAuthorised, PeerFault, UserError
from meshllm.names import MeshId, NodeId
from meshllm.protocol.trust.credential import Credential, Role, found
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import MAX_ADDRESSES, SECRET_BYTES, Ticket

SALT_BYTES = 16
SEED_BYTES = 32
MAX_INVITATIONS = 256  # a mesh has fewer members; the oldest are forgotten

Content: TypeAlias = dict[str, Any]
"""The fields of the file; those that this module does not name are bytes in hexadecimal."""

_FILE = "mesh.json"
_Stamp: TypeAlias = tuple[int, int, int]
_Held: TypeAlias = tuple[_Stamp | None, Content]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invitation:
    """What an inviter remembers of a ticket."""

    secret: bytes
    role: Role
    expires_s: int
    """Seconds since 1970; 0 is never."""
    uses: int | None
    """How many keys it lets in; None is without a limit."""
    guests: tuple[NodeId, ...] = ()
    """The keys that it let in where that has a limit: they may come back, as one whose welcome was
    lost on the way."""

    def is_late(self, now_s: float) -> bool:
        """Tell whether the ticket has expired."""
        return 0 < self.expires_s <= now_s

    def is_open(self, now_s: float, guest: NodeId | None = None) -> bool:
        """Tell whether the ticket still lets this key in, or anybody new."""
        is_full = self.uses is not None and len(self.guests) >= self.uses
        return (not is_full or guest in self.guests) and not self.is_late(now_s)


class Keyring:
    """The state folder of one node.

    What changes a file waits for the disk; on an event loop it is for another thread. The content
    is kept in memory, and read again when another process has changed the file.
    """

    def __init__(self, folder: Path, key: NodeKey, content: Content) -> None:
        self.folder = folder
        self.key = key
        self._held: _Held = None, content  # in one place: a thread may change it

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the folder; make it, with a new key, on first use.

        Raises:
            UserError: the folder is not ours alone, or what lies in it cannot be read.
        """
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.geteuid():  # root could use it, and its owner our key
                raise UserError(
                    f"State folder `{folder}` belongs to another user",
                    hint="name one of your own: `--state FOLDER`",
                )
            folder.chmod(0o700)
            seed = _seed(folder / "node.key")
            content = _read(folder / _FILE) or {}
        except OSError as error:
            raise _unusable(folder, error) from None
        return cls(folder, NodeKey(seed), content)

    @property
    def _content(self) -> Content:
        return self._held[1]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one node; raise `UserError` when another one has it."""
        with _open_private(self.folder / "lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"A node is already running with the key in `{self.folder}`",
                    hint="give each node a folder of its own: `--state FOLDER`",
                ) from None
            yield

    @property
    def credential(self) -> Credential | None:
        """The membership of this node; None while it belongs to no mesh."""
        text = self._content.get("credential")
        return None if text is None else Credential.decode(bytes.fromhex(text))

    @property
    def mesh(self) -> MeshId | None:
        """The mesh this node is a member of."""
        credential = self.credential
        return credential.mesh if credential else None

    def found(self) -> Credential:
        """Begin a mesh of one."""
        return self.join(found(self.key, secrets.token_bytes(SALT_BYTES)))

    def join(self, credential: Credential, ticket: Ticket | None = None) -> Credential:
        """Remember a membership, and what bought it; what was of another mesh is forgotten."""
        is_other = self.mesh != credential.mesh
        bought = {"ticket": _tag(ticket)} if ticket else {}

        def change(content: Content) -> Content:
            kept = {"incarnation": content.get("incarnation", 0)} if is_other else content
            return {**kept, "credential": credential.encode().hex(), **bought}

        self._change(change)
        return credential

    def has_used(self, ticket: Ticket) -> bool:
        """Tell whether this ticket bought the membership."""
        return self._content.get("ticket") == _tag(ticket)

    def next_incarnation(self) -> int:
        """Count the starts of this node, so that its records replace those of earlier runs."""
        self._change(lambda content: {**content, "incarnation": content.get("incarnation", 0) + 1})
        incarnation: int = self._content["incarnation"]
        return incarnation

    def recall(self, name: str) -> bytes:
        """Return what was remembered under a name; nothing where nothing was."""
        return bytes.fromhex(self._content.get(name, ""))

    def remember(self, name: str, data: bytes) -> None:
        """Keep some bytes for the next run."""
        if self.recall(name) != data:
            self._change(lambda content: {**content, name: data.hex()})

    @property
    def peers(self) -> dict[NodeId, tuple[str, ...]]:
        """Where other members were, when this node last heard of them."""
        known = self._content.get("peers", {})
        return {NodeId(bytes.fromhex(node)): tuple(at) for node, at in known.items()}

    @peers.setter
    def peers(self, peers: Mapping[NodeId, Sequence[str]]) -> None:
        known = {node.hex(): list(at) for node, at in sorted(peers.items())}
        if known != self._content.get("peers", {}):
            self._change(lambda content: {**content, "peers": known})

    def invite(
        self, addresses: Sequence[str], role: Role, *, lasts_s: float | None, uses: int | None
    ) -> Ticket:
        """Make a ticket of the mesh and remember it.

        Raises:
            NotAuthorised: this node is no member that may invite.
        """
        if self.mesh is None:
            raise NotAuthorised("This node belongs to no mesh", hint="start it: `meshllm node`")
        now = time.time()
        expires = 0 if lasts_s is None else int(now + lasts_s)
        invitation = Invitation(secrets.token_bytes(SECRET_BYTES), role, expires, uses)

        def change(content: Content) -> Content:
            known = [_invitation(each) for each in content.get("invitations", [])]
            kept = [*(each for each in known if each.is_open(now)), invitation]
            return {**content, "invitations": _lines(kept[-MAX_INVITATIONS:])}

        self._change(change)
        places = tuple(addresses[:MAX_ADDRESSES])
        return Ticket(self.key.node, places, role, expires, invitation.secret)

    def invitations(self) -> list[Invitation]:
        """List the invitations, the oldest first; strangers may ask for them all the time."""
        self._refresh()
        return [_invitation(each) for each in self._content.get("invitations", [])]

    def use(self, invitation: Invitation, guest: NodeId) -> bool:
        """Note whom an invitation lets in; tell whether it still does, when others came as well."""
        if invitation.uses is None or guest in invitation.guests:
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

    def _refresh(self) -> None:
        """Read the file when it is another one than before; as it is now, it may be damaged."""
        path, (stamp, content) = self.folder / _FILE, self._held
        if (now := _stamp(path)) not in (stamp, None):
            try:
                content = _read(path) or content
            except (UserError, OSError) as error:
                logger.warning("%s", error)
            self._held = now, content

    def _change(self, change: Callable[[Content], Content]) -> None:
        """Change what is in the file, which another process may have written since.

        Where somebody has deleted it, it is written as it was known: it has the membership.
        """
        path = self.folder / _FILE
        try:
            with _open_private(self.folder / "mesh.lock") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                before = _read(path)
                content = change(self._content if before is None else before)
                _draft(path, json.dumps(content, indent=2).encode()).replace(path)
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
        }
        for each in invitations
    ]


def _stamp(path: Path) -> _Stamp | None:
    """Return what is another one when a file was written again; None for none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _tag(ticket: Ticket) -> str:
    """Tell a ticket from others without its secret."""
    return blake3(ticket.psk).hexdigest(16)


def _seed(path: Path) -> bytes:
    try:
        seed = bytes.fromhex(path.read_text("ascii").strip())
    except FileNotFoundError:
        seed = _first_seed(path)
    except ValueError:
        seed = b""
    if len(seed) != SEED_BYTES:
        raise UserError(f"`{path}` holds no key", hint="move it away, and a new one is made")
    path.chmod(0o600)
    return seed


def _first_seed(path: Path) -> bytes:
    """Make a key; of two processes that do so at once, both get the same."""
    draft = _draft(path, secrets.token_hex(SEED_BYTES).encode() + b"\n")
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return bytes.fromhex(path.read_text("ascii").strip())


def _read(path: Path) -> Content | None:
    """Read the file; None where there is none."""
    try:
        content: Content = json.loads(path.read_bytes())
        _check(content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PeerFault):
        raise UserError(
            f"`{path}` cannot be read", hint="move it away, and the node begins a new mesh"
        ) from None
    return content


def _check(content: Content) -> None:
    """Read every field as it will be read; raise what that raises, or `ValueError`."""
    kinds = {"incarnation": int, "peers": dict, "invitations": list}
    for name, value in content.items():
        if type(value) is not kinds.get(name, str):
            raise ValueError(name)
        if isinstance(value, str):
            bytes.fromhex(value)
    if "credential" in content:
        Credential.decode(bytes.fromhex(content["credential"]))
    for node, addresses in content.get("peers", {}).items():
        texts = [bytes.fromhex(node).hex(), *addresses]
        if type(addresses) is not list or not all(isinstance(text, str) for text in texts):
            raise ValueError(node)
    for each in content.get("invitations", []):
        _invitation(each)


def _invitation(fields: Content) -> Invitation:
    expires_s, uses = fields["expires_s"], fields["uses"]
    if type(expires_s) is not int or type(uses) not in {int, type(None)}:
        raise ValueError(fields)
    return Invitation(
        bytes.fromhex(fields["secret"]),
        Role(fields["role"]),
        expires_s,
        uses,
        tuple(NodeId(bytes.fromhex(guest)) for guest in fields["guests"]),
    )


def _draft(path: Path, data: bytes) -> Path:
    """Write a file that only its owner can read, beside the one it is for."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with _open_private(draft) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return draft


def _open_private(path: Path) -> BinaryIO:
    """Make a file, or empty it, that only its owner can read from its first moment."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _unusable(folder: Path, error: OSError) -> UserError:
    return UserError(f"State folder `{folder}` cannot be used: {error.strerror}")
