"""Membership of the simulated mesh, with global knowledge."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from blake3 import blake3

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId
from meshllm.node.membership.admission import MemberAdmission
from meshllm.protocol.trust.credential import Credential, Removals, check
from meshllm.protocol.trust.handshake import Purpose
from meshllm.protocol.trust.ticket import TicketProof, parse_ticket
from tests.simulation.faulty import address_of
from tests.simulation.machines import time_of_day
from tests.simulation.mesh_world import member


@dataclass(eq=False)
class Ticket:
    """An invitation, and the keys that joined with it."""

    text: str
    inviter: int
    uses: int | None
    holders: set[int] = field(default_factory=set)
    """Machines whose nodes start with it."""
    guests: set[NodeId] = field(default_factory=set)
    """Keys that were admitted with it."""

    def is_late(self, now_s: float) -> bool:
        """Return whether it has expired."""
        return 0 < parse_ticket(self.text).expires_s <= now_s

    def let_in(self, guest: NodeId, now_s: float) -> str | None:
        """Record that it admitted a key; return what is wrong with that."""
        self.guests.add(guest)
        if self.uses is not None and len(self.guests) > self.uses:
            return f"a ticket for {self.uses} lets in {len(self.guests)} keys"
        return "a ticket that has expired lets somebody in" if self.is_late(now_s) else None


class Members:
    """The credentials, tickets and removals of all machines."""

    def __init__(
        self, home: Path, fault: Callable[[str], None], latest_s: Callable[[int], float]
    ) -> None:
        self._home = home
        self._fault = fault
        self._latest_s = latest_s  # the latest wall clock time that a machine has seen
        self.tickets: dict[int, Ticket] = {}
        """The last ticket that a machine got."""
        self.credentials: dict[int, Credential] = {}
        self.remover: int | None = None
        """The machine that removed another."""
        self.removals: Removals = {}
        """All removals ever made, whether or not a node still knows them."""

    def settle(self, number: int, others: list[int]) -> None:
        """Make a machine a member that knows the addresses of others."""
        credential = member(number)[1]
        peers = {member(other)[0].node.hex(): [address_of(other)] for other in others}
        content = {"credential": credential.encode().hex(), "peers": peers}
        self._key(number)
        (self.folder(number) / "mesh.json").write_text(json.dumps(content))
        self.credentials[number] = credential

    def invite(self, number: int, ticket: Ticket) -> None:
        """Give a ticket to a machine, whose state folder holds only its key."""
        if number not in self.tickets:
            self._key(number)
        self.tickets[number] = ticket
        ticket.holders.add(number)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the keys that nodes admit in the context."""
        authorize = MemberAdmission.authorize

        async def judging(
            gate: MemberAdmission,
            peer: NodeId,
            proof: Credential | TicketProof,
            purpose: Purpose,
            instance: int,
        ) -> Credential:
            now_s, tickets = time_of_day(), set(self.tickets.values())
            credential = await authorize(gate, peer, proof, purpose, instance)
            if isinstance(proof, TicketProof):
                self._let_in(peer, proof, tickets, now_s)
            return credential

        with patch.object(MemberAdmission, "authorize", judging):
            yield

    def _let_in(
        self, guest: NodeId, proof: TicketProof, tickets: set[Ticket], now_s: float
    ) -> None:
        shown = [each for each in tickets if proof.proves(parse_ticket(each.text).secret)]
        if len(shown) != 1:
            self._fault("a ticket that nobody made lets somebody in")
        elif trouble := shown[0].let_in(guest, now_s):
            self._fault(trouble)

    def folder(self, number: int) -> Path:
        """Return the state folder of a machine."""
        return self._home / str(number)

    def is_out(self, number: int, removals: Removals | None = None) -> bool:
        """Return whether a member is excluded by removals, by default all that were made."""
        removals = self.removals if removals is None else removals
        if not removals or number not in self.credentials:
            return False
        credential = self.credentials[number]
        try:
            check(credential, member(number)[0].node, credential.mesh, 0, removals)
        except NotAuthorised:
            return True
        return False

    def out(self, removals: Removals) -> dict[NodeId, int]:
        """Return the members excluded by removals."""
        return {
            member(number)[0].node: number
            for number in self.credentials
            if self.is_out(number, removals)
        }

    def may_be_refused(self, number: int) -> bool:
        """Return whether a node may end because it is not a member."""
        if self.is_out(number):
            return True
        ticket = self.tickets.get(number)
        if ticket is None or number in self.credentials:
            return False
        is_scarce = ticket.uses is not None and len(ticket.holders) > ticket.uses
        has_place = not is_scarce or member(number)[0].node in ticket.guests
        is_closed = not ticket.guests.isdisjoint(self.removals)
        is_late = is_closed or any(
            ticket.is_late(self._latest_s(each)) for each in (number, ticket.inviter)
        )
        return is_late or not has_place or self.is_out(ticket.inviter)

    def _key(self, number: int) -> None:
        folder = self.folder(number)
        folder.mkdir(mode=0o700)
        (folder / "node.key").write_text(blake3(b"member %d" % number).hexdigest())
