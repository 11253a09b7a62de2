"""Memory growth of a node over many short requests: ``python -m tests.bench.growth``.

One process of `meshllm node` with the built-in model answers distinct requests over its socket.
`rss` is the resident memory of the process; the other columns are the parts in `/metrics`. Without
a leak, the last lines are equal: as much memory at 5,000 requests as at 500.
"""

import re
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from meshllm.api.unix import SOCKET
from tests.bench.report import Report, counts, parser_of
from tests.processes import fleet as fleets
from tests.processes.fleet import ALONE, Node, open_fleet, until

_SAMPLE = re.compile(r'^meshllm_memory_bytes\{part="(\w+)"\} (\d+)', re.MULTILINE)
_PARTS = (
    "process",
    "weights",
    "packed_weights",
    "unread_weights",
    "kv_cache",
    "prefix_cache",
    "drafter",
    "recorded_steps",
    "sent_rows",
    "waiting_rows",
    "received_caches",
    "requests",
    "other",
)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by part, after a number of requests."""

    requests: int
    parts: dict[str, int]


def client_of(node: Node) -> httpx2.Client:
    """Open an HTTP client on the socket of a node."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    transport = httpx2.HTTPTransport(uds=str(node.state / SOCKET), verify=context)
    return httpx2.Client(transport=transport, base_url="http://node", timeout=120.0)


def ask(client: httpx2.Client, number: int, tokens: int) -> None:
    """Request an answer to a new question."""
    asked = {"raw": f"Question {number}: what is {number * 7919} times {number}?"}
    client.post("/mesh/ask", json={**asked, "max_tokens": tokens}).raise_for_status()


def held(client: httpx2.Client, requests: int) -> Held:
    """Read the memory of a node."""
    found = _SAMPLE.findall(client.get("/metrics").text)
    return Held(requests, {part: int(size) for part, size in found})


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("growth", __doc__)
    parser.add_argument("--at", type=counts, default=(0, 10, 100, 280, 500, 1000, 2000, 5000))
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    options = parser.parse_args(arguments)
    report, rows = Report(options), list[Held]()
    report.say(f"{'requests':>9}" + "".join(f"{part:>16}" for part in _PARTS) + "  MiB")
    fleets.WAIT_S = 600.0  # for a busy machine
    with open_fleet() as fleet:
        node = fleet.node("solo").start(*ALONE)
        until(lambda: node.status().get("ring", {}).get("state") == "serving", fleet.told)
        with client_of(node) as client:
            done = 0
            for mark in options.at:
                for number in range(done, mark):
                    ask(client, number, options.tokens)
                done = mark
                rows.append(held(client, mark))
                parts = rows[-1].parts
                line = "".join(f"{parts.get(part, 0) / 2**20:>16.1f}" for part in _PARTS)
                report.say(f"{mark:>9}{line}")
    report.write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
