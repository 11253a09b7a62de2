"""Failed dials of one target are bounded, whichever peers name it."""

from meshllm.protocol.membership.dial_limit import BURST, MAX_TARGETS, PAUSE_S, DialLimit


def test_a_silent_target_is_tried_less_and_less() -> None:
    limit = DialLimit()

    tries = [limit.take("a:1", now=0.1 * tenth) for tenth in range(1000)]

    assert tries[: BURST + 1] == [True] * BURST + [False]
    assert sum(tries) <= BURST + 100 / PAUSE_S


def test_an_answer_restores_the_attempts() -> None:
    limit = DialLimit()

    for _ in range(10 * BURST):
        assert limit.take("a:1", now=0.0)
        limit.answered("a:1")


def test_targets_are_counted_apart() -> None:
    limit = DialLimit()
    for _ in range(BURST):
        limit.take("a:1", now=0.0)

    assert not limit.take("a:1", now=0.0)
    assert limit.take("a:2", now=0.0)


def test_the_oldest_target_is_forgotten() -> None:
    limit = DialLimit()
    for number in range(MAX_TARGETS):
        for _ in range(BURST):
            limit.take(f"a:{number}", now=0.0)
    limit.take("a:1", now=0.0)

    assert limit.take("b:1", now=0.0)
    assert limit.take("a:0", now=0.0)
    assert not limit.take("a:1", now=0.0)
