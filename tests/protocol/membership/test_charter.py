"""The charter: encoding, limits, and the merge of amendments."""

from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import NodeId, Quant
from meshllm.protocol.membership import charter as charter_module
from meshllm.protocol.membership.charter import (
    FOUNDER_TERMS,
    MAX_STEP,
    MAX_TERMS,
    MAX_VERSION,
    MAX_WIDTH,
    Amendments,
    Charter,
    Term,
    amend,
    differing,
    effective_terms,
    in_force,
    merge,
    overruled,
)
from meshllm.protocol.membership.records import MAX_BYTES, MAX_LAYERS, MAX_MEMBERS
from meshllm.protocol.planning.plan import MAX_NAME_BYTES, Ends
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.identity import short
from tests.builders.identities import CHARTER, SHAPE
from tests.property.mesh_strategies import TEXTS, amendments, charters

A, B, C = (NodeId(name * 32) for name in (b"a", b"b", b"c"))
AMENDED = replace(
    CHARTER,
    policy="throughput",
    members=3,
    sessions=2,
    ends=Ends.CLIENT,
    exclude=(A, B),
    prefer=(C,),
    shape=replace(SHAPE, context=99),
)


def terms(*found: tuple[str, int, str]) -> Amendments:
    return Amendments(tuple(Term(*each) for each in sorted(found)))


@given(charters())
def test_a_charter_round_trips(charter: Charter) -> None:
    assert Charter.decode(charter.encode()) == charter
    assert Charter.decode(charter.encode() + b"later") == charter


@given(amendments)
def test_amendments_round_trip(found: Amendments) -> None:
    assert Amendments.decode(found.encode()) == found
    assert Amendments.decode(found.encode() + b"later") == found


@given(st.binary())
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFault):
        Charter.decode(b"\x01" + data + b"\xff" * 99_999)
    with suppress(PeerFault):
        assert len(Amendments.decode(b"\x01" + data).terms) <= MAX_TERMS


@pytest.mark.parametrize("record", [CHARTER, terms(("members", 1, "2"))])
def test_a_missing_byte_is_refused(record: Charter | Amendments) -> None:
    with pytest.raises(PeerFault):
        record.decode(record.encode()[:-1])


