"""The time that the API adds to the in-process call: to the first token, and to each later one.

``python -m tests.bench.api_server [--model NAME] [--tokens 128] [--rounds 15] [--threads 1]``

A ring of one node answers in this process. In each round one prompt is asked by a call, and a like
one over HTTP on loopback, streamed as a text completion; the client reads bytes in the same event
loop, so that its work is part of what is added. Figures are medians over the rounds, and, for a
machine that also does other work, the least of all.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Self

from meshllm.api.access.accounts import Accounts
from meshllm.api.tcp import ApiServer, ApiServerOptions, open_api_server
from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Event, Piece, Request, Sampling
from meshllm.status import MeshStatus, ModelStatus, PlannedRing, PlanTerms
from tests.bench.report import Report, parser_of

PROMPT = "Once upon a time there was a fox, who had a friend in the house of number {}. "


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of one way to ask."""

    way: str
    ttft_ms: float
    ms_per_token: float
    least_ttft_ms: float
    least_ms_per_token: float

    @classmethod
    def of(cls, way: str, found: list[tuple[float, float]]) -> Self:
        """Summarise the rounds."""
        firsts, laters = zip(*found, strict=True)
        medians = statistics.median(firsts), statistics.median(laters)
        return cls(way, *medians, min(firsts), min(laters))

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """The columns of the table."""
        least = self.least_ttft_ms, self.least_ms_per_token
        return self.ttft_ms, self.ms_per_token, *least


class RingPort:
    """What an API server needs of a node, over a ring in this process."""

    def __init__(self, ring: LocalRing, model: str) -> None:
        self.ring, self.model = ring, model

    async def models(self) -> list[ModelStatus]:
        """List the model of the ring."""
        return [ModelStatus(self.model, 1, 1, "bfloat16", "none", 2048)]

    async def status(self) -> MeshStatus:
        """Raise: a text completion does not ask for it."""
        raise NotImplementedError

    async def try_plan(self, terms: PlanTerms) -> PlannedRing:
        """Raise: a text completion does not ask for it."""
        raise NotImplementedError

    async def revoke(self, tags: Sequence[bytes]) -> None:
        """Raise: a text completion does not ask for it."""
        raise NotImplementedError

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer with the ring."""
        return self.ring.generate(request)


def times(begin: float, first: float, last: float, tokens: int) -> tuple[float, float]:
    """Return milliseconds to the first token, and for each later one."""
    return (first - begin) * 1e3, (last - first) * 1e3 / (tokens - 1)


async def by_call(ring: LocalRing, prompt: str, tokens: int) -> tuple[float, float]:
    """Ask the ring by a call."""
    begin, first = perf_counter(), 0.0
    sampling = Sampling(temperature=0.0)
    request = Request(raw=prompt, sampling=sampling, max_tokens=tokens, ignores_end=True)
    async with aclosing(ring.generate(request)) as events:
        async for event in events:
            if isinstance(event, Piece):
                first = first or perf_counter()
    return times(begin, first, perf_counter(), tokens)


async def by_http(
    api_server: ApiServer, model: str, prompt: str, tokens: int
) -> tuple[float, float]:
    """Ask the ring through the API server; the connection is kept, as clients keep theirs."""
    fields = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*api_server.bound.getsockname()[:2])
    try:
        begin, first = perf_counter(), 0.0
        writer.write(head.encode() + body)
        said = b""
        while b"[DONE]" not in said:
            said = said[-8:] + await reader.read(1 << 16)
            if not first and b"data: {" in said:
                first = perf_counter()
        return times(begin, first, perf_counter(), tokens)
    finally:
        writer.close()


async def run(options: argparse.Namespace, report: Report) -> int:
    """Measure both ways in turns."""
    source = resolve(options.model)
    inference = InferenceConfig(threads=options.threads)
    found: dict[str, list[tuple[float, float]]] = {"call": [], "HTTP": []}
    with TemporaryDirectory() as folder, Accounts.open(Path(folder) / "state") as accounts:
        async with open_local_ring(source, RingOptions(1, inference=inference)) as ring:
            with open_api_server(ApiServerOptions("127.0.0.1", 0), accounts) as api_server:
                serving = asyncio.ensure_future(api_server.serve(RingPort(ring, options.model)))
                for place in range(options.rounds + 2):
                    prompts = PROMPT.format(2 * place), PROMPT.format(2 * place + 1)
                    pair = {
                        "call": await by_call(ring, prompts[0], options.tokens),
                        "HTTP": await by_http(
                            api_server, options.model, prompts[1], options.tokens
                        ),
                    }
                    for way, each in pair.items() if place > 1 else ():  # the first ones warm up
                        found[way].append(each)
                serving.cancel()
                await asyncio.wait([serving])
    rows = call, http = [Row.of(way, each) for way, each in found.items()]
    report.say(
        f"{'ms':6} {'first token':>12} {'per token':>10} {'least first':>12} {'per token':>10}"
    )
    added = [there - here for there, here in zip(http.figures, call.figures, strict=True)]
    for way, figures in (*((row.way, row.figures) for row in rows), ("added", added)):
        first, later, least_first, least = figures
        report.say(f"{way:6} {first:12.3f} {later:10.3f} {least_first:12.3f} {least:10.3f}")
    ratio = http.least_ms_per_token / call.least_ms_per_token
    report.say(f"HTTP takes {ratio:.3f} times the least time per token of a call")
    report.write(rows)
    return 0


def main() -> int:
    """Measure."""
    parser = parser_of("api_server", __doc__)
    parser.add_argument("--model", default="builtin")
    for name, default in (("tokens", 128), ("rounds", 15), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    return asyncio.run(run(options, Report(options)))


if __name__ == "__main__":
    sys.exit(main())
