"""Who may enter: members by their credential, guests by a ticket."""

import asyncio
import time
from collections.abc import Iterator

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId
from meshllm.node.membership.state_store import Keyring
from meshllm.node.offloop import OffLoop
from meshllm.protocol.trust.credential import Credential, Removals, check, issue
from meshllm.protocol.trust.handshake import Purpose
from meshllm.protocol.trust.ticket import TicketProof, guest_psk


class Gate:
    """The doorkeeper of a node: it lets members in, and makes members of those it invited."""

    def __init__(
        self,
        keyring: Keyring,
        credential: Credential,
        removals: Removals,
        run: OffLoop = asyncio.to_thread,
    ) -> None:
        """Keep the gate; ``run`` is where it waits for the disk."""
        self._run = run
        self._keyring = keyring
        self._credential = credential
        self._removals = removals

    def guests(self) -> Iterator[bytes]:
        """Yield the pre-shared keys of the tickets that are not over, the newest first."""
        now = time.time()
        for invitation in reversed(self._keyring.invitations()):
            if not invitation.is_late(now):
                yield guest_psk(invitation.secret)

    async def judge(
        self, peer: NodeId, proof: Credential | TicketProof, purpose: Purpose, instance: int
    ) -> Credential:
        """Return the credential by which a dialer is a member, checked or new."""
        _ = purpose, instance  # what a member may do is asked where it does it
        if isinstance(proof, TicketProof):
            proof = await self._redeem(peer, proof)
        check(proof, peer, self._credential.mesh, time.time(), self._removals)
        return proof

    async def _redeem(self, peer: NodeId, proof: TicketProof) -> Credential:
        """Make a member of who knows the secret of an invitation; that it did outlasts a crash."""
        for invitation in self._keyring.invitations():
            if invitation.role is proof.role and proof.proves(invitation.secret):
                if peer in self._removals:
                    raise NotAuthorised("The node was removed from the mesh, for ever")
                granted = issue(self._keyring.key, self._credential, peer, invitation.role)
                is_late = not invitation.is_open(time.time(), peer)
                if is_late or not await self._run(self._keyring.use, invitation, peer):
                    raise NotAuthorised(
                        "The ticket has expired or is used up",
                        hint="make another one with `meshllm ring ticket`",
                    )
                return granted
        raise NotAuthorised(
            "The inviter knows no such ticket: it was used up, has expired, or is of another node",
            hint="make another one with `meshllm ring ticket`",
        )
