"""The search against brute force: every way to group machines, labelled with every model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from meshllm.scheduler.options import Options
from meshllm.scheduler.placement import Workload
from meshllm.scheduler.search import ReplicaSet, search, search_exactly, search_locally
from tests.builders.meshes import A100, LLAMA_8B, LLAMA_13B, mesh, random_mesh, served

SMALL = range(12)


def small(seed: int) -> Workload:
    return random_mesh(seed, kinds=2, count=2, models=2)


@cache
def large(seed: int) -> tuple[Options, list[ReplicaSet]]:
    """Search a mesh with too many sets to compare all."""
    options = Options(random_mesh(seed))
    return options, search(options)[0]


def partitions(machines: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to group machines; one of the groups may stay unused."""
    if not machines:
        yield []
        return
    first, *others = machines
    for groups in partitions(others):
        yield [[first], *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], [first, *group], *groups[at + 1 :]]


def brute_force(options: Options) -> float:
    """Return the least mean time of any placement."""
    machines = [kind for kind, count in enumerate(options.workload.counts) for _ in range(count)]
    by_machines: dict[tuple[int, ...], list[int]] = {}
    for at, option in enumerate(options.all):
        by_machines.setdefault(tuple(sorted(option.kinds)), []).append(at)

    def choices(groups: list[list[int]]) -> Iterator[tuple[int, ...]]:
        if not groups:
            yield ()
            return
        for rest in choices(groups[1:]):
            yield rest
            for at in by_machines.get(tuple(sorted(groups[0])), ()):
                yield (at, *rest)

    return min(
        options.mean_s(chosen) for groups in partitions(machines) for chosen in choices(groups)
    )


@pytest.mark.parametrize("seed", SMALL)
def test_the_exact_search_finds_what_brute_force_finds(seed: int) -> None:
    options = Options(small(seed))

    (found,) = search_exactly(options)

    assert found.mean_s == pytest.approx(brute_force(options), rel=1e-9)
    assert search(options) == ([found], True)


@pytest.mark.parametrize("seed", SMALL)
def test_the_local_search_comes_close(seed: int) -> None:
    options = Options(small(seed))

    found = search_locally(options)

    (best,) = search_exactly(options)
    assert best.mean_s <= found[0].mean_s <= 1.05 * best.mean_s


@pytest.mark.parametrize("seed", [29, 33])
def test_a_large_mesh_is_searched_within_its_machines(seed: int) -> None:
    options, (best, *_) = large(seed)
    assert search_exactly(Options(random_mesh(seed))) == []  # too many sets

    uses = zip(*(options.all[at].uses for at in best.chosen), strict=True)
    assert all(sum(used) <= have for used, have in zip(uses, options.workload.counts, strict=True))
    assert {options.all[at].model for at in best.chosen} == set(range(len(options.workload.models)))


def test_the_answer_does_not_depend_on_the_run() -> None:
    _, first = large(33)

    assert search(Options(random_mesh(33))) == (first, False)


@pytest.mark.parametrize("searching", [search_exactly, search_locally])
def test_a_model_that_is_rarely_asked_for_has_a_replica_however_long_the_queue_of_another(
    searching: Callable[[Options], list[ReplicaSet]],
) -> None:
    pair = replace(A100, count=2)
    options = Options(mesh(served(LLAMA_8B, 100.0), served(LLAMA_13B, 1e-4), kinds=(pair,)))

    best = searching(options)[0]

    assert [options.all[at].model for at in best.chosen] == [0, 1]


def test_an_option_can_be_left_out() -> None:
    options = Options(small(1))
    best = search(options)[0][0]

    other = search(options.without(best.chosen[0]))[0][0]

    assert best.chosen[0] not in other.chosen
    assert other.mean_s >= best.mean_s
    assert search(options)[0][0] == best
