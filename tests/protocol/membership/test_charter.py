"""The charter: encoding, limits, and the merge of amendments."""

from base64 import b85decode, b85encode
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import Digest, NodeId, Quant, short
from meshllm.protocol.binary import RECORD_VERSION
from meshllm.protocol.membership import charter as charter_module
from meshllm.protocol.membership.charter import (
    MAX_ALIAS_BYTES,
    MAX_KINDS,
    MAX_MODEL_BYTES,
    MAX_REPLICAS,
    MAX_SERVED,
    MAX_SESSIONS,
    MAX_STEP,
    MAX_TERMS,
    MAX_VERSION,
    MAX_WIDTH,
    Amendments,
    Charter,
    OverridableTerm,
    Term,
    amend,
    differing,
    effective_terms,
    in_force,
    merge,
    overruled,
    unique_name,
)
from meshllm.protocol.membership.gossip import MAX_ITEM_BYTES
from meshllm.protocol.membership.records import MAX_BYTES, MAX_LAYERS, MAX_MEMBERS
from meshllm.protocol.planning.plan import MAX_NAME_BYTES, Ends
from meshllm.protocol.planning.policies import POLICIES
from meshllm.protocol.session.codec import MAX_POSITION
from meshllm.protocol.session.messages import DType
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
    replicas=2,
    aliases=("small", "toy-1"),
)
# The terms of the mesh hold for all of its models.
OF_ALL: dict[str, Any] = {"sessions": 2, "ends": Ends.CLIENT, "exclude": (A, B), "prefer": (C,)}


def model(number: int, **changes: Any) -> Charter:
    """A further model, with layers of two kinds."""
    layers = 100, 200, 100, 200
    shape = replace(SHAPE, name=f"m{number}", layer_bytes=layers, context=7, workspace_bytes=9)
    digest = Digest(bytes([number]) * 32)
    return replace(Charter(1, shape, DType.BFLOAT16, digest), **changes)


def serving(*models: Charter, base: Charter = CHARTER) -> Charter:
    return replace(base, models=tuple(sorted(models, key=lambda each: each.key)))


def term_of(charter: Charter, version: int = 1) -> tuple[str, int, str]:
    """Return the term by which a mesh serves a model."""
    said = amend(serving(charter), CHARTER, A, {})
    assert said is not None
    return said.terms[0].name, version, said.terms[0].text


def terms(*found: tuple[str, int, str]) -> Amendments:
    return Amendments(tuple(Term(*each) for each in sorted(found)))


@given(charters())
def test_a_charter_round_trips(charter: Charter) -> None:
    assert Charter.decode(charter.encode()) == charter
    assert Charter.decode(charter.encode() + b"later") == charter


