"""Follows the status of a node for `--watch`."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace

from meshllm.cli.shared.client import NodeClient
from meshllm.cli.terminal import render
from meshllm.errors import LinkLost, PeerFault, TimedOut
from meshllm.status import PASSING_MEMORY, MeshStatus, RingStatus

REFRESH_S = 1.0  # figures change without an event
_AWAY = LinkLost, TimedOut, PeerFault
"""Errors of a node that has ended, hangs, or was stopped."""
DEBOUNCE_S = 0.1  # events within this time cause one refresh


async def follow(
    client: NodeClient,
    show: Callable[[MeshStatus], None],
    away: Callable[[str], None],
) -> None:
    """Show the status at each event and every second until cancelled.

    ``away`` takes a message when the connection to the node is lost, or it does not answer; it is
    watched again once it does.

    Raises:
        LinkLost: no node is running at first.
    """
    task = asyncio.current_task()
    show(await client.status())
    while True:
        try:
            await _follow(client, show)
        except* _AWAY as errors:
            lost = errors.exceptions[0]
        if task is not None and task.cancelling():
            # Until Python 3.13 a failing TaskGroup drops a cancellation that comes meanwhile.
            raise asyncio.CancelledError
        away(f"{lost}; waiting for the node to return")
        await _until_back(client)


async def _until_back(client: NodeClient) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        with suppress(*_AWAY):
            await client.status()
            return


async def _follow(client: NodeClient, show: Callable[[MeshStatus], None]) -> None:
    changed = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_listen(client, changed))
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await changed.wait()
            await asyncio.sleep(DEBOUNCE_S)
            render.check_reader()
            changed.clear()
            show(await client.status())


def changes(show: Callable[[MeshStatus], None]) -> Callable[[MeshStatus], None]:
    """Wrap ``show`` to skip a status that differs from the last one by counters and clocks only."""
    before: object = None

    def look(status: MeshStatus) -> None:
        nonlocal before
        after = _without_counters(status)
        if after != before:
            before = after
            show(status)

    return look


def _without_counters(status: MeshStatus) -> object:
    nodes = tuple(replace(each, link=None, memory_bytes=0) for each in status.nodes)
    paths = [each.link and each.link.path for each in status.nodes]
    memory = replace(status.memory, **dict.fromkeys(PASSING_MEMORY, 0))
    rings = tuple(
        replace(each, status=each.status and _without_clocks(each.status)) for each in status.rings
    )
    ring = _without_clocks(status.ring)
    return replace(status, nodes=nodes, since_s=0, memory=memory, rings=rings, ring=ring), paths


def _without_clocks(ring: RingStatus) -> RingStatus:
    return replace(ring, history=tuple(replace(each, ago_s=0) for each in ring.history))


async def _listen(client: NodeClient, changed: asyncio.Event) -> None:
    async with aclosing(client.events()) as events:
        async for _ in events:
            changed.set()
