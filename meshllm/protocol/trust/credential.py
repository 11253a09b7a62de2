"""Membership credentials: certificate chains, and permanent removal of keys.

A mesh id is the hash of its founder's key and a salt, so the id authenticates the founder without
an authority. The founder is a member without a certificate; every other member holds a chain of
certificates that begins at the founder, each issued by the subject of the one before.

Any member in the role of a node can remove a key. This also revokes the certificates that the key
issued, so that a thief cannot return, except those of the members that the removal spares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from struct import Struct
from typing import Self

import blake3

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import MESH_ID_BYTES, NODE_ID_BYTES, MeshId, NodeId, short
from meshllm.protocol.trust.identity import NodeKey, verify

MAX_CHAIN = 16  # certificates, one per invitation
MAX_SPARED = 256  # members spared by one removal: 8 KiB of a record
TOO_FAR = "invitations away from the founder"
"""Ends the refusal of a node that is `MAX_CHAIN` of them away."""

_HEAD = Struct("<16s 16s")  # mesh, salt; the certificates follow
_CERTIFICATE = Struct("<32s B Q 32s 64s")
_LIMITS = Struct("<HQ")  # follow the certificates if the last one has any
_REMOVAL = Struct("<32s 32s Q 64s")  # the spared members follow
# A later version appends its fields after the limits, even of no client; and to a removal, fewer
# bytes than a node id, since the spared members are not counted.

MAX_LATER_BYTES = 64  # of such fields; with the limits they are shorter than a certificate
MAX_CREDENTIAL_BYTES = _HEAD.size + MAX_CHAIN * _CERTIFICATE.size + _LIMITS.size + MAX_LATER_BYTES


class Role(StrEnum):
    """What a member may do."""

    NODE = "node"
    """Serve, gossip and invite."""
    CLIENT = "client"
    """Send requests only."""


_ROLES = tuple(Role)  # encoded as its index


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client may ask of each node; 0 means the node's default."""

    concurrency: int = 0
    """Requests at a time."""
    tokens_per_day: int = 0
    """Read and written, in a day of UTC."""


NO_LIMITS = ClientLimits()


@dataclass(frozen=True, slots=True)
class Certificate:
    """A statement, signed by one member, that another key is a member."""

    subject: NodeId
    role: Role
    expires_s: int
    """Seconds since 1970; 0 means never."""
    issuer: NodeId
    signature: bytes = b""
    limits: ClientLimits = NO_LIMITS
    """Of a client."""

    def signed_bytes(self, mesh: MeshId) -> bytes:
        """Return the bytes to sign."""
        fields = (self.subject, _ROLES.index(self.role), self.expires_s, self.issuer, b"")
        return b"meshllm certificate 1" + mesh + _CERTIFICATE.pack(*fields) + _pack(self.limits)


@dataclass(frozen=True, slots=True)
class Credential:
    """A member's certificate chain, from the founder of the mesh to itself."""

    mesh: MeshId
    salt: bytes
    chain: tuple[Certificate, ...] = ()
    """Empty for the founder."""

    @property
    def role(self) -> Role:
        """The role in the last certificate; unverified before `check`."""
        return self.chain[-1].role if self.chain else Role.NODE

    @property
    def limits(self) -> ClientLimits:
        """The limits in the last certificate; unverified before `check`."""
        return self.chain[-1].limits if self.chain else NO_LIMITS

    def is_of(self, node: NodeId) -> bool:
        """Return whether it names a node as its holder; unverified before `check`."""
        if self.chain:
            return self.chain[-1].subject == node
        return _mesh_of(node, self.salt) == self.mesh

    def encode(self) -> bytes:
        """Encode the credential."""
        links = (
            _CERTIFICATE.pack(c.subject, _ROLES.index(c.role), c.expires_s, c.issuer, c.signature)
            for c in self.chain
        )
        return _HEAD.pack(self.mesh, self.salt) + b"".join(links) + _pack(self.limits)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a credential.

        Raises:
            NotAuthorised: it has a role of a later version.
            PeerFault: it is malformed.
        """
        count, trailing = divmod(len(data) - _HEAD.size, _CERTIFICATE.size)
        is_whole = not 0 < trailing < _LIMITS.size and count >= 0
        if not is_whole or len(data) > MAX_CREDENTIAL_BYTES:
            raise PeerFault(f"Credential of {len(data)} bytes; {MAX_CREDENTIAL_BYTES} at most")
        end = len(data) - trailing
        mesh, salt = _HEAD.unpack_from(data)
        chain = []
        for subject, role, *rest in _CERTIFICATE.iter_unpack(data[_HEAD.size : end]):
            if role >= len(_ROLES):
                raise NotAuthorised(
                    f"Node `{short(subject)}` has role {role}, unknown to this version",
                    hint="update meshllm",
                )
            chain.append(Certificate(subject, _ROLES[role], *rest))
        if trailing and chain and chain[-1].role is Role.CLIENT:
            limits = ClientLimits(*_LIMITS.unpack_from(data, end))
            chain[-1] = replace(chain[-1], limits=limits)
        return cls(mesh, salt, tuple(chain))


@dataclass(frozen=True, slots=True)
class Removal:
    """A statement, signed by a member, that a key is permanently removed."""

    node: NodeId
    issuer: NodeId
    at_s: int
    """Seconds since 1970."""
    spared: tuple[NodeId, ...] = ()
    """Members that the removed key had invited and that stay."""
    signature: bytes = b""

    def encode(self) -> bytes:
        """Encode the removal."""
        head = _REMOVAL.pack(self.node, self.issuer, self.at_s, self.signature)
        return head + b"".join(self.spared)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a removal; raise `PeerFault` if it is malformed."""
        count = (len(data) - _REMOVAL.size) // NODE_ID_BYTES
        if not 0 <= count <= MAX_SPARED:
            raise PeerFault(f"Removal of {len(data)} bytes, with {MAX_SPARED} spared at most")
        node, issuer, at_s, signature = _REMOVAL.unpack_from(data)
        places = (_REMOVAL.size + number * NODE_ID_BYTES for number in range(count))
        spared = tuple(NodeId(data[place : place + NODE_ID_BYTES]) for place in places)
        return cls(node, issuer, at_s, spared, signature)

    def is_signed(self, mesh: MeshId) -> bool:
        """Return whether its issuer signed it for this mesh; the issuer's role is not checked."""
        return verify(self.issuer, self.signed_bytes(mesh), self.signature)

    def signed_bytes(self, mesh: MeshId) -> bytes:
        """Return the bytes to sign."""
        return b"meshllm removal 1" + mesh + replace(self, signature=b"").encode()


