"""The status that a node reports."""

import asyncio
from dataclasses import replace

import pytest

from meshllm.names import GroupId, LossCause, Quant, short, show
from meshllm.node.agreement.own_state import PROVIDES, provides
from meshllm.node.provider import NO_ANSWER, NO_MODELS, STARTING
from meshllm.node.requests.counts import RequestCounters
from meshllm.node.view import OwnRing, RingView
from meshllm.protocol.agreement.candidates import NO_LINK
from meshllm.protocol.agreement.groups import REFUSES
from meshllm.protocol.membership.records import Lifecycle, ModelOffer, Profile, RingMembership
from meshllm.protocol.planning.plan import Links, Plan
from meshllm.request import Answer, HopReport
from meshllm.status import (
    CostTable,
    LinkStatus,
    LossCounts,
    MeasuredTimes,
    ModelStatus,
    NetworkStatus,
    NodeState,
    ProviderOffer,
    RingState,
    RingStatus,
    SessionCounts,
    Unplaced,
)
from tests.builders.fake_ring import answer_of
from tests.builders.owned import Owned
from tests.builders.snapshots import CONFIG, charter
from tests.builders.view import CLIENT, A, B, C, D, plan_of, with_state


@pytest.fixture
def node() -> Owned:
    return Owned()


def _holding(weights: bytes) -> Profile:
    """Return the profile of a node with a digest of one byte for each part of the weights."""
    parts = (bytes([each]) for each in weights)
    return Profile("", "", (), 0, weights=(*parts, CONFIG[:16]) if weights else ())


def test_the_status_is_that_of_the_node(node: Owned) -> None:
    status = node.status()

    assert (status.mesh, status.node) == (node.view.mesh.hex(), show(A))
    assert (status.name, status.version, status.since_s) == ("here", "1.0", 3.0)
    key = charter().key.hex()
    assert status.model == ModelStatus(
        "tiny", 4, 4, "bfloat16", "none", 10, "fp_1a7ab2161d6c", key=key, replicas=1, epoch=1
    )
    assert status.listening == ("loopback:a",)
    assert status.networks == (
        NetworkStatus("none", "no NAT", ("192.0.2.1:7700",), (("192.0.2.9:8790", "registered"),)),
    )


def test_a_forming_ring_is_reported(node: Owned) -> None:
    plan, ring = plan_of(node.view), node.ring()

    assert (ring.state, ring.reason) == (RingState.FORMING, "they load")
    assert (ring.entry, ring.epoch) == (show(plan.stages[0].node), plan.epoch)
    assert ring.digest == plan.digest.hex()[:12]
    assert [(each.rank, each.node, each.layers) for each in ring.stages] == [
        (rank, show(stage.node), stage.span) for rank, stage in enumerate(plan.stages)
    ]
    assert {each.room_tokens for each in ring.stages} == {None}  # its layers keep nothing
    assert ring.predicted
    assert ring.predicted.ms_per_token > 0
    assert [hop.rank for hop in ring.predicted.hops] == [0, 1]

    node.see(is_served=True)
    assert (node.ring().state, node.ring().reason) == (RingState.SERVING, "")

    charter = node.view.charter
    assert charter
    shape = replace(charter.shape, kv_bytes_per_token=(1,) * len(charter.shape.layer_bytes))
    node.see(charter=replace(charter, shape=shape))
    assert all(each.room_tokens for each in node.ring().stages)


def test_without_a_plan_it_waits(node: Owned) -> None:
    node.see(plan=None, agreement=None, charter=None, profiles={}, rings=())

    status = node.status()

    assert status.model is None
    assert status.ring == RingStatus(
        state=RingState.WAITING, reason="they load", epoch=0, digest="", policy="auto", entry=None,
        stages=(), predicted=None, measured=None, advice="",
    )  # fmt: skip
    assert [each.is_self for each in status.nodes] == [True]
    assert asyncio.run(node.control.models()) == []


def test_the_terms_of_the_ring_are_told(node: Owned) -> None:
    charter = node.view.charter
    assert charter

    node.see(charter=replace(charter, members=2, exclude=(node.view.me,)))

    assert (node.ring().members, node.ring().exclude) == (2, (show(node.view.me),))


