"""Decode speed of a ring of real nodes on a WAN, relative to the lower bound of its latency.

``python -m tests.bench.wan [--model NAME] [--nodes 2,3] [--rtt 1,20,100] [--mbit 10,100,1000]
[--transports websocket,quic]``

Each node is a process with one thread in its own network namespace, and a process between the
namespaces shapes their traffic. Speculative decoding is off, so the lower bound of a token is the
time that the nodes measure in the same answer (compute, serialisation, waiting for the compute
thread) plus, per link, the one-way delay and the transfer time of its bytes. The transports take
turns on the same network, so that a busy machine slows all of them; ratios are per answer, and
medians of the rounds. The first answer on a network is warm-up. The raw UDP echo of a message's
size measures the network alone. Unless bandwidth is the bottleneck, a ring must reach `BAR` of the
bound, or the command fails. Without namespaces nothing is measured.
"""

import asyncio
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    nullcontext,
)
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Self

import torch

from meshllm.bench.fleet import Fleet, Site, open_fleet
from meshllm.bench.ring_table import DIMENSIONS, NUMBER_TOKENS, WORD, random_model
from meshllm.model.files.source import resolve
from meshllm.model.locate import BUILTIN
from meshllm.request import Answer, Request
from meshllm.transport.registry import Registry
from tests.bench.far import changing, echo_ms, reason
from tests.bench.report import Report, counts, parser_of
from tests.processes.namespaces import Space, new_spaces, open_spaces
from tests.simulation.wires import Line

PROMPT_TOKENS = 64
BAR = 0.9
"""Minimum share of the bound."""
FOOT = """\
bound: compute of all ranks, plus one-way delay and transfer time of each link
kept: share of the speed of compute alone; the HyperCluster paper (Table 1) lost 79 to
  87 % of its speed from 1 to 2 nodes
1 ms with 100 and 1000 Mbit/s, and 100 ms with 100, are the networks of Table 3 of Petals
the shaper is one process: near 1000 Mbit/s it is the bottleneck (738 measured), and it and the
  kernel cause the part of the echo above the round trip"""

Network = tuple[int, float, float]
"""Nodes, round trip in ms, Mbit/s."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One ring on one network; medians of the rounds."""

    transport: str
    nodes: int
    rtt_ms: float
    mbit: float
    ms_per_token: float
    tokens_per_s: float
    ttft_ms: float
    compute_ms: float
    """Compute of all ranks, including serialisation and waiting for the compute thread."""
    bound_ms: float
    of_bound: float
    """Share of the bound; 1 is the best possible."""
    kept: float
    """Share of the speed of compute alone."""
    echo_ms: float
    """Round trip of a UDP datagram of a message's size."""
    binds: str
    """The largest part of the bound."""

    @classmethod
    def of(
        cls, transport: str, network: Network, answers: Sequence[Answer], echo_ms: float
    ) -> Self:
        """Summarise the answers."""
        nodes, rtt_ms, mbit = network
        computes = [compute_ms(answer) for answer in answers]
        transfer_ms = statistics.median(transfer(answer, mbit) for answer in answers)
        latency_ms = nodes * rtt_ms / 2
        bounds = [compute + latency_ms + transfer_ms for compute in computes]
        pace = [answer.ms_per_token for answer in answers]
        compute, median_ms = statistics.median(computes), statistics.median(pace)
        shares = {"compute": compute, "latency": latency_ms, "bandwidth": transfer_ms}
        return cls(
            transport,
            *network,
            ms_per_token=median_ms,
            tokens_per_s=1e3 / median_ms,
            ttft_ms=statistics.median(answer.ttft_ms for answer in answers),
            compute_ms=compute,
            bound_ms=statistics.median(bounds),
            of_bound=_paired(bounds, pace),
            kept=_paired(computes, pace),
            echo_ms=echo_ms,
            binds=max(shares, key=lambda name: shares[name]),
        )


def compute_ms(answer: Answer) -> float:
    """Return the time that all nodes spend on a token, without sending it."""
    return sum(hop.compute_ms + hop.serialise_ms + hop.queue_ms for hop in answer.hops)


def transfer(answer: Answer, mbit: float) -> float:
    """Return the transfer time of a token's messages on the links, in milliseconds."""
    return sum(hop.bytes_per_token for hop in answer.hops) * 8 / (mbit * 1e3)


