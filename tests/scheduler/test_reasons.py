from dataclasses import replace

import pytest

from meshllm.scheduler.load import sample
from meshllm.scheduler.placement import LayerAllocation, ReplicaOption, Workload, make_option
from meshllm.scheduler.reasons import why_slower
from meshllm.scheduler.schedule import Assessment, assess
from tests.builders.meshes import A100, GH200, LLAMA_8B, LLAMA_70B, mesh, served

BOTH = mesh(served(LLAMA_8B, 3.0), served(LLAMA_70B, 0.1), kinds=(A100, GH200))


def option(model: int, *machines: int) -> ReplicaOption:
    found = make_option(BOTH, model, machines, LayerAllocation.BALANCED)
    assert found is not None
    return found


def assessed(*replicas: ReplicaOption, where: Workload = BOTH) -> Assessment:
    return assess(where, replicas, sample([each.load for each in where.models], 1500))


BEST = assessed(option(0, 1), option(0, 0), option(1, 1, 1))


def test_a_model_without_a_replica_is_named_first() -> None:
    other = assessed(option(0, 0))

    assert why_slower(BOTH, BEST, other).startswith("it refuses ")
    assert why_slower(BOTH, BEST, other).endswith(" for `llama-3.1-70b`")


def test_slow_tokens_are_the_reason_where_nothing_waits() -> None:
    other = assessed(option(0, 1), option(0, 0), option(1, 0, 0, 0))

    ours, theirs = (each.models[1].token_s[0] * 1e3 for each in (BEST, other))
    name = BOTH.models[1].architecture.name
    told = why_slower(BOTH, BEST, other)
    assert told == f"a token of `{name}` takes {theirs:.1f} ms, not {ours:.1f} ms"


def test_a_queue_is_the_reason_where_replicas_are_too_few() -> None:
    busy = replace(BOTH, models=(served(LLAMA_8B, 24.0), BOTH.models[1]))
    best = assessed(option(0, 1), option(0, 0), option(1, 1, 1), where=busy)
    other = assessed(option(0, 0), option(1, 1, 1), where=busy)

    reason = why_slower(busy, best, other)

    assert reason.startswith("the first token of `llama-3.1-8b` comes after ")
    assert reason.endswith("% busy")


@pytest.mark.parametrize("spare", [(), (option(1, 1, 1),)])
def test_a_placement_may_be_as_fast_and_take_more_machines(
    spare: tuple[ReplicaOption, ...],
) -> None:
    quiet = replace(BOTH, models=(BOTH.models[0], served(LLAMA_70B, 1e-4)))
    best = assessed(option(0, 1), option(0, 0), option(1, 1, 1), where=quiet)
    other = assessed(option(0, 1), option(0, 0), option(1, 1, 1), *spare, where=quiet)

    words = "it is as fast with 2 more of the machines" if spare else "it is as fast"
    assert why_slower(quiet, best, other) == words


def test_a_placement_that_is_faster_by_one_draw_is_not_said_to_be_as_fast() -> None:
    other = replace(BEST, mean_s=0.95 * BEST.mean_s)

    assert why_slower(BOTH, BEST, other) == (
        "it is faster for this random sample of the load, but not for several"
    )
