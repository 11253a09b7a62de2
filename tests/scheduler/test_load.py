from itertools import islice, pairwise

import pytest

from meshllm.errors import UserError
from meshllm.scheduler.load import Lengths, ModelLoad, sample

LOAD = ModelLoad(5.0, Lengths((10, 30)), Lengths((7,)))


def test_one_length_is_fixed_and_two_are_ends_of_a_range() -> None:
    assert {Lengths((7,)).quantile(share) for share in (0, 0.5, 1)} == {7}
    assert [Lengths((10, 30)).quantile(share) for share in (0, 0.5, 1)] == [10, 20, 30]
    assert Lengths((10, 30)).mean == pytest.approx(20)


def test_quantiles_are_interpolated_between_the_values() -> None:
    lengths = Lengths((10, 20, 60))

    assert [lengths.quantile(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [10, 15, 20, 40, 60]
    assert lengths.mean == pytest.approx(27.5, abs=0.1)
    assert lengths.longest == 60


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_the_shortest_and_the_longest_length_are_allowed(length: int) -> None:
    assert Lengths((length,)).mean == length
    assert set(Lengths.lognormal(length, length).values) == {length}


def test_a_log_normal_distribution_has_its_median_and_percentile() -> None:
    lengths = Lengths.lognormal(200, 800)

    assert lengths.quantile(0.5) == pytest.approx(200, rel=0.02)
    assert lengths.quantile(0.9) == pytest.approx(800, rel=0.05)
    assert lengths.mean > 300
    assert 3000 < lengths.longest < 6000


@pytest.mark.parametrize("values", [(), (0,), (5, 3), (1, 2_000_000)])
def test_invalid_lengths_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(UserError):
        Lengths(values)


def test_a_percentile_below_the_median_is_refused() -> None:
    with pytest.raises(UserError, match="median 200, 90th percentile 100"):
        Lengths.lognormal(200, 100)


def test_arrivals_have_the_rate_and_the_lengths_of_the_load() -> None:
    found = list(islice(LOAD.arrivals(0, seed=1), 20_000))

    assert found[-1].at_s == pytest.approx(20_000 / 5, rel=0.03)
    assert sum(each.prompt for each in found) / 20_000 == pytest.approx(20, rel=0.01)
    assert {each.answer for each in found} == {7}
    pauses = [after.at_s - before.at_s for before, after in pairwise(found)]
    assert sum(pause > 0.2 for pause in pauses) / 20_000 == pytest.approx(0.368, abs=0.01)


def test_the_seed_decides_everything() -> None:
    assert list(islice(LOAD.arrivals(0, 1), 9)) == list(islice(LOAD.arrivals(0, 1), 9))
    assert next(LOAD.arrivals(0, 1)) != next(LOAD.arrivals(0, 2))
    assert next(LOAD.arrivals(0, 1)).at_s != next(LOAD.arrivals(1, 1)).at_s


def test_a_sample_has_some_requests_of_a_rare_model() -> None:
    ones = Lengths((1,)), Lengths((1,))
    busy, rare, rarest = (ModelLoad(rate, *ones) for rate in (100.0, 1.0, 0.01))

    found = sample([busy, rare], 2000)
    assert len(found) == pytest.approx(50 * 101, rel=0.05)
    assert sum(each.model for each in found) == pytest.approx(50, rel=0.3)
    assert len(sample([busy, rarest], 2000)) == pytest.approx(8000, rel=0.05)


def test_a_sample_mixes_models_in_order_of_time() -> None:
    busy, calm = (ModelLoad(rate, Lengths((1,)), Lengths((1,))) for rate in (9.0, 1.0))

    found = sample([busy, calm], 5000)

    assert len(found) == pytest.approx(5000, rel=0.05)
    assert sum(each.model for each in found) == pytest.approx(500, rel=0.2)
    assert found == sorted(found, key=lambda each: each.at_s)


def test_cached_tokens_are_a_fraction_of_each_prompt() -> None:
    load = ModelLoad(5.0, Lengths((10, 30)), Lengths((7,)), cached=0.5)

    assert {each.cached * 2 - each.prompt for each in islice(load.arrivals(0, seed=1), 100)} == {
        -1,
        0,
    }
