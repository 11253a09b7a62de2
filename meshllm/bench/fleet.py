"""Rings of real nodes in separate processes, for benchmarks."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from meshllm.api.unix import SOCKET
from meshllm.bench.targets import lines
from meshllm.config import PREFIX
from meshllm.errors import MeshError, TimedOut
from meshllm.names import Quant
from meshllm.node.provider import launch
from meshllm.node.requests.request_json import event_from_json, request_to_json
from meshllm.request import Answer, Request
from meshllm.status import MeshStatus, RingState, from_json

START_S = 120.0  # s until a ring serves; importing torch takes seconds, many on a busy machine
POLL_S = 0.1  # s between two polls of the status
MAX_SAID = 1000  # characters shown of what a node said before its end


@dataclass(frozen=True, slots=True)
class Site:
    """Where a node runs."""

    listen: str = "127.0.0.1:0"
    """The address it listens on."""
    prefix: tuple[str, ...] = ()
    """A command that runs the node's command, such as in a network namespace; empty for none."""


LOCAL = Site()


@dataclass(frozen=True, slots=True)
class _NodeProcess:
    """A node that was started."""

    process: asyncio.subprocess.Process
    log: Path
    """What it writes to stderr."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A ring of processes that is serving."""

    entry: httpx2.AsyncClient
    """Connected to the socket of the entry."""

    async def answer(self, request: Request) -> Answer:
        """Send the request to the entry; return the answer with its times.

        Raises:
            MeshError: no answer, or one shorter than `max_tokens`: times would not be comparable.
        """
        content = request_to_json(request)
        async with self.entry.stream("POST", "/mesh/ask", content=content) as reply:
            async for line in lines(reply):
                if line and isinstance(event := event_from_json(line.encode()), Answer):
                    return _whole(event, request)
        raise MeshError("The node sent no answer")


@asynccontextmanager
async def open_fleet(
    model: Path,
    nodes: int | Sequence[Site],
    threads: int,
    quant: Quant = Quant.NONE,
    transport: str = "websocket",
    device: str = "cpu",
) -> AsyncIterator[Fleet]:
    """Start nodes on this machine that form one ring; ``nodes`` is their number or their sites.

    The user's settings do not apply to them.

    Raises:
        TimedOut: the ring did not serve within `START_S`.
        MeshError: a node has ended before.
    """
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="meshllm-")))
        ticket = home / "ticket"
        first, *others = [LOCAL] * nodes if isinstance(nodes, int) else nodes
        members = 1 + len(others)
        shared = ["--model", _absolute(model), "--threads", str(threads), "--quant", quant]
        shared += ["--transport", transport, "--device", device]
        found = ["--members", str(members), "--ticket-file", str(ticket)]
        started = [await _start(stack, first, home / "0", [*shared, *found])]
        async with _start_timeout():
            while not (ticket.exists() and ticket.read_text()):
                await _pause(started)
        for number, site in enumerate(others, start=1):
            join = ["--join", ticket.read_text().strip()]
            started.append(await _start(stack, site, home / str(number), [*shared, *join]))
        clients = [
            await stack.enter_async_context(_client(home / str(number) / SOCKET))
            for number in range(members)
        ]
        yield Fleet(await _entry(clients, started))


def _absolute(model: Path) -> str:
    """Name a folder for nodes, which run in another one: theirs has no `meshllm.toml`."""
    return str(model.absolute())


def _whole(answer: Answer, request: Request) -> Answer:
    if (tokens := len(answer.tokens)) != request.max_tokens:
        raise MeshError(f"The answer has {tokens} tokens, not {request.max_tokens}")
    return answer


async def _start(
    stack: AsyncExitStack, site: Site, state: Path, options: list[str]
) -> _NodeProcess:
    command = [
        sys.executable, "-I", "-S", launch.__file__, str(os.getpid()),
        *site.prefix, sys.executable, "-m", "meshllm", "node",
        "--state", str(state), "--name", state.name, "--listen", site.listen,
        "--no-discovery", "--speculation", "off", *options,
    ]  # fmt: skip
    quiet = asyncio.subprocess.DEVNULL
    home, log = state.parent, state.with_suffix(".log")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=quiet, stdout=quiet, stderr=stderr,
            cwd=home, env={**kept, "XDG_CONFIG_HOME": str(home)},
        )  # fmt: skip
    stack.push_async_callback(_end, process)
    return _NodeProcess(process, log)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _client(socket: Path) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=str(socket)),
        base_url="http://node",
        timeout=httpx2.Timeout(None),
    )


async def _entry(
    clients: list[httpx2.AsyncClient], started: Sequence[_NodeProcess]
) -> httpx2.AsyncClient:
    """Wait until all nodes report the ring as serving; return the client of its entry."""
    async with _start_timeout():
        while True:
            seen = [status for client in clients if (status := await _status(client))]
            if len(seen) == len(clients) and all(
                each.ring.state is RingState.SERVING and len(each.ring.stages) == len(clients)
                for each in seen
            ):
                ids = [each.node for each in seen]
                return clients[ids.index(seen[0].ring.entry or "")]
            await _pause(started)


async def _status(client: httpx2.AsyncClient) -> MeshStatus | None:
    try:
        return from_json(MeshStatus, (await client.get("/mesh/status")).json())
    except httpx2.TransportError:
        return None


async def _pause(started: Sequence[_NodeProcess]) -> None:
    """Wait for the next poll; raise `MeshError` if a node has ended."""
    await asyncio.sleep(POLL_S)
    for node in started:
        if (code := node.process.returncode) is not None:
            said = node.log.read_text(errors="replace").rpartition("error: ")[2].strip()
            raise MeshError(f"A node ended with exit code {code}: {said[-MAX_SAID:]}")


@asynccontextmanager
async def _start_timeout() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(START_S):
            yield
    except TimeoutError:
        raise TimedOut(f"The nodes did not form a ring within {START_S:.0f} s") from None
