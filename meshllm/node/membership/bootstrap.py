"""Becoming a member of a mesh: by founding one, returning to one, or with a ticket."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from meshllm.errors import LinkLost, NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.node.membership.admission import REMOVED
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import Heard, JoinerBeacons, open_beacon
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.endpoints import by_scheme
from meshllm.node.net.peer_address import LocalAddressPolicy
from meshllm.node.net.secure import HandshakeClosed, SecureLink
from meshllm.node.options import NodeOptions
from meshllm.protocol.trust.credential import TOO_FAR, Credential, Role
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm.protocol.trust.ticket import Ticket, parse_ticket
from meshllm.transport.contract import Transport

REDIAL_S = 1.0  # s between two dials of the inviter, which may start later
MAX_CLOSED = 5  # closed handshakes in a row; a starting or overloaded node closes some, too
ASK_S = 4.0  # s at most between two queries for the inviter on the local network
_SECOND = "%Y-%m-%d %H:%M:%S"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Membership:
    """The membership of a node, and where to find other members."""

    credential: Credential
    incarnation: int
    link: SecureLink | None
    """To the inviter, if the node has just joined."""
    hints: tuple[tuple[NodeId, tuple[str, ...]], ...]
    """Possible addresses of members."""

    @property
    def is_founder(self) -> bool:
        """Whether this node founded the mesh."""
        return not self.credential.chain


async def enter(
    store: StateStore,
    options: NodeOptions,
    transports: Sequence[Transport],
    off_loop: OffLoop = asyncio.to_thread,
) -> Membership:
    """Found a mesh, return to one, or join one with a ticket; wait until the inviter answers.

    Raises:
        UserError: the ticket is invalid, for a client, or no transport can dial the inviter; or the
            state folder cannot be written.
        NotAuthorised: the inviter rejects it, or it has expired.
    """
    ticket = check_ticket(store, options.join) if options.join else None
    incarnation = await off_loop(store.next_incarnation)
    if ticket is None or _is_redeemed(store, ticket):
        credential = store.credential
        if credential is None:
            credential = await off_loop(store.create_mesh)
        return Membership(credential, incarnation, None, _known(store, ticket))
    link = await dial_inviter(store, ticket, transports, incarnation, discovery=options.discovery)
    credential = await redeem(store, ticket, link, off_loop)
    return Membership(credential, incarnation, link, ((ticket.inviter, ticket.addresses),))


def check_ticket(store: StateStore, text: str) -> Ticket:
    """Parse a ticket for a node; one that has admitted this node is not needed any more.

    Raises:
        UserError: the ticket is invalid, or for a client.
        NotAuthorised: it has expired.
    """
    ticket = parse_ticket(text)
    if _is_redeemed(store, ticket):
        return ticket
    if ticket.role is not Role.NODE:
        raise UserError(
            "The ticket is for a client",
            hint="use it with `meshllm chat --join`, or `meshllm serve --join`",
        )
    _refuse_expired(ticket)
    return ticket


def check_client_ticket(text: str, state: Path) -> Ticket:
    """Parse a ticket for a client; one used here before may have admitted a client for longer.

    Raises:
        UserError: the ticket is invalid, or for a node.
        NotAuthorised: it has expired.
    """
    ticket = parse_ticket(text)
    if ticket.role is not Role.CLIENT:
        raise UserError(
            "The ticket is for a node, not for a client",
            hint="make one with `meshllm ring ticket --role client`",
        )
    if not client_folder(ticket, state).exists():
        _refuse_expired(ticket)
    return ticket


def client_folder(ticket: Ticket, state: Path, place: int = 1) -> Path:
    """Return the folder of one of the concurrent clients of a ticket."""
    return state / f"client-{blake3(ticket.psk).hexdigest(8)}-{place}"


def _known(store: StateStore, ticket: Ticket | None) -> tuple[tuple[NodeId, tuple[str, ...]], ...]:
    """Return the saved addresses of members; those of a ticket come after, as they are older."""
    known = store.peers
    if ticket is not None:
        saved = known.get(ticket.inviter, ())
        known[ticket.inviter] = tuple(dict.fromkeys((*saved, *ticket.addresses)))
    return tuple(known.items())


def _is_redeemed(store: StateStore, ticket: Ticket) -> bool:
    return store.has_used(ticket) or ticket.inviter == store.key.node


async def dial_inviter(
    store: StateStore,
    ticket: Ticket,
    transports: Sequence[Transport],
    instance: int,
    *,
    discovery: bool = True,
) -> SecureLink:
    """Dial the inviter at the addresses of the ticket or of its beacon until it answers.

    Raises:
        UserError: no transport can dial the inviter.
        NotAuthorised: the inviter rejects the ticket, or it has expired.
    """
    _refuse_unreachable(ticket, transports, discovery=discovery)
    dialer = NodeDialer(by_scheme(transports), LocalIdentity(store.key, instance, ticket))
    heard: dict[NodeId, tuple[str, ...]] = {}

    def hear(node: NodeId, addresses: tuple[str, ...]) -> None:
        if node == ticket.inviter:  # beacons of other nodes may be forged
            heard[node] = addresses

    async with AsyncExitStack() as opened:  # closes the link if the queries end with a bug
        async with AsyncExitStack() as stack:
            pause: Callable[[], Awaitable[None]] = partial(asyncio.sleep, REDIAL_S)
            if discovery:
                pause = await stack.enter_async_context(_asking(ticket, store.key.node, hear))
            link = await _dial_until_answered(ticket, dialer, heard, pause)
            opened.push_async_callback(link.close)
        opened.pop_all()
    return link


async def _dial_until_answered(
    ticket: Ticket,
    dialer: NodeDialer,
    heard: Mapping[NodeId, tuple[str, ...]],
    pause: Callable[[], Awaitable[None]],
) -> SecureLink:
    logged, closed = "", 0
    while True:
        _refuse_expired(ticket)
        addresses = (*ticket.addresses, *heard.get(ticket.inviter, ()))
        try:
            with _advised(ticket):
                return await dialer.dial(
                    addresses,
                    Purpose.MESH,
                    expect=ticket.inviter,
                    removals={},
                    local=LocalAddressPolicy.YES,
                )
        except LinkLost as error:
            closed = closed + 1 if isinstance(error, HandshakeClosed) else 0
            if closed == MAX_CLOSED:
                raise NotAuthorised(
                    "Ticket rejected: expired, used up, or issued for another mesh",
                    hint=_advice(ticket),
                ) from error
            if str(error) != logged:
                logged = str(error)
                logger.warning("waiting for the inviter: %s", error)
        await pause()


@asynccontextmanager
async def _asking(
    ticket: Ticket, me: NodeId, hear: Heard
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Ask for the inviter on the local network inside the context.

    Yields what waits for the next dial; it raises the bug that ended the queries, if one did, as
    the end of the context does.
    """
    async with open_beacon(JoinerBeacons(ticket.psk, me), me, hear) as beacon:
        asking = asyncio.ensure_future(beacon.run(ASK_S))

        async def pause() -> None:
            await asyncio.wait({asking}, timeout=REDIAL_S)
            if asking.done():
                asking.result()

        try:
            yield pause
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        if not asking.cancelled():
            asking.result()


