"""Who belongs to a mesh: certificates, and keys removed for ever.

A mesh id is the hash of its founder's key and a salt, so whoever knows the id can tell who founded
it, and no authority is asked. The founder is a member by that alone; every other member holds a
chain of certificates that begins at the founder, each issued by the subject of the one before.

A key is removed by the word of any member in the role of a node. What the removed key had issued is
void too, so that a thief has no way back in, except for the members that the removal spares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from struct import Struct
from typing import Self

import blake3

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import MESH_ID_BYTES, NODE_ID_BYTES, MeshId, NodeId
from meshllm.protocol.trust.identity import NodeKey, short, verify

MAX_CHAIN = 16  # certificates: who was invited by whom
MAX_SPARED = 256  # members that one removal spares: 8 KiB of a record
SALT_BYTES = 16

_HEAD = Struct("<16s 16s")  # mesh, salt; and certificates
_CERTIFICATE = Struct("<32s B Q 32s 64s")
_REMOVAL = Struct("<32s 32s Q 64s")  # and who is spared

MAX_CREDENTIAL_BYTES = _HEAD.size + MAX_CHAIN * _CERTIFICATE.size


class Role(StrEnum):
    """What a member may do."""

    NODE = "node"
    """Serve, gossip and invite."""
    CLIENT = "client"
    """Ask only."""


_ROLES = tuple(Role)  # a role travels as its place here


@dataclass(frozen=True, slots=True)
class Certificate:
    """The word of one member that another key is a member."""

    subject: NodeId
    role: Role
    expires_s: int
    """Seconds since 1970; 0 is never."""
    issuer: NodeId
    signature: bytes = b""

    def words(self, mesh: MeshId) -> bytes:
        """Return what is signed."""
        fields = (self.subject, _ROLES.index(self.role), self.expires_s, self.issuer, b"")
        return b"meshllm certificate 1" + mesh + _CERTIFICATE.pack(*fields)


@dataclass(frozen=True, slots=True)
class Credential:
    """What a member shows: the way from the founder of the mesh to itself."""

    mesh: MeshId
    salt: bytes
    chain: tuple[Certificate, ...] = ()
    """Empty for the founder."""

    @property
    def role(self) -> Role:
        """What the last certificate says; worth nothing before `check`."""
        return self.chain[-1].role if self.chain else Role.NODE

    def encode(self) -> bytes:
        """Write it as bytes."""
        links = (
            _CERTIFICATE.pack(c.subject, _ROLES.index(c.role), c.expires_s, c.issuer, c.signature)
            for c in self.chain
        )
        return _HEAD.pack(self.mesh, self.salt) + b"".join(links)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote; raise `PeerFault` for anything else."""
        count, trailing = divmod(len(data) - _HEAD.size, _CERTIFICATE.size)
        if trailing or not 0 <= count <= MAX_CHAIN:
            raise PeerFault(f"Credential of {len(data)} bytes; {MAX_CREDENTIAL_BYTES} at most")
        mesh, salt = _HEAD.unpack_from(data)
        chain = []
        for subject, role, *rest in _CERTIFICATE.iter_unpack(data[_HEAD.size :]):
            if role >= len(_ROLES):
                raise PeerFault(f"Certificate with unknown role {role}")
            chain.append(Certificate(subject, _ROLES[role], *rest))
        return cls(mesh, salt, tuple(chain))