async def measure(
    folder: Path, nodes: int, options: Namespace, told: Callable[[list[Cell]], None]
) -> None:
    """Measure rings of one size with all transports, network by network."""
    spaces, numbers = new_spaces(nodes), count()
    with open_spaces(*spaces), changing(spaces) as change:
        async with AsyncExitStack() as stack:
            fleets = {
                name: await stack.enter_async_context(_fleet(folder, name, spaces))
                for name in options.transports
            }
            for rtt, mbit in product(options.rtt, options.mbit):
                change(Line(delay_s=rtt / 2e3, bytes_per_s=mbit * 1e6 / 8))
                answers: dict[str, list[Answer]] = {name: [] for name in fleets}
                for _ in range(options.rounds + 1):
                    for name, fleet in fleets.items():
                        request = _request(next(numbers), options.new_tokens)
                        answers[name].append(await fleet.answer(request))
                told(_cells((nodes, rtt, mbit), answers, spaces))


def _fleet(
    folder: Path, transport: str, spaces: Sequence[Space]
) -> AbstractAsyncContextManager[Fleet]:
    scheme = Registry.discover().load(transport).schemes[0]
    sites = [Site(f"{scheme}://{space.host}:0", tuple(space.command())) for space in spaces]
    return open_fleet(folder, sites, threads=1, transport=transport)


def _request(number: int, tokens: int) -> Request:
    """Return a prompt that was not used before, because of the prefix cache."""
    words = WORD * (PROMPT_TOKENS - NUMBER_TOKENS)
    return Request(raw=f"{number % 100:02} {words}", max_tokens=tokens)


def _cells(
    network: Network, answers: dict[str, list[Answer]], spaces: Sequence[Space]
) -> list[Cell]:
    hops = [hop for mine in answers.values() for answer in mine for hop in answer.hops]
    echo = echo_ms(spaces[0], spaces[1], size=round(max(hop.bytes_per_token for hop in hops)))
    return [Cell.of(name, network, mine[1:], echo) for name, mine in answers.items()]


def lines(cells: Sequence[Cell], *, is_first: bool) -> Iterator[str]:
    """Format the cells of one network."""
    line = "{:>5} {:>6} {:>6}  {:<9}  {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>8}  {}".format
    if is_first:
        kind = "nodes", "RTT ms", "Mbit/s", "transport"
        yield line(
            *kind, "tokens/s", "ms/token", "compute", "bound ms", "of bound", "kept", "TTFT",
            "echo ms", "binds",
        )  # fmt: skip
    for cell in cells:
        yield line(
            cell.nodes, f"{cell.rtt_ms:g}", f"{cell.mbit:g}", cell.transport,
            f"{cell.tokens_per_s:.2f}", f"{cell.ms_per_token:.1f}", f"{cell.compute_ms:.1f}",
            f"{cell.bound_ms:.1f}", f"{cell.of_bound:.2f}", f"{cell.kept:.2f}",
            f"{cell.ttft_ms:.0f}", f"{cell.echo_ms:.1f}", cell.binds,
        )  # fmt: skip


def missed(cells: Sequence[Cell]) -> list[str]:
    """List the cells below the bar."""
    return [
        f"{cell.transport}, {cell.nodes} nodes, {cell.rtt_ms:g} ms, {cell.mbit:g} Mbit/s: "
        f"{cell.of_bound:.2f} of the bound, {BAR} at least"
        for cell in cells
        if cell.binds != "bandwidth" and cell.of_bound < BAR
    ]


def main(arguments: Sequence[str] | None = None) -> int | str:
    """Run the command."""
    parser = parser_of("wan", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=[BUILTIN, *DIMENSIONS])
    parser.add_argument("--nodes", default=(2, 3), type=counts, help="sizes of rings, as 2,3")
    parser.add_argument("--rtt", default=[1, 20, 100], type=_numbers, help="in milliseconds")
    parser.add_argument("--mbit", default=[10, 100, 1000], type=_numbers, help="Mbit/s")
    parser.add_argument("--transports", default=["websocket", "quic"], type=_names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer")
    options = parser.parse_args(arguments)
    if min(options.nodes, default=0) < 2 or options.rounds < 1:
        parser.error("at least two nodes and one round are required")
    if unknown := set(options.transports) - set(Registry.discover().names()):
        parser.error(f"unknown transports: {', '.join(sorted(unknown))}")
    report = Report(options, threads=1)
    cells: list[Cell] = []
    about = {"model": options.model, "new_tokens": options.new_tokens}
    if why := reason():
        report.say(f"Nothing measured: {why}")
        report.write(cells, **about, skipped=why)
        return 0

    def told(new: list[Cell]) -> None:
        report.say(*lines(new, is_first=not cells))
        cells.extend(new)

    with _model(options.model) as folder:
        for nodes in options.nodes:
            asyncio.run(measure(folder, nodes, options, told))
    report.say("", FOOT)
    report.write(cells, **about)
    return "\n".join(missed(cells)) or 0


def _model(name: str) -> AbstractContextManager[Path]:
    if name == BUILTIN:
        return nullcontext(resolve(BUILTIN).folder)
    return random_model(name, torch.bfloat16)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _paired(mine: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


if __name__ == "__main__":
    sys.exit(main())
