import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import MeshError
from meshllm.request import (
    Event,
    FinishReason,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Sampling,
    Turn,
)
from meshllm.traces.file import TraceFile
from meshllm.traces.recorder import DAY_S, Recorder
from meshllm.traces.trace import read_trace
from tests.builders.fake_ring import answer_of

NOON = 1_795_003_200.0
PROMPT = tuple(range(40))
SECRET = "attack at dawn"
SEED = 9_876_543_210_987
ASKED = Request(raw=SECRET, sampling=Sampling(temperature=0.5, seed=SEED), max_tokens=8)
ANSWER = replace(answer_of("dawn", 2), prompt_tokens=40, cached_tokens=16)
TOLD = PromptTokens(0, PROMPT[:30]), PromptTokens(30, PROMPT[30:])
EVENTS: tuple[Event, ...] = (*TOLD, Prefilled(40, 40), Piece("dawn", (5,)), Piece("", (6,)), ANSWER)


@dataclass
class Said:
    """Answers with these events, and fails behind them if there is an error."""

    events: tuple[Event, ...] = EVENTS
    error: Exception | None = None
    asked: Request | None = None

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked = request
        for event in self.events:
            yield event
        if self.error:
            raise self.error


@dataclass
class World:
    """A trace with a clock that a test moves."""

    path: Path
    recorder: Recorder
    now: float = NOON

    async def record(self, said: Said, request: Request = ASKED) -> list[Event]:
        return [event async for event in self.recorder.traced(said, "builtin").generate(request)]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    path = tmp_path / "trace"
    with TraceFile.open(path) as file:
        found = World(path, Recorder(file, lambda: found.now))
        yield found


async def test_a_request_is_a_line_without_its_text(world: World) -> None:
    said = Said()

    events = await world.record(said)

    rotated, line = world.lines()
    assert rotated == {"rotated": NOON}
    assert len(line.pop("buckets").split()) == 2
    assert 0 <= line.pop("ttft_ms") <= line.pop("total_ms")
    assert line == {
        "at": NOON, "model": "builtin", "prompt_tokens": 40, "cached_tokens": 16, "new_tokens": 2,
        "max_tokens": 8, "finish_reason": "stop", "sampling": {"temperature": 0.5},
    }  # fmt: skip
    assert events == [each for each in EVENTS if each not in TOLD]
    assert said.asked == replace(ASKED, reports_prompt=True)


async def test_a_request_that_asks_for_its_tokens_gets_them(world: World) -> None:
    assert await world.record(Said(), replace(ASKED, reports_prompt=True)) == [*EVENTS]


async def test_the_next_prompt_of_a_chat_shares_the_ids_of_the_answer(world: World) -> None:
    answer = tuple(range(100, 130))
    await world.record(Said((*TOLD, replace(ANSWER, tokens=answer))))
    longer = PromptTokens(0, (*PROMPT, *answer, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16))
    await world.record(Said((longer, replace(ANSWER, tokens=(), prompt_tokens=80))))

    _, first, second = world.lines()

    assert len(first["buckets"].split()) == 4
    assert second["buckets"].split()[:4] == first["buckets"].split()
    assert len(second["buckets"].split()) == 5


async def test_nothing_of_a_prompt_is_in_the_file(world: World) -> None:
    turns = (Turn(role="user", content=SECRET),)
    await world.record(Said(), replace(ASKED, stop=("dawn",), turns=turns, raw=None))
    with pytest.raises(MeshError):
        await world.record(Said(error=MeshError(f"cannot {SECRET}")))

    text = world.path.read_text("utf-8")

    assert not any(word in text for word in ("attack", "dawn", str(SEED)))


async def test_the_key_is_replaced_each_day(world: World) -> None:
    for now in (NOON, NOON + DAY_S / 2 - 1, NOON + DAY_S / 2):
        world.now = now
        await world.record(Said())

    first, one, same, second, other = world.lines()

    assert (first, second) == ({"rotated": NOON}, {"rotated": NOON + DAY_S / 2})
    assert one["buckets"] == same["buckets"]
    assert set(one["buckets"].split()).isdisjoint(other["buckets"].split())


