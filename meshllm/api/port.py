"""What the HTTP application needs of a node."""

from collections.abc import AsyncGenerator
from typing import Protocol

from meshllm.request import Backend
from meshllm.status import Change, Members, MeshStatus, Removed, RingStatus


class NodePort(Backend, Protocol):
    """A node as its owner sees it.

    What is not a stream is a snapshot: it answers at once, from what the node knows now.
    """

    def status(self) -> MeshStatus:
        """Tell how the node, its ring and its mesh are."""

    def plan(self) -> RingStatus:
        """Tell who holds what, and why."""

    def members(self) -> Members:
        """List who holds a credential of the mesh."""

    def models(self) -> list[str]:
        """List the models that answer here."""

    def invite(self, role: str, expires_s: int, uses: int) -> str:
        """Make a ticket for so many joiners in that time; raise `UserError` for a wrong one."""

    def remove(self, node: str) -> Removed:
        """Permanently remove a member; raise `UserError` when nobody has that id."""

    def events(self) -> AsyncGenerator[Change, None]:
        """Yield where the mesh stands, at once and after each change; those missed become one."""
