"""Startup time and memory of a ring of two nodes: ``python -m tests.bench.startup``.

The baseline, in the same run: transformers imports, loads and runs the same random model in its own
process. Both use one thread; nodes start with `--members 2`. The first start finds no state of
meshllm, the second one that of the first. `serving` is the time from the start until both nodes
report that the ring of two serves, `answer` until the first token; `ratio` is `serving` divided by
the time of transformers plus one second. `rss` is that of the larger process
half a minute after the first answer, when what only the start needs is released, `held` the
weights, caches and compiled steps that it reports.

The last lines are what a user waits for: the time from the start of `meshllm chat PROMPT` until its
first token, with the embedded model. `cold` finds no state and no cache folder, and runs the model
itself; `through a node` asks a node that serves.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from meshllm.bench.ring_table import DIMENSIONS, random_model
from meshllm.model.files.source import resolve
from meshllm.model.locate import BUILTIN
from tests.bench.growth import ask, client_of
from tests.bench.report import Report, parser_of
from tests.processes import fleet as fleets
from tests.processes.fleet import ALONE, Fleet, chatting, environment, open_fleet

_PLAIN = """
import sys, torch, transformers
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=1, do_sample=False)
"""
MIB = 1 << 20
CHATS = 5
TOO_NARROW = "tiny"
"""Its embedding has fewer rows than the tokenizer that it comes with has tokens."""
IDLE_S = 30.0
"""Between the first answer and the look at the memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model."""

    model: str
    bytes: int
    """Size of its weights."""
    plain_s: float
    """Time in which transformers imports, loads and runs it."""
    serving_s: tuple[float, ...]
    """Times of the first and the second start."""
    answer_s: tuple[float, ...]
    rss: int
    """Resident bytes of the larger process."""
    held: int
    """Bytes of weights, caches and steps that this process reports."""


def plain(folder: Path) -> float:
    """Time transformers with a warm page cache: the second of two runs."""
    for _ in range(2):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", _PLAIN, str(folder)], check=True, env=environment())
    return time.perf_counter() - begin


def start(fleet: Fleet, ticket: str, folder: Path) -> tuple[float, float]:
    """Start both nodes; return the seconds until they serve, and until the first token."""
    begin = time.perf_counter()
    model = ("--model", str(folder), *ALONE)
    founder = fleet.node("founder").start("--members", "2", *model)
    fleet.node("guest").start("--join", ticket, *model)
    fleet.form()
    serving = time.perf_counter() - begin
    with client_of(founder) as client:
        ask(client, 1, 1)
    return serving, time.perf_counter() - begin


def weigh(fleet: Fleet) -> tuple[int, int]:
    """Return the resident memory of the larger process, and the memory that it reports."""
    time.sleep(IDLE_S)
    sizes = list[tuple[int, int]]()
    for node in fleet.nodes.values():
        memory = node.status()["memory"]
        sizes.append((memory["process"], memory["process"] - memory["other"]))
    return max(sizes)


@contextmanager
def models(name: str) -> Iterator[Path]:
    """Yield the folder of a model."""
    if name == BUILTIN:
        yield resolve(BUILTIN).folder
        return
    with random_model(name, torch.bfloat16) as folder:
        yield folder


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Run the processes with empty state and cache folders."""
    with TemporaryDirectory() as empty:
        folders = dict.fromkeys(("XDG_STATE_HOME", "XDG_CACHE_HOME"), empty)
        with patch.dict(os.environ, folders):
            yield


def measure(name: str) -> Row:
    """Measure one model."""
    with models(name) as folder, nothing_remembered(), open_fleet() as fleet:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        stock = plain(folder)
        ticket = fleet.create_mesh("founder")
        starts, weighed = [start(fleet, ticket, folder)], weigh(fleet)
        for node in fleet.nodes.values():
            node.kill()
        starts.append(start(fleet, ticket, folder))
        serving, answer = zip(*starts, strict=True)
    return Row(name, size, stock, serving, answer, *weighed)


@dataclass(frozen=True, slots=True)
class Chat:
    """Seconds until the first token of `meshllm chat`, of each run."""

    cold_s: tuple[float, ...]
    node_s: tuple[float, ...]


def first_token(state: Path) -> float:
    """Return the seconds until `meshllm chat` prints its first token."""
    begin = time.perf_counter()
    with chatting(state, "Say hello.", "--max-tokens", "4"):
        return time.perf_counter() - begin


def time_chats() -> Chat:
    """Measure `meshllm chat`, without a node and through one."""
    cold = list[float]()
    for _ in range(CHATS):
        with nothing_remembered(), TemporaryDirectory() as empty:
            cold.append(first_token(Path(empty)))
    with open_fleet() as fleet:
        node = fleet.node("node").start(*ALONE)
        fleet.form()
        first_token(node.state)
        through = [first_token(node.state) for _ in range(CHATS)]
    return Chat(tuple(cold), tuple(through))


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("startup", __doc__)
    known = ", ".join((BUILTIN, *(name for name in DIMENSIONS if name != TOO_NARROW)))
    parser.add_argument("--models", default=f"{BUILTIN},qwen3-0.6b", help=f"of {known}")
    options = parser.parse_args(arguments)
    report, rows = Report(options, threads=1), list[Row]()
    fleets.WAIT_S = 600.0  # for a busy machine
    report.say(
        f"{'':>18}{'':>9}{'transformers':>14}{'first start':>22}{'second start':>22}",
        f"{'model':>18}{'MB':>9}{'s':>14}{'serving':>8}{'answer':>7}{'ratio':>7}"
        f"{'serving':>8}{'answer':>7}{'ratio':>7}{'rss MiB':>9}{'held MiB':>9}",
    )
    for name in options.models.split(","):
        row = measure(name)
        rows.append(row)
        times = "".join(
            f"{serving:>8.1f}{answer:>7.1f}{serving / (row.plain_s + 1):>7.2f}"
            for serving, answer in zip(row.serving_s, row.answer_s, strict=True)
        )
        report.say(
            f"{name:>18}{row.bytes / 1e6:>9.0f}{row.plain_s:>14.1f}{times}"
            f"{row.rss / MIB:>9.0f}{row.held / MIB:>9.0f}"
        )
    chat = time_chats()
    for label, taken in (("cold", chat.cold_s), ("through a node", chat.node_s)):
        median, slowest = statistics.median(taken), max(taken)
        report.say(f"meshllm chat, {label}: {median:.2f} s, at most {slowest:.2f} s")
    report.write(rows, chat=chat)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
