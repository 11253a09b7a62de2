from dataclasses import replace
from math import inf, nan

import pytest

from meshllm.errors import PeerFault, UserError
from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import (
    MAX_EPOCH,
    MAX_NAME_BYTES,
    MAX_SECONDS,
    Ends,
    Links,
    LinkSpeed,
    ModelSizes,
    Offer,
    Plan,
    PlanStage,
    Standby,
)
from meshllm.protocol.session.messages import MAX_RANKS
from tests.builders.offers import A, B, C, D, model, node

PLAN = Plan(
    7, "tiny", Ends.ENTRY, (PlanStage(B, Span(0, 3)), PlanStage(A, Span(3, 4))), (Standby(C, ""),)
)


def test_the_bytes_of_a_plan_are_pinned() -> None:
    # Nodes of different versions compare digests: a change here is a change of the protocol.
    encoded = PLAN.encode()

    assert encoded == (
        b"meshllm plan 1\n"
        + b"\x07\0\0\0\0\0\0\0" + b"\0" + b"\x04\0" + b"\x02\0" + b"\x01\0" + b"tiny"
        + b"b" * 32 + b"\0\0\0\0" + b"\x03\0\0\0"
        + b"a" * 32 + b"\x03\0\0\0" + b"\x04\0\0\0"
        + b"c" * 32
    )  # fmt: skip
    assert PLAN.digest.hex() == "deeae6e64519538322588e0872213c1d1df9de1cdc99ea99761fd34450ca8dcf"


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, epoch=8),
        replace(PLAN, model="tiny2"),
        replace(PLAN, stages=(PlanStage(A, Span(0, 3)), PlanStage(B, Span(3, 4)))),
        replace(PLAN, stages=(PlanStage(B, Span(0, 2)), PlanStage(A, Span(2, 4)))),
        replace(PLAN, standbys=()),
        replace(PLAN, standbys=(Standby(D, ""),)),
    ],
)
def test_any_difference_changes_the_digest(other: Plan) -> None:
    assert other.digest != PLAN.digest


def test_the_reason_of_a_standby_is_not_hashed() -> None:
    other = replace(PLAN, standbys=(Standby(C, "it is slow"),))

    assert (other, other.digest) == (PLAN, PLAN.digest)


def test_the_holder_of_the_ends_changes_the_digest() -> None:
    stages = (PlanStage(C, Span(0, 0)), PlanStage(B, Span(0, 4)))
    client = Plan(7, "tiny", Ends.CLIENT, stages)

    assert client.layers == 4
    assert client.encode()[len(b"meshllm plan 1\n") + 8] == 1


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        replace(PLAN, epoch=MAX_EPOCH, standbys=()),
        Plan(1, "", Ends.CLIENT, (PlanStage(C, Span(0, 0)), PlanStage(B, Span(0, 4)))),
    ],
)
def test_a_plan_comes_back_from_its_bytes(plan: Plan) -> None:
    assert Plan.decode(plan.encode()) == plan


HEAD = len(b"meshllm plan 1\n")
BYTES = PLAN.encode()


@pytest.mark.parametrize(
    "data",
    [
        *(BYTES[:length] for length in range(len(BYTES))),
        BYTES + b"\0",
        b"M" + BYTES[1:],
        replace(PLAN, epoch=MAX_EPOCH + 1).encode(),
        BYTES[: HEAD + 8] + b"\2" + BYTES[HEAD + 9 :],  # neither entry nor client
        BYTES.replace(b"tiny", b"\xff\xff\xff\xff"),
        BYTES.replace(b"c" * 32, b"a" * 32),  # a node twice
        BYTES.replace(b"\x04\0\0\0", b"\x02\0\0\0"),  # a span that ends before it begins
    ],
)
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerFault):
        Plan.decode(data)


def test_rank_is_the_place_in_the_ring() -> None:
    assert [PLAN.rank(at) for at in (B, A, C)] == [0, 1, None]


