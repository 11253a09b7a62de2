"""An API server under load: streaming clients, idle connections, slow readers, hostile requests.

``python -m tests.bench.load [--clients 64] [--seconds 120] [--nodes 3] [--idle 1000] [--slow 200]``

All nodes are processes of this machine, which serve the built-in model. Each client asks again as
soon as its answer is complete. The first row is the load alone; during the second one there are
also idle connections, and requests whose answers are never read. Then requests are sent that must
be refused, with the time until the refusal. Last, clients leave in the prefill and in the answer:
the time until no node holds KV cache for them, the longest of some rounds, with that of asking all
nodes. RSS is that of all nodes together, after one round of
all clients and at the end, when they have gone.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import psutil  # type: ignore[import-untyped]  # ships no types

from meshllm.api.unix import SOCKET
from meshllm.cli.shared.client import NodeClient
from tests.bench.report import Report, parser_of
from tests.processes.fleet import ALONE, Fleet, free_address, open_fleet

MAX_TOKENS = 48
SETTLE_S = 5.0  # until memory is measured
REFUSAL_S = 20.0
POLL_S = 0.01  # between questions to all nodes, which take time from them
LEAVING = 5  # clients that leave in each phase
LONG = "fox " * 1400  # a prefill of several chunks
NODES = "attic", "bench", "cellar", "desk"


@dataclass(frozen=True, slots=True)
class Row:
    """One phase."""

    phase: str
    clients: int
    seconds: float
    answers: int
    tokens: int
    tokens_per_second: float
    fairness: float
    """Maximum tokens of a client divided by the least."""
    slowest_ttft_s: float
    errors: dict[str, int]


@dataclass(slots=True)
class Client:
    """What one client got."""

    tokens: int = 0
    answers: int = 0
    slowest_ttft_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


def request_of(number: int, address: str, **more: object) -> bytes:
    """Write a streaming request for one connection."""
    turn = {"role": "user", "content": f"Tell me a story about fox number {number}."}
    fields = {"model": "builtin", "messages": [turn], "stream": True, "max_tokens": MAX_TOKENS}
    body = json.dumps(fields | more).encode()
    return head_of(address, len(body)) + body


def head_of(address: str, length: int, more: str = "", path: str = "/v1/chat/completions") -> bytes:
    """Write the head of a request, to a chat unless another path is given."""
    lines = f"Host: {address}", "Content-Type: application/json", f"Content-Length: {length}"
    words = "\r\n".join((f"POST {path} HTTP/1.1", *lines, "Connection: close"))
    return f"{words}\r\n{more}\r\n".encode()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to an API server."""
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(address: str, number: int, client: Client) -> None:
    """Make one request, and count what comes."""
    begin, is_begun, said = perf_counter(), False, b""
    reader, writer = await connect(address)
    try:
        writer.write(request_of(number, address))
        while chunk := await reader.read(65536):
            said += chunk
            new = said.count(b'"content":"') - said.count(b'"content":""')
            if new and not is_begun:
                is_begun = True
                ttft_s = perf_counter() - begin
                client.slowest_ttft_s = max(client.slowest_ttft_s, ttft_s)
    finally:
        writer.close()
    if b"data: [DONE]" not in said:
        status = said[9:12].decode(errors="replace") or "closed"
        client.errors[f"{status} {_message(said)}".strip()] += 1
        await asyncio.sleep(0.5)
        return
    client.tokens += new
    client.answers += 1


def _message(said: bytes) -> str:
    _, _, rest = said.partition(b'"message":"')
    return rest.partition(b'"')[0].decode(errors="replace")


async def load(
    phase: str, address: str, clients: int, seconds: float, hindrances: tuple[int, int] = (0, 0)
) -> Row:
    """Let clients ask for some seconds, beside idle connections and slow readers."""
    idle, slow = hindrances
    stop = perf_counter() + seconds
    known = [Client() for _ in range(clients)]

    async def keep_asking(number: int) -> None:
        while perf_counter() < stop:
            try:
                await ask(address, number, known[number])
            except OSError as error:
                known[number].errors[type(error).__name__] += 1

    async def hinder(number: int) -> None:
        """Hold connections as long as the load lasts; a closed one is opened again."""
        while perf_counter() < stop:
            with suppress(OSError):
                reader, writer = await connect(address)
                if number < slow:  # its answer is never read
                    writer.write(request_of(10_000 + number, address, max_tokens=8))
                    reader._transport.pause_reading()  # type: ignore[attr-defined]  # no other way
                    await asyncio.sleep(max(0.0, stop - perf_counter()))
                else:
                    async with asyncio.timeout(max(0.1, stop - perf_counter())):
                        await reader.read(1)
                writer.close()
                await asyncio.sleep(1)

    others = [asyncio.ensure_future(hinder(number)) for number in range(slow + idle)]
    begin = perf_counter()
    await asyncio.gather(*(keep_asking(number) for number in range(clients)))
    took = perf_counter() - begin
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    tokens = [each.tokens for each in known]
    return Row(
        phase,
        clients,
        round(took, 1),
        sum(each.answers for each in known),
        sum(tokens),
        round(sum(tokens) / took, 1),
        round(max(tokens) / max(1, min(tokens)), 2),
        round(max(each.slowest_ttft_s for each in known), 2),
        dict(sum((each.errors for each in known), Counter[str]())),
    )


