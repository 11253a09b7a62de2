"""The service of a node in the rings of its mesh: it moves between rings, and may serve in several.

Theory of operation
-------------------
A mesh that serves several models, or replicas, has a ring for each. If the records name another
first ring than that of the node, it retracts its offer, leaves the ring, which goes on without it,
and begins again with the other model, see `RingServer`. Meanwhile it serves in the further rings
that the records name, see `SecondaryRings`.

A model that cannot be opened ends the node if it can serve no other one, except for a lack of
memory, which may pass: the node stays a member, says so, and tries again with backoff. As it offers
nothing meanwhile, the others plan without it.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from meshllm.errors import ModelError, ModelMissing, OutOfMemory
from meshllm.names import GroupId, ModelKey
from meshllm.node.agreement.further_rings import MOVE_S, SecondaryRings
from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.agreement.ring_directory import RingDirectory
from meshllm.node.agreement.ring_server import NodeParts, RingServer
from meshllm.node.net.secure import SecureLink
from meshllm.node.timer import loop_time
from meshllm.node.view import OwnRing, RingView
from meshllm.protocol.agreement.grouping import has_several
from meshllm.protocol.agreement.groups import UNASSIGNED, groups_of, used_models
from meshllm.protocol.membership.charter import Charter

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.ring.model_runtime import ModelRuntime
    from meshllm.node.ring.runtime import RingRuntime

RETRY_S = 600.0  # s until a model that could not be served here is tried again
LAST_RETRY_S = 6 * 3600.0  # s; doubled up to this, unless the model is only missing
FIRST_OPEN_S, LAST_OPEN_S = 5.0, 300.0  # s; backoff before the only model is opened again

logger = logging.getLogger(__name__)


class RingService:
    """Serves in one ring of the mesh after the other, and in further ones meanwhile."""

    def __init__(self, parts: NodeParts) -> None:
        self.first = RingServer(parts, parts.state.first, parts.offer, self._regrouped)
        """The first ring of this node."""
        self.further = SecondaryRings(parts, self._give_up)
        self._parts = parts
        self._charter_known = asyncio.Event()
        self._moving = asyncio.Event()
        self._target: GroupId | None = None  # the group in which to take part soon
        self._latest = 0.0  # when to move there at the latest, in loop time
        self._unable: set[ModelKey] = set()  # models that could not be served a while ago
        self._retry_s: dict[ModelKey, float] = {}  # the next wait, of models that failed

    @property
    def servers(self) -> list[RingServer]:
        """All rings of this node."""
        return [self.first, *(each.server for each in self.further.rings.values())]

    def rings(self, directory: RingDirectory) -> tuple[RingView, ...]:
        """Return all rings of the mesh."""
        view = self.first.view()
        if view is None:
            return ()
        used, lacks = used_models(view), self.first.planner.lacks
        return tuple(
            RingView(
                group,
                plan,
                is_served=is_served,
                lacks_bytes=lacks.get(group.id, 0),
                is_unused=bool(used) and group.charter.key not in used,
                own=self._own_ring(group.id),
            )
            for group in groups_of(view.charter)
            for plan, is_served in (directory.ring(group.id),)
        )

    def records_changed(self) -> None:
        """Plan again, and publish what follows for this node."""
        if self._parts.machine.charter is not None:
            self._charter_known.set()
        for each in self.servers:
            each.records_changed()
        self._parts.state.publish()

    async def run(self) -> None:
        """Serve in one ring after the other, each with its model."""
        parts, found = self._parts, await self._open_founding_model()
        if found is None:
            await self._charter_known.wait()
            assert parts.machine.charter is not None  # never unset
            parts.editor.check_layers()
            if len(groups_of(parts.machine.charter)) > 1:
                self._regroup(UNASSIGNED)
        parts.editor.amend_nodes()
        while True:
            serving = asyncio.ensure_future(self._serve(found))
            moving = asyncio.ensure_future(self._moving.wait())
            try:
                await asyncio.wait({serving, moving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                    await moving
            finally:
                for task in (serving, moving):
                    task.cancel()
                await asyncio.gather(serving, moving, return_exceptions=True)
            found, target = None, self._target
            self._regroup(self.first.member.group if target is None else target)

    async def survey(self) -> None:
        """Publish which models of the mesh this node may hold, while the mesh has several.

        Without `--model` it may also hold those whose weights another node can send.
        """
        offer, preparation = self._parts.offer, self._parts.prepared
        known: tuple[int, tuple[ModelKey, ...]] = 0, ()
        held: tuple[ModelKey, ...] = ()
        async with aclosing(self._parts.state.changes()) as changes:
            async for _ in changes:
                charter = self._parts.machine.charter
                if charter is None:
                    continue
                keys = tuple(each.key for each in charter.served)
                if not (offer.profile.models or self._retry_s or len(groups_of(charter)) > 1):
                    continue
                if (now := (len(preparation.described), keys)) != known:
                    known, held = now, await preparation.held(charter.served)
                models = self._may_hold(charter, held)
                if models == offer.profile.models:
                    continue
                if not offer.profile.memory_bytes:
                    room = await preparation.room(offer.profile)
                    if not offer.profile.memory_bytes:  # a model may have been measured meanwhile
                        offer.profile = replace(
                            offer.profile,
                            memory_bytes=room.memory_bytes,
                            reserve_bytes=room.reserve_bytes,
                        )
                offer.hold(models)

    async def accept(self, link: SecureLink) -> None:
        """Accept a ring link of the previous rank."""
        if not any(each.runtime for each in self._parts.state.members):
            await link.close()  # a provider imports no torch
            return
        from meshllm.node.ring.runtime import arrive

        await arrive(link, link.peer, self._runtime)

    def _runtime(self, group: GroupId) -> "RingRuntime | None":
        members = self._parts.state.members
        return next((each.runtime for each in members if each.group == group), None)

    def _own_ring(self, group: GroupId) -> OwnRing | None:
        """Return what this node knows of one of its rings; None if it takes part in no such."""
        if self._parts.state.provider:
            return None
        servers = (each for each in self.servers if each.member.group == group)
        return next((each.status for each in servers), None)

    async def _open_founding_model(self) -> "ModelRuntime | None":
        """Open the model of a new mesh, and publish its charter; None if the mesh has one."""
        parts, pauses = self._parts, _pauses()
        while parts.machine.charter is None and parts.is_founder:
            try:
                model, charter = await parts.prepared.open_founding_model()
            except OutOfMemory as error:
                lack = _without_frames(error)
            else:
                parts.editor.publish(charter)
                return model
            await self._wait_for_memory(lack, next(pauses))
        return None

    async def _serve(self, model: "ModelRuntime | None") -> None:
        """Serve in the first ring; do without its model if there are others."""
        ring, pauses = self.first.member.charter, _pauses()
        while True:
            try:
                await self.first.serve(model)
            except ModelError as error:
                if ring is not None and self._parts.offer.profile.models:
                    self._give_up(ring.key, error)
                    self.first.end(UNASSIGNED)  # else it would not begin in the same ring again
                    return
                if not isinstance(error, OutOfMemory):
                    raise
                lack = _without_frames(error)
            else:
                return
            await self._wait_for_memory(lack, next(pauses))

    async def _wait_for_memory(self, lack: OutOfMemory, pause_s: float) -> None:
        """Say that the model cannot be opened, until it is time to try again."""
        logger.warning(
            "this node cannot open its model, it tries again in %.0f s: %s", pause_s, lack
        )
        member = self.first.member
        member.trouble = lack
        try:
            await asyncio.sleep(pause_s)
        finally:
            member.trouble = None

    def _regrouped(self) -> None:
        """Schedule the moves that follow from the groups of this node."""
        part, view = self.first.planner.parts.get(self._parts.machine.me), self.first.view()
        if self._parts.state.provider:
            return
        self._schedule_move(part.first if part else None)
        is_excluded = part is None and view is not None and has_several(view)  # as when it hangs
        if not is_excluded:
            self.further.want(part.further if part else {})

    def _schedule_move(self, target: GroupId | None) -> None:
        """Schedule the move to another group once it has been wanted for a while."""
        if target == self._target:
            return
        self._target = self.further.next_first = target
        if target not in {None, self.first.member.group}:
            self._latest = latest = loop_time() + MOVE_S
            self._parts.call_later(SETTLE_S, self._move, target, latest)

    def _move(self, target: GroupId, latest: float) -> None:
        """Move to another group; if that may wait, only when no session is in progress.

        If other groups were wanted since, the time has begun again.
        """
        if (target, latest) != (self._target, self._latest) or self._parts.state.is_leaving:
            return
        is_late = loop_time() >= latest
        if target in self.further.rings or (self.first.sessions and not is_late):
            self._parts.call_later(SETTLE_S, self._move, target, latest)
            return
        self._moving.set()

    def _regroup(self, group: GroupId) -> None:
        self._moving.clear()
        self.first.end(group)

    def _give_up(self, model: ModelKey, error: ModelError) -> None:
        """Publish that this node cannot hold a model, so that it gets another one; retry later."""
        charters = [each.charter for each in self._parts.state.members if each.runtime]
        has_begun = any(each and each.key == model for each in charters)
        if has_begun or isinstance(error, ModelMissing):  # others may have it at any time
            self._retry_s.pop(model, None)
        retry_s = self._retry_s.get(model, RETRY_S)
        self._retry_s[model] = min(2 * retry_s, LAST_RETRY_S)
        logger.warning(
            "this node cannot serve in its ring, it tries again in %.0f s: %s", retry_s, error
        )
        self._unable.add(model)
        self._parts.call_later(retry_s, self._try_again, model)
        models = tuple(each for each in self._parts.offer.profile.models if each != model)
        self._parts.offer.publish(models=models)

    def _try_again(self, model: ModelKey) -> None:
        self._unable.discard(model)
        self._parts.state.publish()

    def _may_hold(self, charter: Charter, held: Collection[ModelKey]) -> tuple[ModelKey, ...]:
        parts, supply = self._parts, self.first.supply
        return tuple(
            each.key
            for each in charter.served
            if each.key not in self._unable
            and (
                each.key in held
                or (not parts.has_own_model and supply.can_fetch(each, parts.machine.profiles))
            )
        )


def _without_frames(error: OutOfMemory) -> OutOfMemory:
    """Copy an error without its traceback, whose frames would keep memory."""
    return OutOfMemory(str(error), hint=error.hint, needed_bytes=error.needed_bytes)


def _pauses() -> Iterator[float]:
    """Yield the pauses, in seconds, before a model is opened again."""
    pause_s = FIRST_OPEN_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LAST_OPEN_S)
