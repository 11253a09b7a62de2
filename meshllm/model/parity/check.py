"""Check whether a user's model can be split, and verify a split on its actual weights.

The parity table in ``FAMILIES.md`` covers a tiny config of every type. A user's model has its own
switches and every machine its own kernels, so the first use of a config on a machine is checked
again on a tiny model with the same switches, and the verdict is cached.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from meshllm.config import cache_path
from meshllm.errors import ModelError, UserError
from meshllm.local_files import reason_of
from meshllm.model.files.loader import list_weights, open_file
from meshllm.model.files.source import Source, load_stock, stored_dtype
from meshllm.model.json_cache import load_cached, locked, model_code, store_cached
from meshllm.model.kernels.jit import machine
from meshllm.model.parity import cases
from meshllm.model.parity.cases import RingSession, Session, WholeSession
from meshllm.model.parity.compare import Depth, describe, measure
from meshllm.model.parity.families import FamilyTable, read_table, shrink, tiny_config
from meshllm.model.parity.verdict import Verdict
from meshllm.model.pauses import pause
from meshllm.model.split.meta_model import Part, build, quiet
from meshllm.model.split.rope import context_of
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.load import load_shard
from meshllm.model.text.tokenizer import Text, check_vocabulary

log = logging.getLogger(__name__)

MAX_TINY = 64 << 20
"""Weights of a tiny model: a field that shrinking does not know may be any number."""

PROMPT = "A ring of strangers computes a sentence"


@dataclass(frozen=True, slots=True)
class Split:
    """How one division of a model compares to the whole."""

    parts: tuple[Part, ...]
    equal: bool
    """The logits of the prompt and of every new token are equal bit for bit."""
    same_tokens: bool
    """Greedy tokens equal those of ``transformers`` generate."""
    gap: float
    """The largest absolute difference of logits."""
    relative: float
    """The largest difference in a write, relative to its largest logit."""


class Outcome(StrEnum):
    """The result of a comparison."""

    EQUAL = "equal"
    """Every split has the logits of the whole model, bit for bit."""
    ROUNDING = "rounding"
    """The logits differ as little as by another summation order."""
    DIFFERENT = "different"
    """Tokens or logits differ by more, or by what could be more."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The result of `verify`."""

    model: str
    dtype: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Generated greedily by ``transformers``."""
    splits: tuple[Split, ...]

    @property
    def outcome(self) -> Outcome:
        """Classify; in 16 bits rounding is as large as the effect of a lost state."""
        if not all(split.same_tokens for split in self.splits):
            return Outcome.DIFFERENT
        if all(split.equal for split in self.splits):
            return Outcome.EQUAL
        exact = self.dtype in ("float32", "float64")
        if exact and all(split.relative <= cases.TOLERANCE for split in self.splits):
            return Outcome.ROUNDING
        return Outcome.DIFFERENT

    @property
    def equal(self) -> bool:
        """Whether every split has the logits of the whole model, bit for bit."""
        return self.outcome is Outcome.EQUAL

    @property
    def relative(self) -> float:
        """The largest relative difference of all splits; NaN if any is."""
        return _largest([split.relative for split in self.splits])


def check(
    config: PreTrainedConfig, *, folder: Path | None = None, is_whole: bool = False
) -> Verdict:
    """Return the verdict on models with this config, measured once per machine and cached.

    ``folder`` is that of the cached verdicts; the user's cache by default. A model that is to run
    whole is not compared in parts, which takes as long again; its verdict says that it was not.

    Raises:
        UserError: a tiny model cannot be saved to compare it.
    """
    table = read_table()
    if reason := table.excluded.get(config.model_type):
        return Verdict(config.model_type, equal=False, reason=reason)
    text = config.get_text_config(decoder=True)
    folder, keys = folder or cache_path(), [_key(text)]
    if is_whole:
        keys.append((*keys[0], "whole"))
    if known := _load_verdict(folder, keys):
        return known
    with locked(folder, *keys[-1], meanwhile=pause):
        if known := _load_verdict(folder, keys):
            return known
        depth = Depth(layouts=("1",)) if is_whole else Depth()
        try:
            verdict = table.explain(text.model_type, _measure_like(text, table, depth))
        except OSError as error:
            reason = f"A tiny model cannot be saved to check the split: {reason_of(error)}"
            raise UserError(reason, hint="free some space, or set `TMPDIR`") from error
        if is_whole and verdict.equal:
            verdict = replace(verdict, equal=False, reason="it was not compared in parts")
        store_cached(folder, asdict(verdict), *keys[-1])
    return verdict


def _load_verdict(folder: Path, keys: Sequence[tuple[str, ...]]) -> Verdict | None:
    """Return the first cached verdict."""
    for key in keys:
        with suppress(TypeError):  # none, damaged, or of another version
            return Verdict(**load_cached(folder, *key))
    return None


def verify(
    source: Source,
    *,
    splits: Sequence[int] = (2, 3),
    tokens: int = 16,
    prompt: str | Sequence[int] = PROMPT,
    dtype: torch.dtype | None = None,
    progress: Callable[[str], None] = log.info,
) -> ParityReport:
    """Compare a model with its parts on its actual weights: logits and greedy tokens.

    Holds the whole model once at a time. ``progress`` gets one line before each stage.

    Raises:
        ModelError: the model cannot be loaded, has fewer layers than a split has parts, or its
            context is shorter than the text.
    """
    dtype = dtype or stored_dtype(source)
    layers = source.config.get_text_config(decoder=True).num_hidden_layers
    if max(splits) > layers:
        raise ModelError(f"`{source.name}` has {layers} layers, too few for {max(splits)} parts")
    ids = _ids(source, prompt)
    if (most := context_of(source.config)) and len(ids) + tokens > most:
        raise ModelError(f"{len(ids)} + {tokens} tokens exceed the context of {most}")
    progress(f"run the whole model, {layers} layers in {str(dtype).removeprefix('torch.')}")
    with torch.inference_mode():
        written, logits = _run_whole(source, torch.tensor([ids]), tokens, dtype)
        found = []
        for count in splits:
            parts = cases.divide(layers, count)
            progress(f"run it in {count} parts: {' '.join(str(part.span) for part in parts)}")
            found.append(_compare(source, parts, dtype, written, logits))
    new = tuple(written[0, len(ids) :].tolist())
    return ParityReport(
        source.name, str(dtype).removeprefix("torch."), tuple(ids), new, tuple(found)
    )


def _ids(source: Source, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    try:
        text = Text.load(source.folder)
    except ModelError:  # without a tokenizer, compare on arbitrary ids
        return list(range(1, 11))
    size = source.config.get_text_config().vocab_size
    return [*check_vocabulary(text.encode(prompt), size)]


def _run_whole(
    source: Source, ids: Tensor, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Generate greedily with transformers; return all tokens [1, T] and the logits of each."""
    for file in sorted(set(list_weights(source.folder).values())):
        open_file(source.folder / file)  # raises our own error if missing or damaged
    model = load_stock(source, dtype)
    with quiet():
        # Replaced: generate completes a passed config from this one, with penalties and end tokens.
        model.generation_config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        written = model.generate(ids, attention_mask=torch.ones_like(ids))
    return written, _write(WholeSession(model), written, ids.shape[1])


