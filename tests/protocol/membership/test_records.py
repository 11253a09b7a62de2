"""Profiles and states: round trips, limits, and which nodes are alive."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import GroupId, ModelKey, NodeId, Span
from meshllm.protocol.membership.records import (
    DIGEST_PART_BYTES,
    ENDS,
    KEY_TAG_BYTES,
    MACHINE_BYTES,
    MAX_ADDRESS_BYTES,
    MAX_ADDRESSES,
    MAX_BYTES,
    MAX_CONTEXT,
    MAX_COSTS,
    MAX_HELD,
    MAX_LABEL_BYTES,
    MAX_LAYERS,
    MAX_MEMBERS,
    MAX_OBSTACLE_BYTES,
    MAX_OFFERS,
    MAX_PLAN_BYTES,
    MAX_REVOKED,
    MAX_RINGS,
    MAX_ROUND_TRIP_US,
    MAX_ROWS,
    MIN_SECONDS,
    Lifecycle,
    ModelOffer,
    Profile,
    RingMembership,
    RingShare,
    StateRecord,
    alive,
)
from meshllm.protocol.planning.plan import MAX_NAME_BYTES, MAX_SECONDS
from tests.property.mesh_strategies import profiles, states
from tests.property.strategies import nodes

PROFILE = Profile("desk", "1.0", ("ws://10.0.0.7:7700",), 1000, ((1, 0.01), (8, 0.02)), 0.001)
STATE = StateRecord(followed=b"plan", offers=(ModelOffer("m", "bf16", 9),))
A, B, C, D = (NodeId(bytes([number]) * 32) for number in range(4))


@given(profiles)
def test_a_profile_round_trips(profile: Profile) -> None:
    assert Profile.decode(profile.encode()) == profile


@given(states)
def test_a_state_round_trips(state: StateRecord) -> None:
    assert StateRecord.decode(state.encode()) == state


@given(st.binary())
def test_garbage_is_refused(data: bytes) -> None:
    for record in (Profile, StateRecord):
        with pytest.raises(PeerFault):
            record.decode(b"\x01" + data + b"\xff" * 99_999)


@pytest.mark.parametrize("record", [PROFILE, STATE])
def test_appended_fields_are_ignored_and_a_missing_one_is_refused(
    record: Profile | StateRecord,
) -> None:
    assert record.decode(b"\x02" + record.encode()[1:] + b"later") == record

    with pytest.raises(PeerFault):
        record.decode(record.encode()[:10])


@pytest.mark.parametrize(
    "missing",
    [1, 3, 5, 7, 8, 10],
    ids=["further rings", "prepared", "used", "group", "offers", "faulty"],
)
def test_a_state_of_an_earlier_version_lacks_what_it_did_not_know(missing: int) -> None:
    state = StateRecord(links=((A, 9),), obstacle="busy")

    assert StateRecord.decode(state.encode()[:-missing]) == state


@pytest.mark.parametrize("missing", [1, 2, 4, 6], ids=["shares", "exact", "revoked keys", "models"])
def test_a_profile_of_an_earlier_version_lacks_what_it_did_not_know(missing: int) -> None:
    profile = Profile("desk", "1", (), 9, machine=bytes(16))

    assert Profile.decode(profile.encode()[:-missing]) == profile


def test_a_group_and_models_are_bounded() -> None:
    with pytest.raises(PeerFault, match="10 bytes"):
        StateRecord.decode(StateRecord(group=GroupId(bytes(10))).encode())
    with pytest.raises(PeerFault, match="end of its models"):
        Profile.decode(replace(PROFILE, models=(ModelKey(bytes(7)),)).encode())


ONE, OTHER = GroupId(bytes(9)), GroupId(b"\1" * 9)
SHARED = replace(
    PROFILE,
    reserve_bytes=100,
    shares=(
        RingShare(ONE, 300, ((1, 0.5),), 0.25, "m", (bytes(16),)),
        RingShare(OTHER, 500),
    ),
)
BUSY = replace(
    STATE,
    further=(RingMembership(ONE, b"other", is_loaded=True, obstacle="why"), RingMembership(OTHER)),
)


def test_a_ring_sees_its_part_of_a_profile() -> None:
    first = SHARED.in_ring(GroupId(b""), is_further=False)
    further = SHARED.in_ring(ONE, is_further=True)
    unknown = SHARED.in_ring(GroupId(b"\2" * 9), is_further=True)

    assert first == replace(PROFILE, memory_bytes=200, reserve_bytes=100)
    assert (further.memory_bytes, further.reserve_bytes, further.layer_s) == (300, 0, ((1, 0.5),))
    assert (further.model, further.weights, further.head_s) == ("m", (bytes(16),), 0.25)
    assert (unknown.memory_bytes, unknown.weights, unknown.layer_s) == (0, (), ())
    assert PROFILE.in_ring(GroupId(b""), is_further=False) is PROFILE
    assert SHARED.by_ring()[:2] == [first, further]
    assert PROFILE.by_ring() == [PROFILE]


def test_a_ring_sees_its_part_of_a_state() -> None:
    first, further = BUSY.in_ring(GroupId(b"")), BUSY.in_ring(ONE)

    assert first == STATE == BUSY.in_ring(GroupId(b"\2" * 9))
    assert STATE.in_ring(ONE) is STATE
    assert (further.group, further.followed, further.is_loaded) == (ONE, b"other", True)
    assert (further.obstacle, further.further, further.offers) == ("why", (), STATE.offers)
    assert (BUSY.is_further(ONE), BUSY.is_further(STATE.group)) == (True, False)
    assert [each.group for each in BUSY.memberships] == [STATE.group, ONE, OTHER]


def test_a_span_is_loaded_for_its_plan_only_in_any_ring() -> None:
    state = replace(BUSY, followed=b"first", is_loaded=False)

    assert [state.has_loaded(plan) for plan in (b"first", b"other", b"another")] == [
        False, True, False,
    ]  # fmt: skip
    assert replace(state, is_loaded=True).has_loaded(b"first")


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (replace(SHARED, memory_bytes=799), "800 bytes in shares; allowed are 0 to 799"),
        (replace(SHARED, shares=SHARED.shares[::-1]), "1 groups out of order"),
        (replace(SHARED, shares=SHARED.shares[:1] * 2), "1 groups out of order"),
        (replace(BUSY, further=BUSY.further[::-1]), "1 groups out of order"),
        (replace(BUSY, group=ONE), "1 memberships more in its first ring"),
        (
            replace(
                BUSY, further=tuple(RingMembership(GroupId(bytes([at]))) for at in range(MAX_RINGS))
            ),
            "8 further rings; allowed are 0 to 7",
        ),
        (
            replace(
                SHARED, shares=tuple(RingShare(GroupId(bytes([at])), 1) for at in range(MAX_RINGS))
            ),
            "8 shares; allowed are 0 to 7",
        ),
    ],
)
def test_further_rings_are_bounded(record: Profile | StateRecord, what: str) -> None:
    with pytest.raises(PeerFault, match=what):
        record.decode(record.encode())


@pytest.mark.parametrize("code", [0, 5, 255])
def test_an_unknown_lifecycle_is_other(code: int) -> None:
    data = bytearray(StateRecord().encode())
    data[1] = code

    assert StateRecord.decode(bytes(data)).lifecycle is Lifecycle.OTHER


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n" * (MAX_LABEL_BYTES + 1)},
        {"version": "n" * (MAX_LABEL_BYTES + 1)},
        {"model": "n" * (MAX_NAME_BYTES + 1)},
        {"addresses": ("a" * (MAX_ADDRESS_BYTES + 1),)},
        {"addresses": ("a",) * (MAX_ADDRESSES + 1)},
        {"memory_bytes": MAX_BYTES + 1},
        {"reserve_bytes": MAX_BYTES + 1},
        {"layer_s": tuple((rows, 0.1) for rows in range(1, 18))},
        {"layer_s": ((8, 0.1), (8, 0.2))},
        {"layer_s": ((0, 0.1),)},
        {"layer_s": ((4097, 0.1),)},
        {"layer_s": ((1, 0.0),)},
        {"layer_s": ((1, MAX_SECONDS + 1),)},
        {"layer_s": ((1, nan),)},
        {"head_s": inf},
        {"head_s": nan},
        {"head_s": -1.0},
        {"span": Span(0, MAX_LAYERS + 1)},
        {"weights": (b"short",)},
        {"weights": (bytes(16),) * (MAX_LAYERS + 4)},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_profile_beyond_a_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        Profile.decode(replace(PROFILE, **fields).encode())


def test_a_profile_at_every_limit_is_read() -> None:
    costs = (
        (1, MIN_SECONDS),
        *((MAX_ROWS - at, MAX_SECONDS) for at in range(MAX_COSTS - 2, -1, -1)),
    )
    manifest = (bytes(DIGEST_PART_BYTES),) * (MAX_LAYERS + ENDS)
    most = Profile(
        "n" * MAX_LABEL_BYTES,
        "v" * MAX_LABEL_BYTES,
        ("a" * MAX_ADDRESS_BYTES,) * MAX_ADDRESSES,
        MAX_BYTES,
        costs,
        MAX_SECONDS,
        MAX_BYTES,
        Span(MAX_LAYERS - 1, MAX_LAYERS),
        "m" * MAX_NAME_BYTES,
        manifest,
        bytes(MACHINE_BYTES),
        (ModelKey(bytes(8)),) * MAX_HELD,
        (bytes(KEY_TAG_BYTES),) * MAX_REVOKED,
        is_exact=True,
        shares=tuple(
            RingShare(GroupId(bytes([at]) * 9), MAX_BYTES >> 3, costs, MAX_SECONDS, "m", manifest)
            for at in range(MAX_RINGS - 1)
        ),
    )

    assert len(costs) == MAX_COSTS
    assert Profile.decode(most.encode()) == most


def test_a_state_at_every_limit_is_read() -> None:
    most = StateRecord(
        links=((A, MAX_ROUND_TRIP_US),) * MAX_MEMBERS,
        followed=bytes(MAX_PLAN_BYTES),
        obstacle="o" * MAX_OBSTACLE_BYTES,
        faulty=(A,) * MAX_MEMBERS,
        offers=(ModelOffer("m" * MAX_NAME_BYTES, "p" * MAX_LABEL_BYTES, MAX_CONTEXT),) * MAX_OFFERS,
        group=GroupId(bytes(9)),
        used=(ModelKey(bytes(8)),) * MAX_HELD,
        prepared=bytes(32),
        further=tuple(
            RingMembership(
                GroupId(bytes([at]) * 9),
                bytes(MAX_PLAN_BYTES),
                obstacle="o" * MAX_OBSTACLE_BYTES,
                prepared=bytes(32),
            )
            for at in range(1, MAX_RINGS)
        ),
    )

    assert StateRecord.decode(most.encode()) == most


@pytest.mark.parametrize("place", [-1, -2])
def test_an_invalid_flag_of_a_further_ring_is_refused(place: int) -> None:
    data = bytearray(replace(STATE, further=(RingMembership(ONE),)).encode())
    data[place] = 2

    with pytest.raises(PeerFault, match="2 for a flag"):
        StateRecord.decode(bytes(data))


def test_a_reversed_span_is_refused() -> None:
    data = bytearray(replace(PROFILE, span=Span(2, 4)).encode())
    data[1 + 24] = 5

    with pytest.raises(PeerFault, match="with 5 first layer; allowed are 0 to 4"):
        Profile.decode(bytes(data))


@pytest.mark.parametrize(
    "state",
    [
        StateRecord(links=((A, 1),) * (MAX_MEMBERS + 1)),
        StateRecord(links=((A, MAX_ROUND_TRIP_US + 1),)),
        StateRecord(followed=bytes(MAX_PLAN_BYTES + 1)),
        StateRecord(obstacle="o" * (MAX_OBSTACLE_BYTES + 1)),
        StateRecord(faulty=(A,) * (MAX_MEMBERS + 1)),
        StateRecord(faulty=(NodeId(b"short"),)),
        StateRecord(offers=(ModelOffer("m"),) * (MAX_OFFERS + 1)),
        StateRecord(offers=(ModelOffer("m" * (MAX_NAME_BYTES + 1)),)),
        StateRecord(offers=(ModelOffer("m", "p" * (MAX_LABEL_BYTES + 1)),)),
        StateRecord(offers=(ModelOffer("m", context=MAX_CONTEXT + 1),)),
    ],
    ids=[
        "links", "round trip", "plan", "obstacle", "faulty", "id", "offers", "model", "precision",
        "context",
    ],
)  # fmt: skip
def test_a_state_beyond_a_limit_is_refused(state: StateRecord) -> None:
    with pytest.raises(PeerFault):
        StateRecord.decode(state.encode())


@pytest.mark.parametrize(("place", "value"), [(2, 2), (3, 2)])
def test_an_invalid_flag_is_refused(place: int, value: int) -> None:
    data = bytearray(StateRecord().encode())
    data[place] = value

    with pytest.raises(PeerFault):
        StateRecord.decode(bytes(data))


def here(**links: str) -> dict[NodeId, StateRecord]:
    names = {"a": A, "b": B, "c": C, "d": D}
    return {
        names[name]: StateRecord(Lifecycle.SERVING, tuple((names[peer], 1) for peer in peers))
        for name, peers in links.items()
    }


def test_a_node_is_alive_by_itself() -> None:
    assert alive({}, A) == {A}


def test_nodes_connected_by_links_that_both_ends_list_are_alive() -> None:
    assert alive(here(a="b", b="ac", c="b", d=""), A) == {A, B, C}


def test_a_link_that_one_end_lists_does_not_count() -> None:
    assert alive(here(a="b", b="", c="a"), A) == {A}
    assert alive(here(a="bc", b="ac", c="b"), A) == {A, B, C}
    assert alive(here(a="bc", b="a", c="b"), A) == {A, B}


def test_a_departed_node_is_not_alive_and_connects_no_others() -> None:
    states = here(a="b", b="ac", c="b")
    states[B] = replace(states[B], lifecycle=Lifecycle.LEFT)

    assert alive(states, A) == {A}


def test_the_component_without_me_is_not_alive() -> None:
    assert alive(here(a="", b="c", c="b"), A) == {A}


@given(st.dictionaries(nodes, states, max_size=6), nodes)
def test_all_living_nodes_agree_on_who_is_alive(
    states: dict[NodeId, StateRecord], me: NodeId
) -> None:
    links = tuple((node, 1) for node in states)
    linked = {node: replace(state, links=links) for node, state in states.items()}

    for node in alive(linked, me) - {me}:
        assert alive(linked, node) - {me} == alive(linked, me) - {me}


def test_revoked_keys_are_bounded_and_of_one_size() -> None:
    most = replace(PROFILE, revoked=(b"k" * KEY_TAG_BYTES,) * MAX_REVOKED)
    assert Profile.decode(most.encode()) == most

    for wrong in ((*most.revoked, b"k" * KEY_TAG_BYTES), (b"short",)):
        with pytest.raises(PeerFault):
            Profile.decode(replace(PROFILE, revoked=wrong).encode())
