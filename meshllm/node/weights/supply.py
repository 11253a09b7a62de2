"""Sees to it that the weights of this node's layers are here, before a plan uses the node.

Theory of operation
-------------------
A node that lacks weights computes the plan as it would be if every node that fetches weights had
them: all such nodes come to the same plan, so that each fetches its own part of it. Meanwhile it
publishes that it fetches, and no ring is planned with it: a ring that serves is not interrupted by
a download. A plan may still ask for layers that are not here, after a loss for example; then they
are fetched while the plan waits.

When a node has what it needs, it fetches its share of the parts that only one node has: the loss of
one node loses no part of the model.

Weights that this node fetched before may not be those that the founder has now, with the same
configuration: they would keep it out of every plan. It sets them aside if it serves in no ring and
a linked node has the right ones. It does not delete them: those of the founder may be damaged. It
compares them at each change of the records, since the founder may start again with others.

A node that opened the model in a folder of its user, whole or in part, fetches nothing: what it
fetched would not come into that folder.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from meshllm.errors import ModelError
from meshllm.names import NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.node.weights.fetcher import WeightFetcher
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.weights.holders import (
    ABSENT,
    FETCHES,
    LACKS,
    digests_in_force,
    has_model,
    holders,
    is_bare,
    missing_parts,
    needed_parts,
    spare_parts,
    stale_parts,
    with_fetched,
)

FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0  # s; backoff after holders failed
SETTLE_S = 1.0  # s after a change before the plan is looked at

logger = logging.getLogger(__name__)


class SupplyHost(Protocol):
    """What the supply needs from its node."""

    def mesh_view(self) -> MeshView | None:
        """Take a snapshot of the records, with the charter of the ring; None without one."""
        ...

    def linked(self) -> Collection[NodeId]:
        """Return the nodes that are linked to this one."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield once at first, then after each possible change of the records."""
        ...

    def own_weights(self) -> Sequence[bytes]:
        """Return the digests of the weights that are here, even while no offer is published."""
        ...

    def holds_layers(self) -> bool:
        """Return whether a plan is in force for which this node loads layers or has loaded them."""
        ...

    async def part_sizes(self) -> Sequence[int]:
        """Return the most bytes of the file of each part of the model."""
        ...

    async def hash_weights(self) -> None:
        """Publish the digests of the weights that are here now."""
        ...

    def publish_state(self) -> None:
        """Publish whether this node fetches weights."""
        ...


