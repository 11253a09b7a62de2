"""`meshllm bench --replay`: finds what answers, replays the trace, and lays the figures out."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.cli.shared.client import NodeClient, is_running, socket_path, start_command
from meshllm.cli.terminal import render
from meshllm.config import Settings
from meshllm.errors import MeshError, UserError
from meshllm.names import counted

if TYPE_CHECKING:
    from meshllm.bench.replay import LoadFigures, Percentiles, ReplayComparison
    from meshllm.bench.targets import Target
    from meshllm.status import ModelStatus

MAX_NAMED = 5  # models of a trace that an error names
MAX_NAME = 100  # characters of such a name


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay, and what answers: a URL, a ring in this process, or the running node."""

    trace: Path
    speed: float
    model: str | None
    """None is the one that each request names, or the embedded one in this process."""
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
    models = dict.fromkeys(each.model for each in lines if each.prompt_tokens)
    async with _target(options, chosen, report, tuple(models)) as (target, asked):
        sent = [replace(each, model=asked.get(each.model, "")) for each in lines]
        return await TraceReplay(sent, target, options.speed, report).run()


@asynccontextmanager
async def _target(
    options: ReplayOptions,
    chosen: Settings,
    report: Callable[[str], None],
    models: Sequence[str],
) -> AsyncIterator[tuple["Target", dict[str, str]]]:
    """Yield what answers, and by which name to ask it for each model of the trace."""
    from meshllm.bench.targets import BackendTarget, open_http_target

    if options.url is not None:
        key = _key(options.key_file) if options.key_file else None
        async with open_http_target(options.url, key) as api_server:
            if options.model is not None:
                yield api_server, dict.fromkeys(models, options.model)
            else:
                found = served_models(models, await api_server.models())
                yield api_server, {name: each.name for name, each in found.items()}
    elif options.nodes is not None:
        report("loading the ring")
        async with _local(options, chosen, options.nodes) as target:
            yield target, {}
    else:
        if not is_running(chosen):
            command = start_command(socket_path(chosen))
            hint = f"start one with `{command}`, or give `--url` or `--nodes`"
            raise UserError("There is no running node to replay the trace on", hint=hint)
        client = NodeClient(socket_path(chosen))
        yield BackendTarget(client), asked_names(options.model, models, await client.models())


def asked_names(
    model: str | None, models: "Sequence[str]", served: "Sequence[ModelStatus]"
) -> dict[str, str]:
    """Return the name by which to ask a node for each model of a trace, or for ``model`` instead.

    It is empty for a model without a key.
    """
    from meshllm.status import as_asked, find_model

    if not served:
        raise MeshError("The node serves no model yet", hint="see `meshllm ring status`")
    if model is None:
        found = served_models(models, served)
    elif only := find_model(served, model):
        found = dict.fromkeys(models, as_asked(only, model))
    else:
        raise UserError(f"The model `{model}` is not served", hint=_served(served))
    return {name: each.name if each.providers or each.key else "" for name, each in found.items()}


def served_models(
    models: "Sequence[str]", served: "Sequence[ModelStatus]"
) -> dict[str, "ModelStatus"]:
    """Return the served model that each model of a trace names; an empty name is the first.

    Raises:
        UserError: some of them are not served.
    """
    from meshllm.status import as_asked, find_model

    known = {name: find_model(served, name) if name else served[0] for name in models}
    found = {name: as_asked(each, name) for name, each in known.items() if each}
    if missing := [name for name in models if name not in found]:
        listed = ", ".join(f"`{each[:MAX_NAME]}`" for each in missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
        raise UserError(
            f"The trace names {counted(len(missing), 'model')} that"
            f" {'is' if len(missing) == 1 else 'are'} not served: {listed}{more}",
            hint=f"{_served(served)}; `--model NAME` sends all requests to one",
        )
    return found


def _served(served: "Sequence[ModelStatus]") -> str:
    return f"served: {', '.join(f'`{each.name}`' for each in served)}"


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
