"""Cases that compare a model in parts with the whole model.

Theory of operation
-------------------
A *case* drives one generation (prefill, chunks, decode, a padded batch, a crop) and returns the
logits of every write. It runs once on the stock model with the stock cache and once on shards; the
two lists of logits must be equal bit for bit. Both sides get the same tokens in the same writes,
because another grouping of rows may select another matrix kernel and another rounding.

The crop of the stock cache is the reference of the crop: both sides keep the rows that they
computed before. That the stock crop itself leaves no trace is checked separately, by `rolls_back`
against a fresh run, within a tolerance.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from meshllm.model.split.meta_model import Part
from meshllm.model.split.shard import Shard
from meshllm.names import Span

TOLERANCE = 1e-4
"""Relative to the largest logit; between rounding (1e-6) and a lost state (from 3e-4, measured)."""


class Session(Protocol):
    """One generation: the rows written so far, in every part."""

    length: int

    def write(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Append tokens [B, T]; return logits [B, T, V].

        ``mask`` [B, S + T] is 0 where a row is left padding.
        """
        ...

    def crop(self, count: int) -> None:
        """Drop the last ``count`` rows of the last write."""
        ...


Open = Callable[[], Session]
"""Begins a generation."""

Case = Callable[[Open, Tensor], list[Tensor]]
"""Drives generations over tokens [2, 16 or more]; returns the logits of each write."""


