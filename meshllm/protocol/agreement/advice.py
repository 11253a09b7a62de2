"""One-line advice on what would make the ring faster."""

from meshllm.errors import MeshError
from meshllm.names import short
from meshllm.protocol.agreement.agreement import GAIN, Agreement
from meshllm.protocol.agreement.best_plan import BestPlan, PlanningInput, find_missing_link
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.planning.partition import token_time
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.policies import POLICIES, make_plan
from meshllm.protocol.planning.prediction import Prediction, predict

NETWORK_SHARE = 0.5  # of the time per token; above this, network latency dominates


def advise(agreement: Agreement) -> str:
    """Return the most useful advice, as one sentence without a full stop.

    A pure function of the agreement. If the charter constrains the ring, this plans once more
    without the constraints, which takes as long as `agree`.
    """
    plan, best = agreement.plan, agreement.best
    if plan is None and not agreement.offers and not agreement.refused:
        return ""  # the nodes load the model
    if plan is None or best is None:
        return f"There is no ring: {agreement.reason}"
    shape = best.case.view.charter.shape
    now = predict(plan, agreement.offers, agreement.links, shape)
    return (
        _ignored(best)
        or _other_ring(agreement, best, now)
        or _slowest_hop(now)
        or _refused(agreement)
        or _slowest_layers(now)
    )


def _ignored(best: BestPlan) -> str:
    if not best.ignored:
        return ""
    said = " and ".join(f"`--{each.name}` of `{short(each.author)}`" for each in best.ignored)
    return f"No ring is possible with {said}: the founder's apply instead"


def _other_ring(agreement: Agreement, best: BestPlan, now: Prediction) -> str:
    """Compare with the fastest ring of these nodes, ignoring the constraints of the charter."""
    charter = best.case.view.charter
    bounds = _bounds(charter)
    plan = _unbound(best.case) if bounds else best.plan
    if plan is None or find_missing_link(plan, best.case.found):
        return ""
    then = predict(plan, agreement.offers, agreement.links, charter.shape)
    token, other = now.seconds_per_token, then.seconds_per_token
    if token - other <= GAIN * token:
        return ""
    gain = f"{other * 1e3:.1f} instead of {token * 1e3:.1f} ms per token"
    if bounds:
        return f"Without {' and '.join(bounds)} the ring would take {gain}"
    return f"A ring that takes {gain} is pending until running sessions end"


def _bounds(charter: Charter) -> list[str]:
    is_fastest = POLICIES[charter.policy].objective is token_time
    bounds = {
        f"`--policy {charter.policy}`": not is_fastest,
        f"`--members {charter.members}`": charter.members,
        "`--exclude`": charter.exclude,
        "`--prefer`": charter.prefer,
    }
    return [text for text, binds in bounds.items() if binds]


def _unbound(case: PlanningInput) -> Plan | None:
    shape = case.view.charter.shape
    try:
        return make_plan(case.found.offers, case.found.links, shape, terms=case.terms)
    except MeshError:  # no ring satisfies the fixed spans of the nodes
        return None


def _slowest_hop(now: Prediction) -> str:
    token = now.seconds_per_token
    network = sum(hop.wire_s for hop in now.hops)
    if network <= NETWORK_SHARE * token:
        return ""
    longest = max(range(len(now.hops)), key=lambda rank: now.hops[rank].wire_s)
    here, there = now.hops[longest], now.hops[(longest + 1) % len(now.hops)]
    return (
        f"{network / token:.0%} of the time per token is network latency, most of it"
        f" {here.wire_s * 1e3:.1f} ms from `{short(here.node)}` to `{short(there.node)}`: fewer"
        " nodes with more memory each, or nodes closer together, would help"
    )


def _refused(agreement: Agreement) -> str:
    node = min(agreement.refused, default=None)
    if node is None:
        return ""
    return f"`{short(node)}` could take layers, but is refused: {agreement.refused[node]}"


def _slowest_layers(now: Prediction) -> str:
    slowest = max(now.hops, key=lambda hop: hop.compute_s)
    return (
        f"`{short(slowest.node)}` computes {slowest.compute_s * 1e3:.1f} of"
        f" {now.seconds_per_token * 1e3:.1f} ms per token in layers `{slowest.span}`: a faster"
        " node nearby would help"
    )