@pytest.mark.parametrize(
    ("ends", "stages"),
    [
        (Ends.ENTRY, []),
        (Ends.CLIENT, [PlanStage(A, Span(0, 0))]),
        (Ends.ENTRY, [PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 4))]),
        (Ends.ENTRY, [PlanStage(A, Span(1, 4))]),
        (Ends.ENTRY, [PlanStage(A, Span(0, 2)), PlanStage(B, Span(1, 4))]),
        (Ends.ENTRY, [PlanStage(A, Span(0, 2)), PlanStage(B, Span(2, 2))]),
        (Ends.ENTRY, [PlanStage(A, Span(0, 2)), PlanStage(A, Span(2, 4))]),
        (Ends.ENTRY, [PlanStage(A, Span(0, 2)), PlanStage(C, Span(2, 4))]),
        (Ends.CLIENT, [PlanStage(A, Span(0, 1)), PlanStage(B, Span(0, 4))]),
        (Ends.ENTRY, [PlanStage(node(at), Span(at, at + 1)) for at in range(MAX_RANKS + 1)]),
    ],
)
def test_spans_follow_each_other_over_distinct_nodes(ends: Ends, stages: list[PlanStage]) -> None:
    with pytest.raises(UserError):
        Plan(1, "tiny", ends, tuple(stages), (Standby(C, ""),))


def test_a_plan_at_its_limits_comes_back_from_its_bytes() -> None:
    stages = tuple(PlanStage(node(at), Span(at, at + 1)) for at in range(MAX_RANKS))
    most = Plan(MAX_EPOCH, "m" * MAX_NAME_BYTES, Ends.ENTRY, stages, (Standby(C, ""),))

    assert Plan.decode(most.encode()) == most
    assert most.layers == MAX_RANKS


@pytest.mark.parametrize("seconds", [0.0, MAX_SECONDS])
def test_times_at_their_limits_are_accepted(seconds: float) -> None:
    assert LinkSpeed(seconds).seconds(9) == seconds
    assert Offer(A, 1, ((1, MAX_SECONDS),), seconds).head_s == seconds


def test_a_long_name_is_refused() -> None:
    with pytest.raises(UserError, match="at most 512 bytes"):
        replace(PLAN, model="m" * 513)


def test_layer_time_is_interpolated_between_measured_rows() -> None:
    offer = Offer(A, 1, ((2, 0.010), (4, 0.014)), 0.0)

    assert [offer.layer_seconds(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx(
        [0.010, 0.010, 0.012, 0.014, 0.028]
    )


@pytest.mark.parametrize("table", [(), ((0, 1.0),), ((2, 1.0), (2, 1.0)), ((1, 0.0),), ((1, nan),)])
def test_a_cost_table_needs_rising_rows_and_finite_times(
    table: tuple[tuple[int, float], ...],
) -> None:
    with pytest.raises(UserError):
        Offer(A, 1, table, 0.0)


@pytest.mark.parametrize("head_s", [-1.0, inf, 3601.0])
def test_the_time_of_the_head_is_bounded(head_s: float) -> None:
    with pytest.raises(UserError, match="allowed are 0 to 3600 s"):
        Offer(A, 1, ((1, 0.01),), head_s)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s"), [(-1.0, 1.0), (inf, 1.0), (0.0, 0.0), (0.0, nan)]
)
def test_invalid_latency_and_bandwidth_are_refused(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(UserError):
        LinkSpeed(latency_s, bytes_per_s)


def test_a_wire_takes_its_latency_and_the_time_of_the_bytes() -> None:
    assert LinkSpeed(0.5, 100.0).seconds(50) == 1.0


def test_wires_are_symmetric_unless_both_are_given() -> None:
    there, back, other = LinkSpeed(1.0), LinkSpeed(2.0), LinkSpeed(3.0)
    links = Links({(A, B): there, (C, D): there, (D, C): back}, other)

    pairs: list[tuple[NodeId, NodeId]] = [(A, B), (B, A), (C, D), (D, C), (A, D)]
    assert [links.between(*pair) for pair in pairs] == [there, there, there, back, other]


def test_a_tied_head_is_held_once_and_read_whole() -> None:
    tied = replace(model(), embed_bytes=300, head_bytes=5)
    untied = replace(tied, tied=False)

    assert (tied.ends_bytes, untied.ends_bytes) == (305, 305)
    assert (tied.head_read_bytes, untied.head_read_bytes) == (305, 5)


@pytest.mark.parametrize(("layer_bytes", "kv"), [((), ()), ((80,), (1, 1)), ((80, 0), (1, 1))])
def test_a_model_has_layers_with_weights(layer_bytes: tuple[int, ...], kv: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="`tiny` has"):
        ModelSizes("tiny", layer_bytes, kv, 0, 0, True, 4, 2, 10)