def test_an_impossible_prediction_is_left_out(node: Owned) -> None:
    assert node.view.agreement
    node.see(agreement=replace(node.view.agreement, plan=None, offers=()))
    assert node.ring().predicted is None
    assert {each.room_tokens for each in node.ring().stages} == {None}

    node.see(agreement=None)
    assert node.ring().predicted is None
    assert {each.room_tokens for each in node.ring().stages} == {None}


def test_an_unmeasured_link_is_not_a_number(node: Owned) -> None:
    assert node.view.agreement
    assert node.ring().predicted
    lost = Links({}, NO_LINK)

    node.see(agreement=replace(node.view.agreement, links=lost))

    assert node.ring().predicted is None


def test_this_node_comes_first(node: Owned) -> None:
    nodes = node.status().nodes

    assert [(each.name, each.is_self) for each in nodes] == [
        ("here", True), ("spare", False), ("there", False),
    ]  # fmt: skip
    assert [each.incarnation for each in nodes] == [7, 0, 3]
    assert [each.short for each in nodes] == [short(A), short(C), short(B)]


def test_a_link_is_reported_with_its_statistics(node: Owned) -> None:
    assert node.of(B).link == LinkStatus(
        round_trip_ms=2.5, path="direct", path_reason="", address="loopback:y",
        bytes_sent=100, bytes_received=200, heard_s=0.5, clock_s=-3.25,
    )  # fmt: skip
    assert node.of(C).link is None


def test_the_execution_mode_of_this_node_is_reported(node: Owned) -> None:
    node.see(execution="replayed: 8 % faster than stock", warnings=("no room",))

    assert [each.execution for each in node.status().nodes] == [
        "replayed: 8 % faster than stock", "", "",
    ]  # fmt: skip
    assert node.status().warnings == ("no room",)


def test_the_measured_times_of_each_node_are_reported(node: Owned) -> None:
    table = ((1, 0.002), (8, 0.0025))
    timed = replace(node.view.profiles[B], model="m", layer_s=table, head_s=0.001)
    bare = replace(node.view.profiles[C], layer_s=())
    node.see(profiles={**node.view.profiles, B: timed, C: bare})

    assert node.of(B).costs == CostTable("m", ((1, 2.0), (8, 2.5)), 1.0, quant="none")
    assert node.of(C).costs is None


def test_each_node_has_one_state(node: Owned) -> None:
    node.view = with_state(node.view, B, is_loaded=True)
    node.see(trouble="no memory")
    plan = plan_of(node.view)

    assert node.state(A) == (NodeState.LOADING, "no memory")
    assert node.state(B)[0] is NodeState.SERVING
    assert node.of(B).layers == plan.stages[plan.rank(B) or 0].span
    assert node.state(C)[0] is NodeState.STANDBY
    assert node.state(C)[1]
    assert (node.of(C).layers, node.of(C).rank) == (None, None)

    node.see(is_leaving=True)
    assert node.state(A) == (NodeState.LEAVING, "finishing requests")
    node.view = with_state(node.view, C, lifecycle=Lifecycle.JOIN)
    assert node.state(C)[0] is NodeState.JOINING
    node.view = with_state(node.view, C, lifecycle=Lifecycle.LEAVING)
    assert node.state(C) == (NodeState.LEAVING, "finishing requests")
    assert node.view.agreement
    node.see(agreement=replace(node.view.agreement, refused={C: "other weights"}))
    assert node.state(C) == (NodeState.REFUSED, "other weights")
    node.see(alive=frozenset({A, B}))
    assert node.state(C)[0] is NodeState.DOWN
    node.view = with_state(node.view, C, lifecycle=Lifecycle.LEFT)
    assert node.state(C) == (NodeState.LEFT, "")
    node.see(states={A: node.view.states[A], B: node.view.states[B]})
    assert node.state(C)[0] is NodeState.DOWN
    node.see(agreement=None, alive=frozenset({A, B, C}), plan=None)
    assert node.state(B) == (NodeState.STANDBY, "")


