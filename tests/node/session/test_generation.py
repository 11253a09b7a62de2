"""What a generation knows of a step that runs ahead of being asked for."""

from typing import Any

from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.node.session.generation import Ahead


def test_who_asks_early_hears_of_it_when_it_is_known() -> None:
    ahead, heard = Ahead(Stopwatch()), list[Any]()

    ahead.ask(heard.append)
    assert not heard
    ahead.hear(None)

    assert heard == [None]


def test_who_asks_late_hears_of_it_at_once() -> None:
    ahead, heard = Ahead(Stopwatch()), list[Any]()
    error = RuntimeError("out of memory")

    ahead.hear(error)
    ahead.ask(heard.append)

    assert heard == [error]
