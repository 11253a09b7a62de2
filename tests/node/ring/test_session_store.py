"""Sessions that are kept while plans change: whose they are depends on who is the entry."""

from types import SimpleNamespace
from typing import cast

import pytest
from transformers import LlamaConfig

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.received_rows import ReceivedRows
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import NodeId, SessionId, Span
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.session_store import SessionStore, begun
from meshllm.protocol.kv_cache.budget import BLOCK, KvBudget
from meshllm.protocol.kv_cache.prefix_index import PrefixIndex
from meshllm.protocol.kv_cache.prefix_matching import PrefixCache
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from tests.builders.rooms import room

ME, OTHER, THIRD = (NodeId(bytes([number]) * 32) for number in range(3))
OWN, OTHERS, NEW = (SessionId(name * 16) for name in (b"a", b"b", b"c"))


def plan_of(epoch: int, *nodes: NodeId) -> Plan:
    spans = Span(0, 2), Span(2, 4)
    stages = [PlanStage(node, span) for node, span in zip(nodes, spans, strict=True)]
    return Plan(epoch, "model", Ends.ENTRY, tuple(stages))


@pytest.mark.parametrize(
    ("before", "after", "is_kept"),
    [
        ((OTHER, ME), (OTHER, THIRD), True),
        ((ME, OTHER), (ME, THIRD), True),
        ((OTHER, ME), (ME, OTHER), False),
        ((ME, OTHER), (OTHER, ME), False),
        ((OTHER, ME), (THIRD, ME), False),
    ],
)
def test_the_owner_keeps_its_share_until_another_node_is_the_entry(
    before: tuple[NodeId, NodeId], after: tuple[NodeId, NodeId], is_kept: bool
) -> None:
    budget = KvBudget([room(2)])
    index = PrefixIndex(budget, None)
    store = SessionStore(plan_of(1, *before), PrefixCache(index, None))
    index.put(OWN, 1, BLOCK, 0.0, is_own=True)
    index.put(OTHERS, 1, BLOCK, 0.0)

    store.move(plan_of(2, *after), ME, budget, 1.0)

    assert index.put(NEW, 1, BLOCK, 1.0) == [OTHERS if is_kept else OWN]


@pytest.mark.parametrize(
    ("before", "moved"),
    [(None, (Span(0, 2),)), ((OTHER, THIRD), (Span(0, 2),)), ((OTHER, ME), (Span(0, 4),))],
    ids=["restarted", "was a standby", "others have moved too"],
)
def test_a_node_that_has_nothing_knows_which_layers_are_lost(
    before: tuple[NodeId, NodeId] | None, moved: tuple[Span, ...]
) -> None:
    model = cast("ModelRuntime", SimpleNamespace(prefix_bytes=None, max_crop=None, resumes=True))
    plan, earlier = plan_of(2, ME, THIRD), plan_of(1, *before) if before else None

    store = SessionStore.empty(plan, KvBudget([room(2)]), model, ME, earlier)

    found = store.prefixes.resume_empty(OWN, 3, [], Span(0, 2))
    assert found is not None
    assert found[0].lost == moved


@pytest.mark.parametrize(
    ("opens", "later_s", "moved"),
    [(True, 1.0, (Span(0, 4),)), (True, 61.0, None), (False, 61.0, (Span(0, 4),))],
)
def test_what_two_changes_of_plan_moved_is_lost_unless_a_ring_was_open_long_enough_between(
    opens: bool, later_s: float, moved: tuple[Span, ...] | None
) -> None:
    model = cast("ModelRuntime", SimpleNamespace(prefix_bytes=None, max_crop=None, resumes=True))
    budget, first = KvBudget([room(2)]), plan_of(1, OTHER, THIRD)
    store = SessionStore.empty(plan_of(2, ME, THIRD), budget, model, ME, first)
    if opens:
        store.opened(0.0)
        store.opened(50.0)  # again, after the loss of a link

    store.move(plan_of(3, ME, OTHER), ME, budget, later_s)

    found = store.prefixes.resume_empty(OWN, 3, [], Span(0, 2))
    assert (found[0].lost if found else None) == moved


def layers_with(error: Exception) -> SpanRunner:
    """Return layers that can take over nothing."""

    class Layers:
        def new_cache(self) -> SessionCache:
            return SessionCache([SpanCache(LlamaConfig(num_hidden_layers=2), Span(0, 2))])

        def adopt(self, _: object) -> None:
            raise error

    return cast("SpanRunner", Layers())


@pytest.mark.parametrize("error", [IndexError("a bug in model code"), MemoryError()])
def test_what_the_model_cannot_take_over_is_computed_again(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    assert begun(layers_with(error), {OWN: ReceivedRows()}) == {}
    assert "are not used" in caplog.text


def test_a_bug_of_ours_while_layers_take_over_is_not_hidden() -> None:
    with pytest.raises(EOFError):
        begun(layers_with(EOFError("ours")), {OWN: ReceivedRows()})
