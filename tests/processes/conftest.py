"""Meshes of processes, shared by tests since each takes seconds to start."""

from collections.abc import Iterator

import pytest

from tests.processes.fleet import ALONE, Fleet, environment, meshllm, open_fleet
from tests.processes.fork_server import ForkServer, open_fork_server

QUESTION = "What is a ring?"
STORY = "Tell me a story about a fox."


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """What starts nodes that have imported everything."""
    with open_fork_server(environment()) as server:
        yield server


@pytest.fixture
def fleet(server: ForkServer) -> Iterator[Fleet]:
    """No node yet."""
    with open_fleet(server) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def mesh(server: ForkServer) -> Iterator[Fleet]:
    """Three nodes with full logs, one of them as JSON; the founder last. `trio` keeps it whole."""
    with open_fleet(server) as fleet:
        ticket = fleet.create_mesh("attic")
        fleet.node("bench").start("--join", ticket, "--log-format", "json", *ALONE, root=("-vv",))
        fleet.node("cellar").start("--join", ticket, *ALONE, root=("-vv",))
        fleet.node("attic").start("--members", "3", *ALONE, root=("-vv",))
        fleet.form()
        yield fleet


@pytest.fixture
def trio(mesh: Fleet) -> Fleet:
    """The mesh, with nodes restarted that ended in another test."""
    for node in mesh.nodes.values():
        if not node.is_running:
            node.start(*ALONE, root=("-vv",))
    mesh.form()
    return mesh


class Answers(dict[str, str]):
    """The answers of one process, by prompt; each is computed once."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__()
        self._server = server

    def __missing__(self, prompt: str) -> str:
        alone = "chat", "--nodes", "1", "--threads", "1", prompt
        self[prompt] = meshllm(*alone, server=self._server).stdout
        return self[prompt]


@pytest.fixture(scope="session")
def answers(server: ForkServer) -> Answers:
    """The expected answers of a mesh."""
    return Answers(server)