def test_a_charter_of_a_version_beyond_the_limit_is_refused() -> None:
    with pytest.raises(PeerFault):
        Charter.decode(replace(CHARTER, version=MAX_VERSION + 1).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n" * (MAX_NAME_BYTES + 1)},
        {"layer_bytes": (MAX_BYTES + 1,) * 4},
        {"kv_bytes_per_token": (MAX_BYTES + 1,) * 4},
        {"layer_bytes": (1,) * (MAX_LAYERS + 1), "kv_bytes_per_token": (1,) * (MAX_LAYERS + 1)},
        {"embed_bytes": MAX_BYTES + 1},
        {"head_bytes": MAX_BYTES + 1},
        {"hidden_size": 0},
        {"hidden_size": MAX_WIDTH + 1},
        {"itemsize": 0},
        {"context": 0},
        {"context": MAX_POSITION + 1},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_shape_beyond_a_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        Charter.decode(replace(CHARTER, shape=replace(SHAPE, **fields)).encode())


def test_a_charter_without_layers_is_refused() -> None:
    data = bytearray(CHARTER.encode())
    data[10:12] = bytes(2)

    with pytest.raises(PeerFault, match="0 layers"):
        Charter.decode(bytes(data))


@pytest.mark.parametrize(
    "term",
    [
        ("members", 1, "65"),
        ("members", 1, "-1"),
        ("members", 1, "²"),
        ("members", 1, "9" * 5000),
        ("sessions", 1, "0"),
        ("sessions", 1, "4097"),
        ("context", 1, "0"),
        ("exclude", 1, "00" * 31),
        ("exclude", 1, "no hex"),
        ("prefer", 1, "00" * 32 * 65),
    ],
)
def test_an_invalid_term_is_refused(term: tuple[str, int, str]) -> None:
    with pytest.raises(PeerFault):
        Amendments.decode(terms(term).encode())


def test_duplicate_terms_and_too_many_terms_are_refused() -> None:
    twice = Amendments((Term("members", 1, "1"), Term("members", 2, "2")))
    many = terms(*((f"term {number}", 1, "") for number in range(MAX_TERMS + 1)))

    with pytest.raises(PeerFault, match="duplicate"):
        Amendments.decode(twice.encode())
    with pytest.raises(PeerFault, match="33 terms"):
        Amendments.decode(many.encode())


def test_unknown_names_are_an_obstacle() -> None:
    data = CHARTER.encode()
    float8 = Charter.decode(data.replace(b"\x07\0float32", b"\x06\0float8"))
    int2 = Charter.decode(data.replace(b"\x04\0none", b"\x04\0int2"))
    later = Charter.decode(b"\x02" + data[1:])

    assert (float8.dtype, int2.quant) == (DType.FLOAT32, Quant.NONE)
    assert [charter.obstacle for charter in (CHARTER, float8, int2, later)] == [
        "",
        "the mesh uses dtype `float8`, unknown to this version; update meshllm",
        "the mesh uses quantisation `int2`, unknown to this version; update meshllm",
        "the mesh uses charter version 2, unknown to this version; update meshllm",
    ]


@pytest.mark.parametrize(
    ("term", "what"),
    [
        (("policy", 1, "greenest"), "policy `greenest`"),
        (("ends", 1, "nowhere"), "ends `nowhere`"),
        (("tariff", 1, "night"), "term `tariff`"),
    ],
)
def test_unknown_terms_are_an_obstacle_that_names_their_author(
    term: tuple[str, int, str], what: str
) -> None:
    merged = merge(CHARTER, {A: terms(term, ("members", 1, "2"))})

    assert merged.obstacle == (
        f"node `{short(A)}` set {what}, unknown to this version; update meshllm"
    )
    assert replace(merged, unknown=()) == replace(CHARTER, members=2)


def test_every_term_can_be_changed_and_changed_back() -> None:
    first = amend(AMENDED, CHARTER, A, {})
    assert first is not None
    merged = merge(CHARTER, {A: first})
    second = amend(CHARTER, merged, B, {A: first})
    assert second is not None

    assert {term.name for term in first.terms} == TEXTS.keys() - FOUNDER_TERMS - {"tariff"}
    assert Amendments.decode(first.encode()) == first
    assert merged == AMENDED
    assert merge(CHARTER, {A: first, B: second}) == CHARTER
    assert amend(CHARTER, CHARTER, A, {A: first}) is None


def test_concurrent_changes_of_different_terms_are_both_kept() -> None:
    one = amend(replace(CHARTER, members=3), CHARTER, A, {})
    other = amend(replace(CHARTER, policy="throughput"), CHARTER, B, {})
    assert one is not None
    assert other is not None

    assert merge(CHARTER, {A: one, B: other}) == replace(CHARTER, members=3, policy="throughput")


def test_of_concurrent_changes_the_higher_author_wins_and_a_later_change_overrides_both() -> None:
    both = {A: terms(("members", 1, "2")), B: terms(("members", 1, "3"))}
    later = amend(replace(CHARTER, members=4), merge(CHARTER, both), A, both)
    assert later is not None

    assert merge(CHARTER, both).members == 3
    assert overruled(both) == {A}
    assert effective_terms(B, both) == both[B]
    assert later == Amendments((Term("members", 2, "4"),), version=2)
    assert merge(CHARTER, both | {A: later}).members == 4


def test_of_concurrent_changes_the_founder_wins() -> None:
    both = {A: terms(("members", 1, "2")), B: terms(("members", 1, "3"))}

    assert merge(CHARTER, both, founder=A).members == 2
    assert merge(CHARTER, both | {B: terms(("members", 2, "3"))}, founder=A).members == 3
    assert (effective_terms(A, both, A), overruled(both, A)) == (both[A], {B})


def test_only_the_founder_says_who_may_be_the_entry() -> None:
    wanted = replace(CHARTER, entries=(A,))
    said = amend(wanted, CHARTER, A, {})
    assert said is not None
    hostile = {B: terms(("entries", 2, B.hex()), ("members", 1, "3"))}

    assert merge(CHARTER, {A: said, **hostile}, founder=A) == replace(wanted, members=3)
    assert merge(CHARTER, hostile, founder=A).entries == ()
    assert effective_terms(B, hostile, A) == terms(("members", 1, "3"))


def test_a_term_that_others_would_refuse_is_left_out() -> None:
    crowd = tuple(NodeId(bytes([number]) * 32) for number in range(MAX_MEMBERS + 1))
    wanted = replace(CHARTER, exclude=crowd, members=3)

    said = amend(wanted, CHARTER, A, {})

    assert said == terms(("members", 1, "3"))
    assert differing(wanted, merge(CHARTER, {A: said})) == ["exclude"]
    assert amend(replace(CHARTER, exclude=crowd), CHARTER, A, {}) is None


def test_a_version_that_cannot_be_exceeded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charter_module, "MAX_TERM_VERSION", 7)
    before = {B: terms(("members", 6, "2"))}

    assert amend(replace(CHARTER, members=3), merge(CHARTER, before), A, before) is None


def test_a_node_keeps_its_other_terms_when_it_changes_one() -> None:
    before = {A: terms(("members", 1, "2"), ("tariff", 3, "night"))}
    after = amend(replace(CHARTER, members=2, sessions=5), merge(CHARTER, before), A, before)

    assert after is not None
    assert after.version == 2
    assert after.terms == (
        Term("members", 1, "2"),
        Term("sessions", 1, "5"),
        Term("tariff", 3, "night"),
    )


def test_every_version_can_be_exceeded() -> None:
    hostile = {
        B: terms(("members", 2**64 - 1, "64"), ("tariff", MAX_STEP, "night")),
        C: terms(("members", MAX_STEP, "5")),
    }
    now = merge(CHARTER, hostile)
    mine = amend(replace(CHARTER, members=2), now, A, hostile)
    assert mine is not None

    assert now.members == 5
    assert mine.newest == MAX_STEP + 1
    assert merge(CHARTER, hostile | {A: mine}).members == 2


@pytest.mark.property
@given(st.dictionaries(st.sampled_from([A, B, C]), amendments))
def test_the_order_of_amendments_does_not_matter(
    found: dict[NodeId, Amendments],
) -> None:
    merged = {merge(CHARTER, dict(order)) for order in permutations(found.items())}

    assert len(merged) == 1


@pytest.mark.property
@given(
    st.dictionaries(st.sampled_from([A, B, C]), amendments),
    st.sampled_from([A, B, C]),
    st.sampled_from([{"members": 7}, {"policy": "fastest"}, {"prefer": (A,)}, {"sessions": 10}]),
)
def test_a_change_takes_effect_over_any_earlier_amendments(
    found: dict[NodeId, Amendments], author: NodeId, change: dict[str, Any]
) -> None:
    now = merge(CHARTER, found)
    mine = amend(replace(now, **change), now, author, found)

    if mine is not None:
        for name, value in change.items():
            assert getattr(merge(CHARTER, found | {author: mine}), name) == value
        assert in_force(found | {author: mine}).keys() >= change.keys()
