"""`meshllm ring plan`: the layers, speed and reasons of a planned ring."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshllm.cli.shared.local import import_heavy
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, cache_path, change
from meshllm.errors import UserError
from meshllm.names import Quant, counted
from meshllm.units import listed

if TYPE_CHECKING:
    from meshllm.cli.ring.spec import Spec
    from meshllm.cli.ring.workload import WorkloadReport
    from meshllm.protocol.planning.plan import ModelSizes, Plan
    from meshllm.protocol.planning.prediction import (
        Alternative,
        DraftEstimate,
        PredictedHop,
        Prediction,
    )
    from meshllm.status import MeshStatus

PROMPT = 256  # prompt tokens assumed for the time to the first token
CONTEXT = 4096  # tokens of KV cache assumed for one session
ACCEPTANCE = 0.5  # of draft tokens; higher for repetitive text, lower for prose

_STAGES = ("rank", "node", "layers", "memory", "KV tokens", "compute ms", "wire ms")
_POLICIES = ("policy", "nodes", "ms per token", "with drafts", "first token ms", "slowest stage ms")

EXAMPLES = """\b
Examples:
  meshllm ring plan
  meshllm ring plan --model builtin --spec "8GiB,4GiB@20ms"
  meshllm ring plan --spec "3x8GiB:2.5ms@5ms" --policy throughput --json
  meshllm ring plan --nodes home.toml
  meshllm ring plan --workload office.toml --json
  meshllm ring plan --workload office.toml --trace monday.jsonl
"""


@takes("model", "policy", "state")
def plan(
    nodes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan for the nodes of a TOML file.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(metavar="NODES", help="Plan for these nodes, as `8GiB:2.5ms@20ms,4GiB`."),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Place the models of a TOML file on its machines, for its load."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the load of `--workload` from a recorded trace."),
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Reserve KV cache for one session of N tokens.")
    ] = CONTEXT,
    acceptance: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="A", help="Assume this acceptance rate of drafts."),
    ] = ACCEPTANCE,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Plan a ring and predict its speed.

    It shows the layers of each node, the predicted times, and why a node would be on standby.
    Without `--nodes`, `--spec` and `--model` it plans for the nodes of the running mesh, with the
    times that they measured, and without a mesh for this machine alone; its first line says which.
    It changes nothing.
    A node of `--spec` is `[COUNTx]MEMORY[:TIME_PER_LAYER][@LATENCY]`. The file of `--nodes` has a
    table `[[node]]` with `name` and `memory` for each node, if measured also `ms_per_layer` and
    `head_ms`, and may have `[[link]]` with `a`, `b` and `latency_ms`, if known also `mbit_s`.

    `--workload` places several models as replicas. It searches placements, simulates thousands of
    requests on the best ones, and shows why others lose; see `meshllm help scheduling`. A file with
    `measured = true` adds the nodes of the running mesh, which the node of this machine knows.
    With `--trace` the requests that a node recorded with the flag of this name are the load.
    """
    given_by = {"--nodes": nodes, "--spec": spec, "--workload": workload}
    sources = [name for name, value in given_by.items() if value is not None]
    if len(sources) > 1:
        first, second = sources[:2]
        raise UserError(f"`{first}` cannot be combined with `{second}`", hint="omit one of them")
    if workload is not None:
        usual = {"context": CONTEXT, "acceptance": ACCEPTANCE, "model": None, "policy": None}
        _refuse({"context": context, "acceptance": acceptance, **flags}, usual)
        placed = find_placement(workload, trace, settings(flags))
        if as_json:
            render.dump(placed.fields())
        else:
            render.out(placed.text())
        return
    if trace is not None:
        raise UserError("`--trace` needs `--workload`", hint="the file names models and machines")
    with render.Status(sys.stderr) as status:
        status.show("reading the model")
        from meshllm.protocol.planning.policies import make_plan
        from meshllm.protocol.planning.prediction import compare, predict

        given = _subject(flags, nodes, spec, context)
        offers, links, shape = given.spec.offers, given.spec.links, given.shape
        found = make_plan(offers, links, shape, policy=given.policy)
        report = _PlanReport(
            subject=given.text,
            plan=found,
            prediction=predict(found, offers, links, shape, prompt_tokens=PROMPT),
            others=compare(offers, links, shape),
            spec=given.spec,
            shape=shape,
            acceptance=acceptance,
        )
    if as_json:
        render.dump(report.fields())
    else:
        render.out(report.text())


