"""`meshllm bench`: benchmarks of rings and of one engine, and replays of traces."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshllm.cli.commands.replay import ReplayOptions
from meshllm.cli.commands.replay import measure as measure_replay
from meshllm.cli.commands.replay import table as replay_table
from meshllm.cli.shared.options import is_given, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings
from meshllm.errors import MeshError, UserError
from meshllm.local_files import hint_of, replace_text
from meshllm.names import Quant

if TYPE_CHECKING:
    from meshllm.bench import engine_table, ring_table

EXAMPLES = """\b
Examples:
  meshllm bench --model qwen3-0.6b --nodes 1,2,3
  meshllm bench --processes --nodes 2 --threads 1 --quant none,int8
  meshllm bench --engine --model llama-3.2-1b --json engine.json
  meshllm bench --replay trace.jsonl --speed 2
  meshllm bench --replay trace.jsonl --url http://127.0.0.1:7780/v1
"""

MAX_SIZE_DIGITS = 4  # of the number of nodes in a ring

_RING_OPTIONS = ("nodes", "prompt_tokens", "new_tokens", "processes")
_REPLAY_OPTIONS = ("speed", "url", "key_file", "state")
_NOT_OF_REPLAY = ("engine", "prompt_tokens", "new_tokens", "processes", "quant", "rounds")
_UNUSED = (
    ("nodes", ("state",), "a ring in this process answers"),
    ("url", ("threads", "device", "state"), "the API at `--url` answers"),
    ("replay", ("threads", "device"), "the running node answers"),
)
"""Options without effect on a replay, by the first option here that is given."""


@takes("threads", "device", "state")
def bench(
    invocation: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Use the published dimensions of this model.",
        ),
    ] = "qwen3-0.6b",
    engine: Annotated[
        bool,
        typer.Option("--engine", help="Measure one node: prefill, and decode of 1 to 32 sessions."),
    ] = False,
    nodes: Annotated[str, typer.Option(metavar="N,N", help="Use rings of these sizes.")] = "1,2,3",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Use a prompt of N tokens.")
    ] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Generate N tokens.")] = 32,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes", help="Run each node as a process, linked by encrypted WebSocket."
        ),
    ] = False,
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="QUANT,QUANT",
            help="Compare these quantisations, as `none,int8`.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=99, metavar="N", help="Run N rounds and show medians.")
    ] = 3,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay the trace of `meshllm serve --trace FILE`."),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, metavar="X", help="Replay a trace X times as fast.")
    ] = 1.0,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Replay a trace on the API at this base URL."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the key of that API from FILE."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write JSON to FILE; `-` is stdout only."),
    ] = None,
    **flags: Scalar,
) -> None:
    """Benchmark rings, or one engine, or replay a trace.

    Rings and the engine are measured beside transformers. Models are `qwen3-0.6b`, `pythia-70m`,
    `llama-3.2-1b` and `qwen3-8b-4-layers`, with random weights. Each round measures every
    contestant once, and ratios are taken within a round, so that load on the machine affects all
    alike. A speedup above 1.00, or a first token ratio below it, beats transformers. Figures of one
    processor do not carry over to another, so the table names it, its instructions, and the
    versions.

    `--engine` compares all quantisations by default on a CPU, and measures short steps up to four
    times as often. The limit is the time to read the weights at the memory bandwidth, measured in
    these rounds. The command fails if logits that must equal those of transformers differ.

    `--replay` sends the requests of a trace at its times, with made-up prompts of the same lengths
    and shared prefixes, and compares latencies, throughput and the hit rate of the prefix cache
    with those in the trace. The running node answers, or `--url`, each request by the model that
    it names, or by `--model`. With `--nodes N` a ring in this process of `--model` answers, which
    may also be a folder or a Hugging Face name.
    """
    _check_target(json)
    chosen = settings(flags)
    if replay is not None:
        _refuse(invocation, _NOT_OF_REPLAY, "replay")
        _refuse_unused(invocation)
        _replay(
            ReplayOptions(
                replay, speed, model if is_given(invocation, "model") else None,
                url, key_file, _one(nodes) if is_given(invocation, "nodes") else None,
            ),
            chosen,
            json,
        )  # fmt: skip
        return
    for name in _REPLAY_OPTIONS:
        if is_given(invocation, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"`{option}` needs `--replay`", hint="add `--replay FILE`, or omit it")
    from meshllm.cli.shared.signals import unwinding_on_signals

    invocation.with_resource(unwinding_on_signals())  # nodes end, and files are removed
    threads = chosen.threads
    quants = _quants(quant or Quant.NONE)
    about: dict[str, Any] = {"model": model, "rounds": rounds}
    if engine:
        _refuse(invocation, _RING_OPTIONS, "engine")
        with render.Status(sys.stderr) as status:
            status.show("loading torch")
            from meshllm.bench import engine_table

            device = _device(chosen.device, quants)
            if not quant and device == "cpu":
                quants = tuple(Quant)
            engine_case = engine_table.EngineBenchmark(model, quants, rounds, threads, device)
            measured = engine_table.measure(engine_case, status.show)
        about |= {"gb_per_s": measured.gb_per_s, **_facts(engine_case, measured.rows)}
        _show(about, _with_machine(_engine_table(measured), about), json)
        _check(measured.rows)
        return
    sizes = _sizes(nodes)
    with render.Status(sys.stderr) as status:
        status.show("loading torch")
        from meshllm.bench.ring_table import RingBenchmark, measure

        case = RingBenchmark(
            model, sizes, prompt_tokens, new_tokens, rounds, threads,
            quants=quants, processes=processes, device=_device(chosen.device, quants),
        )  # fmt: skip
        rows = measure(case, status.show)
    about |= {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "processes": processes}
    about |= _facts(case, rows)
    _show(about, _with_machine(_ring_table(rows), about), json)


def _device(wanted: str, quants: Sequence[Quant]) -> str:
    """Return a device that supports all of these quantisations."""
    import torch

    from meshllm.model.device import CPU, choose

    found = [choose(wanted, torch.bfloat16, quant) for quant in quants]
    return str(CPU if CPU in found else found[0])


def _replay(options: ReplayOptions, chosen: Settings, json: Path | None) -> None:
    """Replay a trace, and show its figures; requests without an answer are reported on stderr."""
    if options.url is not None and options.nodes is not None:
        raise UserError("`--nodes` cannot be combined with `--url`", hint="omit one of them")
    if options.key_file is not None and options.url is None:
        raise UserError("`--key-file` needs `--url`", hint="add `--url URL`, or omit it")
    with render.Status(sys.stderr) as status:
        found = measure_replay(options, chosen, status.show)
    for reason, count in found.errors.items():
        render.print_message(f"not answered, {count} of {found.requests}: {render.safe(reason)}")
    _show({"speed": options.speed, **asdict(found)}, replay_table(found), json)


def _refuse(invocation: typer.Context, names: Sequence[str], other: str) -> None:
    """Raise `UserError` for options that have no effect with another one."""
    for name in names:
        if is_given(invocation, name):
            option = name.replace("_", "-")
            raise UserError(
                f"`--{option}` cannot be combined with `--{other}`", hint="omit one of them"
            )


def _refuse_unused(invocation: typer.Context) -> None:
    """Raise `UserError` for options without effect on what answers a replay."""
    names, why = next((names, why) for given, names, why in _UNUSED if is_given(invocation, given))
    for name in names:
        if is_given(invocation, name):
            raise UserError(f"`--{name}` has no effect: {why}", hint="omit it")


def _one(nodes: str) -> int:
    if not _is_size(nodes):
        raise UserError(f"Invalid ring size `{nodes}`", hint="a replay uses one, such as `2`")
    return int(nodes)


def _is_size(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_SIZE_DIGITS and int(text) > 0


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(map(_is_size, words)):
        raise UserError(f"Invalid ring sizes `{text}`", hint="write it as `1,2,3`")
    return tuple(sorted({int(word) for word in words}))


def _quants(text: str) -> tuple[Quant, ...]:
    words = text.split(",")
    if unknown := [word for word in words if word not in set(Quant)]:
        known = ", ".join(f"`{quant}`" for quant in Quant)
        raise UserError(f"Unknown quantisation `{unknown[0]}`", hint=f"one of {known}")
    return tuple(quant for quant in Quant if quant in words)


def _facts(
    case: "ring_table.RingBenchmark | engine_table.EngineBenchmark", rows: Sequence[Any]
) -> dict[str, Any]:
    from meshllm.bench.machine import machine

    about = machine(case.threads, case.device)
    return {"machine": about, "rows": [asdict(row) for row in rows]}


def _with_machine(table: str, about: dict[str, Any]) -> str:
    """Add on what the figures of a table were measured."""
    from meshllm.bench.machine import lines_of

    return "\n".join([table, *lines_of(about["machine"])])


def _show(fields: dict[str, Any], text: str, json: Path | None) -> None:
    """Write the figures: a table on stdout, or JSON there or in a file."""
    if str(json) == "-":
        render.dump(fields)
        return
    render.out(text)
    if json is not None:
        _save(json, fields)


def _check(rows: "Sequence[engine_table.EngineRow]") -> None:
    """Raise `MeshError` if logits that must equal those of transformers differ."""
    if wrong := [f"`{row.name}` at {row.task}" for row in rows if row.same is False]:
        raise MeshError(f"Logits differ from those of transformers: {', '.join(wrong)}")


def _check_target(json: Path | None) -> None:
    """Raise `UserError` if the figures could not be written: they take long to measure."""
    if json is None or str(json) == "-" or (json.exists() and not json.is_file()):
        return  # a pipe or a device, or an error that writing shows
    if not json.parent.is_dir():
        raise UserError(f"There is no folder `{json.parent}`", hint="create it, or check the path")
    if not os.access(json if json.exists() else json.parent, os.W_OK):
        raise UserError(f"`{json}` cannot be written", hint="check its permissions")


def _save(path: Path, fields: dict[str, Any]) -> None:
    """Write the figures in one step: earlier ones stay if the disk is full."""
    text = render.as_json(fields, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            replace_text(path, text)
    except OSError as error:
        raise UserError(
            f"`{path}` cannot be written: {error.strerror}", hint=hint_of(error)
        ) from None


def _ring_table(rows: "Sequence[ring_table.RingRow]") -> str:
    header = (
        "contestant", "first token ms", "ms per token", "tokens/s",
        "decode speedup", "vs fewest nodes", "first token ratio", "ms per hop",
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


def _engine_table(measured: "engine_table.EngineTable") -> str:
    header = ("task", "engine", "MB", "ms", "best ms", "tokens/s", "speedup", "of limit", "bits")
    bits = {None: None, True: "same", False: "DIFFERENT"}
    text = render.table(
        header,
        [
            (
                row.task, row.name, round(row.megabytes), row.ms, row.best_ms,
                row.tokens_per_second, row.ratio, row.fraction, bits[row.same],
            )
            for row in measured.rows
        ],
    )  # fmt: skip
    return f"{text}\nmemory bandwidth {measured.gb_per_s:.1f} GB/s"
