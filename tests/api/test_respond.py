import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from threading import Event, get_ident

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from meshllm.api.respond import (
    HELD_STEP,
    KEEP_ALIVE_S,
    REST,
    SHORT_BYTES,
    LongReader,
    Stream,
    begun_within,
    read_body,
    while_connected,
    within,
)
from meshllm.errors import Busy, MeshError, TimedOut, UserError
from meshllm.node.requests import held_bytes
from meshllm.testing.clock import run_virtual
from tests.builders.waiting import timers_fired


def _fail(_: MeshError) -> bytes:
    return b"failed"


async def _never(_: Message) -> None:
    """Send to a client that does not read."""
    await asyncio.Event().wait()


async def test_a_streamed_generator_is_closed_before_the_response_ends() -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def words() -> AsyncGenerator[str, None]:
        try:
            begun.set()
            yield "x"
        finally:
            await asyncio.sleep(0)
            closed.set()

    async def leave() -> Message:
        await begun.wait()
        return {"type": "http.disconnect"}

    kept = words()  # else the garbage collector would close it

    await Stream(kept, "text/plain", str.encode, _fail)({"type": "http"}, leave, _never)

    assert closed.is_set()


async def _stay() -> Message:
    """Stay connected."""
    await asyncio.Event().wait()
    raise AssertionError


class Sent(list[bytes]):
    """What a client was sent; the head is empty."""

    async def __call__(self, message: Message) -> None:
        self.append(message.get("body", b"head"))


def test_a_silent_stream_is_kept_alive_whatever_progress_it_makes() -> None:
    sent = Sent()

    async def words() -> AsyncGenerator[str, None]:
        for _ in range(25):
            await asyncio.sleep(1)
            yield ""  # progress, of which nothing is sent
        yield "x"
        await asyncio.sleep(KEEP_ALIVE_S - 1)
        yield "y"

    stream = Stream(words(), "text/plain", str.encode, _fail, idle=lambda: b"idle")
    run_virtual(stream({"type": "http"}, _stay, sent))

    assert sent == [b"head", b"idle", b"idle", b"x", b"y", b""]


def test_a_silent_response_without_a_comment_is_left_alone() -> None:
    sent = Sent()

    async def words() -> AsyncGenerator[str, None]:
        await asyncio.sleep(25)
        yield "x"

    run_virtual(Stream(words(), "text/plain", str.encode, _fail)({"type": "http"}, _stay, sent))

    assert sent == [b"head", b"x", b""]


async def test_head_has_no_body_and_makes_no_items() -> None:
    sent, made = Sent(), list[str]()

    async def words() -> AsyncGenerator[str, None]:
        made.append("x")
        yield "x"

    kept = words()
    stream = Stream(kept, "text/plain", str.encode, _fail)
    await stream({"type": "http", "method": "HEAD"}, _stay, sent)

    assert (sent, made) == ([b"head", b""], [])
    with pytest.raises(StopAsyncIteration):  # closed, so nothing is left to the garbage collector
        await anext(kept)


def test_nothing_piles_up_for_a_client_that_does_not_read() -> None:
    sent = Sent()

    async def words() -> AsyncGenerator[str, None]:
        yield "x"

    async def slowly(message: Message) -> None:
        await sent(message)
        await asyncio.sleep(25)

    stream = Stream(words(), "text/plain", str.encode, _fail, idle=lambda: b"idle")
    run_virtual(stream({"type": "http"}, _stay, slowly))

    assert sent == [b"head", b"x", b""]


LONG = b"[1" + b" " * SHORT_BYTES + b"]"
LONGER = b"[2" + b" " * (1 << 20) + b"]"


async def test_long_json_is_read_off_the_loop() -> None:
    threads, reader = list[int](), LongReader()

    def convert(found: object) -> object:
        threads.append(get_ident())
        return found

    assert await reader.read("", b"[1]", convert) == [1]
    assert await reader.read("", LONG, convert) == [1]

    here, other = threads
    assert here == get_ident()
    assert here != other


async def test_who_sends_one_text_does_not_wait_for_all_of_another() -> None:
    begun, go, order, reader = asyncio.Event(), Event(), list[str](), LongReader()
    loop = asyncio.get_running_loop()

    async def read(sender: str, data: bytes) -> None:
        def convert(_: object) -> None:
            order.append(sender)
            loop.call_soon_threadsafe(begun.set)
            go.wait()

        await reader.read(sender, data, convert)

    reading = [asyncio.create_task(read("many", LONGER)) for _ in range(4)]
    try:
        await begun.wait()
        reading.append(asyncio.create_task(read("one", LONG)))
        for _ in range(100):  # turns of the loop: more than a turn of the reader takes
            await asyncio.sleep(0)
        assert order == ["many"]  # in the thread: one at a time
    finally:
        go.set()
    await asyncio.gather(*reading)

    assert order == ["many", "one", "many", "many", "many"]


async def test_long_json_that_is_invalid_is_refused() -> None:
    with pytest.raises(UserError, match="Invalid JSON"):
        await LongReader().read("", LONG[:-1], bool)


async def test_the_reader_rests_between_two_texts_that_took_long() -> None:
    now, rests = [5.0], list[float]()

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        now[0] += seconds

    def convert(found: object) -> object:
        now[0] += 1
        return found

    reader = LongReader(sleep, lambda: now[0])
    assert await reader.read("", LONG, convert) == [1]
    with pytest.raises(UserError):
        await reader.read("", LONG[:-1], convert)
    await reader.read("", LONG, convert)
    now[0] += REST
    await reader.read("", LONG, convert)

    assert rests == [REST]


