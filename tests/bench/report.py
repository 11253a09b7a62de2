"""Output of a benchmark: a table, JSON, or both."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

STDOUT = "-"


def parser_of(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{name}", description=about)
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE", help="write JSON (stdout: no table)"
    )
    return parser


def counts(text: str) -> tuple[int, ...]:
    """Parse `1,2,3`."""
    return tuple(int(word) for word in text.split(",") if word)


class Report:
    """Prints lines immediately, and writes the rows at the end."""

    def __init__(self, options: argparse.Namespace, threads: int | None = None) -> None:
        """Set the ``threads`` of torch, unless the options have a value."""
        self._where: str | None = options.json
        self._threads: int | None = getattr(options, "threads", threads)

    def say(self, *lines: str) -> None:
        """Print lines of the table, unless stdout is for JSON."""
        if self._where != STDOUT:
            print(*lines, sep="\n", flush=True)

    def write(self, rows: Iterable[Any], **about: object) -> None:
        """Write dataclasses as JSON if requested, together with ``about``."""
        if self._where is None:
            return
        from meshllm.bench.machine import machine  # imports torch

        facts = {**about, "machine": machine(self._threads), "rows": list(rows)}
        text = json.dumps(facts, indent=2, default=_members)
        if self._where == STDOUT:
            print(text)
        else:
            Path(self._where).write_text(text + "\n", encoding="utf-8")


def _members(value: object) -> dict[str, object]:
    """Return the fields of a dataclass; `asdict` breaks a `Counter` before Python 3.12."""
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{value!r} is not JSON")
    return {each.name: getattr(value, each.name) for each in fields(value)}
