"""Python calls per token: ``python -m tests.bench.calls [--nodes 2] [--top 30]``.

Between two steps the caches of a core hold weights, so that Python runs slower there than in a
loop. The number of calls does not depend on the load of the machine. A ring of a tiny model in this
process, with a compute thread for each rank and WebSocket links without encryption, generates an
answer without drafts; functions of compiled extensions are not counted.
"""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from meshllm.bench.ring_table import random_model
from meshllm.model.files.source import open_folder
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from tests.bench.asking import ask
from tests.bench.report import Report, parser_of

PROMPT = range(5, 20)


@dataclass(frozen=True, slots=True)
class Row:
    """Calls of one function."""

    file: str
    function: str
    per_token: float


class CallCounter:
    """Counts the calls of Python functions, in all threads that start after it."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self.is_counting = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_counting and event == "call":
            self.counts[frame.f_code.co_filename, frame.f_code.co_qualname] += 1


async def measure(folder: Path, nodes: int, tokens: int) -> list[Row]:
    """Count the calls per token, the most frequent functions first."""
    counter = CallCounter()
    inference = InferenceConfig(threads=1, speculation=False, prefix_bytes=0)
    ring = RingOptions(nodes, "websocket", own_threads=True, inference=inference)
    async with open_local_ring(open_folder("tiny", folder), ring) as opened:
        await ask(opened, PROMPT, tokens)  # steps are recorded
        counter.is_counting = True
        await ask(opened, PROMPT, tokens)
        counter.is_counting = False
    return [Row(*place, count / tokens) for place, count in counter.counts.most_common()]


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("calls", __doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--top", type=int, default=30, help="functions to show")
    options = parser.parse_args(arguments)
    report = Report(options, threads=1)
    with random_model("tiny", torch.bfloat16) as folder:
        rows = asyncio.run(measure(folder, options.nodes, options.tokens))
    for row in rows[: options.top]:
        report.say(f"{row.per_token:>9.2f}  {Path(row.file).name:<20} {row.function}")
    report.say(f"{sum(row.per_token for row in rows):>9.0f}  calls per token")
    report.write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
