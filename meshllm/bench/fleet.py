"""Rings of real nodes, each a process of its own, for benchmarks."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from meshllm.api.unix import SOCKET
from meshllm.errors import MeshError, TimedOut
from meshllm.names import Quant
from meshllm.node.requests.request_json import event_from_json, request_to_json
from meshllm.request import Answer, Request
from meshllm.status import MeshStatus, RingState, from_json

START_S = 120.0  # s until a ring stands; importing torch takes seconds, on a busy machine many
POLL_S = 0.1  # s between two looks while it does not


@dataclass(frozen=True, slots=True)
class Site:
    """Where a node runs."""

    listen: str = "127.0.0.1:0"
    """Where the other nodes reach it."""
    prefix: tuple[str, ...] = ()
    """The command that runs its command, as in another network; nothing runs it right here."""


LOCAL = Site()


@dataclass(frozen=True, slots=True)
class Fleet:
    """A ring of processes that is ready to answer."""

    entry: httpx2.AsyncClient
    """To the door of the entry."""

    async def answer(self, request: Request) -> Answer:
        """Ask the entry, and return the answer with its times.

        Raises:
            MeshError: there is none, or it is not as long as it may be: its times are of others.
        """
        content = request_to_json(request)
        async with self.entry.stream("POST", "/mesh/ask", content=content) as reply:
            async for line in reply.aiter_lines():
                if line and isinstance(event := event_from_json(line.encode()), Answer):
                    return _whole(event, request)
        raise MeshError("The node gave no answer")


@asynccontextmanager
async def open_fleet(
    model: Path,
    nodes: int | Sequence[Site],
    threads: int,
    quant: Quant = Quant.NONE,
    transport: str = "websocket",
    device: str = "cpu",
) -> AsyncIterator[Fleet]:
    """Start nodes on this machine that form one ring, encrypted as any; so many, or one a site.

    Raises:
        TimedOut: the ring did not stand in time.
    """
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(TemporaryDirectory(prefix="meshllm-")))
        ticket = home / "ticket"
        first, *others = [LOCAL] * nodes if isinstance(nodes, int) else nodes
        members = 1 + len(others)
        shared = ["--model", str(model), "--threads", str(threads), "--quant", quant]
        shared += ["--transport", transport, "--device", device]
        found = ["--members", str(members), "--ticket-file", str(ticket)]
        await _start(stack, first, home / "0", [*shared, *found])
        async with _patience():
            while not (ticket.exists() and ticket.read_text()):  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(POLL_S)
        for number, site in enumerate(others, start=1):
            join = ["--join", ticket.read_text().strip()]
            await _start(stack, site, home / str(number), [*shared, *join])
        doors = [
            await stack.enter_async_context(_door(home / str(number) / SOCKET))
            for number in range(members)
        ]
        yield Fleet(await _entry(doors))


def _whole(answer: Answer, request: Request) -> Answer:
    if (tokens := len(answer.tokens)) != request.max_tokens:
        raise MeshError(f"An answer of {tokens} tokens, not {request.max_tokens}")
    return answer


async def _start(stack: AsyncExitStack, site: Site, state: Path, options: list[str]) -> None:
    command = [
        *site.prefix, sys.executable, "-m", "meshllm", "node",
        "--state", str(state), "--name", state.name, "--listen", site.listen,
        "--no-discovery", "--speculation", "off", *options,
    ]  # fmt: skip
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=quiet, stdout=quiet, stderr=quiet
    )
    stack.push_async_callback(_end, process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _door(socket: Path) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=str(socket)),
        base_url="http://node",
        timeout=httpx2.Timeout(None),
    )


async def _entry(doors: list[httpx2.AsyncClient]) -> httpx2.AsyncClient:
    """Wait until all nodes see the ring stand; return the door of its entry."""
    async with _patience():
        while True:
            seen = [status for door in doors if (status := await _status(door))]
            if len(seen) == len(doors) and all(
                each.ring.state is RingState.SERVING and len(each.ring.stages) == len(doors)
                for each in seen
            ):
                ids = [each.node for each in seen]
                return doors[ids.index(seen[0].ring.entry or "")]
            await asyncio.sleep(POLL_S)


async def _status(door: httpx2.AsyncClient) -> MeshStatus | None:
    try:
        return from_json(MeshStatus, (await door.get("/mesh/status")).json())
    except httpx2.TransportError:
        return None


@asynccontextmanager
async def _patience() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(START_S):
            yield
    except TimeoutError:
        raise TimedOut(f"The nodes formed no ring in {START_S:.0f} s") from None
