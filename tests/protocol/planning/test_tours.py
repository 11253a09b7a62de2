import random
from itertools import combinations, permutations

import pytest

from meshllm.protocol.planning.tours import all_tours, length, short_tour, shortest_tours

# Seven places on a circle of 28 steps, named out of order; the shortest tour follows the circle.
_AT = [0, 12, 4, 20, 8, 24, 16]
WAYS = [[min((a - b) % 28, (b - a) % 28) for b in _AT] for a in _AT]


def test_a_tour_is_closed() -> None:
    assert length(WAYS, (0, 2, 4)) == 4 + 4 + 8


def test_a_tour_of_one_place_costs_nothing() -> None:
    assert length(WAYS, (3,)) == 0


def test_all_tours_are_every_order_of_every_subset() -> None:
    assert list(all_tours(0, [1, 2])) == [(0,), (0, 1), (0, 2), (0, 1, 2), (0, 2, 1)]
    assert len(set(all_tours(0, range(1, 6)))) == 326


def test_shortest_tours_are_optimal_for_every_subset() -> None:
    costs = [[(3 * a + 5 * b) % 11 * (a != b) for b in range(6)] for a in range(6)]
    shortest: dict[frozenset[int], int] = {}
    for tour in all_tours(5, range(5)):
        places = frozenset(tour)
        shortest[places] = min(length(costs, tour), shortest.get(places, 99))

    found = list(shortest_tours(costs, 5, range(5)))

    assert {frozenset(tour): length(costs, tour) for tour in found} == shortest
    assert {tour[0] for tour in found} == {5}


def test_a_short_tour_has_no_crossing() -> None:
    tour = short_tour(WAYS, 0, range(1, 7))

    assert sorted(tour) == list(range(7))
    assert tour[0] == 0
    assert length(WAYS, tour) == 28


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_no_reversal_shortens_a_short_tour(is_symmetric: bool) -> None:
    drawn = random.Random(7)
    for places in (2, 3, 4, 5, 8, 11):
        costs = [[drawn.randrange(1, 100) for _ in range(places)] for _ in range(places)]
        if is_symmetric:
            costs = [[costs[min(a, b)][max(a, b)] for b in range(places)] for a in range(places)]

        tour = short_tour(costs, 0, range(1, places))

        assert sorted(tour) == list(range(places))
        assert tour[0] == 0
        for low, high in combinations(range(1, places + 1), 2):
            other = (*tour[:low], *reversed(tour[low:high]), *tour[high:])
            assert length(costs, tour) <= length(costs, other), (tour, low, high)


def test_two_opt_repairs_a_bad_insertion() -> None:
    points = [(0, 0), (9, 1), (3, 8), (7, 7), (1, 5), (8, 4), (2, 2), (5, 9), (4, 1), (6, 3)]
    costs = [[abs(a - c) + abs(b - d) for c, d in points] for a, b in points]
    best = min(length(costs, (0, *rest)) for rest in permutations(range(1, 8)))

    assert length(costs, short_tour(costs, 0, range(1, 8))) <= 1.2 * best