async def redeem(
    store: StateStore, ticket: Ticket, link: SecureLink, off_loop: OffLoop = asyncio.to_thread
) -> Credential:
    """Store the credential issued by the inviter over a link, on disk before this returns.

    Raises:
        NotAuthorised: it issued none.
        UserError: the state folder cannot be written.

    The link is closed after an error, or if cancelled.
    """
    async with AsyncExitStack() as opened:
        opened.push_async_callback(link.close)
        credential = _better(store.credential, granted(link))
        await off_loop(store.join, credential, ticket)
        opened.pop_all()
    return credential


def granted(link: SecureLink) -> Credential:
    """Return the credential issued by the inviter; raise `NotAuthorised` if there is none."""
    if link.granted is None:
        raise NotAuthorised("The inviter admitted this node but issued no credential")
    return link.granted


def _refuse_unreachable(
    ticket: Ticket, transports: Sequence[Transport], *, discovery: bool
) -> None:
    schemes = {address.partition(":")[0] for address in ticket.addresses}
    if discovery or schemes.intersection(by_scheme(transports)):
        return
    listed = ", ".join(f"`{address}`" for address in ticket.addresses) or "it has none"
    dialled = " or ".join(f"`{transport.name}`" for transport in transports)
    raise UserError(
        f"{dialled} cannot dial any address of the ticket ({listed}), and discovery is off",
        hint="leave out `--no-discovery`, or get a ticket from a node with `--advertise`",
    )


def _refuse_expired(ticket: Ticket) -> None:
    now_s = time.time()
    if 0 < ticket.expires_s <= now_s:
        late, now = (time.strftime(_SECOND, time.gmtime(at)) for at in (ticket.expires_s, now_s))
        clock = f"; it was good until {late} UTC, and the clock here says {now}"
        raise NotAuthorised("The ticket has expired", hint=_advice(ticket) + clock)


@contextmanager
def _advised(ticket: Ticket) -> Iterator[None]:
    """Add a hint to a refusal, which comes from the inviter without one."""
    try:
        yield
    except NotAuthorised as error:
        raise NotAuthorised(str(error), hint=error.hint or _advice(ticket, str(error))) from error


def _advice(ticket: Ticket, refusal: str = "") -> str:
    """Return what may be done about a refusal."""
    if REMOVED in refusal:
        return "enter as a new node, with another ticket and `--state FOLDER`"
    if TOO_FAR in refusal:
        return "ask a node that joined earlier for a ticket"
    role = "" if ticket.role is Role.NODE else " --role client"
    return f"ask a member for another one, of `meshllm ring ticket{role}`"


def _better(own: Credential | None, granted: Credential) -> Credential:
    """Choose the credential to keep: a founder keeps its own within its mesh."""
    if own is None or own.mesh != granted.mesh:
        if own is not None:
            logger.warning("this node leaves its previous mesh")
        return granted
    return granted if own.chain else own
