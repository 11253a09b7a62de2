"""Failed dials of one target are bounded, whichever peers name it."""

from meshllm.protocol.membership.dial_limit import (
    BURST,
    MAX_TARGETS,
    MAX_UNANSWERED,
    PAUSE_S,
    PORTS,
    DialLimit,
)


def test_a_silent_target_is_tried_less_and_less() -> None:
    limit = DialLimit()

    tries = [limit.take("a", "1", now=0.1 * tenth) for tenth in range(1000)]

    assert tries[: BURST + 1] == [True] * BURST + [False]
    assert sum(tries) <= BURST + 100 / PAUSE_S


def test_a_target_is_tried_for_longer_where_a_node_has_answered() -> None:
    limit = DialLimit()
    for _ in range(BURST + 1):
        limit.take("a", "1", now=0.0)

    limit.answered("a", "1")

    tries = [limit.take("a", "1", now=0.0) for _ in range(MAX_UNANSWERED + 2 * BURST)]
    assert sum(tries) == MAX_UNANSWERED + BURST
    limit.answered("a", "1")
    assert limit.take("a", "1", now=0.0)


def test_the_oldest_answer_is_forgotten() -> None:
    limit = DialLimit()
    for number in (*range(MAX_TARGETS), 0, MAX_TARGETS):
        limit.answered(f"{number}", "1")

    def is_limited(host: str) -> bool:
        return not all(limit.take(host, "1", now=0.0) for _ in range(BURST + 1))

    assert is_limited("1")
    assert not is_limited("0")


def test_ports_of_a_host_are_counted_apart_and_together() -> None:
    limit = DialLimit()
    for _ in range(BURST):
        limit.take("a", "1", now=0.0)

    assert not limit.take("a", "1", now=0.0)
    tries = [limit.take("a", f"{port}", now=0.0) for port in range(2, 1000)]
    assert tries == [True] * (BURST * PORTS - BURST) + [False] * (999 - BURST * PORTS + BURST - 1)
    assert limit.take("b", "2", now=0.0)
    later = [limit.take("a", f"{port}", now=PAUSE_S) for port in range(2, 1000)]
    assert sum(later) == PORTS


def test_other_ports_of_a_host_do_not_use_up_the_attempts_where_a_node_has_answered() -> None:
    limit = DialLimit()
    limit.answered("a", "1")

    others = [limit.take("a", f"{port}", now=0.0) for port in range(2, 1000)]
    tries = [limit.take("a", "1", now=0.0) for _ in range(1000)]

    assert sum(others) == BURST * PORTS
    assert sum(tries) == MAX_UNANSWERED + BURST
    assert limit.take("a", "1", now=PAUSE_S)


def test_attempts_where_a_node_has_answered_do_not_count_for_other_ports_of_the_host() -> None:
    limit = DialLimit()
    for port in ("1", "2"):
        limit.answered("a", port)

    for _ in range(1000):
        limit.take("a", "1", now=0.0)

    assert sum(limit.take("a", "2", now=0.0) for _ in range(1000)) == MAX_UNANSWERED + BURST
    assert sum(limit.take("a", f"{port}", now=0.0) for port in range(3, 99)) == BURST * PORTS


def test_a_host_has_all_attempts_again_once_a_node_has_answered_there() -> None:
    limit = DialLimit()
    for port in range(2, 99):
        limit.take("a", f"{port}", now=0.0)

    limit.answered("a", "1")

    assert sum(limit.take("a", f"{port}", now=0.0) for port in range(99, 999)) == BURST * PORTS


def test_the_oldest_target_is_forgotten() -> None:
    limit = DialLimit()
    for number in range(MAX_TARGETS):
        for _ in range(BURST):
            limit.take(f"{number}", "1", now=0.0)
    limit.take("1", "1", now=0.0)

    assert limit.take("b", "1", now=0.0)
    assert limit.take("0", "1", now=0.0)
    assert not limit.take("1", "1", now=0.0)
