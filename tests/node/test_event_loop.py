import asyncio
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import patch

import pytest

from meshllm.node import event_loop
from meshllm.testing.clock import VirtualLoop, run_virtual

READER = """
import asyncio, socket, sys
from meshllm.node import event_loop

async def main():
    loop, first = asyncio.get_running_loop(), asyncio.Event()
    def note(what):
        print(what, flush=True)
        first.set()
    loop.add_reader(0, note, "read")
    loop.call_later(float(sys.argv[1]), note, "timer")
    print("ready", flush=True)
    await first.wait()
    loop.remove_reader(0)

event_loop.run(main())
"""


def test_what_arrived_before_a_timer_was_due_is_read_first() -> None:
    class Interrupted(selectors.SelectSelector):
        """Returns nothing of what arrived in its time, as after a stop."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            events = super().select(timeout)
            return [] if timeout else events

    near, far = socket.socketpair()
    with near, far, Interrupted() as selector:
        selector.register(near, selectors.EVENT_READ)
        far.send(b"x")

        with patch.object(selectors.DefaultSelector, "select", selector.select):
            assert event_loop._LookingTwice().select(1.0)


@pytest.mark.socket
def test_after_a_stop_what_waits_is_read_before_timers_fire() -> None:
    delay_s = 0.5
    while True:
        near, far = socket.socketpair()
        command = [sys.executable, "-c", READER, str(delay_s)]
        with (
            near,
            far,
            subprocess.Popen(command, stdin=far.fileno(), stdout=subprocess.PIPE) as reader,
        ):
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
            reader.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
            os.set_blocking(reader.stdout.fileno(), False)
            was_late = bool(reader.stdout.read())
            near.send(b"x")
            time.sleep(delay_s)
            reader.send_signal(signal.SIGCONT)
            os.set_blocking(reader.stdout.fileno(), True)
            first = reader.stdout.readline()
        if not was_late:
            break
        delay_s *= 2

    assert first == b"read\n"


def test_a_time_begins_again_after_a_stop() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        times = list[float]()

        async def wait() -> None:
            async with event_loop.awake_timeout(5.0):
                loop.suspend(60.0)
                await asyncio.sleep(4.0)
                times.append(loop.time())
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            await wait()
        assert [*times, loop.time()] == [64.0, 65.0]

    run_virtual(scenario())


def test_what_ends_in_time_does_not_time_out() -> None:
    async def scenario() -> None:
        async with event_loop.awake_timeout(5.0):
            await asyncio.sleep(4.0)
        await asyncio.sleep(60.0)

    run_virtual(scenario())
