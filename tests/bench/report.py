"""Where the figures of a benchmark go: a table, JSON, or both."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

STDOUT = "-"


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Begin with what every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}", description=about)
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="write the figures, to stdout alone"
    )
    return parser


def counts(text: str) -> tuple[int, ...]:
    """Read `1,2,3`."""
    return tuple(int(word) for word in text.split(",") if word)


class Report:
    """Shows lines as they come, and writes rows in the end."""

    def __init__(self, options: argparse.Namespace, threads: int | None = None) -> None:
        """Torch uses so many ``threads``, unless the options say."""
        self._where: str | None = options.json
        self._threads: int | None = getattr(options, "threads", threads)

    def say(self, *lines: str) -> None:
        """Print lines of the table, unless stdout is for JSON."""
        if self._where != STDOUT:
            print(*lines, sep="\n", flush=True)

    def write(self, rows: Iterable[Any], **about: object) -> None:
        """Write dataclasses as JSON where that is wanted, beside what they are ``about``."""
        if self._where is None:
            return
        from meshllm.bench.machine import machine  # torch is of no use before

        facts = {**about, "machine": machine(self._threads), "rows": [asdict(row) for row in rows]}
        text = json.dumps(facts, indent=2)
        if self._where == STDOUT:
            print(text)
        else:
            Path(self._where).write_text(text + "\n", encoding="utf-8")
