"""Replicas of one model as processes, each pinned to one core; see `tests.bench.replicas`.

A replica is one node that holds the whole model: the built-in one, or a larger one of random
weights, beside which the API server takes a smaller share of the CPU. Clients ask through an API
server of its own process, which holds no layers. API server and clients run on a core that is left,
or else on that of the first replica: the time that they take from it is counted, and the same on
one replica.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import httpx2
import psutil  # type: ignore[import-untyped]  # ships no types

from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from tests.bench.chaos import random_model
from tests.bench.load import connect, head_of
from tests.processes.fleet import ALONE, Fleet, Node, free_address, open_fleet, until

TURNS, WORDS, TOKENS = 3, 12, 48  # of a chat; words of a question; tokens of an answer, at most
SESSIONS = 16  # of a replica, that warm up
THINGS = (
    "rivers", "foxes", "machines", "winters", "stories", "towers", "gardens", "stones", "songs",
    "bridges", "letters", "islands", "lamps",
)  # fmt: skip
INGRESS, NAMES = "ingress", ("attic", "bench", "cellar", "desk")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the API server."""

    text: str
    prompt: int
    """Tokens,"""
    cached: int
    """of these in the prefix cache,"""
    tokens: int
    """and new ones."""


@dataclass(slots=True)
class ChatLoad:
    """The answers to all chats."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    """When each was complete, in seconds from the beginning, and its tokens."""
    prompt: int = 0
    cached: int = 0
    """Of the tokens of later prompts."""

    @property
    def rate(self) -> float:
        """Tokens per second until no more chats wait than the replicas can take at once."""
        busy = self.answers[: len(self.answers) * 3 // 4]
        return sum(tokens for _, tokens in busy) / busy[-1][0]

    @property
    def hits(self) -> float:
        return self.cached / self.prompt


@dataclass(slots=True, kw_only=True)
class PinnedLoad(ChatLoad):
    """The same with processes."""

    replicas: int
    model: str
    texts: dict[str, str] = field(default_factory=dict)
    """The answers, by chat and turn."""
    cpu: dict[str, float] = field(default_factory=dict)
    """The share of a core that the processes and the clients took."""

    @property
    def shares(self) -> str:
        """How much CPU each took."""
        return "CPU: " + ", ".join(f"{name} {share:.0%}" for name, share in self.cpu.items())


@dataclass(frozen=True, slots=True)
class Cores:
    """Where each process runs."""

    replicas: tuple[int, ...]
    api_server: int
    """Of the clients too."""

    @classmethod
    def of(cls, replicas: int, free: Sequence[int]) -> "Cores":
        """Give each replica a core; the API server one that is left, or that of the first replica.

        Raises:
            ValueError: there are fewer cores than replicas.
        """
        if len(free) < replicas:
            raise ValueError(f"{replicas} replicas need as many cores, {len(free)} are free")
        own = tuple(free[:replicas])
        return cls(own, free[replicas] if len(free) > replicas else own[0])


def measure(replicas: int, chats: int, cores: Cores, *, is_random: bool = False) -> PinnedLoad:
    """Run all chats in a mesh with so many replicas."""
    with open_fleet() as fleet, _pinned(cores.api_server):
        model = ("--model", str(random_model(fleet.folder / "model"))) if is_random else ()
        names, port = NAMES[:replicas], free_address().rpartition(":")[2]
        ticket = fleet.create_mesh(INGRESS)
        ring = "--members", "1", "--replicas", str(replicas), "--exclude", INGRESS
        api_server = fleet.node(INGRESS).start(
            *ALONE, *model, *ring, "--port", port, command=("serve", "--threads", "1"),
            within=_at(cores.api_server),
        )  # fmt: skip
        for name, core in zip(names, cores.replicas, strict=False):
            node = fleet.node(name)
            until(lambda: bool(api_server.status()), fleet.told)
            node.start(*ALONE, *model, "--join", ticket, within=_at(core))
        until(lambda: _serving(api_server) == replicas, fleet.told)
        address = f"127.0.0.1:{port}"
        (served,) = httpx2.get(f"http://{address}/v1/models").json()["data"]
        return asyncio.run(_load(fleet, address, served["id"], chats))


def _at(core: int) -> tuple[str, ...]:
    return "taskset", "--cpu-list", str(core)


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Run this process on one core inside the context."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serving(node: Node) -> int:
    return sum(each["state"] == "serving" for each in node.status().get("rings", ()))


async def _load(fleet: Fleet, address: str, model: str, chats: int) -> PinnedLoad:
    load = PinnedLoad(replicas=len(fleet.nodes) - 1, model=model)
    await _warm_up(load, address)
    begin, before = perf_counter(), _cpu_s(fleet)
    async with asyncio.TaskGroup() as group:
        for number in range(chats):
            group.create_task(_chat(load, address, begin, number))
    seconds = perf_counter() - begin
    load.cpu = {name: (now - before[name]) / seconds for name, now in _cpu_s(fleet).items()}
    return load


async def _warm_up(load: PinnedLoad, address: str) -> None:
    """Let each replica run batches of each number of sessions, which are traced at first."""
    async with asyncio.TaskGroup() as group:
        for number in range(load.replicas * SESSIONS):
            tokens = TOKENS + 2 * STEPS_BEFORE_REPLAY * (number // load.replicas)
            turns = [{"role": "user", "content": f"{number} {question(number, TURNS)}"}]
            group.create_task(_ask(address, load.model, turns, number, tokens))


def _cpu_s(fleet: Fleet) -> dict[str, float]:
    """Return the CPU time of all processes, and of this one as that of the clients."""
    found = {"clients": psutil.Process()}
    for name, node in fleet.nodes.items():
        assert node.process is not None  # it was started
        found[name] = psutil.Process(node.process.pid)
    times = {name: process.cpu_times() for name, process in found.items()}
    return {name: each.user + each.system for name, each in times.items()}


async def _chat(load: PinnedLoad, address: str, begin: float, number: int) -> None:
    turns = list[dict[str, str]]()
    for turn in range(TURNS):
        turns.append({"role": "user", "content": question(number, turn)})
        reply = await _ask(address, load.model, turns, seed=number)
        load.answers.append((perf_counter() - begin, reply.tokens))
        load.texts[f"{number}.{turn}"] = reply.text
        if turn:
            load.prompt += reply.prompt
            load.cached += reply.cached
        turns.append({"role": "assistant", "content": reply.text})


def question(number: int, turn: int) -> str:
    """Return the words of a user, which no other chat has in common."""
    words = [f"{THINGS[(number + at) % len(THINGS)]} {number}" for at in range(turn, turn + WORDS)]
    return f"Chat {number}: tell me more about {', '.join(words)}."


async def _ask(
    address: str, model: str, turns: Sequence[dict[str, str]], seed: int, tokens: int = TOKENS
) -> Reply:
    fields = {
        "model": model, "messages": turns, "stream": True, "max_tokens": tokens, "seed": seed,
        "temperature": 0.8, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(fields).encode()
    reader, writer = await connect(address)
    try:
        writer.write(head_of(address, len(body)) + body)
        return reply_of(await reader.read())
    finally:
        writer.close()


def reply_of(said: bytes) -> Reply:
    """Read the answer and its usage of a whole HTTP response.

    Raises:
        ValueError: the response is not a whole answer.
    """
    head, _, body = said.partition(b"\r\n\r\n")
    lines = _unchunked(body).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise ValueError(f"not a whole answer: {(head + body)[:500]!r}")
    events = [json.loads(each) for each in data[:-1]]
    pieces = (choice["delta"].get("content") for each in events for choice in each["choices"])
    usage = next(each["usage"] for each in reversed(events) if each.get("usage"))
    return Reply(
        "".join(filter(None, pieces)),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


def _unchunked(body: bytes) -> bytes:
    """Return the content of a body in chunks."""
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        whole += body[:count]
        body = body[count + 2 :]
    return bytes(whole)