async def refused(address: str, head: bytes, body: bytes) -> tuple[str, float]:
    """Send a request until it is refused; return the status and the seconds."""
    reader, writer = await connect(address)
    begin = perf_counter()

    async def send() -> None:
        writer.write(head)
        for at in range(0, len(body), 1 << 16):
            writer.write(body[at : at + (1 << 16)])
            await writer.drain()

    sending = asyncio.ensure_future(send())
    said = b""
    with suppress(OSError):
        async with asyncio.timeout(REFUSAL_S):
            said = await reader.read(1024)
    took = perf_counter() - begin
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.transport.abort()
    return said[9:12].decode() or "closed", took


async def hostile(address: str) -> dict[str, tuple[str, float]]:
    """Send what must be refused."""
    deep = b'{"model":"builtin","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    large = 100 << 20
    header = f"X-Large: {'x' * (10 << 20)}\r\n"
    return {
        "a body of 100 MB": await refused(address, head_of(address, large), bytes(large)),
        "a header of 10 MB": await refused(address, head_of(address, 0, header), b""),
        "JSON 10,000 deep": await refused(address, head_of(address, len(deep)), deep),
    }


async def leave(fleet: Fleet, address: str, number: int, *, in_prefill: bool) -> float:
    """Leave during a request; return the milliseconds until no node holds KV cache for it."""
    reader, writer = await connect(address)
    prompt, most = (f"{number} {LONG}", 500) if in_prefill else (f"{number} foxes", 1900)
    body = {"model": "builtin", "prompt": prompt, "max_tokens": most, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    writer.write(head_of(address, len(data), path="/v1/completions") + data)
    while not await kv_cache(fleet):
        pass  # it is not admitted yet
    if not in_prefill:
        await reader.readuntil(b'"text":"')
    writer.transport.abort()
    begin = perf_counter()
    while await kv_cache(fleet):  # noqa: ASYNC110  # other processes hold it
        await asyncio.sleep(POLL_S)
    return 1000 * (perf_counter() - begin)


async def kv_cache(fleet: Fleet) -> int:
    """Return the bytes that all nodes hold for running sessions."""
    asked = [NodeClient(each.state / SOCKET).status() for each in fleet.nodes.values()]
    return sum(each.memory.kv_cache for each in await asyncio.gather(*asked))


def rss_mib(fleet: Fleet) -> float:
    """Return the memory of all nodes."""
    running = [each.process.pid for each in fleet.nodes.values() if each.process]
    return float(sum(psutil.Process(pid).memory_info().rss for pid in running)) / 2**20


async def run(options: argparse.Namespace, fleet: Fleet, address: str, report: Report) -> int:
    """Run all phases; return 1 if a client got an error or a hostile request was not refused."""
    clients, seconds = options.clients, options.seconds
    await load("warm-up", address, clients, 1)
    before = rss_mib(fleet)
    report.say(f"{'phase':24} {'answers':>7} {'tokens/s':>8} {'fairness':>8} {'TTFT s':>6}  errors")
    rows = []
    for phase, hindrances in (
        ("load", (0, 0)),
        ("and idle, slow readers", (options.idle, options.slow)),
    ):
        row = await load(phase, address, clients, seconds, hindrances)
        rows.append(row)
        report.say(
            f"{row.phase:24} {row.answers:7} {row.tokens_per_second:8} {row.fairness:8}"
            f" {row.slowest_ttft_s:6}  {row.errors or 'none'}"
        )
    found = await hostile(address)
    for what, (status, took) in found.items():
        report.say(f"{what:24} {status} after {took:.2f} s")
    gone = dict[str, float]()
    for phase, in_prefill in (("prefill", True), ("answer", False)):
        rounds = [
            await leave(fleet, address, number, in_prefill=in_prefill) for number in range(LEAVING)
        ]
        gone[phase] = round(max(rounds), 1)
        report.say(f"{f'a client leaves: {phase}':24} freed within {gone[phase]} ms")
    await asyncio.sleep(SETTLE_S)
    after = rss_mib(fleet)
    report.say(f"RSS of {options.nodes} nodes: {before:.0f} MiB before, {after:.0f} MiB after")
    report.write(rows, refused=found, freed_ms=gone, rss_mib=(before, after))
    return int(any(row.errors for row in rows) or any(s == "200" for s, _ in found.values()))


def main() -> int:
    """Start the nodes, and run the load."""
    parser = parser_of("load", __doc__)
    for name, default in (("clients", 64), ("seconds", 120), ("nodes", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("idle", 1000), ("slow", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    names = NODES[: options.nodes]
    with open_fleet() as fleet:
        address, ticket = free_address(), fleet.create_mesh(names[0])
        for name in names[1:]:
            fleet.node(name).start("--join", ticket, *ALONE)
        api_server = ("--members", str(len(names)), "--serve", address)
        fleet.node(names[0]).start(*api_server, *ALONE)
        fleet.form()
        return asyncio.run(run(options, fleet, address, Report(options)))


if __name__ == "__main__":
    sys.exit(main())
