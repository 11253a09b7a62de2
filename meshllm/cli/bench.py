"""`meshllm bench`: Table 1 of the paper on this machine; measures nothing itself."""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from meshllm.cli import render
from meshllm.cli.options import settings, takes
from meshllm.config import Scalar
from meshllm.errors import UserError

EXAMPLES = """\b
Examples:
  meshllm bench --model qwen3-0.6b --nodes 1,2,3
  meshllm bench --processes --nodes 2 --threads 1
  meshllm bench --model llama-3.2-1b --nodes 1,2 --rounds 5 --json table.json
"""


@takes("threads")
def bench(
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Published dimensions: `qwen3-0.6b` or `llama-3.2-1b`."),
    ] = "qwen3-0.6b",
    nodes: Annotated[str, typer.Option(metavar="N,N", help="Sizes of the rings.")] = "1,2,3",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Length of the prompt.")
    ] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Length of the answer.")] = 32,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes", help="Run each node as a process, linked over WebSocket, encrypted."
        ),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measure so often; medians are shown.")
    ] = 3,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures here too; `-` is stdout."),
    ] = None,
    **flags: Scalar,
) -> None:
    """Measure rings beside plain transformers, with random weights.

    Every round measures every contestant once; ratios compare within a round, so that a busy
    machine slows all of them alike. Above 1.00x is faster than transformers' own `generate`.
    """
    sizes = _sizes(nodes)
    threads = settings(flags).threads
    with render.Status(sys.stderr) as status:
        status.show("loading torch")
        from meshllm.testing.table1 import Case, measure

        case = Case(model, sizes, prompt_tokens, new_tokens, rounds, threads, processes=processes)
        rows = measure(case, status.show)
    fields = {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "processes": processes,
        "machine": _machine(),
        "rows": [asdict(row) for row in rows],
    }
    if str(json) == "-":
        render.dump(fields)
        return
    if json is not None:
        _save(json, fields)
    render.out(_table(rows))


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"`{text}` is no list of ring sizes", hint="write it as `1,2,3`")
    return tuple(sorted({int(word) for word in words}))


def _save(path: Path, fields: dict[str, Any]) -> None:
    text = dumps({"schema": render.SCHEMA, **fields}, indent=2)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"`{path}` cannot be written: {error.strerror}") from None


def _machine() -> dict[str, Any]:
    import os
    import platform
    from importlib.metadata import version

    import torch

    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "meshllm": version("meshllm"),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _table(rows: Any) -> str:
    header = (
        "contestant", "first token ms", "ms per token", "tokens/s",
        "decode x", "decode x of fewest", "first token x", "ms per hop",
    )  # fmt: skip
    return render.table(
        header,
        [
            (
                row.name, row.ttft_ms, row.ms_per_token, row.tokens_per_second,
                row.decode_ratio, row.decode_ratio_one, row.ttft_ratio, row.hop_ms,
            )
            for row in rows
        ],
    )  # fmt: skip
