"""The time from a client's departure until all ranks of a ring have freed its caches.

``python -m tests.bench.departure [--model NAME] [--nodes 3] [--rounds 10] [--threads 1]``

A ring answers in this process, behind an API server on loopback. A client asks and closes its
connection in the middle of the prompt, of an answer, or of four; the time begins when the server
notices. What a compute thread has begun is not interrupted: one chunk of a prompt, or a step.
Milliseconds.
"""

import argparse
import asyncio
import json
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from unittest.mock import patch

from meshllm.api.access.accounts import Accounts
from meshllm.api.connection import PublicProtocol
from meshllm.api.tcp import ApiServer, ApiServerOptions, open_api_server
from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from tests.bench.api_server import RingPort
from tests.bench.report import Report, parser_of

PROMPT = "A fox, number {}, saw the river and the mill of its friend. "
PHASES: dict[str, tuple[int, int]] = {"prompt": (60, 1), "answer": (1, 1), "four answers": (1, 4)}
"""How often the prompt repeats itself, and the answers, by phase."""


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds from the server's notice until all caches are free."""

    phase: str
    median_ms: float
    worst_ms: float


def request_of(model: str, number: int, phase: str) -> bytes:
    """Write a request whose answer does not end by itself."""
    repeats, choices = PHASES[phase]
    fields = {
        "model": model, "prompt": PROMPT.format(number) * repeats, "max_tokens": 500,
        "n": choices, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    body = json.dumps(fields).encode()
    lines = "POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"
    return "\r\n".join((*lines, "", "")).encode() + body


def holders(ring: LocalRing) -> list[int]:
    """Return the sessions of each rank."""
    return [ring.entry.sessions, *(stage.sessions for stage in ring.stages)]


async def depart(
    api_server: ApiServer, ring: LocalRing, model: str, number: int, phase: str
) -> float:
    """Ask, leave in a phase, and return the milliseconds until all ranks are free."""
    lost = asyncio.get_running_loop().create_future()
    before = PublicProtocol.connection_lost

    def note(protocol: PublicProtocol, error: Exception | None) -> None:
        lost.set_result(perf_counter())
        before(protocol, error)

    with patch.object(PublicProtocol, "connection_lost", note):
        reader, writer = await asyncio.open_connection(*api_server.bound.getsockname()[:2])
        writer.write(request_of(model, number, phase))
        if phase == "prompt":
            while not all(holders(ring)):  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0)
        else:
            await reader.readuntil(b"data: {")
        writer.transport.abort()
        noticed: float = await lost
        while any(holders(ring)):  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)
        return (perf_counter() - noticed) * 1e3


async def run(options: argparse.Namespace, report: Report) -> int:
    """Measure all phases."""
    rows = list[Row]()
    inference = InferenceConfig(threads=options.threads)
    rings = RingOptions(options.nodes, inference=inference)
    report.say(f"{'leaves during':14} {'median ms':>10} {'worst ms':>9}")
    with TemporaryDirectory() as folder, Accounts.open(Path(folder) / "state") as accounts:
        async with open_local_ring(resolve(options.model), rings) as ring:
            with open_api_server(ApiServerOptions("127.0.0.1", 0), accounts) as api_server:
                port: Any = RingPort(ring, options.model)
                serving = asyncio.ensure_future(api_server.serve(port))
                number = 0
                for phase in PHASES:
                    found = list[float]()
                    for _ in range(options.rounds + 1):
                        number += 1
                        found.append(await depart(api_server, ring, options.model, number, phase))
                    row = Row(phase, statistics.median(found[1:]), max(found[1:]))
                    rows.append(row)
                    report.say(f"{row.phase:14} {row.median_ms:10.1f} {row.worst_ms:9.1f}")
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving
    report.write(rows)
    return 0


def main() -> int:
    """Measure."""
    parser = parser_of("departure", __doc__)
    parser.add_argument("--model", default="builtin")
    for name, default in (("nodes", 3), ("rounds", 10), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    return asyncio.run(run(options, Report(options)))


if __name__ == "__main__":
    sys.exit(main())
