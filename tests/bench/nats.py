"""NAT traversal for all pairs of NATs: `python -m tests.bench.nats [--simulated]`.

The first table is a simulation on a virtual clock: two nodes connect through a relay, with every
kind of NAT on both sides; each cell shows after how many milliseconds both ends of the link use the
direct path, or that it stays on the relay. The one-way delay is 10 ms.
The second uses real kernels: two processes of `meshllm node` in network namespaces, each behind its
own router, and `meshllm relay` between them. Times are seconds since the start of the first
process; datagrams are those of QUIC through the first router during a second answer. A result that
differs from RFC 5128, or an answer that differs from that of a single process, fails the command.
Without namespaces there is only the first table.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Path
from tests.bench.report import Report, parser_of
from tests.plugins.quic.world import relayed
from tests.processes.capture import capturing
from tests.processes.fleet import Waited, ask, meshllm, open_fleet, until
from tests.processes.namespaces import Router, can_make_namespaces
from tests.processes.street import ATTIC, BENCH, Residents, Traffic, open_residents
from tests.simulation.nat import KINDS, is_reachable

QUESTION = "What is a ring?"
PROBED_S = 12.0
"""Addresses are probed for 10 s; a link that is not direct by then stays so for a minute."""
ROUTERS = {
    Router.CONE: "port-restricted",
    Router.FULL: "full cone",
    Router.SYMMETRIC: "symmetric",
}
PAIRS = (
    (Router.CONE, Router.CONE),
    (Router.FULL, Router.SYMMETRIC),
    (Router.CONE, Router.SYMMETRIC),
    (Router.SYMMETRIC, Router.SYMMETRIC),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Two kinds of NAT, simulated."""

    one: str
    other: str
    expected: Path
    got: Path
    direct_ms: float | None
    """Time since the link was opened."""

    def __str__(self) -> str:
        text = str(self.got) if self.direct_ms is None else f"{self.direct_ms:.0f}"
        return text if self.got == self.expected else f"{text}, NOT {self.expected}"


@dataclass(frozen=True, slots=True)
class Row:
    """Two kinds of NAT, with real kernels."""

    one: str
    other: str
    expected: Path
    got: Path
    answered_s: float
    direct_s: float | None
    direct_datagrams: int
    relayed_datagrams: int
    is_right: bool

    def __str__(self) -> str:
        direct = "-" if self.direct_s is None else f"{self.direct_s:.1f}"
        right = "same" if self.is_right else "OTHER"
        counted = f"{self.direct_datagrams} | {self.relayed_datagrams}"
        return (
            f"| {self.one} - {self.other} | {self.expected} | {self.got} | {self.answered_s:.1f} "
            f"| {direct} | {counted} | {right} |"
        )


async def meet(one: str, other: str) -> Cell:
    """Link two simulated nodes, and check whether they find a direct path."""
    async with relayed(one, other) as nodes:
        took_s = None
        with suppress(AssertionError):  # none was found
            took_s = await nodes.until(Path.DIRECT)
        got = Path.RELAY if took_s is None else Path.DIRECT
        return Cell(one, other, expected(one, other), got, took_s and took_s * 1e3)


def expected(one: str, other: str) -> Path:
    """Return the path that RFC 5128 predicts for two kinds."""
    return Path.DIRECT if is_reachable(one, other) else Path.RELAY


def settle(residents: Residents, began: float) -> float | None:
    """Wait for a direct path; return the seconds since ``began``, or None without one."""
    end = time.monotonic() + PROBED_S

    def is_decided() -> bool:
        return is_direct(residents) or time.monotonic() > end

    until(is_decided, residents.fleet.told)
    return time.monotonic() - began if is_direct(residents) else None


def is_direct(residents: Residents) -> bool:
    """Return whether both nodes report a direct path."""
    return {*residents.paths(ATTIC).values(), *residents.paths(BENCH).values()} == {"direct"}


def run(one: Router, other: Router, right: str) -> Row:
    """Run two processes, and count the datagrams of an answer."""
    with open_fleet() as fleet, open_residents(one, other, fleet) as residents:
        began = time.monotonic()
        residents.settle(ATTIC, BENCH)
        said = [ask(residents.node(BENCH), QUESTION)]
        answered_s = time.monotonic() - began
        direct_s = settle(residents, began)
        with capturing(residents.street.router_of_one) as capture:
            traffic = Traffic(capture, residents.street)
            if direct_s is not None:
                with suppress(Waited):  # visible in the table
                    traffic.settle()
            since = time.monotonic()
            said.append(ask(residents.node(BENCH), QUESTION))
        kinds = ROUTERS[one], ROUTERS[other]
        return Row(
            *kinds,
            expected(*kinds),
            Path.RELAY if direct_s is None else Path.DIRECT,
            answered_s,
            direct_s,
            len(traffic.direct(since)),
            len(traffic.relayed(since)),
            said == [right] * 2,
        )


def show_matrix(report: Report, kinds: Sequence[str]) -> list[Cell]:
    """Print the first table."""
    report.say(f"| ms to direct | {' | '.join(kinds)} |", f"|{'---|' * (len(kinds) + 1)}")
    cells = []
    for one in kinds:
        line = [run_virtual(meet(one, other)) for other in kinds]
        report.say(f"| {one} | {' | '.join(map(str, line))} |")
        cells += line
    return cells


def show_kernels(report: Report, pairs: Iterable[tuple[Router, Router]]) -> list[Row]:
    """Print the second table."""
    right = meshllm("chat", "--nodes", "1", "--threads", "1", QUESTION).stdout
    report.say(
        "",
        "| routers | expected | got | answered, s | direct, s | direct | relayed | text |",
        f"|{'---|' * 8}",
    )
    rows = []
    for pair in pairs:
        rows.append(run(*pair, right))
        report.say(str(rows[-1]))
    return rows


def main() -> None:
    """Print the tables."""
    parser = parser_of("nats", __doc__)
    parser.add_argument("--simulated", action="store_true", help="only the simulation")
    options = parser.parse_args()
    report = Report(options)
    cells = show_matrix(report, list(KINDS))
    reason = "not asked for" if options.simulated else can_make_namespaces()
    rows = [] if reason else show_kernels(report, PAIRS)
    if reason:
        report.say("", f"no real kernels: {reason}")
    pairs: list[Cell | Row] = [*cells, *rows]
    report.write(pairs)
    wrong = sum(each.got != each.expected for each in pairs)
    wrong += sum(not row.is_right or not row.direct_datagrams for row in rows if row.direct_s)
    sys.exit(f"{wrong} of {len(pairs)} pairs are not as expected" if wrong else 0)


if __name__ == "__main__":
    main()
