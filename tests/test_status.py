"""The status keeps its JSON names, and tolerates other versions."""

import json
from dataclasses import replace
from typing import Any

import pytest

from meshllm.errors import PeerFault
from meshllm.names import Span
from meshllm.status import (
    Change,
    CostTable,
    Members,
    MeshStatus,
    ModelStatus,
    Named,
    NetworkStatus,
    NodeState,
    Removed,
    RevokedKeys,
    RingState,
    Unplaced,
    find_model,
    from_json,
    to_json,
)
from tests.builders.status import RINGS, member, node_id, status_of, with_node, with_ring

NETWORK = NetworkStatus("none", "no NAT", ("192.0.2.1:7700",), (("192.0.2.9:1", "registered"),))
FULL = with_ring(
    replace(
        status_of(2),
        networks=(NETWORK,),
        warnings=("no room",),
        rings=(replace(RINGS[0], status=status_of(2).ring), RINGS[1]),
    ),
    standbys=(Unplaced("abc", "barn", "its link adds 40 ms"),),
    refused=(Unplaced("def", "loft", "layer 3 differs"),),
)

RING = {"state", "reason", "epoch", "digest", "policy", "entry", "stages", "predicted", "measured",
        "advice", "standbys", "refused", "history", "members", "exclude", "execution"}  # fmt: skip
NODE = {"node", "short", "name", "role", "state", "reason", "addresses", "memory_bytes", "layers",
        "rank", "self", "incarnation", "version", "link", "execution", "costs"}  # fmt: skip
LINK = {"round_trip_ms", "path", "path_reason", "address", "bytes_sent", "bytes_received",
        "heard_s", "clock_s"}  # fmt: skip
MODEL = {"name", "layers", "hidden_size", "dtype", "quant", "context", "fingerprint",
         "providers", "precision", "aliases", "key", "replicas", "epoch", "exact",
         "rings", "offers", "beside", "shared"}  # fmt: skip
STATUS = {"mesh", "node", "name", "version", "model", "ring", "nodes", "sessions", "listening",
          "networks", "since_s", "memory", "warnings", "provided", "rings",
          "models", "client", "unanswered"}  # fmt: skip
SERVED = {"model", "replica", "state", "reason", "own", "epoch", "entry", "stages", "standbys",
          "lacks_bytes", "status"}  # fmt: skip


def sent(value: object) -> Any:
    return json.loads(json.dumps(to_json(value)))


@pytest.mark.parametrize(
    "value",
    [
        FULL,
        with_node(status_of(1, measured=False), 0, layers=None, rank=None),
        with_node(FULL, 0, costs=CostTable("m", ((1, 2.5), (8, 4.0)), 1.5)),
        Members((member(0), member(1, role="client", state="linked"))),
        Removed(node_id(1), "desk", (Named(node_id(2), "laptop"),)),
        RevokedKeys(("01" * 16,)),
        Change("changed", RingState.FORMING, 3, "4f2a", {node_id(0): NodeState.LOADING}),
    ],
)
def test_the_status_round_trips(value: object) -> None:
    assert from_json(type(value), {"schema": 1, **sent(value)}) == value


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (ModelStatus("m", 2, 8, "bfloat16", "none"), "bfloat16"),
        (ModelStatus("m", 2, 8, "bfloat16", ""), "bfloat16"),
        (ModelStatus("m", 2, 8, "bfloat16", "int4"), "int4"),
        (ModelStatus("m", 0, 0, "", "", providers=("desk",), precision="fp16"), "fp16"),
        (ModelStatus("m", 0, 0, "", "", providers=("desk",)), ""),
    ],
)
def test_a_model_has_the_precision_of_its_weights(model: ModelStatus, precision: str) -> None:
    assert model.weight_precision == precision


