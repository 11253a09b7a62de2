"""Every plan of a history: which nodes computed it from what, followed it, and served under it.

Theory of operation
-------------------
No authority assigns epochs: partitioned parts of a mesh count alike, so a plan is identified by
epoch and digest, and the links of a ring compare both. Invariants of every history:

- nodes with the same knowledge compute the same plan;
- a new plan has an epoch above each that its maker knows of, so two of one epoch exist only if
  their makers were not connected, and never without faults;
- no plan names a node that its maker knows to be removed;
- a node never goes back to a plan of lower precedence than one that it followed in the same run, in
  the same ring, unless another node of that plan follows it, or did `STALE_S` ago: where two rings
  meet, one that works outlives a later one that does not; with several rings, `may_rejoin`, there
  may be none in between, and the node may rejoin a ring that still serves;
- the spans of every followed plan tile the layers;
- an answer was computed by the nodes, in the order and with the spans of one plan, which each of
  them followed at some time meanwhile.

`toy` checks that each row went through each layer once, in order.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import aclosing, contextmanager
from functools import lru_cache
from math import inf
from unittest.mock import patch

from meshllm.names import NodeId, Span, short
from meshllm.node.ring.runtime import RingRuntime
from meshllm.node.session.text import RingBackend
from meshllm.protocol.agreement import grouping
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.planning.plan import Plan
from meshllm.request import Answer, Event, Request
from tests.simulation.machines import Process, process_here
from tests.simulation.toy import LAYERS

STALE_S = 10.0  # s; a node that was lost counts as alive for about as long


def tiles(spans: list[Span]) -> bool:
    """Return whether spans tile the layers, in order."""
    layers = [layer for span in spans for layer in range(span.start, span.stop)]
    return layers == [*range(LAYERS)]


def know_same(view: MeshView) -> Hashable:
    """Return what is equal for nodes with the same knowledge."""
    profiles, states = frozenset(view.profiles.items()), frozenset(view.states.items())
    removed, alive = frozenset(view.removed), view.alive()
    return view.charter, view.author, profiles, states, removed, alive, view.group


@lru_cache(1024)
def epoch_of(followed: bytes) -> int:
    """Return the epoch of an encoded plan."""
    return Plan.decode(followed).epoch


class Plans:
    """The plans of one world."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        self._fault = fault
        self.may_rejoin = False
        self._by_view: dict[Hashable, Plan | None] = {}
        self._last: dict[tuple[Process, RingRuntime], Plan] = {}
        self._until: dict[tuple[NodeId, bytes], float] = {}
        """Time when a node stopped following a plan."""
        self._of_epoch: defaultdict[int, set[bytes]] = defaultdict(set)

    @property
    def rivals(self) -> dict[int, int]:
        """Count the followed plans of each epoch that has several."""
        return {epoch: len(plans) for epoch, plans in self._of_epoch.items() if len(plans) > 1}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check every plan that nodes compute in the context."""
        agree: Callable[[MeshView, Agreement | None], Agreement] = vars(grouping)["agree"]
        generate = RingBackend.generate
        follow = RingRuntime.follow

        def agreeing(view: MeshView, before: Agreement | None = None) -> Agreement:
            agreement = agree(view, before)
            self._agreed(view, agreement.plan)
            return agreement

        def following(runtime: RingRuntime, plan: Plan | None) -> None:
            if plan != runtime.plan:
                self._follows(runtime, plan)
            follow(runtime, plan)

        async def generating(backend: RingBackend, request: Request) -> AsyncGenerator[Event, None]:
            begin = asyncio.get_running_loop().time()
            async with aclosing(generate(backend, request)) as events:
                async for event in events:
                    if isinstance(event, Answer):
                        self._served(backend.plan, event, begin)
                    yield event

        with (
            patch.object(grouping, "agree", agreeing),
            patch.object(RingRuntime, "follow", following),
            patch.object(RingBackend, "generate", generating),
        ):
            yield

    def _agreed(self, view: MeshView, plan: Plan | None) -> None:
        other = self._by_view.setdefault(know_same(view), plan)
        if plan != other:
            self._fault(f"nodes that know the same agree on {plan} and {other}")
        if plan is None:
            return
        if any(stage.node in view.removed for stage in plan.stages):
            self._fault(f"a node that is removed has a place in {plan}")
        told = {at.followed for node, at in view.states.items() if node not in view.removed}
        known = max((epoch_of(followed) for followed in told if followed), default=0)
        if plan.encode() not in told and plan.epoch <= known:
            self._fault(f"{plan} is new, and there is an epoch {known}")

    def _follows(self, runtime: RingRuntime, plan: Plan | None) -> None:
        me, before = runtime._me, runtime.plan
        if before is not None:
            self._until[me, before.encode()] = asyncio.get_running_loop().time()
        process = process_here()
        assert process is not None
        if plan is None:
            if self.may_rejoin:
                self._last.pop((process, runtime), None)
            return
        if process.is_gone:  # a timer of a node that has ended
            return
        last = self._last.get((process, runtime))
        if last is not None and (last.epoch, last.digest) > (plan.epoch, plan.digest):
            now, encoded = asyncio.get_running_loop().time(), plan.encode()
            others = {stage.node for stage in plan.stages} - {me}
            if all(self._until.get((node, encoded), -inf) < now - STALE_S for node in others):
                self._fault(f"{process.number} goes back from {last} to {plan}")
        self._last[process, runtime] = plan
        self._until[me, plan.encode()] = inf
        self._of_epoch[plan.epoch].add(plan.encode())
        if not tiles([stage.span for stage in plan.stages]):
            self._fault(f"{plan} does not tile the layers")

    def _served(self, plan: Plan, answer: Answer, begin: float) -> None:
        stages = [(rank, short(each.node), each.span) for rank, each in enumerate(plan.stages)]
        hops = [(hop.rank, hop.node, hop.span) for hop in answer.hops]
        if hops != stages[: len(hops)]:
            self._fault(f"{answer.hops} are not the stages of {plan}")
        for stage in plan.stages:
            if self._until.get((stage.node, plan.encode()), -inf) < begin:
                self._fault(f"`{short(stage.node)}` serves {plan}, and follows another")