class WeightSupply:
    """Fetches what this node needs of the model of its mesh."""

    def __init__(
        self, me: NodeId, fetcher: WeightFetcher, host: SupplyHost, off_loop: OffLoop
    ) -> None:
        self.obstacle = ""
        """Why no plan should use this node yet; empty if one may."""
        self._trouble = ""  # why the last attempt to fetch failed
        self._me = me
        self._fetcher = fetcher
        self._host = host
        self._off_loop = off_loop
        self._before: Agreement | None = None
        self._fetches = True
        self._fetching_ahead: asyncio.Task[None] | None = None
        self._plan_turn = asyncio.Lock()  # held while parts for a plan are fetched

    @property
    def progress(self) -> str:
        """What is fetched now, or why that failed, a phrase; empty for nothing."""
        return self._fetcher.progress or self._trouble

    def collects(self, folder: Path) -> bool:
        """Return whether a folder of a model is one for fetched weights, not one of the user."""
        return self._fetcher.collects(folder)

    async def remove_damaged(self, folder: Path, cache: Path) -> None:
        """Delete damaged weights in a folder that nodes of this user have fetched.

        Raises:
            ModelError: some cannot be read, or not be deleted.
        """
        if self.collects(folder) and (names := await self._fetcher.remove_damaged(folder, cache)):
            logger.warning("damaged weights are fetched again: %s", ", ".join(names))

    def can_fetch(self, charter: Charter, profiles: Mapping[NodeId, Profile]) -> bool:
        """Return whether a model was fetched before, or a linked node can send it."""
        return self._fetcher.place(charter).is_described or any(
            has_model(charter, each) and not is_bare(each.weights)
            for node in self._host.linked()
            if node in profiles
            for each in profiles[node].by_ring()
        )

    async def describe(self) -> Path:
        """Return the folder of the mesh's model, fetched from the first node that has it."""
        delay = FIRST_RETRY_S
        while True:
            view = await self._described_somewhere()
            nodes = self._holders(view, self._digests(view))
            order = sorted(nodes, key=lambda node: (node != view.author, node))
            try:
                folder = await self._fetcher.describe(view.charter, order)
            except ModelError as error:
                self._note(str(error))
                logger.warning("%s, again in %.0f s", error, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)
            else:
                self._note("")
                return folder

    async def _described_somewhere(self) -> MeshView:
        """Wait until the model is described here or at a node that is linked."""
        changes = self._host.changes()
        while True:
            await anext(changes)
            view = self._host.mesh_view()
            if view is not None:
                place = self._fetcher.place(view.charter)
                if place.is_described or self._holders(view, self._digests(view)):
                    return view

    async def run(self) -> None:
        """Fetch ahead what the plan will need, and what the founder changes, until cancelled."""
        changes, delay = self._host.changes(), FIRST_RETRY_S
        while self._fetches:
            await anext(changes)
            await asyncio.sleep(SETTLE_S)  # links are reported one by one
            if (view := self._host.mesh_view()) is None or self._me not in view.profiles:
                continue
            try:
                await self._look(view)
                self._note("")
                delay = FIRST_RETRY_S
            except ModelError as error:
                self._note(str(error))
                logger.warning("%s, again in %.0f s", error, delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)

    async def _look(self, view: MeshView) -> None:
        if self._stale(view):
            await self._fetcher.set_aside(view.charter, self._choose_stale)
            await self._host.hash_weights()  # a change, after which this looks again
        elif self._is_short():
            parts, obstacle = await self._off_loop(self._ahead, view)
            self._set_obstacle(obstacle)
            await self._fetch_ahead(parts)
        else:
            self._set_obstacle("")

    def begin(self, weights: Sequence[bytes], folder: Path) -> None:
        """Let no plan use this node before `run` has looked, if its folder has no layer yet."""
        self._before = None
        self._fetches = self.collects(folder)
        self._set_obstacle(FETCHES if self._fetches and is_bare(weights) else "")

    def end(self) -> None:
        """Forget the ring that this node leaves."""
        self._before, self._trouble = None, ""
        self._set_obstacle("")

    def _note(self, trouble: str) -> None:
        """Show why weights could not be fetched, such as for a full disk; empty if they were."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._host.publish_state()

    def _set_obstacle(self, obstacle: str) -> None:
        if obstacle != self.obstacle:
            self.obstacle = obstacle
            self._host.publish_state()

    def _is_short(self) -> bool:
        own = self._host.own_weights()
        return not own or bool(missing_parts(own, range(len(own) - 1)))

    async def obtain(self, parts: Collection[int]) -> None:
        """Fetch those of the parts that are not here, before those that are fetched ahead.

        Raises:
            ModelError: a part cannot be fetched.
        """
        own, ahead = self._host.own_weights(), self._fetching_ahead
        if ahead is not None and own and missing_parts(own, parts):
            ahead.cancel()
        async with self._plan_turn:
            await self._obtain(parts)

    async def _fetch_ahead(self, parts: Collection[int]) -> None:
        """Fetch parts that no plan needs yet; what is left of them after those of a plan."""
        while True:
            async with self._plan_turn:
                pass
            task = self._fetching_ahead = asyncio.ensure_future(self._obtain(parts))
            try:
                await asyncio.wait({task})
            finally:
                self._fetching_ahead = None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                return task.result()

    async def _obtain(self, parts: Collection[int]) -> None:
        view, own = self._host.mesh_view(), self._host.own_weights()
        if (
            not self._fetches
            or view is None
            or not own
            or not (missing := missing_parts(own, parts))
        ):
            return
        digests = self._digests(view)
        wanted = {part: digests[part] for part in sorted(missing)}
        sizes = await self._host.part_sizes()
        try:
            await self._fetcher.fetch(view.charter, wanted, self._holders(view, digests), sizes)
        finally:
            await self._host.hash_weights()  # of some, if not all

    def _stale(self, view: MeshView) -> dict[int, bytes]:
        """Return the parts to set aside, with the digests in force; none while it holds layers."""
        own = self._host.own_weights()
        stale = stale_parts(view.charter, view.profiles, view.author, own)
        if not stale or self._host.holds_layers():
            return {}
        digests = self._digests(view)
        held = frozenset[int]().union(*self._holders(view, digests).values())
        return {part: digests[part] for part in sorted(stale & held)}

    async def _choose_stale(self) -> dict[int, bytes]:
        """Return the parts to set aside by what is here now, see `WeightFetcher.set_aside`."""
        await self._host.hash_weights()
        view, own = self._host.mesh_view(), self._host.own_weights()
        stale = self._stale(view) if view else {}
        if view and stale:
            logger.warning(
                "the founder has other weights of parts %s: those here are set aside in `%s`",
                [*stale],
                self._fetcher.place(view.charter).folder,
            )
            if is_bare([ABSENT if part in stale else each for part, each in enumerate(own)]):
                self._set_obstacle(FETCHES)
        return stale

    def _spare(self, view: MeshView, alive: Collection[NodeId]) -> frozenset[int]:
        """Return the parts to fetch for the case that their only holder is lost.

        Nodes without layers fetch none for others, so that a share of theirs would stay undone.
        """
        able = [
            node
            for node in alive
            if (profile := view.profiles.get(node))
            and has_model(view.charter, profile)
            and not is_bare(profile.weights)
        ]
        digests = self._digests(view)
        held = holders(view.charter, view.profiles, able, digests)
        return spare_parts(held, len(digests), able, self._me)

    @staticmethod
    def _digests(view: MeshView) -> tuple[bytes, ...]:
        return digests_in_force(view.charter, view.profiles, view.author)

    def _holders(self, view: MeshView, digests: Sequence[bytes]) -> dict[NodeId, frozenset[int]]:
        linked = self._host.linked()
        return holders(view.charter, view.profiles, linked, digests)

    def _ahead(self, view: MeshView) -> tuple[frozenset[int], str]:
        """Return the parts to fetch for the best plan of all nodes, and the obstacle meanwhile.

        A node of the ring fetches ahead without an obstacle, which would break the ring.
        """
        ready = replace(view, states=with_fetched(view.states))
        self._before = agreement = agree(ready, self._before)
        plan = agreement.best.plan if agreement.best else None
        own = view.profiles[self._me].weights
        if plan is None or not own:
            return frozenset(), ""
        parts = missing_parts(own, needed_parts(plan, self._me))
        if not is_bare(own):
            return parts or self._spare(view, agreement.alive), ""
        if parts:
            return parts, FETCHES
        reasons = {each.node: each.reason for each in agreement.standbys}
        return parts, f"{LACKS}: {reasons.get(self._me, 'no plan uses it')}"