def test_the_names_in_json_are_stable() -> None:
    status = sent(FULL)

    assert status.keys() == STATUS
    assert status["ring"].keys() == RING
    assert all(each.keys() == NODE for each in status["nodes"])
    assert status["nodes"][1]["link"].keys() == LINK
    assert [each["self"] for each in status["nodes"]] == [True, False]
    assert status["model"].keys() == MODEL
    assert all(each.keys() == SERVED for each in status["rings"])
    assert [each["status"] and each["status"].keys() for each in status["rings"]] == [RING, None]
    assert status["sessions"].keys() == {
        "active", "waiting", "served", "failed", "tokens", "losses", "recomputed",
    }  # fmt: skip
    assert status["ring"]["stages"][1] == {
        "rank": 1, "node": node_id(1), "name": "desk", "layers": "10:20", "room_tokens": None,
    }  # fmt: skip
    assert status["ring"]["predicted"].keys() == {"ms_per_token", "ttft_ms", "head_ms", "hops"}
    assert status["ring"]["predicted"]["hops"][0].keys() == {"rank", "compute_ms", "wire_ms"}
    assert status["ring"]["measured"].keys() == {"ms_per_token", "ttft_ms", "tokens", "hops"}
    assert status["ring"]["measured"]["hops"][0].keys() == {
        "rank", "node", "layers", "compute_ms", "serialise_ms", "queue_ms", "wire_ms",
        "bytes_per_token",
    }  # fmt: skip
    assert status["networks"][0] == {
        "nat": "none", "line": "no NAT", "observed": ["192.0.2.1:7700"],
        "relays": [["192.0.2.9:1", "registered"]],
    }  # fmt: skip
    assert sent(member(0)).keys() == {"node", "short", "name", "role", "state", "self", "inviters"}


def test_a_model_is_found_by_name_alias_and_prefix_in_this_order() -> None:
    one = ModelStatus("one", 1, 1, "", "", aliases=("two", "uno"), key="0123456789abcdef")
    two = ModelStatus("two", 1, 1, "", "", key="fedcba9876543210")
    provided = ModelStatus("fox", 0, 0, "", "")
    models = (one, two, provided)

    assert [find_model(models, name) for name in ("one", "two", "uno", "fox")] == [
        one, two, one, provided,
    ]  # fmt: skip
    assert [find_model(models, name) for name in ("012345", "fedcba98", "01234", "cat", "")] == [
        one, two, None, None, None,
    ]  # fmt: skip


def test_a_quantisation_is_found_by_its_precise_name_whether_or_not_another_one_is_served() -> None:
    stored = ModelStatus("fox", 1, 1, "bfloat16", "none", key="0123456789abcdef")
    small = ModelStatus("fox@int8", 1, 1, "bfloat16", "int8", key="fedcba98", shared="fox")
    alone = replace(small, name="fox", shared="")
    unknown, folder = (
        ModelStatus("fox", 0, 0, "", ""),
        ModelStatus("/owl@int8", 1, 1, "", "int8", key="9"),
    )

    assert [find_model((stored, small), name) for name in ("fox", "fox@bfloat16", "fox@int8")] == [
        stored, stored, small,
    ]  # fmt: skip
    assert [find_model((alone,), name) for name in ("fox", "fox@int8", "fox@bfloat16")] == [
        alone, alone, None,
    ]  # fmt: skip
    assert [each.shared_name for each in (stored, small, alone, unknown)] == ["fox"] * 4
    assert find_model((unknown,), "fox@") is None
    assert (folder.shared_name, folder.precise_name) == ("/owl@int8", "/owl@int8@int8")


def test_fields_of_a_newer_node_are_ignored() -> None:
    status = sent(FULL)
    status["ring"]["stages"][0]["heat_c"] = 70
    status["nodes"][1]["state"] = "dancing"

    assert from_json(MeshStatus, status) == with_node(FULL, 1, state=NodeState.STANDBY)


def test_fields_missing_in_an_older_node_have_a_default() -> None:
    status = sent(FULL)
    del status["warnings"], status["ring"]["stages"][0]["room_tokens"]

    assert from_json(MeshStatus, status) == replace(FULL, warnings=())


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("ring",), None, "`ring` is null, not an object"),
        (("ring", "state"), 1, "`ring.state` is a whole number, not text"),
        (("ring", "stages"), [{}], r"`ring.stages\[0\].rank` is missing"),
        (("nodes",), {}, "`nodes` is an object, not a list"),
        (("model", "layers"), "28", "`model.layers` is text, not a whole number"),
        (("since_s",), "long", "`since_s` is text, not a number"),
        (("networks",), [{**to_json(NETWORK), "relays": [["a"]]}], "has 1 items, not 2"),
        (("schema",), 2, "reports status schema 2"),
    ],
)
def test_invalid_fields_are_named(place: tuple[str, ...], value: object, message: str) -> None:
    status = at = sent(FULL)
    *way, last = place
    for name in way:
        at = at[name]
    at[last] = value

    with pytest.raises(PeerFault, match=message):
        from_json(MeshStatus, status)


def test_a_report_must_be_an_object() -> None:
    with pytest.raises(PeerFault, match="a list, not an object"):
        from_json(MeshStatus, [])


def test_a_stage_names_its_layers() -> None:
    assert [stage.layers for stage in from_json(MeshStatus, sent(FULL)).ring.stages] == [
        Span(0, 10), Span(10, 20),
    ]  # fmt: skip
