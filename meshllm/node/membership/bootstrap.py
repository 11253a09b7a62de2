"""How a node becomes a member: founding, returning, or with a ticket."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from meshllm.errors import LinkLost, NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.membership.state_store import Keyring
from meshllm.node.net.beacon import open_beacon
from meshllm.node.net.dialer import Caller
from meshllm.node.net.endpoints import by_scheme
from meshllm.node.net.secure import HungUp, SecureLink
from meshllm.node.options import NodeOptions
from meshllm.protocol.trust.credential import Credential, Role
from meshllm.protocol.trust.handshake import Own, Purpose
from meshllm.protocol.trust.ticket import Ticket, parse_ticket
from meshllm.transport.contract import Transport

KNOCK_S = 1.0  # s between two tries to reach the inviter, who may start later
MAX_HUNG_UP = 5  # times in a row; a node that starts, or has too many guests, does so, too
ASK_S = 4.0  # s at most between two questions on the local network where the inviter is

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Membership:
    """By what a node is a member, and where to find the others."""

    credential: Credential
    incarnation: int
    link: SecureLink | None
    """To the inviter, where the node has just joined."""
    hints: tuple[tuple[NodeId, tuple[str, ...]], ...]
    """Where members may be."""

    @property
    def is_founder(self) -> bool:
        """Tell whether this node began the mesh."""
        return not self.credential.chain


async def enter(
    keyring: Keyring, options: NodeOptions, transports: Sequence[Transport]
) -> Membership:
    """Found a mesh, return to one, or join one with a ticket, as soon as the inviter answers.

    Raises:
        UserError: the ticket is mistyped, for a client, or there is no way to find the inviter.
        NotAuthorised: the inviter refuses it, or it has expired.
    """
    incarnation = keyring.next_incarnation()
    ticket = parse_ticket(options.join) if options.join else None
    hints = ((ticket.inviter, ticket.addresses),) if ticket else ()
    if ticket is None or keyring.has_used(ticket) or ticket.inviter == keyring.key.node:
        credential = keyring.credential or keyring.found()
        return Membership(credential, incarnation, None, (*hints, *keyring.peers.items()))
    if ticket.role is not Role.NODE:
        raise UserError("The ticket is for a client", hint="use it with `meshllm chat --join`")
    link = await knock(keyring, ticket, transports, incarnation, discovery=options.discovery)
    credential = keyring.join(_better(keyring.credential, granted(link)), ticket)
    return Membership(credential, incarnation, link, hints)


async def knock(
    keyring: Keyring,
    ticket: Ticket,
    transports: Sequence[Transport],
    instance: int,
    *,
    discovery: bool = True,
) -> SecureLink:
    """Show a ticket to the inviter, where the ticket or its beacon says; ask until it answers.

    Raises:
        UserError: there is no way to find the inviter.
        NotAuthorised: the inviter refuses it, or it has expired.
    """
    _refuse_unreachable(ticket, transports, discovery=discovery)
    caller = Caller(by_scheme(transports), Own(keyring.key, instance, ticket))
    heard: dict[NodeId, tuple[str, ...]] = {}

    def hear(node: NodeId, addresses: tuple[str, ...]) -> None:
        if node == ticket.inviter:  # others are made up as easily as they are met
            heard[node] = addresses

    told, hung_up = "", 0
    async with AsyncExitStack() as stack:
        if discovery:
            beacon = open_beacon(ticket.psk, keyring.key.node, hear)
            asking = asyncio.ensure_future((await stack.enter_async_context(beacon)).run(ASK_S))
            stack.callback(asking.cancel)
        while True:
            _refuse_late(ticket)
            addresses = (*ticket.addresses, *heard.get(ticket.inviter, ()))
            try:
                return await caller.reach(
                    addresses, Purpose.MESH, expect=ticket.inviter, removals={}
                )
            except LinkLost as error:
                hung_up = hung_up + 1 if isinstance(error, HungUp) else 0
                if hung_up == MAX_HUNG_UP:
                    raise NotAuthorised(
                        "The inviter does not know this ticket: it is over, or of another mesh",
                        hint="make another one with `meshllm ring ticket`",
                    ) from error
                if str(error) != told:
                    told = str(error)
                    logger.warning("waiting for the node that invited: %s", error)
            await asyncio.sleep(KNOCK_S)


def granted(link: SecureLink) -> Credential:
    """Return what the inviter gave; raise `NotAuthorised` when it gave nothing."""
    if link.granted is None:
        raise NotAuthorised("The inviter let this node in and gave it no credential")
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
        f"{dialled} dials no address of the ticket ({listed}), and discovery is off",
        hint="leave out `--no-discovery`, or ask for a ticket of a node with `--advertise`",
    )


def _refuse_late(ticket: Ticket) -> None:
    if 0 < ticket.expires_s <= time.time():
        raise NotAuthorised(
            "The ticket has expired", hint="make another one with `meshllm ring ticket`"
        )


def _better(own: Credential | None, granted: Credential) -> Credential:
    """Choose by what to be a member from now on: who founded the mesh needs nobody's word."""
    if own is None or own.mesh != granted.mesh:
        if own is not None:
            logger.warning("this node leaves the mesh it was in")
        return granted
    return granted if own.chain else own
