"""Nodes that are broken on purpose: every invariant is found to be violated."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from meshllm.errors import UserError
from meshllm.names import MeshId, NodeId, Span
from meshllm.node.compute.gauge import GenerationTimes
from meshllm.node.net.secure import SecureLink
from meshllm.node.node_names import Names, resolve_names
from meshllm.node.ring.span_loader import LoadedSpan, RankPart, SpanLoader
from meshllm.node.session import text
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Credential, Removals, Role, check
from meshllm.request import HopReport
from tests.simulation import toy
from tests.simulation.machines import process_here
from tests.simulation.node_world import shortcuts, simulate

MOST = 60  # schedules within which a mutant must be found


@dataclass(frozen=True)
class Mutant:
    """What is replaced, and the expected failure."""

    patches: dict[str, object]
    fault: str
    first: int = 0
    """The first seed to try: the first that finds it."""


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with shortcuts():
        yield


def without_removals(
    credential: Credential, node: NodeId, mesh: MeshId, now_s: float, _: Removals
) -> Role:
    return check(credential, node, mesh, now_s, {})


def change(found: Agreement, change: Callable[[Plan], Plan]) -> Agreement:
    return replace(found, plan=found.plan and change(found.plan))


def agree_on_machine_0(view: MeshView, before: Agreement | None = None) -> Agreement:
    """Swap the first two nodes of a ring in the plans of this machine."""

    def swap(plan: Plan) -> Plan:
        if len(plan.stages) < 2:
            return plan
        one, other, *rest = plan.stages
        swapped = replace(other, span=one.span), replace(one, span=other.span)
        return replace(plan, stages=(*swapped, *rest))

    process, found = process_here(), agree(view, before)
    return change(found, swap) if process and process.number == 0 else found


def agree_on_epoch_1(view: MeshView, before: Agreement | None = None) -> Agreement:
    return change(agree(view, before), lambda plan: replace(plan, epoch=1))


def load_one_more(loader: SpanLoader, part: RankPart) -> LoadedSpan:
    start = part.span.start if part.is_entry else part.span.start - 1
    return LOAD(loader, replace(part, span=Span(start, part.span.stop)))


LOAD, HOPS = SpanLoader._load, text._hops


async def stay_open(_: SecureLink) -> None:
    pass


def nod(*_: object) -> None:
    pass


def tell_layer_0(measured: GenerationTimes, plan: Plan) -> tuple[HopReport, ...]:
    return tuple(replace(hop, span=Span(0, 1)) for hop in HOPS(measured, plan))


def one_node_for_each(texts: Iterable[str], profiles: Mapping[NodeId, Profile]) -> Names:
    """Raise an error that is meant for the user of a command."""
    names = resolve_names(texts, profiles)
    if names.ambiguous:
        raise UserError("several nodes are called so")
    return names


def always_open(*_: object) -> bool:
    return True


AGREE = "meshllm.protocol.agreement.grouping.agree"
AGREED = {"tests.simulation.plans.Plans._agreed": nod}  # so that what is looked at later shows
UNSEEN = {
    **AGREED,
    "tests.simulation.checks.Checks.look": nod,
    "tests.simulation.checks.Checks.unsettled": nod,
}
EXPIRED = (
    "meshllm.node.membership.state_store.Invitation.is_expired",
    "meshllm.node.membership.bootstrap._refuse_expired",
)
MUTANTS = {
    "a plan of its own": Mutant({AGREE: agree_on_machine_0}, "nodes that know the same agree on"),
    "a plan of its own, linked": Mutant(
        {AGREE: agree_on_machine_0, **AGREED}, "are linked, and follow two plans of an epoch", 2
    ),
    "a plan of its own, in calm": Mutant(
        {AGREE: agree_on_machine_0, **UNSEEN}, "nothing went wrong, and of some epochs are", 17
    ),
    "epochs do not rise": Mutant({AGREE: agree_on_epoch_1}, "is new, and there is an epoch"),
    "epochs go back": Mutant({AGREE: agree_on_epoch_1, **AGREED}, "goes back from", 40),
    "removals are ignored": Mutant(
        {"meshllm.protocol.membership.record_store.check": without_removals}, "and is removed", 128
    ),
    "used-up tickets are good": Mutant(
        {"meshllm.node.membership.state_store.Invitation.is_open": always_open},
        "a ticket for 1 lets in 2",
        35,
    ),
    "expired tickets are good": Mutant(
        dict.fromkeys(EXPIRED, nod), "a ticket that has expired lets somebody in", 11
    ),
    "a layer runs twice": Mutant(
        {"meshllm.node.ring.span_loader.SpanLoader._load": load_one_more}, "a row behind"
    ),
    "other layers are told": Mutant(
        {"meshllm.node.session.text._hops": tell_layer_0}, "are not the stages of"
    ),
    "a request has no end": Mutant(
        {"meshllm.node.requests.router.RING_S": 1e9}, "requests are under way", 15
    ),
    "links are left open": Mutant(
        {"meshllm.node.net.secure.SecureLink.close": stay_open}, "links, of the ring and others", 3
    ),
    "links of a ring that ended stay": Mutant(
        {"meshllm.node.ring.idle_links.IdleLinks.discard": nod}, "links, of the ring and others", 23
    ),
    "reservations stay": Mutant(
        {"meshllm.protocol.kv_cache.budget.KvBudget.release": nod}, "bytes of its KV cache", 1
    ),
    "caches are not dropped": Mutant(
        {"meshllm.protocol.kv_cache.prefix_matching.PrefixCache._drop": nod},
        "sessions that it does not keep",
        2,
    ),
    "bugs are reported only": Mutant(
        {"meshllm.node.supervisor.Supervisor._owns": nod}, "met a bug, and goes on"
    ),
    "hangs are not seen": Mutant(
        {"meshllm.node.compute.worker.Worker.hung_s": 0.0}, "hangs, and", 120
    ),
    "hangs are seen late": Mutant({"meshllm.protocol.ring.hang.HANG_S": 60.0}, "hangs, and", 120),
    "two nodes of one name": Mutant(
        {"meshllm.node.agreement.charter_editor.resolve_names": one_node_for_each},
        "several nodes are called so",
    ),
    "as much memory is offered again": Mutant(
        {"meshllm.node.agreement.offer.SMALLER": 10.0}, "without memory for", 10
    ),
    "loading is not retried": Mutant(
        {"meshllm.node.agreement.offer.NodeOffer._offer_again": nod}, "offers no layers", 14
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_node_is_found(name: str) -> None:
    mutant = MUTANTS[name]

    with ExitStack() as stack:
        for target, mutation in mutant.patches.items():
            stack.enter_context(patch(target, mutation))
        seeds = range(mutant.first, mutant.first + MOST)

        assert any(mutant.fault in text for seed in seeds for text in simulate(seed).wrong)


def test_a_wrong_row_is_found() -> None:
    through = toy._through
    calls = iter(range(10**9))

    def sometimes(value: int, cache: toy.ToyCache) -> int:
        return through(value, cache) + (next(calls) % 40 == 39)

    for seed in range(3):
        simulate(seed)  # so that the references are known
    with patch.object(toy, "_through", sometimes):
        assert any(simulate(seed).wrong for seed in range(3))
