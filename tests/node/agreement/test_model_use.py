"""Which models were asked for here lately."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from meshllm.names import ModelKey
from meshllm.node.agreement.model_use import ModelUse
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import call_later, several

WHOLE, *_ = several()
FIRST, OTHER = (each.key for each in WHOLE.served)


class Used:
    """The use of the models of a mesh, kept for a minute, and each change that it tells."""

    def __init__(self) -> None:
        self.told: list[tuple[ModelKey, ...]] = []
        self.machine = SimpleNamespace(charter=WHOLE)
        self.use = ModelUse(cast("Any", self.machine), 60.0, self._note, call_later)

    def ask(self, model: str) -> None:
        with self.use.using(model):
            pass

    def _note(self) -> None:
        self.told.append(self.use.used)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_a_model_is_used_for_a_while_after_it_was_asked_for() -> None:
    async def scenario() -> None:
        used = Used()
        used.ask("of an engine")
        assert used.told == []
        used.ask("other")
        await asyncio.sleep(40)
        used.ask("other")
        assert used.told == [(OTHER,)]  # nothing new
        await asyncio.sleep(40)
        assert used.use.used == (OTHER,)
        await asyncio.sleep(21)
        assert used.told == [(OTHER,), ()]

    run(scenario)


def test_a_model_is_used_while_it_answers() -> None:
    async def scenario() -> None:
        used = Used()
        with used.use.using("tiny"):
            await asyncio.sleep(200)
            assert used.use.used == (FIRST,)
        await asyncio.sleep(59)
        assert used.use.used == (FIRST,)
        await asyncio.sleep(2)
        assert used.told == [(FIRST,), ()]

    run(scenario)


def test_a_mesh_of_one_model_does_not_tell() -> None:
    async def scenario() -> None:
        used = Used()
        used.ask("")
        told = [used.use.used]
        for charter in (replace(WHOLE, models=()), None):
            used.machine.charter = cast("Any", charter)
            used.ask("")
            told.append(used.use.used)
        assert told == [(FIRST,), (), ()]
        assert [used.use.is_used(each) for each in (FIRST, OTHER)] == [True, False]

    run(scenario)
