"""Whether one request has one text: `python -m tests.bench.same`.

The same prompt, seed and temperature is asked first, again with a cached prefix, and beside seven
other sessions: on rings of one and of three nodes, with and without speculative decoding, and with
prompts read in chunks of several sizes. The model is random, with 12 layers. The table shows how
many of the tokens are those of the first answer of all, of ``--times`` rings the fewest; the
command fails if any differ. What a loss in the middle of an answer changes is shown by
`tests.bench.chaos`.
"""

import asyncio
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Sampling
from meshllm_loopback import LoopbackTransport
from tests.bench.chaos import agreed, random_model
from tests.bench.report import Report, counts, parser_of

SEED = 7
OTHERS = 7


@dataclass(frozen=True, slots=True)
class Row:
    """Answers of one ring, and how many of their tokens are the same."""

    nodes: int
    speculation: bool
    chunk: int | None
    first: int
    cached: int
    batched: int


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked."""

    prompt: int
    tokens: int
    temperature: float


def prompt_of(number: int, length: int) -> list[int]:
    """Return made-up tokens that the embedded tokenizer knows."""
    return [1000 + (31 * number + 7 * place * place) % 997 for place in range(length)]


async def ask(ring: LocalRing, number: int, options: Options) -> list[int]:
    """Return an answer; ``number`` 0 is the request that is compared."""
    prompt = prompt_of(number, options.prompt)
    sampling = Sampling(temperature=options.temperature, seed=SEED + number)
    return [token async for token in ring.tokens(prompt, sampling, options.tokens)]


async def compare(
    model: Path, case: tuple[int, bool, int | None], options: Options, right: list[int]
) -> Row:
    """Ask a ring; ``right`` is the answer to compare with, and set if it is empty."""
    nodes, speculation, chunk = case
    config = InferenceConfig(threads=1, speculation=speculation, chunk=chunk)
    source = resolve(str(model))
    async with open_local_ring(
        source, RingOptions(nodes, inference=config), LoopbackTransport()
    ) as ring:
        first = await ask(ring, 0, options)
        right += first if not right else []
        cached = await ask(ring, 0, options)
        batched, *_ = await asyncio.gather(
            *(ask(ring, number, options) for number in range(1 + OTHERS))
        )
    same = (agreed(each, right) for each in (first, cached, batched))
    return Row(nodes, speculation, chunk, *same)


def fewest(rows: list[Row]) -> Row:
    """Return the worst of the rows of one case."""
    worst = (min(getattr(row, name) for row in rows) for name in ("first", "cached", "batched"))
    return Row(rows[0].nodes, rows[0].speculation, rows[0].chunk, *worst)


def main() -> None:
    """Run the command."""
    parser = parser_of("same", __doc__)
    parser.add_argument("--nodes", type=counts, default=(1, 3), metavar="N,...")
    parser.add_argument("--chunks", type=counts, default=(32, 100), metavar="N,...")
    parser.add_argument("--prompt", type=int, default=300, metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--times", type=int, default=1, help="rings of each case")
    given = parser.parse_args()
    options = Options(given.prompt, given.tokens, given.temperature)
    report, rows, right = Report(given, threads=1), list[Row](), list[int]()
    report.say(
        f"| nodes | speculation | chunk | first, of {options.tokens} | cached | beside {OTHERS} |",
        "|---|---|---|---|---|---|",
    )
    with TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model")
        for case in product(given.nodes, (True, False), (None, *given.chunks)):
            times = range(given.times)
            row = fewest([asyncio.run(compare(model, case, options, right)) for _ in times])
            rows.append(row)
            how = "on" if row.speculation else "off"
            cells = row.nodes, how, row.chunk or "auto", row.first, row.cached, row.batched
            report.say(f"| {' | '.join(map(str, cells))} |")
    report.write(rows)
    found = [same for row in rows for same in (row.first, row.cached, row.batched)]
    differ = sum(same < options.tokens for same in found)
    sys.exit(f"{differ} of {len(found)} answers differ" if differ else 0)


if __name__ == "__main__":
    main()
