import asyncio
from collections.abc import AsyncGenerator
from threading import Event, get_ident

import pytest
from starlette.types import Message

from meshllm.api.respond import KEEP_ALIVE_S, REST, SHORT_BYTES, LongReader, Stream
from meshllm.errors import MeshError, UserError
from meshllm.testing.clock import run_virtual


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

    stream = Stream(words(), "text/plain", str.encode, _fail, idle=b"idle")
    run_virtual(stream({"type": "http"}, _stay, sent))

    assert sent == [b"head", b"idle", b"idle", b"x", b"y", b""]


def test_a_silent_response_without_a_comment_is_left_alone() -> None:
    sent = Sent()

    async def words() -> AsyncGenerator[str, None]:
        await asyncio.sleep(25)
        yield "x"

    run_virtual(Stream(words(), "text/plain", str.encode, _fail)({"type": "http"}, _stay, sent))

    assert sent == [b"head", b"x", b""]


def test_nothing_piles_up_for_a_client_that_does_not_read() -> None:
    sent = Sent()

    async def words() -> AsyncGenerator[str, None]:
        yield "x"

    async def slowly(message: Message) -> None:
        await sent(message)
        await asyncio.sleep(25)

    stream = Stream(words(), "text/plain", str.encode, _fail, idle=b"idle")
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
            loop.call_soon_threadsafe(begun.set)
            go.wait()
            order.append(sender)  # in the thread: two at a time would be out of order

        await reader.read(sender, data, convert)

    reading = [asyncio.create_task(read("many", LONGER)) for _ in range(4)]
    try:
        await begun.wait()
        reading.append(asyncio.create_task(read("one", LONG)))
        await asyncio.sleep(0)  # it asks for its turn
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