def test_a_charter_of_an_earlier_version_has_no_workspace() -> None:
    charter = replace(CHARTER, shape=replace(SHAPE, workspace_bytes=77))

    assert Charter.decode(charter.encode()) == charter
    assert Charter.decode(charter.encode()[:-8]) == CHARTER


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
        {"workspace_bytes": MAX_BYTES + 1},
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
        ("aliases", 1, "a,b,c,d,e"),
        ("aliases", 1, "a,,b"),
        ("aliases", 1, "a" * 65),
        ("replicas", 1, "0"),
        ("replicas", 1, "17"),
        (f"model.{'0' * 16}", 1, "no base 85 \\"),
        (f"model.{'0' * 16}", 1, b85encode(b"\x01garbage").decode()),
        (f"model.{'0' * 16}", 1, "0" * (MAX_MODEL_BYTES + 5)),
        (f"model.{'0' * 16}", 1, term_of(model(1))[2]),
    ],
)
def test_an_invalid_term_is_refused(term: tuple[str, int, str]) -> None:
    with pytest.raises(PeerFault):
        Amendments.decode(terms(term).encode())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("members", ["0", "1", f"{MAX_MEMBERS}"]),
        ("sessions", ["1", f"{MAX_SESSIONS}"]),
        ("context", ["1", f"{MAX_POSITION}"]),
        ("replicas", ["1", f"{MAX_REPLICAS}"]),
        ("exclude", ["", "00" * 32 * MAX_MEMBERS]),
        ("aliases", ["", "a", ",".join(letter * MAX_ALIAS_BYTES for letter in "abcd")]),
    ],
)
def test_a_term_at_its_limits_is_accepted(name: str, values: list[str]) -> None:
    for value in values:
        said = terms((name, 1, value))
        assert Amendments.decode(said.encode()) == said


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
def test_unknown_terms_of_the_founder_are_an_obstacle_that_names_it(
    term: tuple[str, int, str], what: str
) -> None:
    said = terms(term, ("members", 1, "2"))
    merged = merge(CHARTER, {A: said}, founder=A)

    by_member = replace(CHARTER, members=2, yields=(OverridableTerm("members", A, None),))
    assert merge(CHARTER, {A: said}, founder=B) == by_member
    assert merged.obstacle == (
        f"node `{short(A)}` set {what}, unknown to this version; update meshllm"
    )
    assert replace(merged, unknown=()) == replace(CHARTER, members=2)


def test_every_term_can_be_changed_and_changed_back() -> None:
    first = amend(AMENDED, CHARTER, A, {})
    assert first is not None
    merged = merge(CHARTER, {A: first}, A)
    second = amend(CHARTER, merged, A, {A: first}, A)
    assert second is not None

    assert {term.name for term in first.terms} == TEXTS.keys() - {"entries", "tariff"}
    assert Amendments.decode(first.encode()) == first
    assert merged == AMENDED
    assert merge(CHARTER, {A: second}, A) == CHARTER
    assert amend(CHARTER, CHARTER, A, {A: first}) is None


def test_models_are_served_with_the_terms_of_the_mesh_and_stopped() -> None:
    one = model(1, policy="throughput", members=3, quant=Quant.INT8, aliases=("x", "y"))
    other = model(2, replicas=4)
    wanted = serving(one, other, base=AMENDED)

    said = amend(wanted, CHARTER, A, {})
    assert said is not None
    merged = merge(CHARTER, {A: Amendments.decode(said.encode())}, A)

    assert set(merged.models) == {replace(each, **OF_ALL) for each in (one, other)}
    assert merged.served == (AMENDED, *merged.models)
    stopped = amend(replace(merged, models=merged.models[:1]), merged, B, {A: said}, A)
    assert stopped is not None
    assert merge(CHARTER, {A: said, B: stopped}, A) == replace(merged, models=merged.models[:1])
    assert [term.text for term in stopped.terms] == [""]
    assert differing(merged, CHARTER) == [*(term.name for term in said.terms)]


def test_the_precision_of_a_model_is_its_quantisation_or_data_type() -> None:
    assert CHARTER.precision == "float32"
    assert replace(CHARTER, quant=Quant.INT8).precision == "int8"


@pytest.mark.parametrize(
    ("terms", "readers"),
    [
        ({}, {A, B}),
        ({"entries": (A,)}, {A}),
        ({"ends": Ends.CLIENT}, set()),
        ({"entries": (A,), "ends": Ends.CLIENT}, set()),
    ],
    ids=["all", "entries", "client", "both"],
)
def test_a_provider_reads_prompts_where_an_entry_may(
    terms: dict[str, Any], readers: set[NodeId]
) -> None:
    charter = replace(CHARTER, **terms)

    assert {node for node in (A, B) if charter.may_read(node)} == readers


def test_a_model_is_found_by_name_alias_and_prefix_in_this_order() -> None:
    first, second = model(1, aliases=("m2", "other")), model(2)
    charter = serving(first, second)

    assert charter.find("") == charter.find("toy") == CHARTER
    assert charter.find("m2") == second  # not the alias of the first
    assert charter.find("other") == first
    assert charter.find(second.key.hex()[:6]) == second
    assert charter.find(second.key.hex()[:5]) is None
    assert charter.find("m3") is None