def _refuse(given: Mapping[str, Scalar], usual: Mapping[str, Scalar]) -> None:
    """Raise `UserError` for an option that a workload does not use."""
    for name, value in usual.items():
        if given[name] != value:
            raise UserError(
                f"`--{name}` has no effect with `--workload`, whose file names models and machines",
                hint="omit it",
            )


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a plan is made for."""

    text: str
    """The nodes, and why these."""
    spec: "Spec"
    shape: "ModelSizes"
    policy: str


def _subject(
    flags: dict[str, Scalar], path: Path | None, nodes: str | None, context: int
) -> _Subject:
    """Choose the nodes of a plan: given ones, those of the running mesh, or this machine."""
    from meshllm.cli.ring.spec import own_spec, parse_spec, read_spec, running_spec

    chosen = settings(flags)
    if path is not None or nodes is not None:
        shape = _shape(chosen, context)
        if path is not None:
            return _Subject(f"the nodes of `{path}`", read_spec(path, shape), shape, chosen.policy)
        given = parse_spec(nodes or "", shape)
        return _Subject("the nodes of `--spec`", given, shape, chosen.policy)
    mesh, why = (None, "`--model` is given") if flags["model"] is not None else _running(chosen)
    if mesh is None or mesh.model is None:
        shape = _shape(chosen, context)
        return _Subject(f"this machine alone: {why}", own_spec(shape), shape, chosen.policy)
    policy = chosen.policy if flags["policy"] is not None else mesh.ring.policy
    name, dtype, quant = mesh.model.shared_name, mesh.model.dtype, mesh.model.quant
    model = {"model": name, "dtype": dtype, "quant": quant}
    shape = _shape(change(chosen, model), context)
    return _Subject("the nodes of the running mesh", running_spec(mesh, shape), shape, policy)


def _running(chosen: Settings) -> "tuple[MeshStatus | None, str]":
    """Return the status of the running mesh; None, and why, if there is none with a ring."""
    import asyncio

    from meshllm.cli.ring.status import clean
    from meshllm.cli.shared.client import NodeClient, is_running, socket_path

    if not is_running(chosen):
        return None, "no node runs here"
    status = clean(asyncio.run(NodeClient(socket_path(chosen)).status()))
    has_ring = status.ring.predicted and status.model
    return (status, "") if has_ring else (None, "the node here has no ring yet")


def find_placement(path: Path, trace: Path | None, chosen: Settings) -> "WorkloadReport":
    """Place the models of a file.

    Raises:
        UserError: the file is invalid.
        ModelError: a model is not on this machine, or does not fit.
    """
    import asyncio

    from meshllm.cli.ring.status import clean
    from meshllm.cli.ring.workload import WorkloadReport
    from meshllm.cli.ring.workload_spec import read_workload
    from meshllm.cli.shared.client import NodeClient, socket_path

    client = NodeClient(socket_path(chosen))
    spec = read_workload(path, lambda: clean(asyncio.run(client.status())), trace)
    with render.Status(sys.stderr) as status:
        status.show("simulating placements")
        return WorkloadReport.make(spec)


def _shape(chosen: Settings, context: int) -> "ModelSizes":
    from meshllm.model.locate import find_installed, is_folder
    from meshllm.model.shape import CachedShape
    from meshllm.node.ring.shape import plan_shape

    cache, quant = cache_path(), Quant(chosen.quant)
    dtype = None if chosen.dtype == "auto" else f"torch.{chosen.dtype}"
    models = (chosen.model,) if is_folder(chosen.model) else listed(chosen.model)
    model = (models or (chosen.model,))[0]
    folder = find_installed(model)
    shape = CachedShape(folder, cache, dtype, quant).read(model)
    if shape is None:
        import_heavy("meshllm.model.capacity")
        import torch

        from meshllm.model.capacity import shape_of
        from meshllm.model.files.source import open_folder

        wanted = getattr(torch, chosen.dtype) if dtype else None
        shape = shape_of(open_folder(model, folder), wanted, quant, cache)
    return plan_shape(shape, context)


@dataclass(frozen=True, slots=True)
class _PlanReport:
    """A plan and its predictions."""

    subject: str
    """The nodes of the plan, and why these."""
    plan: "Plan"
    prediction: "Prediction"
    others: "tuple[Alternative, ...]"
    spec: "Spec"
    shape: "ModelSizes"
    acceptance: float

    def fields(self) -> dict[str, Any]:
        """Lay it out for ``--json``."""
        return {
            "planned_for": self.subject,
            "model": self.plan.model,
            "context": self.shape.context,
            "digest": self.plan.digest.hex(),
            "stages": [
                {
                    "rank": rank,
                    "node": self.spec.names[hop.node],
                    "layers": str(hop.span),
                    "memory_bytes": memory,
                    "room_tokens": room,
                    "compute_ms": hop.compute_s * 1e3,
                    "wire_ms": hop.wire_s * 1e3,
                    "bytes_per_token": hop.bytes_per_token,
                }
                for rank, hop, memory, room in self._ranks()
            ],
            "standbys": self._standbys(),
            "head_ms": self.prediction.head_s * 1e3,
            "prompt_tokens": PROMPT,
            "chunk": self.prediction.chunk,
            "ttft_ms": self.prediction.ttft_s * 1e3,
            "ms_per_token": self.prediction.seconds_per_token * 1e3,
            "acceptance": self.acceptance,
            "speculation": _speculation(self._with_drafts),
            "policies": [
                {
                    "policy": each.policy,
                    "nodes": len(each.plan.stages) if each.plan else None,
                    "ms_per_token": forecast and forecast.seconds_per_token * 1e3,
                    "speculation": forecast and _speculation(forecast.with_drafts(self.acceptance)),
                    "ttft_ms": forecast and forecast.ttft_s * 1e3,
                    "slowest_stage_ms": forecast and forecast.slowest_stage_s * 1e3,
                    "reason": each.reason,
                }
                for each in self.others
                for forecast in [each.prediction]
            ],
            "measured": list(self.spec.measured),
            "assumed": self._assumed(),
        }

    def text(self) -> str:
        """Lay it out as text."""
        ranks = [
            (rank, self.spec.names[hop.node], str(hop.span), render.bytes_of(memory),
             room, hop.compute_s * 1e3, hop.wire_s * 1e3)
            for rank, hop, memory, room in self._ranks()
        ]  # fmt: skip
        token_s, drafted = self.prediction.seconds_per_token, self._with_drafts
        return "\n".join(
            [
                f"`{self.plan.model}` on {self.subject}",
                "",
                render.table(_STAGES, ranks),
                *(f"standby {each['node']}: {each['reason']}" for each in self._standbys()),
                "",
                f"{token_s * 1e3:.2f} ms per token, {1 / token_s:.1f} tokens/s"
                f" (head {self.prediction.head_s * 1e3:.2f} ms)",
                f"{drafted.seconds_per_token * 1e3:.2f} ms with"
                f" {counted(drafted.drafts, 'draft')} per step",
                f"{self.prediction.ttft_s * 1e3:.1f} ms to the first token of a prompt of {PROMPT}"
                f" tokens, prefill in chunks of {self.prediction.chunk}",
                "",
                render.table(_POLICIES, self._policies()),
                *(f"{each.policy}: {each.reason}" for each in self.others if each.plan is None),
                *(f"measured: {each}" for each in self.spec.measured),
                *(f"assumed: {each}" for each in self._assumed()),
            ]
        )

    def _ranks(self) -> Iterator[tuple[int, "PredictedHop", int, int | None]]:
        """Yield rank, hop, bytes needed, and capacity in tokens of KV cache.

        The bytes are those of the layers, the KV cache of one session, and the ends.
        """
        from meshllm.protocol.planning.problem import room_tokens

        rooms = room_tokens(self.plan, self.spec.offers, self.shape)
        caches = [each * self.shape.context for each in self.shape.kv_bytes_per_token]
        for rank, (hop, room) in enumerate(zip(self.prediction.hops, rooms, strict=True)):
            span = slice(hop.span.start, hop.span.stop)
            ends = self.shape.ends_bytes if rank == 0 else 0
            yield rank, hop, sum(self.shape.layer_bytes[span]) + sum(caches[span]) + ends, room

    def _standbys(self) -> list[dict[str, str]]:
        return [
            {"node": self.spec.names[each.node], "reason": each.reason}
            for each in self.plan.standbys
        ]

    @property
    def _with_drafts(self) -> "DraftEstimate":
        return self.prediction.with_drafts(self.acceptance)

    def _assumed(self) -> list[str]:
        from meshllm.cli.ring.spec import ROWS

        rows, times = ROWS[-1]
        share = f"a draft is accepted with probability {self.acceptance:g} if those before it are"
        return [
            *self.spec.assumed,
            f"{rows} rows take {times:g} times as long as one row",
            share,
        ]

    def _policies(self) -> list[tuple[object, ...]]:
        """Return a row per policy; figures are None if it finds no ring."""
        return [
            (
                each.policy,
                len(each.plan.stages) if each.plan else None,
                forecast and forecast.seconds_per_token * 1e3,
                forecast and forecast.with_drafts(self.acceptance).seconds_per_token * 1e3,
                forecast and forecast.ttft_s * 1e3,
                forecast and forecast.slowest_stage_s * 1e3,
            )
            for each in self.others
            for forecast in [each.prediction]
        ]


def _speculation(found: "DraftEstimate") -> dict[str, float]:
    return {"drafts": found.drafts, "ms_per_token": found.seconds_per_token * 1e3}
