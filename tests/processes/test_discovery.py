"""Nodes that find each other on the local network, and over IPv6."""

import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, ask, free_address

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]


def test_a_ticket_with_a_dead_address_is_enough_on_one_network(
    fleet: Fleet, answers: Answers
) -> None:
    ticket = fleet.create_mesh("founder", f"ws://{free_address()}")

    fleet.node("founder").start("--members", "3")
    fleet.node("one", free_address("[::1]")).start("--join", ticket)
    fleet.node("two").start("--join", ticket)
    fleet.form()

    assert ask(fleet.node("two"), QUESTION) == answers[QUESTION]


@pytest.mark.slow
def test_a_ring_forms_over_ipv6(fleet: Fleet, answers: Answers) -> None:
    for name in ("founder", "one"):
        fleet.node(name, free_address("[::1]"))
    ticket = fleet.create_mesh("founder")

    fleet.node("founder").start("--members", "2", *ALONE)
    fleet.node("one").start("--join", ticket, *ALONE)
    fleet.form()

    own = fleet.node("one").address
    assert fleet.node("one").status()["listening"] == [f"ws://{own}", f"quic://{own}"]
    assert ask(fleet.node("one"), QUESTION) == answers[QUESTION]