def test_a_name_finds_the_quantisation_of_the_first_model_then_the_most_precise() -> None:
    first = replace(CHARTER, quant=Quant.INT4)
    stored, small = (replace(model(1), quant=each) for each in (Quant.NONE, Quant.INT8))
    own = replace(first, quant=Quant.INT8, models=())
    charter = serving(small, stored, own, base=first)

    for name, found in {
        "toy": first, "toy@int4": first, "toy@int8": own, "toy@bfloat16": None,
        "m1": stored, "m1@bfloat16": stored, "m1@int8": small,
    }.items():  # fmt: skip
        known = charter.find(name)
        assert (known and known.key) == (found and found.key)
    assert charter.find("m1", Quant.INT8) == small
    assert charter.find("m1", Quant.INT4) is None
    assert [unique_name(each, charter.served) for each in (first, own, stored, small)] == [
        "toy", "toy@int8", "m1", "m1@int8",
    ]  # fmt: skip
    assert unique_name(small, serving(small).served) == unique_name(small, ()) == "m1"


def test_a_stop_is_forgotten_when_nobody_else_serves_the_model() -> None:
    served = amend(serving(model(1)), CHARTER, A, {})
    assert served is not None
    found = {A: served}

    stopped = amend(CHARTER, merge(CHARTER, found), A, found)

    assert stopped == Amendments((), version=2)
    assert merge(CHARTER, {A: stopped}).models == ()


def test_a_mesh_serves_no_more_models_than_all_can_agree_on() -> None:
    most = [model(number) for number in range(1, MAX_SERVED + 3)]
    both = {A: terms(*map(term_of, most[:9])), B: terms(*map(term_of, most[9:]))}

    kept = merge(CHARTER, both).models

    assert kept == tuple(sorted(most, key=lambda each: each.key)[: MAX_SERVED - 1])
    assert merge(most[0], {A: terms(term_of(most[0]))}).models == ()  # the first one


def test_no_more_models_are_read_than_are_served() -> None:
    said = {
        NodeId(bytes([at]) * 32): terms(*(term_of(model(8 * at + part)) for part in range(8)))
        for at in range(1, 9)
    }
    kept = merge(CHARTER, said, A).models  # reads what is unknown of each term, once

    with patch.object(charter_module, "_read_model", wraps=charter_module._read_model) as read:
        again = merge(CHARTER, said, A).models

    assert len(kept) == MAX_SERVED - 1
    assert again == kept
    assert read.call_count == MAX_SERVED - 1


def test_all_models_of_one_author_fit_into_an_item() -> None:
    crowd = tuple(NodeId(bytes([number]) * 32) for number in range(MAX_MEMBERS))
    layers = 126  # of the largest published model, all of different sizes but for a few
    shape = replace(
        SHAPE,
        layer_bytes=tuple(100 + at % 20 for at in range(layers)),
        kv_bytes_per_token=(9,) * layers,
    )
    models = [
        model(at, shape=replace(shape, name=f"{at:02}" + "n" * 200), aliases=("a" * 64, "b" * 64))
        for at in range(1, MAX_SERVED)
    ]
    wanted = replace(serving(*models), exclude=crowd, prefer=crowd, entries=crowd)

    said = amend(wanted, CHARTER, A, {})

    assert said is not None
    assert differing(wanted, merge(CHARTER, {A: said}, A)) == []
    assert len(merge(CHARTER, {A: said}).models) == MAX_SERVED - 1
    assert len(said.encode()) < MAX_ITEM_BYTES - 1024


