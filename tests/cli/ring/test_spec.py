from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.spec import (
    FREE,
    LAN_S,
    MAX_NODES,
    MEASURED,
    MEMORY_BYTES_PER_S,
    ROWS,
    parse_spec,
    read_spec,
    running_spec,
)
from meshllm.cli.ring.toml_fields import MAX_BYTES
from meshllm.errors import UserError
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.planning.policies import make_plan
from meshllm.status import CostTable, NodeState
from tests.builders.status import node_id, status_of, with_node, with_ring

GIB = 1 << 30
SHAPE = ModelSizes("tiny", (2 * GIB,) * 4, (0,) * 4, GIB, 0, True, 1024, 2, 100)


def test_a_spec_lists_memories() -> None:
    spec = parse_spec("8GiB, 4.5 GB,800MB", SHAPE)

    assert [offer.memory_bytes for offer in spec.offers] == [8 * GIB, 4_500_000_000, 800_000_000]
    assert list(spec.names.values()) == ["n1", "n2", "n3"]
    assert [spec.names[offer.node] for offer in spec.offers] == ["n1", "n2", "n3"]


def test_a_count_repeats_a_node() -> None:
    spec = parse_spec("3x8GiB,1TiB", SHAPE)

    assert [offer.memory_bytes // GIB for offer in spec.offers] == [8, 8, 8, 1024]


def test_a_spec_sets_the_time_per_layer() -> None:
    first, second = parse_spec("8GiB:2.5ms,8GiB:800us", SHAPE).offers

    assert first.layer_seconds(1) == pytest.approx(0.0025)
    assert second.layer_seconds(1) == pytest.approx(0.0008)
    assert first.head_s == pytest.approx(0.0025 / 2)  # it reads half of what a layer reads


def test_without_a_time_the_memory_bandwidth_is_assumed() -> None:
    spec = parse_spec("8GiB,8GiB@1s", SHAPE)

    assert spec.offers[0].layer_seconds(1) == pytest.approx(2 * GIB / MEMORY_BYTES_PER_S)
    assert spec.assumed == ("nodes without a time per layer read memory at 20 GB/s",)


def test_more_rows_take_longer() -> None:
    offer = parse_spec("8GiB:1ms", SHAPE).offers[0]

    times = [offer.layer_seconds(rows) for rows in (1, 8, 32, 128, 256)]
    assert times == sorted(set(times))


def test_the_higher_latency_of_two_nodes_applies() -> None:
    spec = parse_spec("8GiB:1ms,8GiB:1ms@20ms,8GiB:1ms@30ms,8GiB:1ms", SHAPE)

    a, b, c, d = (offer.node for offer in spec.offers)
    pairs = [(a, b), (b, a), (b, c), (a, c), (a, d)]
    assert [spec.links.between(*pair).latency_s for pair in pairs] == [
        0.02,
        0.02,
        0.03,
        0.03,
        LAN_S,
    ]
    assert spec.assumed == ("links without a latency have 0.5 ms",)


def test_a_latency_of_zero_is_accepted() -> None:
    spec = parse_spec("2x8GiB:1ms@0ms", SHAPE)

    assert spec.links.between(spec.offers[0].node, spec.offers[1].node).latency_s == 0.0
    assert spec.assumed == ()


def test_a_spec_can_be_planned() -> None:
    spec = parse_spec("8GiB:2ms,4GiB:1ms@20ms", SHAPE)

    plan = make_plan(spec.offers, spec.links, SHAPE)

    assert plan.layers == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid node ``"),
        ("8GiB,", "Invalid node ``"),
        ("8GiB@", "Invalid node `8GiB@`"),
        ("8GiB@1ms:2ms", "Invalid node"),
        ("8", "Invalid memory size `8`"),
        ("8 gigs", "Invalid memory size `8 gigs`"),
        ("-8GiB", "Invalid memory size"),
        ("0GiB", "Invalid memory size"),
        ("1025TiB", "Invalid memory size"),
        ("0x8GiB", "Invalid memory size"),
        ("8GiB:fast", "Invalid time `fast`"),
        ("8GiB@61s", "Invalid time `61s`"),
        ("8GiB:0ms", "Time per layer of `8GiB:0ms` is zero"),
        ("65x8GiB", "65 nodes"),
        (",".join(["8GiB"] * (MAX_NODES + 1)), "65 nodes"),
    ],
)
def test_a_mistake_in_a_spec_is_explained(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_spec(text, SHAPE)

    assert caught.value.hint


NODES = """
[[node]]
name = "attic"
memory = "8GiB"
ms_per_layer = 2.5
head_ms = 0

[[node]]
name = "cellar"
memory = "800MB"
ms_per_layer = 3
"""

LINK = """
[[link]]
a = "attic"
b = "cellar"
latency_ms = 20
mbit_s = 100.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a spec."""
    return tmp_path / "spec.toml"


def test_a_file_describes_nodes_and_links(file: Path) -> None:
    file.write_text(NODES + LINK)

    spec = read_spec(file, SHAPE)

    attic, cellar = spec.offers
    assert list(spec.names.values()) == ["attic", "cellar"]
    assert (attic.memory_bytes, attic.layer_seconds(1), attic.head_s) == (8 * GIB, 0.0025, 0.0)
    assert cellar.head_s == pytest.approx(0.0015)
    wire = spec.links.between(cellar.node, attic.node)
    assert (wire.latency_s, wire.bytes_per_s) == (0.02, 12.5e6)
    assert spec.assumed == ()


def test_omitted_figures_are_assumed(file: Path) -> None:
    file.write_text(
        '[[node]]\nname = "a"\nmemory = "8GiB"\n[[node]]\nname = "b"\nmemory = "8GiB"\n'
    )

    spec = read_spec(file, SHAPE)

    assert spec.links.between(spec.offers[0].node, spec.offers[1].node).latency_s == LAN_S
    assert len(spec.assumed) == 2


def test_a_link_has_unlimited_bandwidth_by_default(file: Path) -> None:
    file.write_text(NODES + LINK.replace("mbit_s = 100.0", ""))

    spec = read_spec(file, SHAPE)

    assert spec.links.between(spec.offers[0].node, spec.offers[1].node).seconds(1 << 40) == 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 nodes"),
        ("[[node", "Invalid TOML in"),
        ("x = " + "[" * 100_000, "Invalid TOML in"),
        ("#" * MAX_BYTES + "\n", "longer than"),
        ("node = 3", "`node` must be an array of tables"),
        ("node = [3]", "`node` must be an array of tables"),
        ("nodes = []", "Unknown key `nodes` in a file"),
        ("[[node]]\nmemory = '8GiB'", "`name` must be text"),
        ("[[node]]\nname = ''", "`name` must be text"),
        ("[[node]]\nname = \"\\u001b[2J\"\nmemory = '8GiB'", "`name` must be text"),
        ("[[node]]\nname = 'a'\nmemory = 8", "`memory` must be text"),
        (
            "[[node]]\nname = 'a'\nmemory = '8GiB'\nms_per_layer = 0",
            "`ms_per_layer` must be a number above 0",
        ),
        (
            "[[node]]\nname = 'a'\nmemory = '8GiB'\nms_per_layer = true",
            "`ms_per_layer` must be a number above 0",
        ),
        (
            "[[node]]\nname = 'a'\nmemory = '8GiB'\nms_per_layer = nan",
            "`ms_per_layer` must be a number above 0",
        ),
        (
            "[[node]]\nname = 'a'\nmemory = '8GiB'\nhead_ms = -1",
            "`head_ms` must be a number from 0 up to 60000",
        ),
        ("[[node]]\nname = 'a'\nmemory = '8GiB'\nspeed = 1", "Unknown key `speed` in a node"),
        ("[[node]]\nname = 'a'\nmemory = '8GiB'\n" * 2, "have the same name"),
        ("[[node]]\nname = 'a'\nmemory = '8GiB'\n" * 65, "65 nodes"),
        (NODES + LINK * 2, "Invalid link `attic` to `cellar`"),
        (NODES + LINK.replace("cellar", "attic"), "Invalid link `attic` to `attic`"),
        (NODES + LINK.replace("cellar", "barn"), "Invalid link `attic` to `barn`"),
        (NODES + LINK.replace("attic", "barn"), "Invalid link `barn` to `cellar`"),
        (NODES + LINK.replace("latency_ms = 20", ""), "has no `latency_ms`"),
        (NODES + LINK.replace("100.0", "inf"), "`mbit_s` must be a number above 0 up to 1000000"),
        (NODES + LINK + "km = 3", "Unknown key `km` in a link"),
    ],
)
def test_a_mistake_in_a_file_is_explained(file: Path, text: str, message: str) -> None:
    file.write_text(text)

    with pytest.raises(UserError, match=message) as caught:
        read_spec(file, SHAPE)

    assert caught.value.hint


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(UserError, match=r"spec\.toml` cannot be read: No such file") as caught:
        read_spec(file, SHAPE)

    assert caught.value.hint


