"""Nodes start in every order, with one ticket that was made before.

The other tests start the founder first or last; this one is run by itself:
`pytest -m slow tests/processes/test_orders.py`.
"""

import json
from itertools import permutations

import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, ask, meshllm, until

pytestmark = [pytest.mark.socket, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("founder", "one", "two")


@pytest.mark.parametrize("order", list(permutations(NAMES)), ids="-".join)
def test_every_order_makes_one_ring_that_answers_from_each_node(
    fleet: Fleet, order: tuple[str, ...], answers: Answers
) -> None:
    ticket = fleet.create_mesh("founder")

    for name in order:
        # The ticket is for all three; the node that made it knows it.
        node = fleet.node(name).start("--join", ticket, "--members", "3", *ALONE)
        until(lambda node=node: bool(node.stderr), fleet.told)  # type: ignore[misc]  # it waits, or is ready
    fleet.form()

    shown = [
        json.loads(meshllm("ring", "status", "--json", state=fleet.node(name).state).stdout)["ring"]
        for name in NAMES
    ]
    assert [ask(fleet.node(name), QUESTION) for name in NAMES] == [answers[QUESTION]] * 3
    assert answers[QUESTION].startswith("A ring is")
    assert len({json.dumps([ring["epoch"], ring["digest"], ring["stages"]]) for ring in shown}) == 1