def test_a_model_with_the_most_kinds_of_layers_is_described() -> None:
    layers, caches = tuple(range(1, MAX_KINDS + 1)), (9,) * MAX_KINDS
    wanted = model(1, shape=replace(SHAPE, layer_bytes=layers, kv_bytes_per_token=caches))

    said = amend(serving(wanted), CHARTER, A, {})

    assert said is not None
    assert merge(CHARTER, {A: Amendments.decode(said.encode())}).models == (wanted,)


def test_a_model_that_is_too_large_to_describe_is_left_out() -> None:
    shape = replace(
        SHAPE, layer_bytes=tuple(range(1, MAX_KINDS + 2)), kv_bytes_per_token=(9,) * (MAX_KINDS + 1)
    )
    wanted = serving(model(1, shape=shape))

    assert amend(wanted, CHARTER, A, {}) is None
    assert len(differing(wanted, CHARTER)) == 1


def test_models_that_others_have_stopped_do_not_use_up_the_terms_of_a_node() -> None:
    served = terms(*(term_of(model(number)) for number in range(MAX_TERMS)))
    stopped = terms(
        *(
            (name, version + 1, "")
            for name, version, _ in map(term_of, map(model, range(MAX_TERMS)))
        )
    )
    found = {A: served, B: stopped}

    said = amend(replace(CHARTER, members=2), merge(CHARTER, found), A, found)

    assert said is not None
    assert [each.name for each in said.terms] == ["members"]
    assert merge(CHARTER, {A: said, B: stopped}).members == 2


def test_a_node_does_not_set_more_terms_than_others_accept() -> None:
    found = {A: terms(*((f"tariff {number}", 1, "") for number in range(MAX_TERMS)))}
    # Terms of later versions that say nothing are not needed.
    assert amend(serving(model(1)), merge(CHARTER, found), A, found) is not None

    for count, is_said in ((MAX_TERMS - 1, True), (MAX_TERMS, False)):
        found = {A: terms(*((f"tariff {number}", 1, "x") for number in range(count)))}
        said = amend(serving(model(1)), merge(CHARTER, found), A, found)
        assert (said is not None) is is_said


@pytest.mark.parametrize("word", ["bfloat16", "none", "auto"])
def test_a_model_with_unknown_names_is_an_obstacle(word: str) -> None:
    name, version, text = term_of(model(1))
    data = b85decode(text).replace(word.encode(), b"x" * len(word))

    merged = merge(CHARTER, {A: terms((name, version, b85encode(data).decode()))}, founder=A)

    assert f"a model with {_WHAT[word]} `{'x' * len(word)}`" in merged.obstacle
    assert merged.models == ()


FIRST_WORDS = {
    "terms": "aliases context ends entries exclude members policy prefer replicas sessions",
    "policies": "auto fastest proportional throughput",
    "quantisations": "int4 int8 none",
    "dtypes": "bfloat16 float16 float32",
    "ends": "client entry",
    "record": "1",
}


def test_no_word_was_added_that_earlier_versions_believe_of_the_founder_only() -> None:
    """A new one must not count from other members, see `charter`; then it belongs here, too."""
    words = {
        "terms": charter_module._TERMS,
        "policies": POLICIES,
        "quantisations": charter_module._QUANTS,
        "dtypes": charter_module._DTYPES,
        "ends": charter_module._ENDS,
        "record": [str(RECORD_VERSION)],
    }

    assert {kind: " ".join(sorted(known)) for kind, known in words.items()} == FIRST_WORDS


def test_a_value_of_a_later_version_hides_none_of_this_one() -> None:
    """Any member could stop the rings with it."""
    said = {A: terms(("policy", 1, "throughput")), B: terms(("policy", 9, "greenest"))}

    changed = amend(replace(CHARTER, policy="latency"), CHARTER, A, said, founder=C)

    assert merge(CHARTER, said, founder=C).policy == "throughput"
    assert changed == Amendments((Term("policy", 2, "latency"),), version=2)


