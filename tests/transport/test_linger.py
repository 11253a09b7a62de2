"""How long a closing connection waits for its peer."""

import asyncio

import pytest

from meshllm.testing.clock import run_virtual
from meshllm.transport.linger import MAX_S, STALL_S, Linger


async def _lasts(bytes_per_s: float, size: int) -> float:
    """Return how long a peer that takes so much per second has until the abort."""
    now, ended = asyncio.get_running_loop().time, asyncio.Event()
    linger = Linger(lambda: max(0, size - int(bytes_per_s * now())), ended.set)

    for _ in range(2):  # the second call changes nothing
        linger.start()
    await ended.wait()

    return now()


@pytest.mark.parametrize(
    ("bytes_per_s", "size", "seconds"),
    [(0, 0, STALL_S), (0, 100, STALL_S), (10, 120, 20.0), (1, 1000, MAX_S)],
)
def test_a_peer_has_as_long_as_it_takes_data(bytes_per_s: float, size: int, seconds: float) -> None:
    assert run_virtual(_lasts(bytes_per_s, size)) == pytest.approx(seconds, abs=0.01)


def test_a_connection_that_closes_is_not_aborted() -> None:
    aborts: list[bool] = []

    async def closes() -> None:
        linger = Linger(lambda: 0, lambda: aborts.append(True))
        linger.cancel()
        linger.start()
        linger.cancel()
        await asyncio.sleep(2 * MAX_S)

    run_virtual(closes())

    assert aborts == []
