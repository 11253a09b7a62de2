"""Speed of this machine with a model, and its memory budget."""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import llvmlite
import torch
import transformers
from torch import Tensor, nn

import meshllm
from meshllm.model.cgroups import MOUNT, VERSION_2, own_cgroups
from meshllm.model.device import CPU, free_bytes, name_of, wait
from meshllm.model.files.manifest import config_digest
from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.hardware import uncached_bytes
from meshllm.model.json_cache import load_cached, locked, store_cached
from meshllm.model.kernels.jit import machine
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.modules.replacement import replace_modules
from meshllm.model.pages import huge_zeros
from meshllm.model.pauses import pause
from meshllm.model.shape import free_memory, reclaim
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.meta_model import MetaModel, Part, build, quiet, strip
from meshllm.model.split.rope import context_of
from meshllm.model.split.shard import Shard
from meshllm.model.steps.execution import lacks_invariance
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.trial import run_untested
from meshllm.model.without_compiler import without_compiler
from meshllm.names import Quant, Span

ROWS = (1, 8, 16, 32, 128, 256, 1024)
"""Of decode steps and prefill chunks; the last two show how time grows with attention."""
_WARMED = ROWS[:5]  # more rows run the same kernels
TRIALS = 3
ENOUGH_S = 0.1  # for repeated runs; many rows of a large layer are timed once
LONGEST_S = 0.5  # for the largest number of rows, which is skipped if it would take longer
MAX_AGE_S = 24 * 3600.0
BUSY_AGE_S = 600.0  # the same, if other programs had much of the time
BUSY_SHARE = 0.8  # of the time that this thread ran, and less: others had much of it
SHARE = 0.8  # of free memory; the rest is for other processes
_CGROUP_FILES = {
    VERSION_2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    "memory": (
        *(f"memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
        "total_inactive_file",
    ),
}
"""By controller: files in a cgroup."""

_STEP_BYTES = 192 << 20  # of the layers of timed steps, before they are quantised: so many that
# fixed overhead counts little
_HEAD_BYTES = 64 << 20  # of the timed part of the head
_MIN_BYTES = 16 << 20  # of each of these, however little memory is free
_TILE = 4099  # values; prime, so that no two rows of a matrix are equal


@dataclass(frozen=True, slots=True)
class Speed:
    """The time that a machine needs for the parts of one model."""

    layer_s: tuple[tuple[int, float], ...]
    """Number of rows, and seconds of one mean layer for them."""
    head_s: float
    """Seconds of the final norm and head for one row."""


def measure_speed(
    source: Source,
    dtype: torch.dtype,
    cache: Path,
    quant: Quant = Quant.NONE,
    device: torch.device = CPU,
) -> Speed:
    """Time layers and the head with random weights, on this thread and its torch threads.

    Steps of a few rows run over a few layers, with the strategy of a node. For many rows one layer
    is timed, on a GPU without the copies to it and back.

    The result is cached in the folder ``cache`` for a day, or for `BUSY_AGE_S` if other programs
    used the core meanwhile. Processes that measure at the same time would slow down each other, so
    the second waits and uses the result of the first.

    Raises:
        ModelError: transformers cannot build the model.
    """
    key: tuple[str | float, ...] = (
        config_digest(source).hex(), str(dtype), quant, torch.get_num_threads(), torch.__version__,
        transformers.__version__, llvmlite.__version__, meshllm.__version__, name_of(device),
        *machine(), "chunks by median, warm, on new pages",
    )  # fmt: skip
    if known := _read(load_cached(cache, *key)):
        return known
    with locked(cache, *key, meanwhile=pause):
        if known := _read(load_cached(cache, *key)):
            return known
        begin, own = time.perf_counter(), time.thread_time()
        with torch.inference_mode():
            what = source, dtype, quant, device
            speed = Speed(_layer_seconds(*what), _head_seconds(*what))
        share = (time.thread_time() - own) / (time.perf_counter() - begin)
        reclaim()  # the weights: hooks and modules form cycles
        record = asdict(speed) | {"at_s": time.time(), "share": share}
        store_cached(cache, record, *key)
    return speed


def memory_budget(
    limit: int | None = None,
    *,
    share: float = SHARE,
    cgroup: Path = MOUNT,
    device: torch.device = CPU,
    own: int = 0,
) -> int:
    """Return the memory budget of this machine in bytes: a share of its free memory, or ``limit``.

    ``limit`` is set by the owner, and bounded by the free memory. The limit of a container counts
    too, as the free memory of the machine does not show it. For a GPU it is its own memory. The
    ``own`` bytes, already in use by the model, are not free and are part of the budget.
    """
    if device != CPU:
        free = free_bytes(device)
    else:
        free = max(0, int(min(free_memory(), _cgroup_free(cgroup))))
    return own + int(free * share) if limit is None else min(limit, own + free)


def _read(record: Any) -> Speed | None:
    """Parse a cached record; None if it is too old or damaged."""
    try:
        most_s = MAX_AGE_S if record["share"] > BUSY_SHARE else BUSY_AGE_S
        if not 0 <= time.time() - record["at_s"] < most_s:
            return None
        rows = tuple((int(rows), float(seconds)) for rows, seconds in record["layer_s"])
        return Speed(rows, float(record["head_s"]))
    except (TypeError, ValueError, LookupError):
        return None


def _layer_seconds(
    source: Source, dtype: torch.dtype, quant: Quant, device: torch.device = CPU
) -> tuple[tuple[int, float], ...]:
    """Time a mean layer, with row-invariant steps of a few rows where the model allows them.

    A layer so large that steps are timed with it alone is used for chunks, too: it takes long to
    be packed.
    """
    what, context = (source, dtype, quant, device), context_of(source.config) or max(ROWS)
    all_rows = [rows for rows in ROWS if rows <= context]
    steps, layers = _step_seconds(*what, [rows for rows in all_rows if rows <= MAX_ROWS])
    if layers is not None and (device != CPU or len(layers.runner.span) > 1):
        layers = None
    reclaim()  # the weights: hooks and modules form cycles
    rest = [rows for rows in all_rows if rows not in steps]
    chunks = _stock_seconds(*what, rest, layers)
    return tuple(sorted((steps | chunks).items()))


@dataclass(frozen=True, slots=True)
class _Layers:
    """Some layers of a model, with random weights."""

    runner: Runner
    sizes: list[int]
    """The bytes of each layer of the model."""

    @property
    def mean(self) -> float:
        """The bytes of a mean layer."""
        return sum(self.sizes) / len(self.sizes)


def _stock_seconds(
    source: Source,
    dtype: torch.dtype,
    quant: Quant,
    device: torch.device,
    counts: Sequence[int],
    layers: _Layers | None = None,
) -> dict[int, float]:
    """Time the forward of the layer nearest to the mean size, with each of ``counts`` rows.

    What surrounds the layers, such as the attention mask, takes its time once for all of them: it
    counts with the share of one layer. On a GPU it is left out, with the copies. ``layers`` is that
    one layer, if it is there.
    """
    if not counts:  # a very short context
        return {}
    if layers is None:
        meta_model = build(source.config, dtype)
        sizes = _sizes(meta_model)
        part = Part(_nearest(sizes), embed=False, head=False)
        shard = _random_shard(
            meta_model, part, packed=dtype == stored_dtype(source), quant=quant, device=device
        )
        few = (MAX_ROWS,) if device == CPU else ()
        layers = _Layers(Runner(shard, few, run_untested), sizes)
    runner, sizes = layers.runner, layers.sizes
    shard, index = runner.shard, runner.span.start
    stopwatch, kept = _Stopwatch(shard.layer(index), device), list[SpanCache]()

    def seconds(rows: int) -> float:
        x, cache = _hidden(shard, rows), shard.new_cache()
        kept.append(cache)  # as a session does: the next prompt gets new pages
        begin = time.perf_counter()
        runner.prefill(x, cache)
        around_s = time.perf_counter() - begin - stopwatch.seconds
        return stopwatch.seconds + (around_s / len(sizes) if device == CPU else 0.0)

    for rows in _WARMED:  # excludes what only the first call does, such as compiling a kernel
        if rows in counts:
            seconds(rows)
    scale, times = layers.mean / sizes[index], list[tuple[int, float]]()
    for rows in counts:
        if rows < ROWS[-1] or times[-1][1] * rows / times[-1][0] <= LONGEST_S:
            times.append((rows, _typical(seconds, rows, device)))
            kept.clear()
    return {rows: time * scale for rows, time in times}


def _step_seconds(
    source: Source, dtype: torch.dtype, quant: Quant, device: torch.device, few: Sequence[int]
) -> tuple[dict[int, float], _Layers | None]:
    """Time steps of each of ``few`` rows, per mean layer; also return the layers that were timed.

    Stock steps are not timed.
    """
    meta_model = build(source.config, dtype)
    sizes, config = _sizes(meta_model), meta_model.model.config
    mean = sum(sizes) / len(sizes)
    count = min(len(sizes), int(_affordable(_STEP_BYTES, device) / mean))
    span = Span(0, count) if count > 1 else _nearest(sizes)
    is_croppable = SpanCache(config, span).croppable
    if not is_croppable or lacks_invariance(config, meta_model.model, device):
        return {}, None
    part, packed = Part(span, embed=False, head=False), dtype == stored_dtype(source)
    shard = _random_shard(meta_model, part, packed=packed, quant=quant, device=device)
    runner, cache = Runner(shard, few, run_untested), shard.new_cache()
    if not runner.is_row_invariant:
        return {}, None
    runner.step(_hidden(shard, 1), cache)

    def seconds(rows: int) -> float:
        x = _hidden(shard, rows)
        begin = time.perf_counter()
        runner.step(x, cache)
        took = time.perf_counter() - begin
        cache.crop(1)
        return took / sum(sizes[span.start : span.stop]) * mean

    for rows in few:
        for _ in range(STEPS_BEFORE_REPLAY):
            seconds(rows)
    return {rows: _typical(seconds, rows, device) for rows in few}, _Layers(runner, sizes)


def _nearest(sizes: Sequence[int]) -> Span:
    """Return the layer whose size is nearest to the mean."""
    mean = sum(sizes) / len(sizes)
    index = min(range(len(sizes)), key=lambda index: abs(sizes[index] - mean))
    return Span(index, index + 1)


def _head_seconds(
    source: Source, dtype: torch.dtype, quant: Quant, device: torch.device = CPU
) -> float:
    """Time the head for one row; of a large one time a part, and scale."""
    config = copy.deepcopy(source.config)
    text = config.get_text_config(decoder=True)
    whole = int(text.vocab_size)
    most = max(1, _affordable(_HEAD_BYTES, device) // (int(text.hidden_size) * dtype.itemsize))
    text.vocab_size = timed = min(whole, most)
    text.pad_token_id = None  # it may be out of range
    meta_model = build(config, dtype)
    end = Span(meta_model.layers, meta_model.layers)
    part = Part(end, embed=False, head=True)
    shard = _random_shard(
        meta_model, part, packed=dtype == stored_dtype(source), quant=quant, device=device
    )

    runner = Runner(shard, (MAX_ROWS,), run_untested)

    def seconds(rows: int) -> float:
        x = _hidden(shard, rows)
        begin = time.perf_counter()
        runner.step(x, None)
        return time.perf_counter() - begin

    for _ in range(STEPS_BEFORE_REPLAY):
        seconds(1)
    return _typical(seconds, 1, device) * whole / timed


def _affordable(most: int, device: torch.device) -> int:
    """Bound ``most`` bytes by a quarter of the budget; weights may need as much again packed."""
    return min(most, max(_MIN_BYTES, memory_budget(device=device) // 4))


class _Stopwatch:
    """Times the forward of one module."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._begin = 0.0
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop, prepend=True)  # the shard's ends the forward

    def _start(self, *_: Any) -> None:
        wait(self._device)
        self._begin = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        wait(self._device)
        self.seconds = time.perf_counter() - self._begin


def _typical(seconds: Callable[[int], float], rows: int, device: torch.device) -> float:
    """Return the shortest of several times of a step, the median of a chunk, with cold caches.

    A chunk takes so long that other programs always have a part of it.
    """
    cold = torch.empty(_affordable(uncached_bytes(), device), dtype=torch.uint8, device=device)
    times: list[float] = []
    while len(times) < TRIALS and sum(times) < ENOUGH_S:
        pause()
        cold.fill_(len(times))
        wait(device)
        times.append(seconds(rows))
    return min(times) if rows <= MAX_ROWS else median(times)


def _hidden(shard: Shard, rows: int) -> Tensor:
    """Make rows [1, T, D]."""
    width = shard.model.config.get_text_config(decoder=True).hidden_size
    return torch.ones(1, rows, width, dtype=shard.model.dtype)


def _sizes(meta_model: MetaModel) -> list[int]:
    """Return the bytes of each layer."""
    return [sum(tensor.nbytes for tensor in layer.parameters()) for layer in meta_model.parts]


def _random_shard(
    meta_model: MetaModel,
    part: Part,
    *,
    packed: bool = False,
    quant: Quant = Quant.NONE,
    device: torch.device = CPU,
) -> Shard:
    """Fill a part of a model on meta with random weights, in the layout of loaded ones.

    On a CPU, matrices that its cache does not hold share their memory: each is read from there all
    the same.
    """
    strip(meta_model, part)
    model = meta_model.model
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(0)) / 50
    own = [each for each in model.named_parameters() if each[0] not in model.all_tied_weights_keys]
    large, least = dict[torch.dtype, Tensor](), uncached_bytes()
    for name, parameter in sorted(own, key=lambda each: -each[1].nbytes):  # the largest is first
        owner, _, leaf = name.rpartition(".")
        dtype, is_large = parameter.dtype, device == CPU and parameter.nbytes >= least
        value = large.get(dtype) if is_large else None
        if value is None:
            value = _tiled(parameter.numel(), tile.to(device, dtype))
        if is_large:
            large[dtype] = value
        filled = nn.Parameter(value[: parameter.numel()].view(parameter.shape), requires_grad=False)
        filled._is_hf_initialized = True  # type: ignore[attr-defined]  # else drawn again
        setattr(model.get_submodule(owner), leaf, filled)
    with quiet(), without_compiler():  # the stock model makes the buffers, as on load
        buffers = set(model.state_dict()) - set(
            dict(model.named_parameters(remove_duplicate=False))
        )
        model._move_missing_keys_from_meta_to_device(buffers, None, None, None)
        model._initialize_missing_keys(False)
        model.tie_weights(recompute_mapping=False)
    model.to(device)
    unused = meta_model.unused_ends(part)
    replace_modules(model, device, quant, skip=unused, mapped=packed and quant is Quant.NONE)
    return Shard(meta_model, part, device, quant)


def _tiled(count: int, tile: Tensor) -> Tensor:
    """Repeat a few random values, which is faster than drawing all, in pages like loaded ones."""
    flat = (
        huge_zeros(count, dtype=tile.dtype)
        if tile.device == CPU
        else torch.empty(count, dtype=tile.dtype, device=tile.device)
    )
    whole = count // _TILE * _TILE
    flat[:whole].view(-1, _TILE).copy_(tile)
    flat[whole:] = tile[: count - whole]
    return flat


def _cgroup_free(mount: Path) -> float:
    """Return the free bytes of our cgroup, counting inactive page cache as free."""
    free = inf
    for controller, (limit, used, stat, inactive) in _CGROUP_FILES.items():
        for folder in own_cgroups(controller, mount):
            with suppress(OSError, ValueError, LookupError):  # no limit, or not readable
                lines = (folder / stat).read_text().splitlines()
                spare = int(dict(line.split() for line in lines)[inactive])
                most, held = (int((folder / name).read_text()) for name in (limit, used))
                free = min(free, most - held + spare)
    return free