@dataclass(frozen=True, slots=True)
class Removal:
    """The word of a member that a key is none any more, for ever."""

    node: NodeId
    issuer: NodeId
    at_s: int
    """Seconds since 1970."""
    spared: tuple[NodeId, ...] = ()
    """Members that the removed key had invited, and who stay."""
    signature: bytes = b""

    def encode(self) -> bytes:
        """Write it as bytes."""
        head = _REMOVAL.pack(self.node, self.issuer, self.at_s, self.signature)
        return head + b"".join(self.spared)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what `encode` wrote; raise `PeerFault` for anything else."""
        count, trailing = divmod(len(data) - _REMOVAL.size, NODE_ID_BYTES)
        if trailing or not 0 <= count <= MAX_SPARED:
            raise PeerFault(f"Removal of {len(data)} bytes, with {MAX_SPARED} spared at most")
        node, issuer, at_s, signature = _REMOVAL.unpack_from(data)
        places = range(_REMOVAL.size, len(data), NODE_ID_BYTES)
        spared = tuple(NodeId(data[place : place + NODE_ID_BYTES]) for place in places)
        return cls(node, issuer, at_s, spared, signature)

    def is_signed(self, mesh: MeshId) -> bool:
        """Tell whether its issuer said so of this mesh; that it may is for the caller to check."""
        return verify(self.issuer, self.words(mesh), self.signature)

    def words(self, mesh: MeshId) -> bytes:
        """Return what is signed."""
        return b"meshllm removal 1" + mesh + replace(self, signature=b"").encode()


Removals = Mapping[NodeId, Removal]
"""Each by the node that it removes."""


def found(key: NodeKey, salt: bytes) -> Credential:
    """Found a mesh: its id is new with each salt of 16 random bytes."""
    return Credential(_mesh_of(key.node, salt), salt)


def issue(
    key: NodeKey, own: Credential, subject: NodeId, role: Role, expires_s: int = 0
) -> Credential:
    """Make ``subject`` a member by the word of the holder of ``own``.

    Raises:
        NotAuthorised: a client invites nobody, and a chain is not longer than `MAX_CHAIN`.
    """
    if own.role is not Role.NODE:
        raise NotAuthorised("A client cannot invite", hint="ask a node of the mesh for a ticket")
    if len(own.chain) == MAX_CHAIN:
        raise NotAuthorised(
            f"Node `{short(key.node)}` is {MAX_CHAIN} invitations away from the founder",
            hint="let a node that joined earlier invite",
        )
    certificate = Certificate(subject, role, expires_s, key.node)
    signature = key.sign(certificate.words(own.mesh))
    return replace(own, chain=(*own.chain, replace(certificate, signature=signature)))


def remove(
    key: NodeKey, mesh: MeshId, node: NodeId, at_s: int, spared: tuple[NodeId, ...] = ()
) -> Removal:
    """Remove a key from a mesh for ever, and all whom it invited but the spared."""
    removal = Removal(node, key.node, at_s, spared)
    return replace(removal, signature=key.sign(removal.words(mesh)))


def check(
    credential: Credential, node: NodeId, mesh: MeshId, now_s: float, removals: Removals
) -> Role:
    """Return the role in which ``node`` is a member.

    Raises:
        NotAuthorised: it is none.
    """
    founder = credential.chain[0].issuer if credential.chain else node
    if credential.mesh != mesh or _mesh_of(founder, credential.salt) != mesh:
        raise NotAuthorised(f"Node `{short(node)}` is a member of another mesh")
    holder, role = founder, Role.NODE
    for certificate in credential.chain:
        if role is not Role.NODE:
            raise NotAuthorised(f"Node `{short(holder)}` is a client, and cannot invite")
        _check_link(certificate, holder, mesh, now_s)
        if (removal := removals.get(holder)) and certificate.subject not in removal.spared:
            raise NotAuthorised(
                f"Node `{short(certificate.subject)}` was invited by `{short(holder)}`,"
                " which is removed"
            )
        holder, role = certificate.subject, certificate.role
    if holder != node:
        raise NotAuthorised(f"Node `{short(node)}` shows the credential of `{short(holder)}`")
    if node in removals:
        raise NotAuthorised(f"Node `{short(node)}` is removed from the mesh")
    return role


def _check_link(certificate: Certificate, issuer: NodeId, mesh: MeshId, now_s: float) -> None:
    subject = short(certificate.subject)
    if certificate.issuer != issuer or not verify(
        issuer, certificate.words(mesh), certificate.signature
    ):
        raise NotAuthorised(f"The certificate of node `{subject}` is not of its issuer")
    if 0 < certificate.expires_s <= now_s:
        raise NotAuthorised(
            f"The membership of node `{subject}` has expired", hint="join with a new ticket"
        )


def _mesh_of(founder: NodeId, salt: bytes) -> MeshId:
    return MeshId(blake3.blake3(founder + salt).digest()[:MESH_ID_BYTES])