class WholeSession:
    """A generation on the stock model with the stock cache."""

    def __init__(self, model: nn.Module, *, recording: bool = False) -> None:
        self.length = 0
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._accepts = inspect.signature(model.forward).parameters
        self._recording = recording
        self._pending = False
        if recording:
            self._cache.activate_past_recording()

    @property
    def croppable(self) -> bool:
        """Whether the stock cache declares that it can be cropped."""
        return bool(self._cache.is_croppable)

    def write(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run tokens through the stock forward, see `Session.write`."""
        if self._pending:
            self._cache.crop(0)
        named = _arguments(self.length, ids, mask)
        cache = "past_key_values" if "past_key_values" in self._accepts else "cache_params"
        named |= {"input_ids": ids, "use_cache": True, cache: self._cache}
        output = self._model(**{key: named[key] for key in named if key in self._accepts})
        self.length += ids.shape[1]
        self._pending = self._recording
        logits: Tensor = output.logits
        return logits

    def crop(self, count: int) -> None:
        """Drop rows by the stock crop."""
        self._cache.crop(-count)
        self.length -= count
        self._pending = False


class RingSession:
    """A generation through shards, each with its own cache."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.length = 0
        self._shards = shards
        self._caches = [shard.new_cache() for shard in shards]

    @property
    def croppable(self) -> bool:
        """Whether the caches of all parts declare that they can be cropped."""
        return all(cache.croppable for cache in self._caches)

    def write(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run tokens round the ring, see `Session.write`."""
        rows = ids
        for shard, cache in zip(self._shards, self._caches, strict=True):
            rows = shard.forward(rows, cache, **_arguments(self.length, ids, mask))
        self.length += ids.shape[1]
        return rows

    def clear(self, part: int) -> None:
        """Empty the cache of one part, a damage that checks must detect."""
        self._caches[part] = self._shards[part].new_cache()

    def crop(self, count: int) -> None:
        """Drop rows in every part."""
        self.length -= count
        for cache in self._caches:
            cache.crop(self.length)


def layout(name: str, layers: int) -> tuple[Part, ...]:
    """Divide a model: ``"1"``, ``"2"``, ``"3"``, ``"L"`` (one layer each), ``"entry"``, ``"ends"``.

    ``"entry"`` is a ring of two with the head as a separate part, as on the entry node; ``"ends"``
    is one layer each between a separate embedding and a separate head, as on a client.
    """
    head = Part(Span(layers, layers), embed=False, head=True)
    match name:
        case "entry":
            first, last = divide(layers, 2)
            return first, Part(last.span, embed=False, head=False), head
        case "ends":
            spans = [part.span for part in divide(layers, layers)]
            inner = (Part(span, embed=False, head=False) for span in spans)
            return Part(Span(0, 0), embed=True, head=False), *inner, head
        case _:
            return divide(layers, layers if name == "L" else int(name))


def divide(layers: int, count: int) -> tuple[Part, ...]:
    """Cut layers into ``count`` spans of almost equal length, with embedding and head."""
    marks = [layers * part // count for part in range(count + 1)]
    return tuple(
        Part(Span(start, stop), embed=start == 0, head=stop == layers)
        for start, stop in itertools.pairwise(marks)
    )


def prefill(begin: Open, ids: Tensor) -> list[Tensor]:
    """Write a prompt at once."""
    return [begin().write(ids[:, :9])]


def chunks(begin: Open, ids: Tensor) -> list[Tensor]:
    """Write a prompt in pieces."""
    return list(_written(begin(), ids, (5, 4, 3)))


def decode(begin: Open, ids: Tensor) -> list[Tensor]:
    """Write a prompt, then one row at a time, and several as when verifying a draft."""
    return list(_written(begin(), ids, (7, 1, 1, 3, 1)))


def alone(begin: Open, ids: Tensor) -> list[Tensor]:
    """Decode one session alone: the reference of `sessions`."""
    return list(_written(begin(), ids, (6, 1, 1)))


def sessions(begin: Open, ids: Tensor) -> list[Tensor]:
    """Decode while another generation writes in between: state belongs to a cache."""
    session, other = begin(), begin()
    logits = []
    for mine, theirs in zip(_pieces(ids, (6, 1, 1)), _pieces(ids.flip(1), (6, 1, 1)), strict=True):
        logits.append(session.write(mine))
        other.write(theirs)
    return logits


def padded(begin: Open, ids: Tensor) -> list[Tensor]:
    """Decode a batch whose first row is three tokens shorter."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    session = begin()
    return [
        session.write(rows, mask[:, : session.length + rows.shape[1]])
        for rows in _pieces(ids, (7, 1, 1))
    ]


def cropped(counts: Sequence[int]) -> Case:
    """Make a case that, for each count, writes ten rows, crops so many and writes on."""

    def case(begin: Open, ids: Tensor) -> list[Tensor]:
        session = begin()
        logits = [session.write(ids[:, :6])]
        for count in counts:
            logits.append(session.write(ids[:, :10]))
            session.crop(count)
            logits.append(session.write(ids[:, 10:11]))
        return logits

    return case


CASES: dict[str, Case] = {
    "prefill": prefill,
    "chunked prefill": chunks,
    "decode": decode,
    "two sessions": sessions,
    "left padding": padded,
}
"""What every splittable model must pass."""

REFERENCES: dict[str, Case] = CASES | {"two sessions": alone}
"""What the stock model runs for each case."""


def unequal(reference: Sequence[Tensor], logits: Sequence[Tensor]) -> str | None:
    """Describe how two runs of a case differ; None if they are equal bit for bit."""
    for write, (expected, found) in enumerate(zip(reference, logits, strict=True)):
        if expected.shape != found.shape:
            return f"logits have shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        if not torch.equal(expected, found):
            gap = (expected - found).abs().max().item()
            return f"logits differ by {gap:.1e} in write {write}"
    return None


def resumes(begin: Open, ids: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether writes of these sizes give the logits of one write, within `TOLERANCE`."""
    fresh = begin().write(ids[:, : sum(sizes)])
    return _close(torch.cat(list(_written(begin(), ids, sizes)), dim=1), fresh)


def rolls_back(begin: Open, ids: Tensor) -> bool:
    """Return whether a crop leaves no trace: the next write has the logits of a fresh run."""
    *_, found = cropped((3,))(begin, ids)
    fresh = begin().write(torch.cat([ids[:, :6], ids[:, :7], ids[:, 10:11]], dim=1))
    return _close(found, fresh[:, 13:])


def undetected_damage(shards: Sequence[Shard], ids: Tensor) -> str | None:
    """Return which damage to three or more parts is not detected; None if all is."""
    expected = prefill(lambda: RingSession(shards), ids)
    skipped = prefill(lambda: RingSession([shards[0], *shards[2:]]), ids)
    if unequal(expected, skipped) is None:
        return "skipping a part is not detected"
    kept, lost = RingSession(shards), RingSession(shards)
    kept.write(ids[:, :9])
    lost.write(ids[:, :9])
    lost.clear(1)
    try:
        found = lost.write(ids[:, 9:10])
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        return None  # the mask does not fit the empty cache: detected
    same = unequal([kept.write(ids[:, 9:10])], [found]) is None
    return "losing a cache is not detected" if same else None


def _close(found: Tensor, expected: Tensor) -> bool:
    """Return whether any row of the batch is within tolerance throughout.

    A lost state affects every row; a tie of sparse attention, which rounding can break either way,
    affects only some.
    """
    gaps = (found - expected).abs().amax(dim=(1, 2))
    return bool((gaps <= TOLERANCE * expected.abs().max()).any())


def _pieces(ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Cut tokens into consecutive writes."""
    start = 0
    for size in sizes:
        yield ids[:, start : start + size]
        start += size


def _written(session: Session, ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    return (session.write(rows) for rows in _pieces(ids, sizes))


def _arguments(length: int, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Return the positions of new rows, and the mask if there is one, as keyword arguments."""
    rows = ids.shape[1]
    if mask is None:
        positions = torch.arange(length, length + rows, device=ids.device)
        return {"position_ids": positions.expand(len(ids), -1)}
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -rows:]
    return {"position_ids": positions, "attention_mask": mask}