async def test_a_request_keeps_the_key_of_its_beginning(world: World) -> None:
    await world.record(Said())
    async with aclosing(world.recorder.traced(Said(), "builtin").generate(ASKED)) as events:
        await anext(events)
        world.now += DAY_S
        await world.record(Said())
        _ = [event async for event in events]

    _, first, _, _, late = world.lines()

    assert late["buckets"] == first["buckets"]


async def test_the_prompt_is_taken_once_when_a_ring_is_lost(world: World) -> None:
    await world.record(Said())
    await world.record(Said(events=(TOLD[0], *EVENTS)))

    _, once, again = world.lines()

    assert again["buckets"] == once["buckets"]


@pytest.mark.parametrize("error", [MeshError("gone"), RuntimeError("a bug")])
async def test_a_failed_request_is_recorded(world: World, error: Exception) -> None:
    with pytest.raises(type(error)):
        await world.record(Said(events=EVENTS[:-1], error=error))

    _, line = world.lines()
    assert (line["finish_reason"], line["prompt_tokens"], line["new_tokens"]) == ("error", 40, 2)


async def test_a_cancelled_request_is_recorded(world: World) -> None:
    async with aclosing(world.recorder.traced(Said(), "builtin").generate(ASKED)) as events:
        assert isinstance(await anext(events), Prefilled)

    _, line = world.lines()
    assert (line["finish_reason"], line["prompt_tokens"], line["ttft_ms"]) == (
        "cancelled",
        40,
        None,
    )


async def test_an_entry_that_reports_no_tokens_leaves_the_ids_unknown(world: World) -> None:
    await world.record(Said(events=EVENTS[2:]))

    assert world.lines()[1]["buckets"] is None


async def test_an_echoed_prompt_is_not_generated(world: World) -> None:
    told = replace(ANSWER, tokens=(*PROMPT, 5, 6), finish_reason=FinishReason.LENGTH)
    await world.record(Said(events=(told,)), replace(ASKED, scores_prompt=True))

    assert world.lines()[1]["new_tokens"] == 2


async def test_a_cancelled_echo_can_be_read(world: World) -> None:
    echoed = tuple(Piece("a", (token,)) for token in (*PROMPT, 5, 6))
    asked = replace(ASKED, scores_prompt=True)
    for count in (3, 42):
        said = Said((*TOLD, Prefilled(1, 1), *echoed[:count]), MeshError("gone"))
        with pytest.raises(MeshError):
            await world.record(said, asked)

    lines = read_trace(world.path)

    assert [(each.prompt_tokens, each.new_tokens) for each in lines] == [(40, 0), (40, 2)]
    assert [len(each.ids) for each in lines] == [2, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": 1 << 40},
        {"cached_tokens": 1 << 40},
        {"cached_tokens": -1},
        {"counted": 1 << 40},
        {"prompt_tokens": 3, "tokens": ()},
    ],
)
@pytest.mark.parametrize("scores_prompt", [True, False])
async def test_absurd_counts_of_others_can_be_read(
    world: World, changes: dict[str, Any], *, scores_prompt: bool
) -> None:
    told = replace(ANSWER, **changes)

    await world.record(Said((*TOLD, told)), replace(ASKED, scores_prompt=scores_prompt))

    assert len(read_trace(world.path)) == 1


async def test_requests_at_once_have_a_line_each(world: World) -> None:
    await asyncio.gather(*(world.record(Said()) for _ in range(20)))

    assert len({line["buckets"] for line in world.lines() if "at" in line}) == 1
    assert len(world.lines()) == 21


async def test_an_engine_that_tells_no_tokens_has_its_times_and_counts(world: World) -> None:
    answer = replace(ANSWER, tokens=(), counted=3)

    await world.record(Said((Piece("dawn"), answer)))

    line = world.lines()[1]
    assert (line["new_tokens"], line["prompt_tokens"], line["buckets"]) == (3, 40, None)
    assert line["ttft_ms"] is not None
