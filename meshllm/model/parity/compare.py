"""Comparison of a tiny random model with its parts."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity import cases
from meshllm.model.parity.cases import RingSession, WholeSession
from meshllm.model.parity.verdict import Verdict
from meshllm.model.pauses import pause
from meshllm.model.split.meta_model import MetaModel, Part, build, quiet
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.model.split.shard import Shard
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.load import load_shard
from meshllm.model.without_compiler import without_compiler


@dataclass(frozen=True, slots=True)
class Depth:
    """The extent of a comparison."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    layouts: tuple[str, ...] = ("1", "ends")
    """Names for `cases.layout`."""
    crops: tuple[int, ...] = (3,)
    """Numbers of rows that are cropped, one after the other."""


@dataclass(frozen=True, slots=True)
class Stock:
    """The reference: the logits of the whole model in every case."""

    logits: dict[str, list[Tensor]]
    """By the name of the case."""
    chunkable: bool
    croppable: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one layout in one dtype."""

    fault: str
    """The first difference; empty if there is none."""
    croppable: bool
    """The cache of every part can be cropped."""


def measure(config: PreTrainedConfig, depth: Depth | None = None) -> Verdict:
    """Compare a tiny random model with its parts in every layout, dtype and case.

    Raises:
        PROBE_ERRORS: the stock model itself cannot be built or run with this config.
        OSError: there is no space for a tiny model.
    """
    depth = depth or Depth()
    stocks: list[Stock] = []
    findings: dict[str, Comparison] = {}
    for dtype in depth.dtypes:
        with random_model(config, dtype) as (model, source), torch.inference_mode():
            stocks.append(run_stock(model, depth.crops, *stocks[:1]))
            for name in depth.layouts:
                pause()
                parts = cases.layout(name, config.num_hidden_layers)
                finding = compare(source, parts, dtype, stocks[-1], depth.crops)
                if name not in findings or not findings[name].fault:
                    findings[name] = finding
    return _conclude(config.model_type, stocks[0], findings)


@contextmanager
def random_model(
    config: PreTrainedConfig, dtype: torch.dtype
) -> Iterator[tuple[nn.Module, Source]]:
    """Build a model with random weights, saved in a temporary folder.

    Raises:
        OSError: there is no space for one.
    """
    warm_up_onemkl()
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        with without_compiler():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            with torch.no_grad():  # biases of zero and norms of one would hide a missing tensor
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape).to(weight.dtype) * 0.02)
            model.tie_weights()
            try:
                model.save_pretrained(folder)
            except SafetensorError as error:
                raise OSError(f"{error}: `{folder}`") from None
            stock = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        yield stock.eval(), open_folder(config.model_type, Path(folder))


def run_stock(model: nn.Module, crops: Sequence[int], like: Stock | None = None) -> Stock:
    """Run every case on the whole model; traits are measured unless ``like`` has them.

    Raises:
        ModelError: the stock model does not continue from its own cache.
    """

    def begin() -> WholeSession:
        return WholeSession(model)

    def record() -> WholeSession:
        return WholeSession(model, recording=True)

    pause()
    if like is None and not cases.resumes(begin, tokens(8), (7, 1, 1, 1)):
        raise ModelError("the stock model does not continue from its cache")
    chunkable = like.chunkable if like else cases.resumes(begin, tokens(8), (7, 5))
    croppable = like.croppable if like else _rolls_back(record)
    logits = {}
    for name, case in cases.REFERENCES.items():
        pause()
        logits[name] = case(begin, tokens())
    if croppable:
        logits["crop"] = cases.cropped(crops)(record, tokens())
    return Stock(logits, chunkable, croppable)


def compare(
    source: Source, parts: Sequence[Part], dtype: torch.dtype, stock: Stock, crops: Sequence[int]
) -> Comparison:
    """Load the parts of a model and find their first difference from the whole."""
    where = f"parts {' '.join(str(part.span) for part in parts)} in {dtype}".replace("torch.", "")
    try:
        whole = build(source.config, dtype)
        shards = [_load(source, part, dtype, whole) for part in parts]
        pause()
        ring = RingSession(shards)
        fault = _first_gap(shards, stock, crops if ring.croppable else ())
        return Comparison(f"{fault}, {where}" if fault else "", ring.croppable)
    except PROBE_ERRORS as error:  # a type that cannot be split is a finding, not a crash
        reason = describe(error).replace(str(source.folder), "the model")
        return Comparison(f"{reason}, {where}", croppable=False)


def _load(source: Source, part: Part, dtype: torch.dtype, whole: MetaModel) -> Shard:
    pause()
    embed, head = part.embed, part.head
    return load_shard(source, part.span, embed=embed, head=head, dtype=dtype, whole=whole)


def describe(error: Exception) -> str:
    """Return the first line of an error of foreign code."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def tokens(rows: int = 2) -> Tensor:
    """Draw the tokens [rows, 16] of the cases, from ids in every tiny vocabulary."""
    return torch.randint(3, 120, (rows, 16), generator=torch.Generator().manual_seed(1))


def _first_gap(shards: Sequence[Shard], stock: Stock, crops: Sequence[int]) -> str | None:
    def begin() -> RingSession:
        return RingSession(shards)

    cropping = {"crop": cases.cropped(crops)} if stock.croppable and crops else {}
    for name, case in (cases.CASES | cropping).items():
        pause()
        if gap := cases.unequal(stock.logits[name], case(begin, tokens())):
            return f"{name}: {gap}"
    return cases.undetected_damage(shards, tokens()) if len(shards) > 2 else None


def _conclude(model_type: str, stock: Stock, findings: dict[str, Comparison]) -> Verdict:
    faults = {name: finding.fault for name, finding in findings.items() if finding.fault}
    return Verdict(
        model_type,
        equal=not faults,
        reason=next(iter(faults.values()), ""),
        whole="1" not in faults,
        chunkable=stock.chunkable,
        croppable=stock.croppable and all(finding.croppable for finding in findings.values()),
        transformers=transformers.__version__,
    )


def _rolls_back(begin: Callable[[], WholeSession]) -> bool:
    """Return whether the stock cache declares that it can be cropped, and really can."""
    session = begin()
    session.write(tokens()[:, :6])
    try:
        return session.croppable and cases.rolls_back(begin, tokens(8))
    except PROBE_ERRORS:  # some caches declare that they can be cropped, and raise
        return False
