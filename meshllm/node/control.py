"""The owner's control of a node: its status, see `report`, and the commands to it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from meshllm.errors import Busy, Leaving, MeshError, UserError
from meshllm.model.shape import absent_bytes
from meshllm.names import Digest, NodeId, Span, show
from meshllm.node.node import MeshNode
from meshllm.node.node_names import find_node
from meshllm.node.options import ModelOptions
from meshllm.node.report import (
    change,
    members,
    mesh_status,
    model_status,
    models,
    named,
    planned_ring,
)
from meshllm.node.requests.model_list import models_to_json
from meshllm.node.requests.peer_requests import MAX_PER_CLIENT
from meshllm.node.ring.memory import addresses, measure
from meshllm.node.training import LayerPass, TrainingRelay
from meshllm.node.view import NodeView
from meshllm.protocol.agreement.trial import TrialTerms, try_out
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.client_quota import MAX_TOKENS_PER_DAY
from meshllm.protocol.membership.records import MAX_REVOKED
from meshllm.protocol.trust.credential import NO_LIMITS, ClientLimits, Removal, Role, remove
from meshllm.protocol.trust.identity import NodeKey
from meshllm.request import Event, Request
from meshllm.status import (
    Change,
    Members,
    MemoryStatus,
    MeshStatus,
    ModelStatus,
    Named,
    PlannedRing,
    PlanTerms,
    Removed,
    Stopped,
)

MAX_LASTS_S = 100 * 365 * 24 * 3600  # s of validity of a ticket: a century


@dataclass(slots=True)
class NodeControl:
    """The implementation of `NodePort` over a node."""

    snapshot: Callable[[], NodeView]
    key: NodeKey
    create_ticket: Callable[[Role, float | None, int | None, ClientLimits], Awaitable[str]]
    """Takes role, seconds of validity, and uses; None means no limit."""
    publish_removal: Callable[[Removal], Awaitable[None]]
    publish_revoked: Callable[[tuple[bytes, ...]], None]
    changes: Callable[[], AsyncGenerator[None, None]]
    """Yields once at first, then after each possible change."""
    answer: Callable[[Request], AsyncGenerator[Event, None]]
    measure: Callable[[], Awaitable[MemoryStatus]]
    """Measures the memory of the process."""
    add_model: Callable[[ModelOptions], Awaitable[Charter]]
    stop_model: Callable[[str], str]
    relay: TrainingRelay
    _trial: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def status(self) -> MeshStatus:
        """Return the status of the node, its ring and its mesh."""
        memory = await self.measure()
        return mesh_status(self.snapshot(), memory)

    def status_now(self) -> MeshStatus:
        """Return the status without the memory of the process, which takes time to measure."""
        return mesh_status(self.snapshot(), MemoryStatus())

    async def try_plan(self, terms: PlanTerms) -> PlannedRing:
        """Plan with other terms, off the event loop; nothing moves."""
        view = self.snapshot()
        if view.agreement is None:
            raise Busy("Planning is not possible yet", hint="the mesh is forming; try again")
        if self._trial.locked():
            raise Busy("A plan is being tried out", hint="try again")
        wanted = _trial_terms(view, terms)
        async with self._trial:
            found = await asyncio.to_thread(try_out, view.agreement, wanted)
        return planned_ring(view, found)

    def members(self) -> Members:
        """List the members of the mesh, as far as known to this node."""
        return members(self.snapshot())

    async def models(self) -> list[ModelStatus]:
        """List the models that the mesh serves: those of rings, and those of providers."""
        return models(self.snapshot())

    async def serve(self, asked: ModelOptions) -> ModelStatus:
        """Let the mesh serve a model, or change how it does."""
        charter = await self.add_model(asked)
        return model_status(self.snapshot(), charter)

    def stop(self, model: str) -> Stopped:
        """Let the mesh no longer serve a model."""
        return Stopped(self.stop_model(model))

    async def invite(
        self, role: str, expires_s: int, uses: int, limits: ClientLimits = NO_LIMITS
    ) -> str:
        """Create a ticket; 0 seconds or uses mean no limit."""
        if role not in tuple(Role):
            raise UserError(f"Invalid role `{role}`", hint="`node` or `client`")
        if not (0 <= expires_s <= MAX_LASTS_S and uses >= 0):
            raise UserError(
                f"Invalid limits of a ticket: {expires_s} s, {uses} uses",
                hint=f"at most {MAX_LASTS_S} s; 0 means no limit",
            )
        if limits != NO_LIMITS and role != Role.CLIENT:
            raise UserError(
                "`concurrency` and `tokens_per_day` limit clients, not nodes",
                hint="make a ticket with `--role client`",
            )
        is_valid = 0 <= limits.concurrency <= MAX_PER_CLIENT
        if not (is_valid and 0 <= limits.tokens_per_day <= MAX_TOKENS_PER_DAY):
            raise UserError(
                f"Invalid limits of a client: {limits.concurrency} requests at a time,"
                f" {limits.tokens_per_day} tokens per day",
                hint=f"at most {MAX_PER_CLIENT} requests at a time; 0 means the default",
            )
        return await self.create_ticket(Role(role), expires_s or None, uses or None, limits)

    async def remove(self, node: str, spare: Sequence[str] = ()) -> Removed:
        """Permanently remove a member, and those it invited except this node and those to spare."""
        view = self.snapshot()
        gone = find_node(node, view.profiles)
        if gone == view.me:
            raise UserError("A node cannot remove itself", hint="stop it with Ctrl-C")
        if gone in view.inviters.get(view.me, ())[:1]:
            raise UserError("The founder cannot be removed", hint="begin a new mesh without it")
        guests = _guests(view, gone)
        kept = [find_node(text, view.profiles) for text in spare]
        if strange := [each for each in kept if each not in guests]:
            raise UserError(f"`{show(strange[0])}` was not invited by `{show(gone)}`")
        spared = {guests[each] for each in (view.me, *kept) if each in guests}
        removal = remove(self.key, view.mesh, gone, int(time.time()), tuple(sorted(spared)))
        await self.publish_removal(removal)
        if gone not in self.snapshot().removed:
            raise MeshError(
                "The mesh cannot store more removals of this member and its guests",
                hint="remove it on a node that the founder invited, or on the founder's",
            )
        stay, go = (
            tuple(Named(*named(view, each)) for each in guests if (guests[each] in spared) is is_so)
            for is_so in (True, False)
        )
        return Removed(*named(view, gone), stay, go)

    async def layer_spans(self, model: Digest) -> Sequence[Span]:
        """Return the spans of a ring with a model, see `TrainingRelay.spans`."""
        return await self.relay.spans(model)

    async def compute_layers(self, asked: LayerPass, data: bytes) -> bytes:
        """Send a batch through layers of one node, see `TrainingRelay.compute`."""
        return await self.relay.compute(asked, data)

    async def revoke(self, tags: Sequence[bytes]) -> None:
        """Publish the newest of the API keys that the owner of this node revoked."""
        self.publish_revoked(tuple(tags[-MAX_REVOKED:]))

    def revocations(self) -> dict[str, tuple[bytes, ...]]:
        """Return the API keys that other members revoked, by the member."""
        view = self.snapshot()
        others = view.profiles.items()
        return {show(each): at.revoked for each, at in others if each != view.me and at.revoked}

    async def events(self) -> AsyncGenerator[Change, None]:
        """Yield once at first, then after each possible change."""
        async with aclosing(self.changes()) as changes:
            async for _ in changes:
                yield change(self.snapshot())

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of a request; see `RequestRouter.generate`."""
        if self.snapshot().is_leaving:
            raise Leaving("This node is leaving the mesh", hint="ask another node")
        return self.answer(request)


