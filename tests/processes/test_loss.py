"""Nodes that are killed, leave or are interrupted, while the others go on."""

import signal
from pathlib import Path

import pytest

from tests.processes.conftest import QUESTION, STORY, Answers
from tests.processes.fleet import ALONE, Fleet, Node, ask, asking, meshllm, until

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]


def entry(trio: Fleet) -> Node:
    """Return the node that embeds and samples."""
    status = trio.node("attic").status()
    return next(trio.node(each["name"]) for each in status["nodes"] if each["rank"] == 0)


def test_the_mesh_answers_without_a_killed_node_which_can_return(
    trio: Fleet, answers: Answers
) -> None:
    lost, witness = trio.node("cellar"), trio.node("bench")
    before = lost.status()["node"]

    lost.kill()
    until(lambda: witness.states()["cellar"] == "down", trio.told)
    answer = ask(witness, QUESTION)
    lost.start(*ALONE)
    trio.form()

    assert answer == answers[QUESTION]
    assert lost.status()["node"] == before
    assert ask(lost, QUESTION) == answers[QUESTION]


@pytest.mark.parametrize("is_entry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_running_answer_survives_a_killed_node(
    trio: Fleet, answers: Answers, *, is_entry: bool
) -> None:
    first = entry(trio)
    others = [node for node in trio.nodes.values() if node is not first]
    lost, ingress = (first, others[0]) if is_entry else (others[0], first)

    with asking(ingress, STORY) as chat:
        lost.send(signal.SIGKILL)
        is_under_way = chat.is_under_way
        answer = chat.answer()

    assert is_under_way
    assert answer == answers[STORY]
    assert chat.process.returncode == 0


@pytest.mark.slow
def test_a_running_answer_survives_two_nodes_killed_at_once(trio: Fleet, answers: Answers) -> None:
    ingress, *lost = trio.nodes.values()

    with asking(ingress, STORY) as chat:
        for node in lost:
            node.send(signal.SIGKILL)  # `kill` waits for the end of each
        is_under_way = chat.is_under_way
        answer = chat.answer()

    assert is_under_way
    assert answer == answers[STORY]
    assert chat.process.returncode == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_leaving_node_finishes_its_answers(
    trio: Fleet, answers: Answers, number: signal.Signals
) -> None:
    leaver, witness = trio.node("cellar"), trio.node("attic")

    with asking(leaver, STORY) as chat:
        leaver.send(number)
        answer = chat.answer()
    code = leaver.ended()
    until(lambda: witness.states()["cellar"] == "left", trio.told)

    assert answer == answers[STORY]
    assert code == 0
    assert ask(witness, QUESTION) == answers[QUESTION]
    assert witness.states()["cellar"] == "left"


@pytest.mark.parametrize("is_entry", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_leaving_node_hands_its_layers_over(
    trio: Fleet, answers: Answers, *, is_entry: bool
) -> None:
    first = entry(trio)
    others = [node for node in trio.nodes.values() if node is not first]
    leaver, ingress = (first, others[0]) if is_entry else (others[0], first)

    with asking(ingress, STORY) as chat:
        leaver.send(signal.SIGTERM)
        is_under_way = chat.is_under_way  # it may end on the old ring while the next one is loaded
        answer = chat.answer()

    assert is_under_way
    assert answer == answers[STORY]
    until(lambda: ingress.states()[leaver.name] == "left", trio.told)
    assert leaver.ended() == 0


def test_the_second_ctrl_c_ends_it_at_once(trio: Fleet, answers: Answers) -> None:
    leaver, ingress = trio.node("cellar"), trio.node("bench")

    with asking(ingress, STORY) as chat, asking(leaver, STORY):
        trio.node("attic").send(signal.SIGSTOP)  # so that no answer ends before the second signal
        leaver.send(signal.SIGINT)
        leaver.sees("Ctrl-C again exits at once")
        leaver.send(signal.SIGINT)
        code = leaver.ended()
        trio.node("attic").send(signal.SIGCONT)
        answer = chat.answer()

    assert code == 130
    assert answer == answers[STORY]


@pytest.mark.parametrize("is_entry", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_client_goes_on_at_another_node_when_its_own_is_killed(
    trio: Fleet, answers: Answers, tmp_path: Path, *, is_entry: bool
) -> None:
    first = entry(trio)
    api_server = (
        first if is_entry else next(each for each in trio.nodes.values() if each is not first)
    )
    ticket = meshllm("ring", "ticket", "--role", "client", state=api_server.state).stdout.strip()

    with asking(api_server, STORY, "--join", ticket, state=tmp_path / "client") as chat:
        api_server.kill()
        is_under_way = chat.is_under_way
        answer = chat.answer()

    assert is_under_way
    assert not api_server.is_running
    assert answer == answers[STORY]
    assert "another one answers" in chat.errors
