"""One mesh of processes serves replicas, a second model and an engine; any of them is killed.

The engine is a stand-in. With ``MESHLLM_LLAMA=FOLDER`` and the package ``gguf`` in the path of
Python, `test_each_of_five_processes_may_die` also has the `llama-server` of that folder.
"""

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from meshllm.api.unix import SOCKET
from meshllm.bench.ring_table import random_model
from meshllm.model.locate import find_folder
from tests.processes.fleet import ALONE, WAIT_S, Fields, Fleet, Node, meshllm, open_fleet, until
from tests.processes.fork_server import ForkServer

pytestmark = [pytest.mark.socket, pytest.mark.timeout(600)]

RING_NODES = ("attic", "bench", "cellar", "desk")
PROVIDER = "gpu"
RINGS = {"builtin 0", "builtin 1", "random 0"}
PROMPT = "A ring is"
TWELVE, FOX, BUILTIN = "twelve", "fox", "builtin"
TOKENS = 48  # of an answer: long enough to be in progress when a node dies
STAND_IN = (sys.executable, "-m", "tests.builders.fake_engine", "{port}", FOX)
TO_GGUF = Path(__file__).parents[1] / "engines" / "gguf_of.py"


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """A model of 12 random layers."""
    with random_model("tiny", torch.float32, layers=12) as folder:
        yield str(folder)


