"""The interface of a node that the HTTP application uses."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from meshllm.names import Digest, Span
from meshllm.node.options import ModelOptions
from meshllm.node.training import LayerPass
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits
from meshllm.request import Backend
from meshllm.status import (
    Change,
    Members,
    MeshStatus,
    ModelStatus,
    PlannedRing,
    PlanTerms,
    Removed,
    Stopped,
)


class ModelPort(Backend, Protocol):
    """What the public API needs: models that answer, and the state of their mesh."""

    async def models(self) -> Sequence[ModelStatus]:
        """List the models that are served; empty while there is none."""

    async def status(self) -> MeshStatus:
        """Return the status of the node, its ring and its mesh."""


class ApiServerPort(ModelPort, Protocol):
    """What an API server needs: the public API, and what the owner's views do."""

    async def try_plan(self, terms: PlanTerms) -> PlannedRing:
        """Plan with other terms; nothing moves.

        Raises:
            Busy: another trial runs, or planning is not possible yet.
            UserError: a term is invalid.
        """

    async def revoke(self, tags: Sequence[bytes]) -> None:
        """Publish the API keys that the owner of this node revoked, the newest last."""


class NodePort(ApiServerPort, Protocol):
    """A node, as its owner controls it.

    All methods that are not asynchronous return at once, a snapshot of the node's own records.
    """

    def members(self) -> Members:
        """List the members of the mesh."""

    async def invite(
        self, role: str, expires_s: int, uses: int, limits: ClientLimits = NO_LIMITS
    ) -> str:
        """Create a ticket, on disk by then; 0 seconds or uses mean no limit.

        Raises:
            UserError: a limit is out of range.
        """

    async def remove(self, node: str, spare: Sequence[str] = ()) -> Removed:
        """Permanently remove a member, and whom it invited except those to spare.

        Its links close at once; the removal is on disk when this returns.

        Raises:
            UserError: an id is unknown.
        """

    async def serve(self, asked: ModelOptions) -> ModelStatus:
        """Let the mesh serve a model, or change how it does.

        Raises:
            MeshError: this node does not have the model, or the mesh cannot serve it.
        """

    def stop(self, model: str) -> Stopped:
        """Let the mesh no longer serve a model; raise `MeshError` if it does not, or cannot."""

    async def layer_spans(self, model: Digest) -> Sequence[Span]:
        """Return the spans of a ring with a model, see `TrainingRelay.spans`."""

    async def compute_layers(self, asked: LayerPass, data: bytes) -> bytes:
        """Send a batch through layers of one node, see `TrainingRelay.compute`."""

    def revocations(self) -> Mapping[str, tuple[bytes, ...]]:
        """Return the API keys that other members revoked, by the id of the member."""

    def events(self) -> AsyncGenerator[Change, None]:
        """Yield the state at once and after each change; missed changes are merged into one."""