def control_of(node: MeshNode) -> NodeControl:
    """Build the control of a node, which from now on tells clients of its models."""
    control = NodeControl(
        node.view,
        node.store.key,
        node.invite,
        node.publish_removal,
        node.revoke,
        node.state.changes,
        node.router.generate,
        partial(_measured, node),
        node.serve_model,
        node.charter_editor.stop_model,
        node.relay,
    )
    node.router.peers.list_models = lambda: models_to_json(models(node.view()))
    return control


async def _measured(node: MeshNode) -> MemoryStatus:
    """Measure memory; the pages of large weights are counted off the event loop."""
    ranges = addresses(node.state.held)
    unread = await asyncio.to_thread(absent_bytes, ranges) if ranges else 0
    return measure(
        node.state.ranks,
        node.state.held,
        unread=unread,
        received=node.state.received_bytes,
        requests=node.router.request_bytes,
    )


def _guests(view: NodeView, inviter: NodeId) -> dict[NodeId, NodeId]:
    """Return whom a member invited, itself or by guests, and which of its own guests led there."""
    chains = {**view.inviters, **{peer: link.issuers for peer, link in view.links.items()}}
    paths = ((*chain, node) for node, chain in sorted(chains.items()))
    return {path[-1]: path[path.index(inviter) + 1] for path in paths if inviter in path[:-1]}


def _trial_terms(view: NodeView, terms: PlanTerms) -> TrialTerms:
    exclude = terms.exclude
    return TrialTerms(
        terms.policy,
        terms.members,
        None if exclude is None else tuple(find_node(each, view.profiles) for each in exclude),
        {find_node(each, view.profiles): size for each, size in terms.memory_bytes.items()},
    )