def test_a_binary_file_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")

    with pytest.raises(UserError, match="Invalid TOML in"):
        read_spec(file, SHAPE)


@pytest.mark.parametrize("quant", ["", "int8"])
def test_the_cost_tables_of_a_running_mesh_are_used(quant: str) -> None:
    """Those of another quantisation are not."""
    status = status_of(2)
    model = status.model
    assert model
    costs = CostTable(model.name, ((1, 2.0), (64, 3.0)), 7.0, quant)
    status = with_node(status, 1, costs=costs)

    offers = running_spec(replace(status, model=replace(model, quant="")), SHAPE).offers

    assert (offers[1].layer_s == ((1, 0.002), (64, 0.003))) is (not quant)
    assert (offers[1].head_s == pytest.approx(0.007)) is (not quant)
    assert len(offers[0].layer_s) == len(ROWS)


def test_a_running_mesh_is_described_by_its_predicted_times() -> None:
    status = with_node(status_of(4), 3, state=NodeState.STANDBY, memory_bytes=GIB, name="desk")
    status = with_node(status, 2, state=NodeState.DOWN)
    stages, hops = status.ring.stages[:2], status.ring.predicted
    assert hops
    status = with_ring(status, stages=stages, predicted=replace(hops, hops=hops.hops[:2]))

    spec = running_spec(status, SHAPE)

    names = list(spec.names.values())
    assert names[0] == "attic"
    assert names[1:] == [f"desk {node_id(1)[:7]}", f"desk {node_id(3)[:7]}"]
    first, second, standby = (offer.layer_seconds(1) for offer in spec.offers)
    assert [first, second] == pytest.approx([0.00125, 0.00135])
    assert standby == pytest.approx(0.0013)
    assert [offer.head_s for offer in spec.offers] == [pytest.approx(0.0018)] * 3
    a, b, c = spec.names
    assert spec.links.between(a, b).latency_s == pytest.approx(0.00042)
    assert spec.links.between(a, c).latency_s == LAN_S
    assert (spec.measured, spec.assumed[0]) == ((MEASURED,), FREE)
    assert spec.assumed[-1] == f"{names[2]}: as fast as the nodes of the ring"
    assert not any("without a time" in each for each in spec.assumed)
