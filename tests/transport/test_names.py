import asyncio
import socket
import threading
from typing import Any

import pytest

from meshllm.transport import names
from meshllm.transport.names import look_up

STREAM = socket.SOCK_STREAM


async def test_a_number_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_threads", None)

    (found,) = await look_up("127.0.0.1", 80, STREAM)

    assert found[4] == ("127.0.0.1", 80)


async def test_a_slow_name_server_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, find = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any, **more: Any) -> Any:
        if not more.get("flags"):
            answer.wait()
            host = "127.0.0.1"
        return find(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asking = [asyncio.ensure_future(look_up(f"a{at}.invalid", 80, STREAM)) for at in range(99)]
    await asyncio.sleep(0)

    assert await asyncio.to_thread(lambda: "served") == "served"
    answer.set()
    assert {found[0][4] for found in await asyncio.gather(*asking)} == {("127.0.0.1", 80)}
