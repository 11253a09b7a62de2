"""The token path of two revisions, paired: `python -m tests.bench.revisions BEFORE [AFTER]`.

Each side runs its own code in rings of its own, in turns: time per token in rings of processes with
encrypted links on this machine, and bytes per hop. Revisions must have `meshllm bench --processes`.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.report import Report, parser_of

ROOT = Path(__file__).parents[2]
BENCH = ("meshllm", "bench", "--processes", "--threads", "1", "--json", "-")
BUDGET = ("tests.bench.budget", "--json")


@dataclass(frozen=True, slots=True)
class RevisionRow:
    """One figure of both revisions."""

    name: str
    before: float
    after: float
    ratio: float
    """The median of the ratios of the rounds, each of two runs in a row."""


def paired(name: str, before: Sequence[float], after: Sequence[float]) -> RevisionRow:
    """Return the medians of both, and the median ratio of pairs."""
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    return RevisionRow(name, median(before), median(after), median(ratios))


def speeds(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds per token of each ring that `meshllm bench --json` measured."""
    return {f"ms per token, {row['name']}": row["ms_per_token"] for row in found["rows"]}


def sizes(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes per hop of each ring that `tests.bench.budget --json` counted."""
    return {
        f"bytes per hop, {row['nodes']} nodes, ends at {row['ends']}": row["bytes_per_hop"]
        for row in found["rows"]
        if row["bytes_per_hop"]
    }


def main() -> None:
    """Print the table."""
    parser = parser_of("revisions", __doc__)
    parser.add_argument("before", help="a revision")
    parser.add_argument("after", nargs="?", default="HEAD", help="another one")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--nodes", default="2", help="sizes of the rings")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each answer")
    options = parser.parse_args()
    report = Report(options)
    with TemporaryDirectory() as before, TemporaryDirectory() as after:
        for revision, folder in ((options.before, before), (options.after, after)):
            _extract(revision, folder)
        rows = _measure(Path(before), Path(after), options)
    report.say("| figure | before | after | ratio |", "|---|---|---|---|")
    for row in rows:
        report.say(f"| {row.name} | {row.before:.4g} | {row.after:.4g} | {row.ratio:.3f} |")
    report.write(rows, before=options.before, after=options.after)


def _measure(before: Path, after: Path, options: argparse.Namespace) -> list[RevisionRow]:
    bench = (*BENCH, "--nodes", options.nodes, "--new-tokens", str(options.new_tokens))
    times: tuple[dict[str, list[float]], dict[str, list[float]]] = {}, {}
    for _ in range(options.rounds):
        for folder, known in zip((before, after), times, strict=True):
            for name, value in speeds(_run(folder, (*bench, "--rounds", "1"))).items():
                known.setdefault(name, []).append(value)
    common = [name for name in times[0] if name in times[1]]
    small, now = (sizes(_run(folder, BUDGET)) for folder in (before, after))
    return [
        *(paired(name, times[0][name], times[1][name]) for name in common),
        *(paired(name, [small[name]], [now[name]]) for name in small if name in now),
    ]


def _extract(revision: str, folder: str) -> None:
    packed = subprocess.check_output(["git", "archive", revision], cwd=ROOT)
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _run(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run a module of a revision; return what it wrote as JSON."""
    path = f"{folder}:{folder / 'plugins'}"
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
