"""`meshllm model`: list, inspect, verify, download, merge and serve models."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.commands import merging, serving
from meshllm.cli.commands.serving import Model
from meshllm.cli.shared.local import import_heavy
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, cache_path
from meshllm.errors import MeshError, ModelError, UserError
from meshllm.local_files import stat_all
from meshllm.model.locate import fetched
from meshllm.model.shape import ModelShape
from meshllm.names import Quant, Span, counted

if TYPE_CHECKING:
    import torch

    from meshllm.model.parity.check import ParityReport
    from meshllm.model.parity.verdict import Verdict

CONTEXT = 4096  # tokens of KV cache assumed for one session

app = typer.Typer(
    help="List, inspect, verify, download, merge and serve models.",
    rich_markup_mode=None,
    epilog="""\b
Examples:
  meshllm model list
  meshllm model show builtin
  meshllm model verify builtin
  meshllm model pull Qwen/Qwen3-0.6B --layers 0:14
  meshllm model serve Qwen/Qwen3-0.6B --replicas 2
  meshllm model merge Qwen/Qwen3-0.6B adapter merged
""",
)
app.command("serve", epilog=serving.EXAMPLES)(serving.serve)
app.command("stop")(serving.stop)
app.command("merge", epilog=merging.EXAMPLES)(merging.merge)


@dataclass(frozen=True, slots=True)
class _Installed:
    """A model on this machine."""

    name: str
    bytes: int
    folder: str


@dataclass(frozen=True, slots=True)
class _Measured:
    """What torch says of a model on this machine."""

    shape: ModelShape
    folder: str
    device: str
    engine: str
    """How it would be run there, as a line."""
    execution: object
    """The same, as fields."""


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the models on this machine."""
    models = [*_builtin(), *_cached(), *_fetched()]
    if as_json:
        render.dump({"models": [asdict(model) for model in models]})
        return
    rows = [(model.name, render.bytes_of(model.bytes), model.folder) for model in models]
    render.out(render.table(("model", "size", "folder"), rows))


@app.command()
@takes("dtype")
def show(model: Model, as_json: Json = False, **flags: Scalar) -> None:
    """Show the sizes of a model and what fits on this machine."""
    from meshllm.cli.shared.model_record import ModelRecord
    from meshllm.model.shape import free_memory

    chosen = settings(flags)
    record = ModelRecord("model show", model, chosen)
    if (known := record.read(_Measured)) is None:
        with _loading(f"reading {model}"):
            known = _measure(model, chosen)
        record.write(known)
    shape, free = known.shape, free_memory()
    fitting = _fitting(shape, free)
    if as_json:
        here = {
            "free_bytes": free,
            "context": min(CONTEXT, shape.context),
            "layers_with_ends": fitting,
            "device": known.device,
            "execution": known.execution,
        }
        render.dump({**asdict(shape), "folder": known.folder, "here": here})
        return
    engine = f"{'CPU' if known.device == 'cpu' else 'GPU'} engine", known.engine
    render.out(_facts(shape, free, fitting, engine))


@app.command()
@takes("dtype")
def verify(model: Model, as_json: Json = False, **flags: Scalar) -> None:
    """Compare a model split in 2 and 3 with the whole one.

    The parts compute as with `--exact`, in plain torch. The logits of a short prompt and of 16
    greedy tokens are compared bit for bit with those of `generate` of transformers. If they differ
    by more than rounding, the exit code is 4.
    """
    chosen = settings(flags)
    with render.Status(sys.stderr) as status:
        status.show("loading torch")
        import_heavy("meshllm.model.parity.check")
        from meshllm.model.files.source import resolve
        from meshllm.model.parity import check
        from meshllm.model.split.onemkl import rounds_by_alignment

        report = check.verify(resolve(model), dtype=_dtype(chosen), progress=status.show)
    if as_json:
        found = {"outcome": report.outcome, "equal": report.equal, "relative": report.relative}
        render.dump({**asdict(report), **found})
    else:
        render.out(_comparison(report, aligned=not rounds_by_alignment()))
    if report.outcome is check.Outcome.DIFFERENT:
        raise ModelError(f"`{model}` computes other logits when split", hint=_hint(report))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Use a Hugging Face name.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Download only the files with layers A to B-1."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Download this branch, tag or commit; use the printed folder."
        ),
    ] = None,
) -> None:
    """Download a model from Hugging Face."""
    span = None if layers is None else Span.parse(layers)
    with _loading(f"downloading {model}"):
        from meshllm.model.files.source import resolve

        source = resolve(model, revision=revision, span=span, download=True)
    render.out(str(source.folder))


