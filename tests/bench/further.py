"""How long answers pause while their node loads a further model: `python -m tests.bench.further`.

One process serves the built-in model, and a client asks it without a break. Then the mesh serves a
further model, which the same process loads beside it. The table shows the longest time between two
tokens, from one answer to the next too, before that and until the further ring serves, and how long
that took.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event, Thread

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from tests.bench.chaos import ask
from tests.bench.report import Report, parser_of
from tests.processes.fleet import ALONE, Node, meshllm, open_fleet, until

TOKENS = 400  # of each answer
QUIET_S = 10.0
REQUEST = {
    "raw": "Once upon a time there was a ring of nodes that",
    "max_tokens": TOKENS,
    "sampling": {"temperature": 0.0, "seed": 0},
}


@dataclass(frozen=True, slots=True)
class Pauses:
    """The longest times between two tokens of a client."""

    model: str
    mebibytes: int
    """Of its weights."""
    before_ms: float
    """While nothing is loaded."""
    loading_ms: float
    """The longest until the further ring serves,"""
    second_ms: float
    """and the second and the third longest."""
    third_ms: float
    serves_s: float
    """From the command until the further ring serves."""


@dataclass
class Client:
    """Asks a node without a break, and notes when each token comes."""

    node: Node
    times: list[float] = field(default_factory=list)
    _is_over: Event = field(default_factory=Event)

    @contextmanager
    def running(self) -> Iterator["Client"]:
        """Ask inside the context."""
        thread = Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    def longest_ms(self, begin: float, end: float, count: int = 1) -> list[float]:
        """Return the longest times between two tokens that ended within a period."""
        times = list(self.times)
        gaps = [(b - a) * 1e3 for a, b in pairwise(times) if begin < b <= end]
        return sorted(gaps, reverse=True)[:count]

    def _run(self) -> None:
        while not self._is_over.is_set():
            for _ in ask(self.node, REQUEST):
                self.times.append(time.monotonic())


def measure(name: str, layers: int, *, quiet_s: float = QUIET_S) -> Pauses:
    """Load a random model of these dimensions beside the built-in one."""
    with random_model(name, torch.bfloat16, layers) as folder, open_fleet() as fleet:
        size = (folder / "model.safetensors").stat().st_size >> 20
        fleet.create_mesh("attic")
        node = fleet.node("attic").start("--model", f"builtin,{folder}", *ALONE)
        until(lambda: _serving(node) == 1, fleet.told)
        with Client(node).running() as client:
            until(lambda: len(client.times) > TOKENS, fleet.told)
            begin = time.monotonic()
            time.sleep(quiet_s)
            loads = time.monotonic()
            made = meshllm("model", "serve", str(folder), "--alias", "further", state=node.state)
            assert made.returncode == 0, made.stderr
            until(lambda: _serving(node) == 2, fleet.told)
            end = time.monotonic()
            time.sleep(1.0)  # for the token that ends the last pause
            first, second, third = client.longest_ms(loads, end + 1.0, 3)
            before = client.longest_ms(begin, loads)[0]
            return Pauses(name, size, before, first, second, third, end - loads)


def _serving(node: Node) -> int:
    return sum(each["state"] == "serving" for each in node.status().get("rings", ()))


def main() -> int:
    """Print the pauses."""
    parser = parser_of("further", __doc__ and __doc__.splitlines()[0])
    parser.add_argument(
        "--dimensions", default="qwen3-0.6b", choices=DIMENSIONS, help="of the model"
    )
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of them")
    options = parser.parse_args()
    report = Report(options)
    found = measure(options.dimensions, options.layers)
    report.say(
        f"{found.model}, {found.mebibytes} MiB of weights, served after {found.serves_s:.1f} s",
        f"longest time between two tokens: {found.before_ms:.0f} ms before,"
        f" {found.loading_ms:.0f} ms while it loads"
        f" (then {found.second_ms:.0f} and {found.third_ms:.0f} ms)",
    )
    report.write([found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
