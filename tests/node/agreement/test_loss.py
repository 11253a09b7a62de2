"""A lost ring is explained by what the records say of its nodes."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from meshllm.names import FIRST_GROUP, LossCause, RingEntry
from meshllm.node.agreement.own_state import HANGS
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import ALONE, ENTRY, PLAN, STAGE, Place


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(story())


def test_a_loss_is_explained_with_the_names_of_nodes() -> None:
    async def story() -> None:
        place = Place()
        place.serve(replace(ALONE, epoch=PLAN.epoch + 1))
        after = place.directory.ring_at(RingEntry(ENTRY))
        place.alive.discard(STAGE)
        place.profiles[STAGE] = SimpleNamespace(name="cellar")
        cause, text = place.directory.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_LOST, "cellar is gone")
        place.silent.add(STAGE)
        cause, text = place.directory.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_SILENT, "cellar is silent")
        place.states[ENTRY] = StateRecord(faulty=(STAGE,))
        cause, text = place.directory.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_REFUSED, "cellar is refused")
        place.alive.add(STAGE)
        place.states[STAGE] = StateRecord(obstacle=HANGS)
        cause, text = place.directory.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_HUNG, "cellar hangs")
        del place.states[ENTRY]
        place.states[STAGE] = StateRecord(Lifecycle.LEFT)
        cause, text = place.directory.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_LEFT, "cellar left")

    run(story)
