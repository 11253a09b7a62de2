"""The shape of a model for the planner, and what a rank reserves besides weights and caches."""

from dataclasses import replace

import pytest

from meshllm.model.capacity import shape_of
from meshllm.model.files.source import resolve
from meshllm.model.shape import ModelShape, workspace_bytes
from meshllm.node.ring.shape import plan_shape, reserved_bytes, waiting_room
from meshllm.protocol.planning.plan import Links
from meshllm.protocol.planning.policies import make_plan
from meshllm.protocol.planning.problem import HEADROOM_PERCENT, kv_capacities
from tests.builders.offers import A, B, C, offer
from tests.builders.sized_shapes import qwen3_sized

MIB = 1 << 20


def builtin() -> ModelShape:
    return shape_of(resolve("builtin"))


def wide() -> ModelShape:
    """A model of 8192 columns, with few layers."""
    shape = qwen3_sized()
    sizes = (1600 * MIB,) * 4
    return replace(
        shape, layers=4, hidden_size=8192, layer_bytes=sizes, windows=(0,) * 4,
        state_bytes=(0,) * 4, kv_bytes_per_token=(4096,) * 4,
    )  # fmt: skip


def test_a_charter_tells_what_a_rank_reserves() -> None:
    shape = builtin()

    assert waiting_room(shape).row_bytes == 256 * 2
    assert reserved_bytes(shape) == workspace_bytes(shape) + waiting_room(shape).total
    assert plan_shape(shape).workspace_bytes == reserved_bytes(shape)


@pytest.mark.parametrize("own", [0, 400 * MIB])
@pytest.mark.parametrize(
    ("shape", "memory"),
    [
        (builtin(), (420 * MIB, 300 * MIB)),
        (builtin(), (840 * MIB, 840 * MIB)),
        (qwen3_sized(), (1700 * MIB, 1200 * MIB)),
        (qwen3_sized(), (1 << 40, 1 << 40, 1 << 40)),
        (wide(), (7000 * MIB, 5000 * MIB, 9000 * MIB)),
    ],
    ids=["tight", "small", "Qwen3-0.6B", "large", "wide"],
)
def test_weights_caches_and_rows_that_wait_fit_into_what_each_node_offers(
    shape: ModelShape, memory: tuple[int, ...], own: int
) -> None:
    sizes, room = plan_shape(shape, 1024), waiting_room(shape)
    offers = [
        replace(offer(node, 1), memory_bytes=own + each, reserve_bytes=own + reserved_bytes(shape))
        for node, each in zip((A, B, C), memory, strict=False)
    ]

    plan = make_plan(offers, Links(), sizes, policy="proportional")
    rooms = kv_capacities(plan, offers, sizes)

    given = {each.node: each for each in offers}
    for rank, (stage, kv) in enumerate(zip(plan.stages, rooms, strict=True)):
        layers = slice(stage.span.start, stage.span.stop)
        weights = sum(sizes.layer_bytes[layers]) + (0 if rank else sizes.ends_bytes)
        used = own + workspace_bytes(shape) + weights + kv + room.total
        assert kv >= sizes.context * sum(sizes.kv_bytes_per_token[layers])
        offered = given[stage.node]
        headroom = (offered.memory_bytes - offered.reserve_bytes) * HEADROOM_PERCENT // 100
        assert used + headroom <= offered.memory_bytes
