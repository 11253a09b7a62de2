"""What a ring waits for, and why it was lost, by the names of nodes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshllm.names import FIRST_GROUP, LossCause, NodeId, RingEntry
from meshllm.node.agreement.explanation import gathering, loading_layers, loading_model
from meshllm.node.agreement.own_state import HANGS
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A, B, C
from tests.builders.ring_places import AGREEMENT, ALONE, ENTRY, PLAN, STAGE, Place
from tests.builders.snapshots import profile

PROFILES = {
    node: replace(profile(4), name=name) for node, name in ((A, "attic"), (B, "desk"), (C, "barn"))
}


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (3, "2 of 3 members are here, loading the model: attic, desk"),
        (2, "2 of 2 members are here, loading the model: attic, desk"),
        (1, "1 member is requested, 2 nodes are here, loading the model: attic, desk"),
        (None, "the nodes are loading the model: attic, desk"),
    ],
)
def test_nodes_that_load_the_model_are_named(members: int | None, text: str) -> None:
    assert loading_model([A, B], members, PROFILES) == text


@pytest.mark.parametrize(
    ("ready", "loading", "text"),
    [
        ((), (), "0 of 2 members are ready; the others have up to 30 s"),
        ((A,), (), "1 of 3 members are ready: attic; the others have up to 30 s"),
        (
            (A,),
            (B,),
            "1 of 3 members are ready: attic; loading the model: desk; the others have up to 30 s",
        ),
    ],
)
def test_members_that_are_ready_and_that_load_are_named(
    ready: tuple[NodeId, ...], loading: tuple[NodeId, ...], text: str
) -> None:
    agreement = replace(AGREEMENT, ready=frozenset(ready), lacking=2)

    assert gathering(agreement, loading, 30.0, PROFILES) == text


@pytest.mark.parametrize(
    ("loading", "unlinked", "text"),
    [
        ((B, C), None, "1 of 3 nodes have loaded their layers; loading: barn, desk"),
        ((), None, "3 of 3 nodes have loaded their layers and connect"),
        ((), B, "3 of 3 nodes have loaded their layers and connect; no link to desk"),
    ],
)
def test_nodes_that_load_layers_or_do_not_link_are_named(
    loading: tuple[NodeId, ...], unlinked: NodeId | None, text: str
) -> None:
    assert loading_layers(3, loading, unlinked, PROFILES) == text


def test_a_loss_is_explained_with_the_names_of_nodes() -> None:
    async def scenario() -> None:
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

    run_virtual(scenario())
