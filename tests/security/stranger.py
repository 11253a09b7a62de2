"""Runs what a stranger does in a process of its own."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

NICE = 19  # an attacker has a machine of its own, and takes no time of this one's processors
SETTLE_S = 1.0  # s of the attack before anybody looks
STOP_S = 10.0  # s until its process has ended

FORK = get_context("fork")


@contextmanager
def running(attack: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run an attack that does not end by itself."""

    def run() -> None:
        os.nice(NICE)
        asyncio.run(attack())

    process = FORK.Process(target=run)
    process.start()
    try:
        process.join(SETTLE_S)
        assert process.is_alive(), "the attack has ended"
        yield
    finally:
        process.kill()
        process.join(STOP_S)