@pytest.fixture
def fleet(server: ForkServer) -> Iterator[Fleet]:
    with open_fleet(server) as fleet:
        yield fleet


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request."""

    text: str
    error: str = ""
    """Of an answer that was not completed."""


def chat(node: Node, model: str, prompt: str = PROMPT) -> Iterator[str]:
    """Yield the pieces of an answer by the API of a node; raise `AssertionError` on a failure."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "stream": True,
        "temperature": 0, "max_tokens": TOKENS,
    }  # fmt: skip
    with (
        api_server(node) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        if response.is_error:
            raise AssertionError(f"{response.status_code} {response.read().decode()}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or line.startswith(":"):
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise AssertionError(json.dumps(event["error"]))
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    raise AssertionError("the connection was closed before the end")


def outcome(node: Node, model: str, prompt: str = PROMPT) -> Outcome:
    """Return what comes of a request."""
    text = ""
    try:
        for piece in chat(node, model, prompt):
            text += piece
    except (AssertionError, httpx2.TransportError) as error:
        return Outcome(text, str(error) or type(error).__name__)
    return Outcome(text)


@contextmanager
def api_server(node: Node) -> Iterator[httpx2.Client]:
    """Open a client of the API of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # an empty one: nothing is encrypted here
    transport = httpx2.HTTPTransport(uds=str(node.state / SOCKET), verify=context)
    with httpx2.Client(transport=transport, base_url="http://node", timeout=WAIT_S) as client:
        yield client


@dataclass
class Load:
    """Clients of an API server, one for each model, that ask again and again."""

    node: Node
    models: tuple[str, ...]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Load"]:
        self.outcomes = {model: [] for model in self.models}
        clients = [threading.Thread(target=self._ask, args=(model,)) for model in self.models]
        for client in clients:
            client.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for client in clients:
                client.join()

    def more(self, count: int) -> None:
        """Wait until each client has so many further outcomes."""
        before = {model: len(found) for model, found in self.outcomes.items()}
        until(
            lambda: all(len(self.outcomes[each]) >= before[each] + count for each in self.models),
            lambda: f"{self.outcomes}",
        )

    def _ask(self, model: str) -> None:
        while not self._is_over.is_set():
            self.outcomes[model].append(outcome(self.node, model))


@dataclass
class Mesh:
    """Five processes: two replicas, a model over two or three nodes, and an engine.

    If it has three, one of these serves a replica too.
    """

    fleet: Fleet
    other: str
    """Folder of the second model."""
    engine: tuple[str, ...] = STAND_IN
    """Its command."""
    twelve: str = TWELVE
    """Name of the second model."""
    split: int = 2
    """Nodes of its ring."""
    ticket: str = ""

    def start(self) -> None:
        self.ticket = self.fleet.create_mesh(RING_NODES[0])
        for name in (*RING_NODES, PROVIDER):
            self.start_node(name)
            until(self.node(name).is_up, self.fleet.told)
        self.wait({"builtin 0", "builtin 1"}, stages=None)
        made = meshllm(
            "model", "serve", self.other, "--members", "2", "--alias", TWELVE, "--json",
            state=self.node(RING_NODES[1]).state,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["layers"] == 12
        self.wait()

    def start_over_three(self) -> None:
        """Split the second model over three of four nodes, one of which serves a replica too."""
        self.twelve, self.split = self.other, 3
        self.ticket = self.fleet.create_mesh(RING_NODES[0])
        for name in (*RING_NODES, PROVIDER):
            self.start_node(name)
            until(self.node(name).is_up, self.fleet.told)
        self.wait({"random 0"})
        made = meshllm(
            "model", "serve", BUILTIN, "--replicas", "2", state=self.node(RING_NODES[1]).state
        )
        assert made.returncode == 0, made.stderr
        self.wait()

    @property
    def models(self) -> tuple[str, str, str]:
        return BUILTIN, self.twelve, FOX

    def start_node(self, name: str) -> None:
        node = self.fleet.node(name)
        join = ("--join", self.ticket) if not (node.state / "mesh").exists() else ()
        if name == PROVIDER:
            node.start(*join, *ALONE, "--", *self.engine, command=("provide",))
        elif name == RING_NODES[0] and self.split == 2:
            node.start("--model", f"builtin,{self.other}", *ALONE, "--replicas", "2")
        elif name == RING_NODES[0]:
            node.start("--model", f"{self.other},builtin", *ALONE, "--members", "3")
        else:
            node.start(*join, "--model", f"builtin,{self.other}", *ALONE)

    def node(self, name: str) -> Node:
        return self.fleet.nodes[name]

    def wait(self, names: set[str] = RINGS, stages: int | None = 0) -> None:
        """Wait until all running nodes see these rings and the engine serve; 0 stages are all."""
        running = [node for node in self.fleet.nodes.values() if node.is_running]
        is_provided = self.node(PROVIDER).is_running

        def is_so(status: Fields) -> bool:
            found = rings(status)
            return (
                found.keys() == names
                and bool(status["provided"]) == is_provided
                and (stages is None or len(found["random 0"]["stages"]) == (stages or self.split))
            )

        until(lambda: all(is_so(node.status()) for node in running), lambda: self.told(running))

    def told(self, running: list[Node]) -> str:
        return f"{[rings(node.status()) for node in running]}\n{self.fleet.told()}"

    def name_of(self, node: str) -> str:
        found = self.node(RING_NODES[0]).status() or self.node(RING_NODES[1]).status()
        return next(str(each["name"]) for each in found["nodes"] if each["node"] == node)


def rings(status: Mapping[str, Any]) -> dict[str, Fields]:
    """Return the rings that serve, by model and replica."""
    return {
        f"{'random' if '/' in each['model'] else each['model']} {each['replica']}": each
        for each in status.get("rings", ())
        if each["state"] == "serving"
    }


def lose(mesh: Mesh, victim: str, expected: Mapping[str, str]) -> None:
    """Kill a node under load: no request of a ring fails, and all texts are the same.

    The model of an engine goes with its only provider: then it is refused by name.
    """
    entrance = mesh.node(PROVIDER if victim != PROVIDER else RING_NODES[1])
    models = mesh.models if victim != PROVIDER else mesh.models[:2]
    with Load(entrance, models).running() as load:
        load.more(1)
        is_held = victim == PROVIDER and mesh.engine is STAND_IN  # another one may have ended
        if is_held:
            begun = chat(entrance, FOX, "one wait two")
            assert "".join(next(begun) for _ in range(2)).strip() == "one"
        mesh.node(victim).kill()
        load.more(3)
        if is_held:
            with pytest.raises(AssertionError, match="service_unavailable"):
                list(begun)
        if victim == PROVIDER:
            until(lambda: outcome(entrance, FOX).error.startswith("404 "))

    for model, found in load.outcomes.items():
        assert found == [Outcome(expected[model])] * len(found), f"{model}\n{mesh.fleet.told()}"


def answers_of(mesh: Mesh) -> dict[str, str]:
    """Return the answers of all models, which every API server tells, lists and gives."""
    expected = {model: "".join(chat(mesh.node(PROVIDER), model)) for model in mesh.models}
    for node in mesh.fleet.nodes.values():
        with api_server(node) as client:
            listed = {each["id"] for each in client.get("/v1/models").json()["data"]}
        assert listed == {BUILTIN, mesh.other, FOX}
        assert {model: "".join(chat(node, model)) for model in mesh.models} == expected
    shown = meshllm("ring", "status", state=mesh.node(PROVIDER).state)
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in (BUILTIN, "desk", FOX)), shown.stdout
    return expected


def test_a_mesh_serves_replicas_another_model_and_an_engine_and_a_node_may_die(
    fleet: Fleet, other: str
) -> None:
    mesh = Mesh(fleet, other)
    mesh.start()

    expected = answers_of(mesh)
    assert expected[FOX] == f"{PROMPT} "

    lose(mesh, mesh.name_of(rings(mesh.node(PROVIDER).status())["builtin 0"]["entry"]), expected)

    mesh.wait(stages=None)


def llama_server(folder: Path) -> tuple[str, ...]:
    """Return the command of llama.cpp with the built-in model; skip if it is not there."""
    binary = Path(os.environ.get("MESHLLM_LLAMA", "")) / "llama-server"
    if "MESHLLM_LLAMA" not in os.environ or not binary.is_file():
        pytest.skip("`MESHLLM_LLAMA` names no folder with `llama-server`")
    if find_spec("gguf") is None:
        pytest.skip("the package `gguf` is not in the path of Python")
    target = folder / "builtin.gguf"
    subprocess.run((sys.executable, TO_GGUF, find_folder(BUILTIN), target), check=True)
    return (
        str(binary), "--model", str(target), "--alias", FOX, "--port", "{port}",
        "--ctx-size", "2048", "--threads", "1",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["stand-in", "llama.cpp"])
def test_each_of_five_processes_may_die(
    fleet: Fleet, other: str, engine: str, tmp_path: Path
) -> None:
    mesh = Mesh(fleet, other, STAND_IN if engine == "stand-in" else llama_server(tmp_path))
    mesh.start_over_three()
    expected = answers_of(mesh)
    assert all(expected.values())

    for victim in (*RING_NODES, PROVIDER):
        lose(mesh, victim, expected)
        mesh.wait(stages=None)
        mesh.start_node(victim)
        until(mesh.node(victim).is_up, fleet.told)
        mesh.wait()
    assert answers_of(mesh) == expected


def test_one_process_serves_two_models_and_another_one_answers_for_both(
    fleet: Fleet, other: str
) -> None:
    ticket = fleet.create_mesh("attic")
    attic, bench = fleet.node("attic"), fleet.node("bench")
    models = ("--model", f"builtin,{other}")
    attic.start(*models, *ALONE)
    until(lambda: rings(attic.status()).keys() == {"builtin 0"}, fleet.told)
    alone = "".join(chat(attic, BUILTIN))

    made = meshllm("model", "serve", other, "--alias", TWELVE, state=attic.state)

    assert made.returncode == 0, made.stderr
    until(lambda: rings(attic.status()).keys() == {"builtin 0", "random 0"}, fleet.told)
    assert all(each["own"] for each in attic.status()["rings"])
    texts = {name: "".join(chat(attic, name)) for name in (BUILTIN, TWELVE)}
    assert texts[BUILTIN] == alone != texts[TWELVE]
    shown = meshllm("ring", "status", state=attic.state)
    assert (shown.returncode, shown.stdout.count("serving  attic")) == (0, 2), shown.stdout

    # Another process takes one of the models over, and is killed: the first serves both again.
    bench.start("--join", ticket, *models, *ALONE)
    until(lambda: len(attic.status()["nodes"]) == 2, fleet.told)
    until(lambda: rings(bench.status()).keys() == {"builtin 0", "random 0"}, fleet.told)
    assert {name: "".join(chat(bench, name)) for name in texts} == texts
    bench.kill()
    until(lambda: rings(attic.status()).keys() == {"builtin 0", "random 0"}, fleet.told)
    assert {name: outcome(attic, name) for name in texts} == {
        name: Outcome(text) for name, text in texts.items()
    }


def test_two_replicas_share_a_process_and_one_goes_on_when_the_other_breaks(
    fleet: Fleet, other: str
) -> None:
    ticket = fleet.create_mesh("attic")
    attic, bench, cellar = (fleet.node(name) for name in RING_NODES[:3])
    model, first = ("--model", other, *ALONE), ("--layers", "0:8")

    def stages(node: Node) -> dict[str, list[tuple[str, str]]]:
        return {
            name: [(at["name"], at["layers"]) for at in each["stages"]]
            for name, each in rings(node.status()).items()
        }

    attic.start(*model, "--layers", "8:12", "--replicas", "2")
    until(attic.is_up, fleet.told)
    for node in (bench, cellar):
        node.start("--join", ticket, *model, *first)
        until(lambda: "random 0" in stages(attic), fleet.told)
    both = {
        f"random {replica}": [(name, "0:8"), ("attic", "8:12")]
        for replica, name in enumerate(("bench", "cellar"))
    }
    until(lambda: all(stages(each) == both for each in (attic, bench, cellar)), fleet.told)

    # By one API server: two prompts at a time, one for each ring.
    with Load(attic, (other,)).running() as load:
        load.more(1)
        asked = [outcome(attic, other, f"{number} is") for number in range(8)]
        answered = {name for name, at in rings(attic.status()).items() if at["status"]["measured"]}
        cellar.kill()
        load.more(3)
    again = [outcome(attic, other, f"{number} is") for number in range(8)]

    assert not any(each.error for each in (*asked, *again, *load.outcomes[other])), fleet.told()
    assert again == asked
    assert answered == both.keys()
    until(lambda: stages(attic) == {"random 0": both["random 0"]}, fleet.told)
