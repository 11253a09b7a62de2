"""Spans as they are loaded: what is kept, cut, or does not fit."""

import gc
import weakref
from dataclasses import replace

import pytest

from meshllm.errors import OutOfMemory
from meshllm.names import Span
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.span_loader import LoadedSpan, SpanLoader
from meshllm.protocol.planning.plan import Ends, PlanStage
from meshllm.protocol.planning.problem import HEADROOM_PERCENT
from tests.builders.offers import A, B, C
from tests.builders.rank_plans import plan_of

TORCH = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "Not enough memory for layers 0:2 of `llama`"),
        (RuntimeError(TORCH), f"Not enough memory for layers 0:2 of `llama`: {TORCH}"),
    ],
    ids=["of Python", "of torch"],
)
async def test_layers_that_do_not_fit_into_free_memory_are_named(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(*_: object) -> LoadedSpan:
        raise error

    monkeypatch.setattr(SpanLoader, "_load", fail)

    with pytest.raises(OutOfMemory) as raised:
        await model.hold(plan_of("0:2", "2:6"), A)

    assert str(raised.value).replace(model.shape.name, "llama") == told
    assert raised.value.needed_bytes == sum(model.shape.layer_bytes[:2])


async def test_another_error_of_torch_is_raised_as_it_is(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> LoadedSpan:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(SpanLoader, "_load", fail)

    with pytest.raises(RuntimeError, match="mat1"):
        await model.hold(plan_of("0:2", "2:6"), A)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    ("has_caches", "after", "pieces"),
    [
        (True, "3:6", ["3:4", "4:6"]),
        (False, "3:6", ["3:6"]),
        (True, "1:4", ["1:2", "2:4"]),
        (True, "3:4", ["3:4"]),
    ],
)
async def test_a_span_that_moves_is_cut_where_kept_caches_end(
    model: ModelRuntime, *, has_caches: bool, after: str, pieces: list[str], is_ahead: bool
) -> None:
    before, span = plan_of("0:2", "2:4", "4:6"), Span.parse(after)
    other = plan_of(f"0:{span.start}", after, *([f"{span.stop}:6"] if span.stop < 6 else []))
    await model.hold(before, B)

    if is_ahead:
        await model.preload(other, B, lambda _: True, is_urgent=True, has_caches=has_caches)
    held = await model.hold(other, B, has_caches=has_caches)

    assert [str(piece.span) for piece in held.layers.pieces] == pieces


async def test_no_span_is_cut_between_pieces_whose_caches_one_piece_can_take(
    model: ModelRuntime,
) -> None:
    await model.hold(plan_of("0:3", "3:6"), A)
    grown = await model.hold(plan_of("0:5", "5:6"), A, has_caches=True)
    stages = (PlanStage(B, Span(0, 1)), PlanStage(A, Span(1, 4)), PlanStage(C, Span(4, 6)))
    moved = await model.hold(replace(plan_of("0:6"), stages=stages), A, has_caches=True)

    assert [str(piece.span) for piece in grown.layers.pieces] == ["0:3", "3:5"]
    assert [str(piece.span) for piece in moved.layers.pieces] == ["1:4"]


@pytest.mark.usefixtures("divided_head")
async def test_the_last_rank_holds_a_part_of_a_large_head(model: ModelRuntime) -> None:
    two, three = plan_of("0:2", "2:6"), plan_of("0:2", "2:4", "4:6")

    assert (await model.hold(plan_of("0:6"), A)).help is None
    ends = (await model.hold(two, A)).entry
    middle = await model.hold(three, B)
    last = await model.hold(three, C)

    assert ends is not None
    assert [each.shard.model.lm_head.out_features for each in ends.runners[1:]] == [64, 64]
    assert middle.help is None
    assert last.help is not None
    assert await model.hold(three, C) is last


@pytest.mark.usefixtures("divided_head")
async def test_a_part_of_the_head_that_no_entry_asks_for_is_released(model: ModelRuntime) -> None:
    plan = plan_of("0:2", "2:6")
    before = await model.hold(plan, B)
    assert before.help is not None
    part = weakref.ref(before.help)
    runner = before.runner
    del before

    client = PlanStage(C, Span(0, 0))
    after = await model.hold(replace(plan, ends=Ends.CLIENT, stages=(client, *plan.stages)), B)

    assert (after.runner, after.help) == (runner, None)
    gc.collect()
    assert part() is None


@pytest.mark.usefixtures("divided_head")
async def test_a_last_rank_that_gives_layers_to_another_releases_its_part_of_the_head(
    model: ModelRuntime,
) -> None:
    before = await model.hold(plan_of("0:2", "2:6"), B)
    assert before.help is not None
    part = weakref.ref(before.help)
    del before

    after = await model.hold(plan_of("0:2", "2:4", "4:6"), B)

    assert after.help is None
    gc.collect()
    assert part() is None


@pytest.mark.usefixtures("divided_head")
async def test_a_rank_that_becomes_the_last_one_loads_no_layers_again(model: ModelRuntime) -> None:
    before = await model.hold(plan_of("0:2", "2:4", "4:6"), B)
    after = await model.hold(
        replace(plan_of("0:2"), stages=(PlanStage(A, Span(0, 2)), PlanStage(B, Span(2, 4)))), B
    )

    assert after.runner is before.runner
    assert (before.help, after.help is None) == (None, False)


@pytest.mark.parametrize("missing", [0, 4], ids=["enough", "too little"])
@pytest.mark.usefixtures("divided_head")
async def test_a_part_of_the_head_takes_at_most_half_of_the_headroom(
    missing: int, model: ModelRuntime
) -> None:
    layers, part = sum(model.shape.layer_bytes[5:]), 64 * 64 * 4
    usable = part * 2 * (100 - HEADROOM_PERCENT) // HEADROOM_PERCENT
    assert usable > layers

    held = await model.hold(plan_of("0:5", "5:6"), B, usable - layers - missing)

    assert (held.help is None) is bool(missing)


async def test_a_part_of_the_head_that_cannot_be_loaded_keeps_no_rank_from_serving(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(model._loader, "_load_help", fail)
    held = await model.hold(plan_of("0:2", "2:6"), B)

    assert held.runner is not None
    assert held.help is None
    assert "MemoryError" in caplog.text
