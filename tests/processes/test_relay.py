"""A relay that is killed while an answer needs it, in namespaces with a shaped network."""

from collections.abc import Iterator

import pytest

from tests.bench.nemesis import Ground, open_ground
from tests.processes.conftest import QUESTION, STORY, Answers
from tests.processes.fleet import ALONE, ask, asking, open_fleet, until

NAMES = ("attic", "bench", "cellar")

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(300)]


@pytest.fixture
def ground() -> Iterator[Ground]:
    """Three nodes in a ring, with QUIC and a relay."""
    with open_fleet() as fleet, open_ground(fleet, NAMES, has_relay=True) as ground:
        if ground.lacks:
            pytest.skip(ground.lacks)
        ticket = ground.ticket(NAMES[0])
        for name in NAMES:
            ground.start(name, "--join", ticket, "--members", str(len(NAMES)), *ALONE)
        fleet.form()
        yield ground


def test_a_running_answer_survives_the_death_of_a_relay_that_it_needs(
    ground: Ground, answers: Answers
) -> None:
    assert ground.relay is not None
    fleet = ground.fleet
    hidden, *others = (ground.node(name) for name in NAMES)

    with ground.hiding(hidden.name):
        fleet.form()
        before = ask(hidden, QUESTION)
        with asking(others[0], STORY) as chat:
            ground.relay.kill()
            was_under_way = chat.is_under_way
            answer = chat.answer()
        until(lambda: others[0].states()[hidden.name] == "down", fleet.told)
        ground.relay.start()
        fleet.form()
        after = ask(hidden, QUESTION)

    assert was_under_way
    assert answer == answers[STORY]
    assert [before, after] == [answers[QUESTION]] * 2
    losses = others[0].status()["sessions"]["losses"]
    assert [(each["cause"], each["count"]) for each in losses] == [("node_silent", 1)]
