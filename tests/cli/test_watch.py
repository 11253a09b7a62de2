import asyncio
from typing import Any

import pytest

from meshllm.cli import watch
from meshllm.cli.door import Client
from meshllm.errors import LinkLost
from tests.cli.statuses import FakeDoor, status_of, waiting


async def test_an_event_is_a_look_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDoor(monkeypatch)
    door.status = [waiting("alone"), status_of(2)]
    monkeypatch.setattr(watch, "EVERY_S", 3600)
    seen: list[str] = []
    both = asyncio.Event()

    def show(status: dict[str, Any]) -> None:
        seen.append(status["ring"]["state"])
        if len(seen) == 2:
            both.set()

    watching = asyncio.create_task(watch.follow(client(door), show))
    await both.wait()
    watching.cancel()

    assert seen == ["waiting", "serving"]


async def test_it_ends_with_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    door = FakeDoor(monkeypatch)
    door.status = [status_of(1), LinkLost("The node is gone")]
    monkeypatch.setattr(watch, "EVERY_S", 0.01)

    with pytest.raises(ExceptionGroup) as ended:
        await watch.follow(client(door), lambda _: None)

    assert ended.value.subgroup(LinkLost)


def test_clocks_and_counters_are_no_change() -> None:
    seen: list[dict[str, Any]] = []
    show = watch.changes(seen.append)
    second, third = status_of(2), status_of(2)
    second["since_s"] += 1
    second["nodes"][1]["link"]["heard_s"] += 1
    second["nodes"][1]["link"]["bytes_sent"] += 1
    third["nodes"][1]["link"] = None

    for status in (status_of(2), second, third):
        show(status)

    assert seen == [status_of(2), third]


def client(door: FakeDoor) -> Client:
    return door  # type: ignore[return-value]  # the half of it that is used
