"""What one node loads for one plan after the other."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import ModelError
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source, resolve
from meshllm.model.shape import ModelShape
from meshllm.names import NodeId, Span
from meshllm.node.compute.worker import Worker
from meshllm.node.options import InferenceConfig
from meshllm.node.ring import model_runtime
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.protocol.planning.chunking import RankTimes, RingTimes, default_pace
from meshllm.protocol.planning.plan import Ends, LinkSpeed, Plan, PlanStage
from meshllm.protocol.ring.hang import FIRST_S, HANG_S
from meshllm.protocol.session.codec import MAX_ROWS
from meshllm.protocol.session.stage import MAX_PATIENCE_S, MAX_PENDING
from meshllm.testing.clock import InlineExecutor
from meshllm.transport.contract import MAX_MESSAGE_BYTES
from tests.builders.offers import A, B, C, offer
from tests.builders.rank_plans import plan_of


async def test_nothing_is_loaded_at_first(model: ModelRuntime) -> None:
    assert model._held is None
    assert (model.shape.layers, model.shape.dtype, model.context) == (6, "float32", 128)


async def test_a_gpu_that_is_not_used_is_told(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_runtime, "refused_gpu", lambda *_: "`cuda:0` is too old")

    model = await ModelRuntime.open(resolve(str(llama)), Worker(InlineExecutor()))

    assert model.rank(model.worker, divides_head=True).refused_gpu == "`cuda:0` is too old"
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == "computing on the CPU: `cuda:0` is too old"


async def test_its_shape_is_kept_in_the_cache_of_the_node(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noting(source: Source, *how: Any) -> ModelShape:
        asked.append(how[-1])
        return shape_of(source, *how)

    monkeypatch.setattr(model_runtime, "shape_of", noting)

    config = InferenceConfig(cache=tmp_path)
    model = await ModelRuntime.open(resolve(str(llama)), Worker(InlineExecutor()), config)

    assert (asked, model.shape.layers) == ([tmp_path], 6)


async def test_a_node_alone_holds_everything(model: ModelRuntime) -> None:
    held = await model.hold(plan_of("0:6"), A)

    assert (held.span, held.runner) == (Span(0, 6), None)
    assert held.entry is not None
    assert held.entry.head is None


async def test_each_rank_holds_its_part(model: ModelRuntime) -> None:
    plan = plan_of("0:2", "2:6")

    entry, stage = await model.hold(plan, A), await model.hold(plan, B)

    assert (entry.span, entry.runner) == (Span(0, 2), None)
    assert entry.entry is not None
    assert entry.entry.head is not None
    assert (stage.span, stage.entry) == (Span(2, 6), None)
    assert stage.runner is not None


@pytest.mark.parametrize(
    ("before", "after", "me", "is_kept"),
    [
        (plan_of("0:2", "2:6"), plan_of("0:2", "2:6", epoch=2), A, True),
        (plan_of("0:2", "2:6"), plan_of("0:2", "2:4", "4:6"), A, True),
        (plan_of("0:2", "2:4", "4:6"), plan_of("0:2", "2:4", "4:6", epoch=2), B, True),
        (plan_of("0:2", "2:6"), plan_of("0:3", "3:6"), A, False),
        (plan_of("0:6"), plan_of("0:6", epoch=2), A, True),
    ],
)
async def test_a_span_is_kept_if_the_next_plan_needs_the_same(
    model: ModelRuntime, before: Plan, after: Plan, me: NodeId, is_kept: bool
) -> None:
    first = await model.hold(before, me)

    assert (await model.hold(after, me) is first) is is_kept


async def test_a_span_that_loses_its_head_is_loaded_again(model: ModelRuntime) -> None:
    first = await model.hold(plan_of("0:6"), A)
    other = replace(plan_of("0:6"), stages=(PlanStage(B, Span(0, 3)), PlanStage(A, Span(3, 6))))

    assert await model.hold(other, A) is not first
    model.release()
    assert model._held is None


@pytest.mark.parametrize("spans", [("0:6",), ("0:2", "2:6")])
async def test_a_draft_is_loaded_by_the_entry_only(llama: Path, spans: tuple[str, ...]) -> None:
    source = resolve(str(llama))
    model = await ModelRuntime.open(source, Worker(InlineExecutor()), draft=source)

    assert (await model.hold(plan_of(*spans), A)).draft is not None
    assert (await model.hold(plan_of("0:2", "2:6"), B)).draft is None


async def test_a_draft_model_that_does_not_match_is_refused_before_loading(llama: Path) -> None:
    source, builtin = resolve(str(llama)), resolve("builtin")

    with pytest.raises(ModelError, match="`builtin` cannot draft for"):
        await ModelRuntime.open(source, Worker(InlineExecutor()), draft=builtin)


async def test_a_failed_load_leaves_nothing_loaded(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await model.hold(plan_of("0:2", "2:6"), A)

    def damaged(*_: object) -> None:
        raise ModelError("damaged")

    monkeypatch.setattr(model._loader, "_load", damaged)
    with pytest.raises(ModelError, match="damaged"):
        await model.hold(plan_of("0:3", "3:6"), A)

    assert model._held is None


@pytest.mark.usefixtures("divided_head")
async def test_a_client_holds_the_ends_and_no_layers(model: ModelRuntime) -> None:
    plan = Plan(1, "tiny", Ends.CLIENT, (PlanStage(C, Span(0, 0)), PlanStage(A, Span(0, 6))))

    client, last = await model.hold(plan, C), await model.hold(plan, A)

    assert client.entry is not None
    assert client.entry.helped is None  # no other node sees a token
    assert last.help is None


async def test_a_model_that_cannot_be_split_is_refused(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(model, "verdict", SimpleNamespace(require=asked.append, chunkable=True))

    await model.hold(plan_of("0:2", "2:6"), A)

    assert asked == [2]


async def test_the_tokenizer_is_read_once(llama: Path) -> None:
    model = await ModelRuntime.open(resolve("builtin"), Worker(InlineExecutor()))

    assert await model.text() is await model.text()


async def test_a_prompt_goes_in_the_best_chunks(model: ModelRuntime) -> None:
    ranks = tuple(RankTimes(offer(A, 2, ms=100), 2.0, LinkSpeed(0.5)) for _ in range(3))
    times = RingTimes(ranks, 0.0, 8)

    assert model.pace(3, 2000, 0, None) == default_pace(2000, 3)
    alone, beside = (model.pace(3, 2000, others, times) for others in (0, 1))
    best = [times.best_pace(2000, others) for others in (0, 1)]
    assert [(each.chunk, each.window) for each in (alone, beside)] == [
        (each.chunk, each.window) for each in best
    ]
    assert alone.chunk > beside.chunk


async def test_a_fast_ring_does_not_wait_long_for_rows_that_a_rank_swallows(
    model: ModelRuntime,
) -> None:
    fast, slow = (
        RingTimes((RankTimes(offer(A, 2, ms=ms), 2.0, LinkSpeed(0.0)),) * 3, 0.0, 8)
        for ms in (1e-3, 1e4)
    )

    assert model.pace(3, 10, 0, fast).patience_s == FIRST_S + HANG_S
    assert model.pace(3, 10, 0, slow).patience_s == MAX_PATIENCE_S
    assert model.pace(3, 10, 0, None).patience_s == MAX_PATIENCE_S


async def test_without_chunked_prefill_a_prompt_goes_whole(
    model: ModelRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "verdict", SimpleNamespace(chunkable=False))

    pace = model.pace(3, 10, 0, None)

    assert (pace.chunk, pace.window) == (MAX_ROWS, 3)
    assert model.pace(10_000, 10, 0, None).window == MAX_PENDING


async def test_a_chunk_fits_in_a_message(model: ModelRuntime) -> None:
    model.shape = replace(model.shape, hidden_size=MAX_MESSAGE_BYTES // 400)
    times = RingTimes((RankTimes(offer(A, 2, ms=1e-3), 1.0, LinkSpeed(0.0)),), 0.0, 8)

    assert [model.pace(1, 2000, 0, each).chunk for each in (None, times)] == [99, 99]


async def test_a_prompt_in_one_message_has_the_limit_of_messages(llama: Path) -> None:
    source = cast("Source", object())
    width = MAX_MESSAGE_BYTES // 400
    shape: Any = SimpleNamespace(context=1 << 20, hidden_size=width, dtype="float32")
    verdict: Any = SimpleNamespace(chunkable=False, croppable=False)
    model = ModelRuntime(source, Worker(InlineExecutor()), shape, verdict)

    assert model.context == 99
    verdict.chunkable = True
    assert model.context == 1 << 20