@pytest.mark.parametrize(
    ("lifecycle", "trouble", "offers", "state"),
    [
        (Lifecycle.JOIN, STARTING, (), (NodeState.JOINING, STARTING)),
        (Lifecycle.JOIN, NO_MODELS, (), (NodeState.JOINING, NO_MODELS)),
        (Lifecycle.SERVING, "", (ModelOffer("fox"),), (NodeState.SERVING, "")),
        (Lifecycle.JOIN, NO_ANSWER, (), (NodeState.DOWN, NO_ANSWER)),
        (Lifecycle.JOIN, "its engine ended with code 1", (),
         (NodeState.DOWN, "its engine ended with code 1")),
        (Lifecycle.SERVING, "", (), (NodeState.STANDBY, PROVIDES)),
        (Lifecycle.LEAVING, NO_ANSWER, (), (NodeState.LEAVING, "finishing requests")),
    ],
    ids=["starting", "empty", "serving", "silent", "ended", "of an earlier version", "leaving"],
)  # fmt: skip
def test_a_provider_has_the_state_of_its_engine(
    node: Owned,
    lifecycle: Lifecycle,
    trouble: str,
    offers: tuple[ModelOffer, ...],
    state: tuple[NodeState, str],
) -> None:
    node.view = with_state(
        node.view, C, lifecycle=lifecycle, obstacle=provides(trouble), offers=offers
    )

    assert node.state(C) == state
    assert (
        next(each for each in node.control.members().members if each.name == "spare").state
        == (state[0])
    )


def test_the_plan_lists_nodes_without_a_span_and_why(node: Owned) -> None:
    assert node.view.agreement
    node.see(agreement=replace(node.view.agreement, refused={B: "other weights"}))

    ring = node.ring()

    assert ring.refused == (Unplaced(show(B), "there", "other weights"),)
    assert [(each.node, each.name) for each in ring.standbys] == [(show(C), "spare")]


def test_reasons_and_advice_name_nodes(node: Owned) -> None:
    assert node.view.agreement
    told = f"`{short(B)}` and `{short(D)}`"
    refused = replace(node.view.agreement, refused={C: told})
    node.see(agreement=refused, advice=told, reason=told, is_served=False)

    named = f"`there` and `{short(D)}`"
    ring = node.ring()
    assert (ring.advice, ring.reason) == (named, named)
    assert [each.reason for each in ring.refused] == [named]
    assert node.state(C) == (NodeState.REFUSED, named)

    same = replace(node.view.profiles[C], name="there")
    node.see(profiles={**node.view.profiles, C: same})
    assert node.status().ring.advice == told


def answer_by(plan: Plan) -> Answer:
    """Return an answer that the ring of a plan gave."""
    (hop, *_), stages = answer_of("", 0).hops, enumerate(plan.stages)
    hops = (replace(hop, rank=rank, node=short(at.node), span=at.span) for rank, at in stages)
    return replace(answer_of("", 0), hops=tuple(hops))


def test_measurements_of_another_ring_are_not_reported(node: Owned) -> None:
    plan = plan_of(node.view)
    node.see(counts=replace(node.view.counts, last=answer_by(plan), last_tokens=5))
    assert node.ring().measured

    first, *rest = plan.stages
    other = replace(plan, stages=(replace(first, node=D), *rest))
    for answer in (answer_by(other), answer_of("", 0)):
        node.see(counts=replace(node.view.counts, last=answer))
        assert node.ring().measured is None
    node.see(plan=None)
    assert node.ring().measured is None


def test_the_latest_measurement_is_reported(node: Owned) -> None:
    node.see(
        counts=RequestCounters(
            active=3,
            begun=1,
            served=2,
            failed=1,
            tokens=9,
            losses={LossCause.NODE_LOST: LossCounts(LossCause.NODE_LOST, 1, 0.9, 7)},
        )
    )
    assert node.ring().measured is None

    answer = answer_by(plan_of(node.view))
    node.see(counts=replace(node.view.counts, last=answer, last_tokens=5), sessions=1)

    measured = node.ring().measured
    assert measured
    assert (measured.ms_per_token, measured.ttft_ms, measured.tokens) == (4.0, 20.0, 5)
    of_ring = {node.view.group: (answer, 6)}
    node.see(counts=replace(node.view.counts, by_ring=of_ring))  # the last was of an engine
    assert (found := node.ring().measured)
    assert found.tokens == 6
    hop = answer.hops[0]
    assert measured.hops[0] == MeasuredTimes(
        0, hop.node, hop.span, compute_ms=1.25, serialise_ms=0.08, queue_ms=0.02, wire_ms=0.05,
        bytes_per_token=512.0,
    )  # fmt: skip
    assert node.status().sessions == SessionCounts(
        active=3,
        waiting=2,
        served=2,
        failed=1,
        tokens=9,
        losses=(
            LossCounts(LossCause.NODE_LOST, 1, 0.9, 7, 3),
            LossCounts(LossCause.NODE_SILENT, rows=2),
        ),
        recomputed=5,
    )


