"""`meshllm bench --replay`: finds what answers, replays the trace, and lays the figures out."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.cli.shared.client import NodeClient, is_running, socket_path, start_command
from meshllm.cli.terminal import render
from meshllm.config import Settings
from meshllm.errors import MeshError, UserError

if TYPE_CHECKING:
    from meshllm.bench.replay import LoadFigures, Percentiles, ReplayComparison
    from meshllm.bench.targets import Target
    from meshllm.status import ModelStatus


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and what answers: a URL, a ring in this process, or the running node."""

    trace: Path
    speed: float
    model: str | None
    """None is the first model that is served, or the embedded one in this process."""
    url: str | None = None
    """Base URL of an OpenAI-compatible API."""
    key_file: Path | None = None
    """Its first key is that of the API."""
    nodes: int | None = None
    """Of a ring in this process."""


def measure(
    options: ReplayOptions, chosen: Settings, report: Callable[[str], None]
) -> "ReplayComparison":
    """Replay a trace.

    Raises:
        MeshError: the trace is invalid, nothing answers, or no request was answered.
    """
    import asyncio

    found = asyncio.run(_measure(options, chosen, report))
    if not found.compared:
        reason = next(iter(found.errors), "the trace has no answered request")
        raise MeshError(f"No request was answered: {reason}")
    return found


def table(found: "ReplayComparison") -> str:
    """Lay out a replay beside its trace."""
    sides = (found.trace, found.replay)
    rows: list[tuple[object, ...]] = [("requests", found.compared, found.compared)]
    rows += [
        (name, *(getattr(side, field) for side in sides))
        for name, field in (("prompt tokens", "prompt_tokens"), ("new tokens", "new_tokens"))
    ]
    rows += [
        (f"{name} {rank}", *(_rank(side, field, rank) for side in sides))
        for name, field in (("first token ms", "ttft_ms"), ("ms per token", "token_ms"))
        for rank in ("p50", "p90", "p99")
    ]
    rows.append(("tokens/s", *(side.tokens_per_second for side in sides)))
    rows.append(("prefix hits %", *(side.hit_rate * 100 for side in sides)))
    return render.table(("", "trace", "replay"), rows)


def _rank(side: "LoadFigures", field: str, rank: str) -> float | None:
    found: Percentiles | None = getattr(side, field)
    return None if found is None else getattr(found, rank)


async def _measure(
    options: ReplayOptions, chosen: Settings, report: Callable[[str], None]
) -> "ReplayComparison":
    import asyncio

    from meshllm.bench.replay import TraceReplay
    from meshllm.traces.trace import read_trace

    lines = await asyncio.to_thread(read_trace, options.trace)
    async with _target(options, chosen, report) as target:
        return await TraceReplay(lines, target, options.speed, report).run()


@asynccontextmanager
async def _target(
    options: ReplayOptions, chosen: Settings, report: Callable[[str], None]
) -> AsyncIterator["Target"]:
    from meshllm.bench.targets import BackendTarget, open_door_target

    if options.url is not None:
        key = _key(options.key_file) if options.key_file else None
        async with open_door_target(options.url, key, options.model) as door:
            yield door
    elif options.nodes is not None:
        report("loading the ring")
        async with _local(options, chosen, options.nodes) as target:
            yield target
    else:
        if not is_running(chosen):
            command = start_command(socket_path(chosen))
            hint = f"start one with `{command}`, or give `--url` or `--nodes`"
            raise UserError("There is no running node to replay the trace on", hint=hint)
        client = NodeClient(socket_path(chosen))
        yield BackendTarget(client, asked_name(options.model, await client.models()))


def asked_name(model: str | None, served: "Sequence[ModelStatus]") -> str:
    """Return the name by which to ask for a model, or for the first one; empty if it has no key."""
    from meshllm.status import find_model

    if model is None and not served:
        raise MeshError("The node serves no model yet", hint="see `meshllm ring status`")
    if found := served[0] if model is None else find_model(served, model):
        return found.name if found.providers or found.key else ""
    hint = f"served: {', '.join(f'`{each.name}`' for each in served) or 'nothing yet'}"
    raise UserError(f"The model `{model}` is not served", hint=hint)


@asynccontextmanager
async def _local(options: ReplayOptions, chosen: Settings, nodes: int) -> AsyncIterator["Target"]:
    """Open a ring of a model, or of one with published dimensions and random weights."""
    import torch

    from meshllm.bench.ring_table import DIMENSIONS, random_model
    from meshllm.bench.targets import BackendTarget
    from meshllm.cli.shared.signals import unwinding_on_signals
    from meshllm.model.files.source import resolve
    from meshllm.model.locate import BUILTIN
    from meshllm.node.options import InferenceConfig
    from meshllm.node.ring.local_ring import RingOptions, open_local_ring

    name = options.model or BUILTIN
    is_random = name in DIMENSIONS
    inference = InferenceConfig(device=chosen.device, threads=chosen.threads)
    model = random_model(name, torch.bfloat16) if is_random else nullcontext(name)
    with unwinding_on_signals(), model as found:  # its files are removed
        ring = open_local_ring(resolve(str(found)), RingOptions(nodes, inference=inference))
        async with ring as backend:
            yield BackendTarget(backend)


def _key(path: Path) -> str:
    from meshllm.api.tcp import read_key_file

    return read_key_file(path)[0]