async def test_a_text_whose_reader_left_keeps_its_turn_until_it_is_read() -> None:
    begun, go, reader = asyncio.Event(), Event(), LongReader()
    loop, inside = asyncio.get_running_loop(), list[str]()

    async def read(name: str) -> None:
        def convert(_: object) -> None:
            inside.append(name)
            loop.call_soon_threadsafe(begun.set)
            go.wait()

        await reader.read(name, LONG, convert)

    left, waiting = asyncio.create_task(read("left")), asyncio.create_task(read("waiting"))
    try:
        await begun.wait()
        left.cancel()
        for _ in range(100):  # turns of the loop: more than a turn of the reader takes
            await asyncio.sleep(0)
        assert (inside, left.done()) == (["left"], False)
    finally:
        go.set()
    await waiting

    assert (inside, left.cancelled()) == (["left", "waiting"], True)


async def test_texts_that_wait_are_bounded_by_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_bytes, "MAX_HELD_BYTES", 2 * len(LONG))
    begun, go, reader = asyncio.Event(), Event(), LongReader()
    loop = asyncio.get_running_loop()

    def convert(_: object) -> str:
        loop.call_soon_threadsafe(begun.set)
        go.wait()
        return "read"

    reading = [asyncio.create_task(reader.read("many", LONG, convert)) for _ in range(2)]
    try:
        await begun.wait()
        with pytest.raises(Busy, match="bytes are in progress"):
            await reader.read("many", LONG, convert)
        reading.append(asyncio.create_task(reader.read("one", LONG, convert)))
        await asyncio.sleep(0)
    finally:
        go.set()

    assert await asyncio.gather(*reading) == ["read"] * 3


async def test_what_is_done_for_a_client_ends_when_it_leaves() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await while_connected(Request({"type": "http"}, leave), work())

    assert ended.is_set()


async def test_what_fails_for_a_client_that_stays_is_told() -> None:
    async def work() -> None:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        await while_connected(Request({"type": "http"}, _stay), work())


Timed = Callable[[AsyncGenerator[int, None]], AsyncGenerator[int, None]]
TIMED: list[Timed] = [
    lambda items: within(items, 3600, "the request"),
    lambda items: begun_within(items, 3600, lambda _: False),
]


@pytest.mark.parametrize("timed", TIMED, ids=["deadline", "first token"])
@pytest.mark.parametrize("turns", range(5))
async def test_a_client_that_leaves_just_when_an_item_comes_ends_its_answer(
    timed: Timed, turns: int
) -> None:
    go, closed = asyncio.Event(), asyncio.Event()

    async def items() -> AsyncGenerator[int, None]:
        try:
            await go.wait()
            for number in range(100):
                yield number
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def answer() -> list[int]:
        async with aclosing(timed(items())) as events:
            return [each async for each in events]

    answering = asyncio.ensure_future(answer())
    await asyncio.sleep(0)
    go.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    answering.cancel()
    await asyncio.wait({answering})

    assert answering.cancelled()
    assert closed.is_set()


@pytest.mark.parametrize("timed", TIMED, ids=["deadline", "first token"])
def test_items_that_wait_for_a_slow_reader_are_late_after_the_deadline(timed: Timed) -> None:
    async def items() -> AsyncGenerator[int, None]:
        for number in range(9):
            yield number  # at once

    async def scenario() -> None:
        read = list[int]()

        async def read_slowly() -> None:
            async with aclosing(timed(items())) as events:
                async for each in events:
                    read.append(each)
                    await asyncio.sleep(1800)

        with pytest.raises(TimedOut):
            await read_slowly()
        assert read == [0, 1]

    run_virtual(scenario())


class Arriving:
    """A request whose body arrives in pieces."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        self.queue = asyncio.Queue[Message]()
        self.held = list[int]()
        named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.request = Request({"type": "http", "headers": named}, self.queue.get)

    def put(self, size: int, *, more: bool = True) -> None:
        message = {"type": "http.request", "body": b"x" * size, "more_body": more}
        self.queue.put_nowait(message)

    def hold(self, size: int) -> None:
        self.held.append(size)


async def test_a_long_body_is_counted_as_it_arrives() -> None:
    short, long = Arriving(), Arriving()
    short.put(SHORT_BYTES, more=False)
    assert len(await read_body(short.request, hold=short.hold)) == SHORT_BYTES
    assert short.held == []

    reading = asyncio.ensure_future(read_body(long.request, hold=long.hold))
    for _ in range(3):
        long.put(HELD_STEP // 2)
    await timers_fired()
    assert long.held == [HELD_STEP] * 2
    long.put(0, more=False)
    assert len(await reading) == 3 * HELD_STEP // 2


@pytest.mark.parametrize("closes", [False, True])
async def test_a_body_for_which_there_is_no_memory_is_refused(closes: bool) -> None:
    body = Arriving({"connection": "close"} if closes else None)

    def refuse(_: int) -> None:
        raise Busy("full")

    reading = asyncio.ensure_future(read_body(body.request, hold=refuse))
    for _ in range(3):
        body.put(HELD_STEP)
    await timers_fired()
    assert reading.done() == (not closes)  # which reads what follows first
    body.put(0, more=False)
    with pytest.raises(Busy, match="full"):
        await reading
