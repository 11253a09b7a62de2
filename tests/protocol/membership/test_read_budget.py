"""What one peer may make this node work."""

import pytest

from meshllm.protocol.membership.read_budget import (
    BURST_S,
    CLIENT_BYTES_PER_S,
    FREE,
    MESSAGE_S,
    QUANTUM_S,
    SHORT_BYTES,
    TURNS,
    ReadBudget,
)
from meshllm.protocol.trust.credential import Role


def read_for(role: Role, seconds: float, size: int, *, is_gossip: bool = True) -> int:
    """Return how many messages are read in a time, from a peer that sends without end."""
    budget, now, read = ReadBudget(role, 0.0), 0.0, 0
    while now < seconds:
        read += 1
        now += MESSAGE_S + budget.pause(size, now, is_gossip=is_gossip)
    return read


@pytest.mark.parametrize("role", Role)
def test_a_flood_of_small_messages_gets_a_share_of_a_thread(role: Role) -> None:
    most = (BURST_S + QUANTUM_S + 100 * (FREE[role] + TURNS)) / MESSAGE_S

    assert most / 2 < read_for(role, 100, 0) < most


def test_an_honest_peer_is_read_at_once() -> None:
    budget = ReadBudget(Role.NODE, 0.0)

    beats = [budget.pause(38, now / 2, is_gossip=True) for now in range(1000)]
    events = [budget.pause(100, 500 + now / 400, is_gossip=False) for now in range(4000)]

    assert set(beats) == set(events) == {0.0}


def test_the_longest_gossip_costs_more_than_as_long_an_answer() -> None:
    gossip = read_for(Role.NODE, 10, 256 * 1024)

    assert gossip < read_for(Role.NODE, 10, 256 * 1024, is_gossip=False) / 5


def test_a_pause_pays_for_the_work() -> None:
    budget, now = ReadBudget(Role.NODE, 0.0), 0.0
    first = budget.pause(4 << 20, now, is_gossip=False)
    second = budget.pause(0, now + first, is_gossip=False)

    assert first > 0
    assert second == 0.0


def test_idle_time_is_saved_up_to_a_burst() -> None:
    rested, new = ReadBudget(Role.NODE, 0.0), ReadBudget(Role.NODE, 1000.0)

    assert rested.pause(4 << 20, 1000.0, is_gossip=False) == new.pause(
        4 << 20, 1000.0, is_gossip=False
    )


def test_long_messages_of_clients_always_wait() -> None:
    short, long, of_node = (
        ReadBudget(role, 0.0).pause(size, 0.0, is_gossip=False)
        for role, size in (
            (Role.CLIENT, SHORT_BYTES),
            (Role.CLIENT, SHORT_BYTES + 1),
            (Role.NODE, SHORT_BYTES + 1),
        )
    )

    assert (short, of_node) == (0.0, 0.0)
    assert long == pytest.approx(SHORT_BYTES / CLIENT_BYTES_PER_S, rel=0.01)
