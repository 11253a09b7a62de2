"""What one node holds for one plan after the other."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import ModelError
from meshllm.model.source import Source, resolve
from meshllm.names import NodeId, Span
from meshllm.node.engine import Engine
from meshllm.node.worker import Worker
from meshllm.protocol.codec import MAX_ROWS
from meshllm.protocol.plan import Ends, Plan, Stage
from meshllm.protocol.stage import MAX_PENDING
from meshllm.testing.clock import InlineExecutor
from meshllm.transport.contract import MAX_MESSAGE_BYTES
from tests.protocol.nodes import A, B, C


def plan_of(*spans: str, epoch: int = 1) -> Plan:
    stages = (Stage(node, Span.parse(span)) for node, span in zip((A, B, C), spans, strict=False))
    return Plan(epoch, "tiny", Ends.ENTRY, tuple(stages))


@pytest.fixture
async def engine(llama: Path) -> Engine:
    return await Engine.open(resolve(str(llama)), Worker(InlineExecutor()), None)


async def test_nothing_is_loaded_at_first(engine: Engine) -> None:
    assert engine._held is None
    assert (engine.shape.layers, engine.shape.dtype, engine.context) == (6, "float32", 128)


async def test_a_node_alone_holds_everything(engine: Engine) -> None:
    held = await engine.hold(plan_of("0:6"), A)

    assert (held.span, held.runner) == (Span(0, 6), None)
    assert held.ends is not None
    assert held.ends.head is None


async def test_each_rank_holds_its_part(engine: Engine) -> None:
    plan = plan_of("0:2", "2:6")

    entry, stage = await engine.hold(plan, A), await engine.hold(plan, B)

    assert (entry.span, entry.runner) == (Span(0, 2), None)
    assert entry.ends is not None
    assert entry.ends.head is not None
    assert (stage.span, stage.ends) == (Span(2, 6), None)
    assert stage.runner is not None


@pytest.mark.parametrize(
    ("before", "after", "me", "is_kept"),
    [
        (plan_of("0:2", "2:6"), plan_of("0:2", "2:6", epoch=2), A, True),
        (plan_of("0:2", "2:6"), plan_of("0:2", "2:4", "4:6"), A, True),
        (plan_of("0:2", "2:4", "4:6"), plan_of("0:2", "2:4", "4:6", epoch=2), B, True),
        (plan_of("0:2", "2:6"), plan_of("0:3", "3:6"), A, False),
        (plan_of("0:2", "2:6"), plan_of("0:6"), A, False),
        (plan_of("0:6"), plan_of("0:6", epoch=2), A, True),
    ],
)
async def test_what_is_held_is_loaded_once(
    engine: Engine, before: Plan, after: Plan, me: NodeId, is_kept: bool
) -> None:
    first = await engine.hold(before, me)

    assert (await engine.hold(after, me) is first) is is_kept


async def test_a_span_that_loses_its_head_is_loaded_again(engine: Engine) -> None:
    first = await engine.hold(plan_of("0:6"), A)
    other = replace(plan_of("0:6"), stages=(Stage(B, Span(0, 3)), Stage(A, Span(3, 6))))

    assert await engine.hold(other, A) is not first
    engine.release()
    assert engine._held is None


async def test_what_cannot_be_loaded_leaves_nothing_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.hold(plan_of("0:2", "2:6"), A)

    def damaged(*_: object) -> None:
        raise ModelError("damaged")

    monkeypatch.setattr(engine, "_load", damaged)
    with pytest.raises(ModelError, match="damaged"):
        await engine.hold(plan_of("0:3", "3:6"), A)

    assert engine._held is None


async def test_ends_elsewhere_are_refused(engine: Engine) -> None:
    plan = Plan(1, "tiny", Ends.CLIENT, (Stage(C, Span(0, 0)), Stage(A, Span(0, 6))))

    with pytest.raises(ModelError, match="ends on the entry"):
        await engine.hold(plan, A)


async def test_a_model_that_cannot_be_split_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(engine, "verdict", SimpleNamespace(require=asked.append, chunkable=True))

    await engine.hold(plan_of("0:2", "2:6"), A)

    assert asked == [2]


async def test_the_tokenizer_is_read_once(llama: Path) -> None:
    engine = await Engine.open(resolve("builtin"), Worker(InlineExecutor()), None)

    assert await engine.text() is await engine.text()


@pytest.mark.parametrize(("is_chunkable", "chunk"), [(True, 256), (False, MAX_ROWS)])
async def test_prompts_go_in_chunks_where_they_can(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_chunkable: bool, chunk: int
) -> None:
    monkeypatch.setattr(engine, "verdict", SimpleNamespace(chunkable=is_chunkable))

    pace = engine.pace(3)

    assert (pace.chunk, pace.window) == (chunk, 3)
    assert engine.pace(10_000).window == MAX_PENDING


async def test_a_prompt_in_one_message_has_the_limit_of_messages(llama: Path) -> None:
    source = cast("Source", object())
    width = MAX_MESSAGE_BYTES // 400
    shape: Any = SimpleNamespace(context=1 << 20, hidden_size=width, dtype="float32")
    verdict: Any = SimpleNamespace(chunkable=False, croppable=False)
    engine = Engine(source, Worker(InlineExecutor()), shape, verdict)

    assert engine.context == 99
    verdict.chunkable = True
    assert engine.context == 1 << 20
