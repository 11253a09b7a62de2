"""Meshes of processes; each costs seconds to start, so that tests share them."""

from collections.abc import Iterator

import pytest

from tests.processes.fleet import ALONE, Fleet, meshllm, open_fleet

QUESTION = "What is a ring?"
STORY = "Tell me a story about a fox."


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """No node yet."""
    with open_fleet() as fleet:
        yield fleet


@pytest.fixture(scope="module")
def mesh() -> Iterator[Fleet]:
    """Three nodes that tell all, one of them as JSON; the founder last. `trio` keeps it whole."""
    with open_fleet() as fleet:
        ticket = fleet.found("attic")
        fleet.node("bench").start("--join", ticket, "--log-format", "json", *ALONE, root=("-vv",))
        fleet.node("cellar").start("--join", ticket, *ALONE, root=("-vv",))
        fleet.node("attic").start("--members", "3", *ALONE, root=("-vv",))
        fleet.form()
        yield fleet


@pytest.fixture
def trio(mesh: Fleet) -> Fleet:
    """The mesh, with whoever ended in another test back again."""
    for node in mesh.nodes.values():
        if not node.is_running:
            node.start(*ALONE, root=("-vv",))
    mesh.form()
    return mesh


class Answers(dict[str, str]):
    """What one process answers, by prompt; each is asked once."""

    def __missing__(self, prompt: str) -> str:
        self[prompt] = meshllm("chat", "--nodes", "1", "--threads", "1", prompt).stdout
        return self[prompt]


@pytest.fixture(scope="session")
def answers() -> Answers:
    """What the nodes of a mesh are to answer together."""
    return Answers()