def test_models_share_the_obstacle_of_the_mesh() -> None:
    merged = merge(CHARTER, {A: terms(term_of(model(1)), ("tariff", 1, "night"))}, founder=A)

    assert merged.models[0].obstacle == merged.obstacle != ""


@pytest.mark.parametrize("name", ["model.xyz", f"model.{'A' * 16}", "0" * 16])
def test_another_form_of_a_term_of_models_is_unknown(name: str) -> None:
    found = Amendments.decode(terms((name, 1, "later")).encode())

    assert f"term `{name}`" in merge(CHARTER, {A: found}, founder=A).obstacle


def test_a_key_with_each_hexadecimal_digit_is_one() -> None:
    name = "model.0123456789abcdef"
    found = Amendments.decode(terms((name, 1, "")).encode())

    assert merge(CHARTER, {A: found}, founder=A).obstacle == ""


_WHAT = {"bfloat16": "dtype", "none": "quantisation", "auto": "policy"}


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

    assert merge(CHARTER, {A: said, **hostile}, founder=A).entries == (A,)
    assert merge(CHARTER, hostile, founder=A).entries == ()
    assert effective_terms(B, hostile, A) == terms(("members", 1, "3"))


def test_exclusions_and_members_that_a_member_sets_yield_to_the_founders() -> None:
    said = {
        A: terms(("exclude", 1, A.hex()), ("members", 1, "2")),
        B: terms(("exclude", 2, (A + B + C).hex()), ("members", 2, "1")),
    }

    by_member, by_founder = merge(CHARTER, said, founder=A), merge(CHARTER, said, founder=B)

    assert by_member.exclude == (A, B, C)
    assert [(each.name, each.author) for each in by_member.yields] == [
        ("exclude", B),
        ("members", B),
    ]
    assert by_member.eased == replace(CHARTER, exclude=(A,), members=2)
    assert by_founder.eased == by_founder == replace(CHARTER, exclude=(A, B, C), members=1)
    assert merge(CHARTER, {B: said[B]}, founder=A).eased == CHARTER


def test_a_member_sets_a_shorter_context_than_the_founder_but_no_longer_one() -> None:
    def context(*said: tuple[NodeId, int], founder: NodeId | None = A) -> int:
        at = {node: terms(("context", 1 + at, f"{n}")) for at, (node, n) in enumerate(said)}
        return merge(CHARTER, at, founder).shape.context

    own = CHARTER.shape.context
    assert context((B, own + 1)) == context((B, MAX_POSITION)) == own
    assert context((B, own - 1)) == own - 1
    assert context((A, own + 9)) == context((A, own + 9), (B, own + 99)) == own + 9
    assert context((A, own + 9), (B, own + 5)) == own + 5
    assert context((B, own + 1), founder=None) == own + 1


def test_exclusions_yield_in_all_models_and_members_in_the_first() -> None:
    said = {B: terms(("exclude", 1, A.hex()), ("members", 1, "1"), term_of(model(1, members=2)))}

    merged = merge(CHARTER, said, founder=A)

    assert merged.eased.served[0].members is None
    assert merged.models[0].eased == replace(merged.models[0], exclude=(), yields=())


@pytest.mark.parametrize("term", [("ends", 1, "client"), ("sessions", 1, "4096")])
def test_a_member_sets_no_term_with_which_no_ring_fits(term: tuple[str, int, str]) -> None:
    assert merge(CHARTER, {B: terms(term)}, founder=A) == CHARTER
    assert merge(CHARTER, {B: terms(term)}, founder=B) != CHARTER


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
    st.sampled_from([{"members": 7}, {"policy": "fastest"}, {"prefer": (A,)}, {"replicas": 10}]),
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


def test_the_founder_is_heard_after_a_member_with_a_high_version_was_removed() -> None:
    said = {A: terms(("context", MAX_STEP + 1, "2048"))}

    assert in_force(said, A)["context"][0] == A
    assert "context" not in in_force(said, B)
