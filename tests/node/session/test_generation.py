"""A prefetched step, and the job that requests it."""

from typing import Any

from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.generation import PrefetchedStep


def test_an_early_request_gets_the_result_when_it_is_known() -> None:
    ahead, heard = PrefetchedStep(Stopwatch()), list[Any]()

    ahead.ask(heard.append)
    assert not heard
    ahead.set_result(None)

    assert heard == [None]


def test_a_late_request_gets_the_result_at_once() -> None:
    ahead, heard = PrefetchedStep(Stopwatch()), list[Any]()
    error = RuntimeError("out of memory")

    ahead.set_result(error)
    ahead.ask(heard.append)

    assert heard == [error]
