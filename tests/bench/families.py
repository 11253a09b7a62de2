"""The parity table: ``python -m tests.bench.families [--types a,b] [--write]``.

With ``--odd`` models of odd shapes are verified instead, in the way of `meshllm model verify`.

Types run one after the other in a worker process; a crash or a timeout is the verdict of its type,
and a new worker continues with the next one.
"""

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

from meshllm.model.parity.check import verify
from meshllm.model.parity.compare import Depth, describe, measure
from meshllm.model.parity.families import FamilyTable, read_table, text_types, tiny_config
from meshllm.model.parity.verdict import Verdict, measured_verdicts
from meshllm.model.split.structure import PROBE_ERRORS
from tests.builders.odd_shapes import ODD_SHAPES, odd_model

FULL = Depth(
    (torch.float32, torch.bfloat16), ("1", "2", "3", "L", "entry", "ends"), tuple(range(1, 9))
)  # the extent of the table; a crop removes up to the longest draft
LIMIT = 120.0  # s for one type; the slowest takes 10 s of one core
FOLDER = Path(__file__).parents[2] / "meshllm" / "model" / "parity"
"""Where the table is written."""


def survey(names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Measure types in order; restart the worker after a crash or a timeout."""
    context = multiprocessing.get_context("spawn")
    rest = list(names)
    while rest:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(rest, sender), daemon=True)
        process.start()
        sender.close()
        try:
            while rest:
                yield rest[0], _next(receiver, rest[0])
                rest.pop(0)
        except (EOFError, TimeoutError) as end:
            hung = isinstance(end, TimeoutError)
            reason = f"no answer within {LIMIT:.0f} s" if hung else "the process died"
            name = rest.pop(0)
            yield name, Verdict(name.partition(":")[0], equal=False, reason=reason)
        finally:
            process.kill()
            process.join()


def work(names: Sequence[str], sender: Connection) -> None:
    """Measure types in the worker, and send each verdict."""
    torch.set_num_threads(1)
    table = read_table()
    for name in names:
        sender.send(authorize(name, table))


def authorize(name: str, table: FamilyTable) -> Verdict:
    """Run all parity checks on the tiny config of one type."""
    try:
        verdict = measure(tiny_config(name, table), FULL)
    except PROBE_ERRORS as error:
        reason = f"the stock model does not run: {describe(error)}"
        verdict = Verdict(name.partition(":")[0], equal=False, reason=reason)
    return table.explain(name, verdict)


def render(verdicts: dict[str, Verdict], table: FamilyTable) -> str:
    """Write the table as Markdown; the same verdicts give the same bytes."""
    equal = [name for name, verdict in verdicts.items() if verdict.equal]
    lines = [
        "# Which model types can be split",
        "",
        "<!-- written by `python -m tests.bench.families --write` -->",
        "",
        f"Every causal-LM type that transformers {transformers.__version__} registers."
        f" {len(equal)} of {len(verdicts)} text types and variants can be split,"
        f" {len(verdicts) - len(equal)} are refused by name, {len(table.excluded)} are not text"
        " decoders.",
        "",
        "*Equal*: a tiny random model in 1, 2, 3 and L parts, and with the head apart, gives logits"
        " bit-equal to the whole one on a CPU, in float32 and bfloat16, in prefill, chunked"
        " prefill, cached decode (one row and several), two interleaved sessions, a left-padded"
        " batch, and after cropping 1 to 8 rows where the cache can be cropped.",
        "*Chunks*: several rows can be appended to a filled cache.",
        "*Crop*: rows can be removed from the end of the cache.",
        "",
        "| type | split | chunks | crop | why not |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(name, verdict) for name, verdict in verdicts.items()]
    lines += ["", "Multimodal types whose text model is split:", ""]
    lines += ["| type | as |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in sorted(table.wrappers.items())]
    lines += ["", "Not measured:", "", "| type | why |", "|---|---|"]
    lines += [f"| {name} | {why} |" for name, why in sorted(table.excluded.items())]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.families")
    parser.add_argument("--types", help="only these, separated by commas")
    parser.add_argument("--write", action="store_true", help="update their rows in the package")
    parser.add_argument("--odd", action="store_true", help="verify models of odd shapes instead")
    options = parser.parse_args(arguments)
    if options.odd:
        return verify_odd(options.types.split(",") if options.types else list(ODD_SHAPES))
    table = read_table()
    verdicts = {}
    for name, verdict in survey(options.types.split(",") if options.types else text_types(table)):
        verdicts[name] = verdict
        print(_row(name, verdict), flush=True)
    if options.write:
        write(verdicts, table)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    equal = sum(verdict.equal for verdict in verdicts.values())
    print(f"{equal} of {len(verdicts)} equal, {used.ru_utime + used.ru_stime:.0f} s of one core")
    return 0


def verify_odd(names: Sequence[str]) -> int:
    """Verify models of odd shapes, weights at odd offsets; return 1 unless all are equal."""
    torch.set_num_threads(1)
    equal = 0
    for name in names:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            with odd_model(name, dtype) as source:
                report = verify(source, prompt=range(3, 10))
            found.append(f"{report.outcome} ({report.relative:.1e})")
            equal += report.equal
        print(f"| {name} | {' | '.join(found)} |", flush=True)
    print(f"{equal} of {2 * len(names)} equal bit for bit")
    return 0 if equal == 2 * len(names) else 1


def write(verdicts: dict[str, Verdict], table: FamilyTable) -> None:
    """Update some or all rows of the written table."""
    names = text_types(table)
    known = (measured_verdicts() if len(verdicts) < len(names) else {}) | verdicts
    ordered = {name: known[name] for name in names if name in known}
    fields = {name: asdict(verdict) for name, verdict in ordered.items()}
    (FOLDER / "families.json").write_text(json.dumps(fields, indent=1) + "\n", "utf-8")
    (FOLDER / "FAMILIES.md").write_text(render(ordered, table), "utf-8")


def _next(receiver: Connection, name: str) -> Verdict:
    if not receiver.poll(LIMIT):
        raise TimeoutError(name)
    verdict: Verdict = receiver.recv()
    return verdict


def _row(name: str, verdict: Verdict) -> str:
    marks = ["yes" if mark else "no" for mark in (verdict.chunkable, verdict.croppable)]
    if not verdict.equal:
        marks = ["", ""]
    split = "equal" if verdict.equal else "whole only" if verdict.whole else "refused"
    return f"| {name} | {split} | {' | '.join(marks)} | {verdict.reason.replace('|', '/')} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