Removals = Mapping[NodeId, Removal]
"""Removals by the node that each removes."""


def founder_credential(key: NodeKey, salt: bytes) -> Credential:
    """Return the founder's credential of a new mesh; ``salt`` is 16 random bytes."""
    return Credential(_mesh_of(key.node, salt), salt)


def issue(
    key: NodeKey,
    own: Credential,
    subject: NodeId,
    role: Role,
    expires_s: int = 0,
    limits: ClientLimits = NO_LIMITS,
) -> Credential:
    """Issue a credential to ``subject``, signed by the holder of ``own``; limits are for clients.

    Raises:
        NotAuthorised: the issuer is a client, or its chain has reached `MAX_CHAIN`.
    """
    if own.role is not Role.NODE:
        raise NotAuthorised("A client cannot invite", hint="ask a node of the mesh for a ticket")
    if len(own.chain) == MAX_CHAIN:
        raise NotAuthorised(
            f"Node `{short(key.node)}` is {MAX_CHAIN} {TOO_FAR}",
            hint="let a node that joined earlier invite",
        )
    certificate = Certificate(subject, role, expires_s, key.node, limits=limits)
    signature = key.sign(certificate.signed_bytes(own.mesh))
    return replace(own, chain=(*own.chain, replace(certificate, signature=signature)))


def remove(
    key: NodeKey, mesh: MeshId, node: NodeId, at_s: int, spared: tuple[NodeId, ...] = ()
) -> Removal:
    """Permanently remove a key from a mesh, and all members that it invited except ``spared``."""
    removal = Removal(node, key.node, at_s, spared)
    return replace(removal, signature=key.sign(removal.signed_bytes(mesh)))


def check(
    credential: Credential, node: NodeId, mesh: MeshId, now_s: float, removals: Removals
) -> Role:
    """Return the role in which ``node`` is a member.

    Raises:
        NotAuthorised: it is not a member.
    """
    founder = founder_of(credential, node)
    if credential.mesh != mesh or _mesh_of(founder, credential.salt) != mesh:
        raise NotAuthorised(f"Node `{short(node)}` is a member of another mesh")
    refuse_removed(node, removals)  # first: it must not make us verify a chain of signatures
    holder, role = founder, Role.NODE
    for certificate in credential.chain:
        if role is not Role.NODE:
            raise NotAuthorised(f"Node `{short(holder)}` is a client and cannot invite")
        if _ends(removals.get(holder), certificate):
            raise NotAuthorised(
                f"Node `{short(certificate.subject)}` was invited by `{short(holder)}`,"
                " which was removed"
            )
        _check_link(certificate, holder, mesh, now_s)
        holder, role = certificate.subject, certificate.role
    if holder != node:
        raise NotAuthorised(f"Node `{short(node)}` shows the credential of `{short(holder)}`")
    return role


def refuse_removed(node: NodeId, removals: Removals) -> None:
    """Raise `NotAuthorised` if a node is known to be removed; it needs to show nothing for that."""
    if node in removals:
        raise NotAuthorised(f"Node `{short(node)}` is removed from the mesh")


def is_revoked(credential: Credential, node: NodeId, removals: Removals) -> bool:
    """Return whether a removal ended the membership that a verified credential shows."""
    links = credential.chain
    return node in removals or any(_ends(removals.get(each.issuer), each) for each in links)


def founder_of(credential: Credential, node: NodeId) -> NodeId:
    """Return the founder of the mesh in whose credential ``node`` is the subject."""
    return credential.chain[0].issuer if credential.chain else node


def _ends(removal: Removal | None, certificate: Certificate) -> bool:
    """Return whether the removal of its issuer revokes a certificate."""
    return removal is not None and certificate.subject not in removal.spared


def _check_link(certificate: Certificate, issuer: NodeId, mesh: MeshId, now_s: float) -> None:
    subject = short(certificate.subject)
    if certificate.issuer != issuer or not verify(
        issuer, certificate.signed_bytes(mesh), certificate.signature
    ):
        raise NotAuthorised(f"The certificate of node `{subject}` was not signed by its issuer")
    if 0 < certificate.expires_s <= now_s:
        raise NotAuthorised(
            f"The membership of node `{subject}` has expired", hint="join with a new ticket"
        )


def _pack(limits: ClientLimits) -> bytes:
    is_limited = limits != NO_LIMITS
    return _LIMITS.pack(limits.concurrency, limits.tokens_per_day) if is_limited else b""


def _mesh_of(founder: NodeId, salt: bytes) -> MeshId:
    return MeshId(blake3.blake3(founder + salt).digest()[:MESH_ID_BYTES])
