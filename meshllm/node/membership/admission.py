"""Admission of peers: members by their credential, guests by a ticket."""

import asyncio
import time
from collections.abc import Iterator

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.node.membership.state_store import Invitation, StateStore
from meshllm.protocol.trust.credential import Credential, Removals, check, issue
from meshllm.protocol.trust.handshake import Purpose
from meshllm.protocol.trust.ticket import TicketProof, guest_psk

REMOVED = "The node was permanently removed from the mesh"


class MemberAdmission:
    """Admits members, and issues credentials to guests with a ticket of this node."""

    def __init__(
        self,
        store: StateStore,
        credential: Credential,
        removals: Removals,
        run: OffLoop = asyncio.to_thread,
    ) -> None:
        """Create the gate; ``run`` executes disk I/O off the event loop."""
        self._run = run
        self._store = store
        self._credential = credential
        self.removals = removals

    async def refresh(self) -> None:
        """Learn of the tickets that another process has made."""
        await self._run(self._store.refresh)

    def guests(self) -> Iterator[bytes]:
        """Yield the pre-shared keys of the valid tickets that are known, the newest first."""
        now = time.time()
        for invitation in reversed(self._store.invitations()):
            if not (invitation.is_expired(now) or self._is_closed(invitation)):
                yield guest_psk(invitation.secret)

    async def authorize(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        """Return the dialer's verified credential, or a new one for its ticket."""
        _ = purpose, instance  # what a role may do is checked by the receiver of a request
        if isinstance(proof, TicketProof):
            proof = await self._redeem(peer, proof)
        check(proof, peer, self._credential.mesh, time.time(), self.removals)
        return proof

    async def _redeem(self, peer: NodeId, proof: TicketProof) -> Credential:
        """Issue a credential to a guest with a valid ticket; save its use first."""
        for invitation in self._store.invitations():
            if invitation.role is proof.role and proof.proves(invitation.secret):
                if peer in self.removals:
                    raise NotAuthorised(REMOVED)
                own, role = self._credential, invitation.role
                granted = issue(self._store.key, own, peer, role, limits=invitation.limits)
                is_refused = not invitation.is_open(time.time(), peer)
                is_refused = is_refused or self._is_closed(invitation)
                if is_refused or not await self._run(self._store.use, invitation, peer):
                    raise NotAuthorised(
                        "The ticket has expired or is used up",
                        hint="make another one with `meshllm ring ticket`",
                    )
                return granted
        raise NotAuthorised(
            "Ticket rejected: used up, expired, or issued by another node",
            hint="make another one with `meshllm ring ticket`",
        )

    def _is_closed(self, invitation: Invitation) -> bool:
        """Return whether a ticket admitted a member that was removed since."""
        return not self.removals.keys().isdisjoint(invitation.guests)