@app.command()
def families(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="Show this type only, the `model_type` of a `config.json`.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the model types: checked or refused, and why."""
    from meshllm.model.parity.verdict import known_verdicts, measured_verdicts

    verdicts = known_verdicts()
    if kind is not None:
        verdicts = _of_type(kind, verdicts)
    if as_json:
        render.dump({"families": {name: asdict(verdict) for name, verdict in verdicts.items()}})
        return
    rows = [
        (name, "checked" if verdict.equal else "refused", verdict.reason)
        for name, verdict in verdicts.items()
    ]
    render.out(render.table(("type", "split", "reason"), rows))
    if kind is not None:
        return
    measured = measured_verdicts().values()
    checked = sum(verdict.equal for verdict in measured)
    render.print_message(f"{checked} of {len(measured)} text model types are bit-equal when split")


def _of_type(kind: str, verdicts: "Mapping[str, Verdict]") -> "dict[str, Verdict]":
    """Return the verdicts on a model type, and on its variants."""
    if found := {name: each for name, each in verdicts.items() if kind in (name, each.model_type)}:
        return found
    close = get_close_matches(kind, verdicts, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`meshllm model families` lists them"
    raise UserError(f"Unknown model type `{kind}`", hint=hint)


def _builtin() -> Iterator[_Installed]:
    from importlib import resources

    folder = Path(str(resources.files("meshllm.model"))) / "builtin" / "weights"
    if folder.is_dir():
        size = sum(path.stat().st_size for path in folder.iterdir())
        yield _Installed("builtin", size, str(folder))


def _cached() -> Iterator[_Installed]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, ValueError):  # or it is a file
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            yield _Installed(repo.repo_id, repo.size_on_disk, str(repo.repo_path))


def _fetched() -> Iterator[_Installed]:
    for name, folder in fetched():
        size = sum(each.st_size for each in stat_all(folder))
        yield _Installed(f"{name} (from peers)", size, str(folder))


@contextmanager
def _loading(text: str) -> Iterator[None]:
    """Show a progress line while torch is imported and the block runs."""
    with render.Status(sys.stderr) as status:
        status.show(text)
        import_heavy("meshllm.model.capacity")
        yield


def _measure(model: str, chosen: Settings) -> _Measured:
    import torch

    from meshllm.model.capacity import shape_of
    from meshllm.model.device import CPU, choose, refused_gpu
    from meshllm.model.files.loader import list_weights
    from meshllm.model.files.source import resolve
    from meshllm.model.steps.execution import forecast

    source = resolve(model)
    list_weights(source.folder)  # a config without weights is not a model
    shape = shape_of(source, _dtype(chosen), cache=cache_path())
    dtype: torch.dtype = getattr(torch, shape.dtype)
    quant = Quant(chosen.quant)
    try:
        device = choose(chosen.device, dtype, quant)
        refusal = refused_gpu(chosen.device, dtype, quant)
    except MeshError as error:  # the sizes are known all the same
        device, refusal = CPU, str(error)
    execution = forecast(source.config, dtype, device, quant).instead_of_gpu(refusal)
    folder = str(source.folder)
    return _Measured(shape, folder, str(device), str(execution), asdict(execution))


def _fitting(shape: ModelShape, free: int) -> int:
    """Count the first layers that fit together with the ends and one session's KV cache."""
    from meshllm.protocol.planning.problem import HEADROOM_PERCENT

    tokens = min(CONTEXT, shape.context)
    room = free * (100 - HEADROOM_PERCENT) // 100 - shape.embed_bytes - shape.head_bytes
    caches = (each * tokens for each in shape.kv_bytes_per_token)
    needs = accumulate(map(sum, zip(shape.layer_bytes, caches, strict=True)))
    return sum(need <= room for need in needs)


def _dtype(chosen: Settings) -> "torch.dtype | None":
    """Return the dtype of torch; None is as stored."""
    import torch

    return None if chosen.dtype == "auto" else getattr(torch, chosen.dtype)


def _comparison(report: "ParityReport", *, aligned: bool) -> str:
    rows = [
        (
            len(split.parts),
            " ".join(str(part.span) for part in split.parts),
            "equal" if split.equal else f"differ by {split.gap:.2g}",
            "equal" if split.same_tokens else "differ",
        )
        for split in report.splits
    ]
    return "\n".join(
        [
            render.table(("parts", "layers", "logits", "tokens"), rows),
            f"{report.model} in {report.dtype}: {_verdict(report, aligned=aligned)}"
            f" ({counted(len(report.prompt), 'prompt token')}, {len(report.tokens)} generated)",
        ]
    )


def _verdict(report: "ParityReport", *, aligned: bool) -> str:
    """Describe the outcome; unless ``aligned``, rounding may come from the BLAS."""
    share = f"largest relative difference {report.relative:.1e}"
    match report.outcome:
        case "equal":
            return "bit-equal to transformers"
        case "rounding" if aligned:
            return f"equal to transformers up to rounding, {share}"
        case "rounding":
            return (
                f"equal to transformers up to rounding, {share}: rounding of this machine's BLAS"
                " depends on memory alignment; for oneMKL set `MKL_CBWR=AUTO`"
            )
        case _:
            return f"NOT equal to transformers: {share}"


def _hint(report: "ParityReport") -> str:
    if report.dtype in ("float32", "float64"):
        return "run it with `--nodes 1`"
    return "run it with `--nodes 1`, or rule out rounding with `--dtype float32`"


def _facts(shape: ModelShape, free: int, fitting: int, engine: tuple[str, str]) -> str:
    sizes = sorted({render.bytes_of(size) for size in shape.layer_bytes})
    weights = sum(shape.layer_bytes) + shape.embed_bytes + shape.head_bytes
    whole = "all" if fitting == shape.layers else f"{fitting} of {shape.layers}"
    tied = " (tied to the embedding)" if shape.tied else ""
    rows = [
        ("type", shape.model_type),
        ("layers", f"{shape.layers}, {' or '.join(sizes)} each"),
        ("embedding", render.bytes_of(shape.embed_bytes)),
        ("head", render.bytes_of(shape.head_bytes) + tied),
        ("weights", f"{render.bytes_of(weights)} in {shape.dtype}"),
        ("KV cache", f"{render.bytes_of(sum(shape.kv_bytes_per_token))} per token"),
        ("context", f"{shape.context} tokens"),
        ("hidden state", f"{render.bytes_of(shape.hidden_size * shape.itemsize)} per hop"),
        ("fits here", f"{whole} layers in {render.bytes_of(free)} of free memory"),
        engine,
    ]
    return render.table((shape.name, ""), rows)
