"""A host that founded a mesh, a guest, and both machines of a handshake between them."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from meshllm.names import NodeId
from meshllm.protocol.trust.credential import Removals, Role, founder_credential, issue
from meshllm.protocol.trust.handshake import (
    AuthorizeDialer,
    Established,
    HandshakeDialer,
    HandshakeListener,
    LocalIdentity,
    Purpose,
    SendHandshake,
)
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import Ticket
from meshllm.protocol.trust.transcript import HandshakeRandomness
from tests.protocol import handshake_vectors as vectors

NOW = 1_800_000_000
HOST, GUEST, OTHER = (
    NodeKey(seed) for seed in (vectors.SEEDS["listener"], vectors.SEEDS["dialer"], bytes(32))
)
FOUNDED = founder_credential(HOST, vectors.SALT)
MESH = FOUNDED.mesh
MEMBER = issue(HOST, FOUNDED, GUEST.node, Role.NODE, vectors.EXPIRES_S)
TICKET = Ticket(HOST.node, (), Role.NODE, 0, vectors.SECRET)

AS_HOST = LocalIdentity(HOST, 7, FOUNDED)
AS_MEMBER = LocalIdentity(GUEST, 3, MEMBER)
AS_JOINER = LocalIdentity(GUEST, 3, TICKET)
AS_STRANGER = LocalIdentity(GUEST, 3, founder_credential(GUEST, bytes(16)))

FRESH_DIALER, FRESH_LISTENER = (
    HandshakeRandomness(vectors.EPHEMERALS[side], vectors.NONCES[side])
    for side in ("dialer", "listener")
)
OTHER_FRESH = HandshakeRandomness(bytes([9]) * 32, bytes(16))
NOBODY: Removals = MappingProxyType({})


def make_dialer(
    own: LocalIdentity = AS_MEMBER,
    *,
    expect: NodeId = HOST.node,
    fresh: HandshakeRandomness = FRESH_DIALER,
    removals: Removals = NOBODY,
) -> HandshakeDialer:
    return HandshakeDialer(own, Purpose.MESH, fresh, expect=expect, now_s=NOW, removals=removals)


def make_listener(
    own: LocalIdentity = AS_HOST,
    *,
    fresh: HandshakeRandomness = FRESH_LISTENER,
    guests: Iterable[bytes] = (TICKET.psk,),
    removals: Removals = NOBODY,
) -> HandshakeListener:
    return HandshakeListener(own, fresh, guests, now_s=NOW, removals=removals)


def said(actions: Sequence[SendHandshake | AuthorizeDialer | Established]) -> bytes:
    """Return the message of the only action."""
    (action,) = actions
    assert isinstance(action, SendHandshake)
    return action.message


def asked(actions: Sequence[SendHandshake | AuthorizeDialer]) -> AuthorizeDialer:
    """Return the only action, a `AuthorizeDialer`."""
    (action,) = actions
    assert isinstance(action, AuthorizeDialer)
    return action


def known(actions: Sequence[SendHandshake | Established]) -> Established:
    """Return the only action, an `Established`."""
    (action,) = actions
    assert isinstance(action, Established)
    return action
