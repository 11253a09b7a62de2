from dataclasses import replace

import pytest

from meshllm.scheduler import cp_sat, schedule
from meshllm.scheduler.cp_sat import is_installed, pool_of, search_by_solver
from meshllm.scheduler.options import Options
from meshllm.scheduler.schedule import SearchMethod, candidates, finalists
from meshllm.scheduler.search import ReplicaSet, search, search_exactly, search_locally
from tests.builders.meshes import A100, LLAMA_8B, LLAMA_13B, mesh, random_mesh, served

needs_solver = pytest.mark.skipif(not is_installed(), reason="needs `meshllm[plan]`")


@pytest.mark.parametrize("seed", range(6))
def test_pools_hold_the_best_set_of_each_model(seed: int) -> None:
    options = Options(random_mesh(seed, kinds=2, count=2, models=2))

    (best,) = search_exactly(options)

    for model in (0, 1):
        own = tuple(at for at in best.chosen if options.all[at].model == model)
        costs = [cost for cost, _ in pool_of(options, model).values()]
        assert min(costs) <= options.cost(model, own) <= max(costs)
        assert own in [chosen for _, chosen in pool_of(options, model).values()]


def test_a_pool_begins_with_no_replica_and_never_gets_worse_with_machines() -> None:
    options = Options(random_mesh(5))

    pool = pool_of(options, 0)

    assert pool[(0,) * len(options.workload.counts)][1] == ()
    for uses, (cost, _) in pool.items():
        for fewer, (other, _) in pool.items():
            if fewer != uses and all(map(int.__le__, fewer, uses)):
                assert cost < other


def test_what_the_solver_finds_is_among_the_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(random_mesh(29))
    assert search_exactly(options) == []
    known = search(options)[0][0]
    better = ReplicaSet(known.mean_s / 2, known.chosen[:-1])
    monkeypatch.setattr(schedule, "is_installed", lambda: True)
    monkeypatch.setattr(schedule, "search_by_solver", lambda _: [better])

    found, searched = candidates(options)
    assert finalists(options, found)[0] == better
    assert searched is SearchMethod.SOLVER


def test_a_local_search_says_that_no_solver_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(random_mesh(29))
    monkeypatch.setattr(schedule, "is_installed", lambda: False)

    assert candidates(options) == (search_locally(Options(random_mesh(29))), SearchMethod.LOCAL)


@pytest.mark.parametrize("is_installed", [False, True])
def test_an_exact_search_needs_no_solver(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(random_mesh(0, kinds=2, count=2, models=2))
    monkeypatch.setattr(schedule, "is_installed", lambda: is_installed)

    assert candidates(options) == (search_exactly(options), SearchMethod.EXACT)


@needs_solver
@pytest.mark.parametrize("seed", [0, 29])
def test_the_solver_is_as_good_as_the_local_search(seed: int) -> None:
    options = Options(random_mesh(seed))

    (found,) = search_by_solver(options)

    assert found.mean_s <= 1.01 * search_locally(options)[0].mean_s
    assert search_by_solver(options) == [found]


@needs_solver
def test_the_solver_serves_every_model_however_long_the_queue_of_one() -> None:
    pair = replace(A100, count=2)
    options = Options(mesh(served(LLAMA_8B, 1e4), served(LLAMA_13B, 1e-4), kinds=(pair,)))

    (found,) = search_by_solver(options)

    assert [options.all[at].model for at in found.chosen] == [0, 1]


@needs_solver
def test_a_solver_without_time_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "MAX_WORK_S", 0.0)

    assert search_by_solver(Options(random_mesh(29))) == []