def test_an_answer_of_one_token_measures_nothing(node: Owned) -> None:
    node.see(counts=RequestCounters(last=replace(answer_of("", 1), ms_per_token=0.0)))

    assert node.ring().measured is None


def test_members_are_nodes_clients_and_the_removed(node: Owned) -> None:
    node.see(removed=(D,))

    members = node.control.members().members

    assert [(each.role, each.state, each.is_self) for each in members] == [
        ("node", "loading", True), ("node", "standby", False), ("node", "loading", False),
        ("client", "linked", False), ("", "removed", False),
    ]  # fmt: skip
    assert [each.node for each in members[-2:]] == [show(CLIENT), show(D)]
    hosts = [(), (A, B, D), (A,), (), ()]
    assert [each.inviters for each in members] == [tuple(map(show, each)) for each in hosts]


def test_the_model_of_the_charter_is_served(node: Owned) -> None:
    (model,) = asyncio.run(node.control.models())

    assert (model.name, model.fingerprint, model.context > 0) == ("tiny", "fp_1a7ab2161d6c", True)


def test_a_fingerprint_depends_on_the_weights_and_not_on_who_holds_them(node: Owned) -> None:
    def fingerprint(*weights: bytes) -> str:
        node.view = replace(
            node.view, profiles=dict(zip((A, B, D), map(_holding, weights), strict=False))
        )
        (model,) = asyncio.run(node.control.models())
        return model.fingerprint

    whole = fingerprint(b"abcd")

    assert whole.startswith("fp_")
    assert fingerprint(b"ab\0\0", b"\0\0cd") == whole
    assert fingerprint(b"\0bcd", b"a\0\0\0", b"") == whole
    assert fingerprint(b"abce") != whole
    assert fingerprint(b"ab\0\0") == ""


@pytest.mark.parametrize(
    ("others", "quant", "expected"),
    [(True, Quant.NONE, True), (False, Quant.NONE, False), (True, Quant.INT8, False)],
)
async def test_a_model_is_exact_if_the_whole_ring_is(
    quant: Quant, *, others: bool, expected: bool
) -> None:
    owned = Owned()
    plan = plan_of(owned.view)
    assert owned.view.charter
    first, *rest = (stage.node for stage in plan.stages)
    exact = {first: True, **dict.fromkeys(rest, others)}
    quantised = replace(owned.view.charter, quant=quant)
    (ring,) = owned.view.rings
    owned.see(
        charter=quantised,
        rings=(replace(ring, group=replace(ring.group, charter=quantised)),),
        profiles={
            node: replace(each, is_exact=exact.get(node, False))
            for node, each in owned.view.profiles.items()
        },
    )

    (model,) = await owned.control.models()

    assert rest
    assert (model.is_exact, model.epoch) == (expected, plan.epoch)


async def test_a_model_is_exact_if_one_of_its_rings_is() -> None:
    owned = Owned()
    (ring,), plan = owned.view.rings, plan_of(owned.view)
    alone = replace(plan, stages=plan.stages[:1])
    owned.see(
        rings=(ring, replace(ring, group=replace(ring.group, replica=1), plan=alone)),
        profiles={
            node: replace(each, is_exact=node == alone.stages[0].node)
            for node, each in owned.view.profiles.items()
        },
    )

    (model,) = await owned.control.models()

    assert len(plan.stages) > 1
    assert (model.is_exact, model.epoch) == (True, plan.epoch)


async def test_rings_that_serve_a_model_are_counted(node: Owned) -> None:
    (ring,), plan = node.view.rings, plan_of(node.view)
    second = replace(ring.group, replica=1, id=GroupId(b"second"))
    for serving in ((False, False), (True, False), (True, True)):
        rings = zip((ring.group, second), serving, strict=True)
        node.see(rings=tuple(RingView(group, plan, is_served=serves) for group, serves in rings))

        (model,) = await node.control.models()

        assert model.rings == sum(serving)


