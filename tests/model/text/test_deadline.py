"""Functions that end in time, fail, and never end."""

from itertools import count
from threading import Event

import pytest

from meshllm.model.text import deadline
from meshllm.model.text.deadline import DeadlineExceeded, run_within


def test_a_result_is_returned() -> None:
    assert run_within(60, lambda: 7) == 7


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_within(60, lambda: 1 // 0)


def test_a_panic_is_the_callers() -> None:
    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic

    with pytest.raises(Panic):
        run_within(60, panic)


def test_a_loop_without_end_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE_S", 60)
    ended = Event()

    def loop() -> None:
        try:
            for _ in count():
                pass
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded):
        run_within(0.01, loop)
    assert ended.is_set()


def test_a_call_that_cannot_be_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE_S", 0.01)
    go_on, ended = Event(), Event()

    def wait() -> None:
        try:
            go_on.wait()
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded):
        run_within(0.01, wait)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(60)