def _compare(
    source: Source,
    parts: tuple[Part, ...],
    dtype: torch.dtype,
    written: Tensor,
    expected: list[Tensor],
) -> Split:
    """Write the same tokens round a ring, and compare logits and greedy tokens."""
    shards = [
        load_shard(source, part.span, embed=part.embed, head=part.head, dtype=dtype)
        for part in parts
    ]
    prompt = expected[0].shape[1]
    logits = _write(RingSession(shards), written, prompt)
    gaps = [float((a - b).abs().max()) for a, b in zip(expected, logits, strict=True)]
    sizes = [float(rows.abs().max()) for rows in expected]
    chosen = [int(rows[0, -1].argmax()) for rows in logits]
    return Split(
        parts,
        equal=cases.unequal(expected, logits) is None,
        same_tokens=chosen == written[0, prompt:].tolist(),
        gap=_largest(gaps),
        relative=_largest([gap / (size or 1) for gap, size in zip(gaps, sizes, strict=True)]),
    )


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _write(session: Session, ids: Tensor, prompt: int) -> list[Tensor]:
    """Write a prompt, then token by token all but the last, whose logits are not needed."""
    logits = [session.write(ids[:, :prompt])]
    logits += [session.write(ids[:, at : at + 1]) for at in range(prompt, ids.shape[1] - 1)]
    return logits


def _measure_like(config: PreTrainedConfig, table: FamilyTable, depth: Depth) -> Verdict:
    """Measure a tiny model with the config's switches, or else with those of its type."""
    try:
        return measure(_within_memory(shrink(config, table)), depth)
    except PROBE_ERRORS as error:  # shrinking breaks related widths in some types
        log.warning(
            "`%s` is checked with the default switches of its type instead of its own: %s",
            config.model_type,
            describe(error),
        )
    try:
        return measure(tiny_config(config.model_type, table), depth)
    except PROBE_ERRORS as error:
        reason = f"the stock model does not run in a tiny size: {describe(error)}"
        return Verdict(config.model_type, equal=False, reason=reason)


def _within_memory(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a tiny config; raise `ModelError` if a size that shrinking does not know is large."""
    model = build(config, torch.float32).model
    if (count := sum(each.numel() for each in (*model.parameters(), *model.buffers()))) > MAX_TINY:
        raise ModelError(f"a tiny model of its config has {count} weights, more than {MAX_TINY}")
    return config


def _key(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the cache key of a verdict: code, versions, processor, and every switch of a model."""
    versions = model_code(), transformers.__version__, torch.__version__
    return *versions, *machine(), json.dumps(config.to_dict(), sort_keys=True, default=str)