async def test_each_provider_says_what_it_has(node: Owned) -> None:
    told = {B: ModelOffer("fox", "bf16", 8192), C: ModelOffer("fox", "int4")}
    for each, offer in told.items():
        node.view = with_state(node.view, each, offers=(offer,), lifecycle=Lifecycle.SERVING)

    _, fox = await node.control.models()

    assert (fox.providers, fox.precision, fox.context) == (("spare", "there"), "", 8192)
    assert fox.offers == (ProviderOffer("spare", "int4"), ProviderOffer("there", "bf16", 8192))


async def test_providers_of_a_ring_s_model_are_told_with_it(node: Owned) -> None:
    charter = node.view.rings[0].group.charter
    offer = ModelOffer(charter.shape.name, "fp32", 8192)
    twice = offer, replace(offer, precision="int4")  # the first counts
    node.view = with_state(node.view, B, offers=twice, lifecycle=Lifecycle.SERVING)

    (model,) = await node.control.models()

    assert (model.providers, model.is_uniform) == ((), False)
    assert model.beside == (ProviderOffer("there", "fp32", 8192),)


def test_each_ring_of_the_node_has_its_own_status(node: Owned) -> None:
    (ring,), plan = node.view.rings, plan_of(node.view)
    ours = OwnRing(node.view.agreement, "more memory", "it loads", "stock", (("loading", 2.0),))
    other = replace(ring.group, id=GroupId(b"other"))
    alone = replace(plan, stages=plan.stages[:1], epoch=9)
    times = HopReport(0, show(A), alone.stages[0].span, 1.0, 0.1, 0.1, 0.0, 0.0)
    counts = RequestCounters()
    for tokens in (4, 5):
        counts.count(replace(answer_of("", 1), hops=(times,), counted=tokens), other.id)
    node.see(
        counts=counts,
        rings=(
            replace(ring, own=OwnRing(node.view.agreement, reason="they load")),
            RingView(other, alone, is_served=False, own=ours),
            replace(ring, group=replace(other, id=GroupId(b"not here"))),
        ),
    )

    first, further, strange = (each.status for each in node.status().rings)

    assert first == node.ring()
    assert strange is None
    assert further
    assert (further.epoch, further.digest) == (9, alone.digest.hex()[:12])
    assert (further.reason, further.advice, further.execution) == (
        "it loads", "more memory", "stock",
    )  # fmt: skip
    assert [each.state for each in further.history] == ["loading"]
    assert further.measured
    assert (further.measured.tokens, first.measured) == (5, None)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_ring_gives_one_reason_wherever_it_is_shown(node: Owned, *, is_planned: bool) -> None:
    (ring,) = node.view.rings
    plan = ring.plan if is_planned else None
    own = OwnRing(node.view.agreement, reason="1 of 2 members are ready")
    waits = replace(ring, plan=plan, is_served=False, lacks_bytes=1 << 30, own=own)
    node.see(plan=plan, is_served=False, reason=own.reason, rings=(waits,))

    status = node.status()

    (shown,) = status.rings
    assert shown.status
    assert [status.ring.reason, shown.reason, shown.status.reason] == [own.reason] * 3


def test_a_node_that_refuses_a_further_ring_is_not_shown_in_it(node: Owned) -> None:
    (ring,) = node.view.rings
    other = replace(ring.group, id=GroupId(b"other"))
    waits = RingView(other, None, is_served=False)

    def shown(obstacle: str) -> tuple[RingState, int, str]:
        further = (RingMembership(other.id, obstacle=obstacle),)
        states = {**node.view.states, A: replace(node.view.states[A], further=further)}
        node.see(rings=(ring, waits), states=states)
        _, status = node.status().rings
        return status.state, len(status.standbys), status.reason

    assert shown("") == (RingState.FORMING, 1, "its nodes are loading and connecting: here")
    assert shown(REFUSES) == (RingState.WAITING, 0, "no node is free")


async def test_a_ring_that_nobody_uses_says_what_loads_it(node: Owned) -> None:
    (ring,) = node.view.rings
    other = replace(ring.group, id=GroupId(b"other"))
    waits = replace(ring, group=other, plan=None, lacks_bytes=1 << 30)

    node.see(rings=(ring, waits, replace(waits, is_unused=True)))

    _, lacking, unused = node.status().rings
    assert lacking.reason.endswith("with 1.0 GiB of memory")
    assert unused.reason.startswith("not in use: a request loads it")
    assert (lacking.state, unused.state) == (RingState.WAITING, RingState.WAITING)
