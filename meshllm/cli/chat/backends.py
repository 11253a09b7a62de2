"""Chooses the backend of a chat: the running node, the mesh of a ticket, or a local ring."""

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshllm.cli.shared.client import (
    NodeClient,
    client_ticket,
    is_running,
    open_client,
    socket_path,
)
from meshllm.cli.shared.local import Opener, open_local
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, change, state_path
from meshllm.errors import MeshError, UserError
from meshllm.request import Answer, Backend, Event, Request
from meshllm.units import listed

if TYPE_CHECKING:
    from meshllm.status import MeshStatus, ModelStatus, ServedRing

_RING_SETTINGS = (
    "transport", "ends", "dtype", "quant", "device", "threads", "speculation", "draft",
    "exact", "wire", "prefix_cache",
)  # fmt: skip
"""Settings used when a ring forms; they have no effect on an existing one."""

_NODE = "the node of this machine"
ANY_MODEL = "the mesh"
"""Shown in place of a model that the mesh of a ticket chooses."""


def choose(
    chosen: Settings,
    flags: Mapping[str, Scalar],
    *,
    shows_model: bool = True,
    quiet: bool = False,
    names_hops: bool = True,
) -> tuple[Opener, Settings, str]:
    """Return a function that opens the backend, the settings with its model, and who is asked, for
    people.

    Unless ``quiet``, a message says where the prompt goes when another machine reads it, and what a
    ring that does not serve yet waits for. To save
    time, a running node is asked for its status only if something of it is shown or compared. With
    ``names_hops`` the hops of its answers have the names of nodes beside their ids.

    Raises:
        UserError: a flag contradicts the backend.
    """
    if flags["nodes"] is not None:
        _refuse_beside_nodes(flags)
        return open_local, _of_first(chosen, flags), _here(chosen)
    if flags["join"] is None and client_ticket(chosen) is None and is_running(chosen):
        node = _open_named if names_hops else open_client
        return _running(chosen, flags, node, shows_model=shows_model, quiet=quiet)
    if chosen.join is None:
        membership = state_path(chosen) / "mesh.json"
        is_member = os.path.isfile(membership)  # noqa: PTH113  # never raises
        if not quiet and (chosen.state is not None or is_member):
            _announce_local(chosen)
        return open_local, _of_first(chosen, flags), _here(chosen)
    _refuse(flags, _RING_SETTINGS, "the mesh of the ticket already has a ring", "omit it")
    mesh = f"the mesh of node `{_inviter(chosen)}`, which made the ticket"
    if not quiet:
        _announce(mesh)
    if model := flags["model"]:
        return _asking(open_ticket, str(model)), chosen, mesh
    return open_ticket, change(chosen, {"model": ANY_MODEL}), mesh


def _running(
    chosen: Settings,
    flags: Mapping[str, Scalar],
    node: Opener,
    *,
    shows_model: bool,
    quiet: bool,
) -> tuple[Opener, Settings, str]:
    """Choose the running node, opened by ``node``, see `choose`."""
    import logging

    logging.getLogger(__name__).info("using the node at %s", socket_path(chosen))
    alone = "omit it, or add `--nodes 1` to run a ring in this process"
    _refuse(flags, _RING_SETTINGS, "the running node already has a ring", alone)
    if quiet and not shows_model and flags["model"] is None:
        return node, change(chosen, {"model": "the running node"}), _NODE
    from meshllm.status import as_asked

    status = _fetch_status(chosen)
    model = _model_of(status, flags["model"])
    providers = _providers_of(as_asked(model, str(flags["model"]))) if model else ()
    reader = f"{_listed(providers)} of the mesh" if providers else _reader_of(status, model)
    if not quiet:
        if reader:
            _announce(reader)
        if not providers and (cause := _awaited(status, model)):
            render.print_message(render.dim(f"waiting: {cause}"))
    named = flags["model"]
    opener = node if model is None or not named else _asking(node, as_asked(model, str(named)).name)
    served = change(chosen, {"model": render.one_line(model.name)}) if model else chosen
    return opener, served, reader or f"{_NODE}{_size_of(status, model)}"


@dataclass(frozen=True, slots=True)
class _OfModel:
    """A backend, asked for one of its models."""

    backend: Backend
    model: str

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer with the model, see `Backend`."""
        return self.backend.generate(replace(request, model=self.model))


@dataclass(frozen=True, slots=True)
class _NamingHops:
    """The running node, whose answers tell the names of the nodes beside their ids."""

    node: NodeClient

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer, see `Backend`."""
        async with aclosing(self.node.generate(request)) as events:
            async for event in events:
                yield await self._named(event) if isinstance(event, Answer) else event

    async def _named(self, answer: Answer) -> Answer:
        from meshllm.cli.ring.status import clean

        if not answer.hops:
            return answer
        try:
            status = clean(await self.node.status())
        except MeshError:  # the answer is complete: names are not worth an error
            return answer
        names = {each.short: f"{each.name} ({each.short})" for each in status.nodes if each.name}
        hops = (replace(hop, node=names.get(hop.node, hop.node)) for hop in answer.hops)
        return replace(answer, hops=tuple(hops))


@asynccontextmanager
async def _open_named(settings: Settings) -> AsyncIterator[Backend]:
    async with open_client(settings) as node:
        yield _NamingHops(node)


def _asking(opener: Opener, model: str) -> Opener:
    """Return an opener of a backend that is asked for one model."""

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[Backend]:
        async with opener(settings) as backend:
            yield _OfModel(backend, model)

    return opened


def _providers_of(model: "ModelStatus") -> tuple[str, ...]:
    """Return the providers that answer for a model now: for one of rings if none serves."""
    beside = () if model.rings else model.beside
    return model.providers or tuple(each.provider for each in beside)


def _listed(providers: Sequence[str]) -> str:
    names = ", ".join(f"`{render.one_line(each)}`" for each in providers)
    return f"the provider {names}" if len(providers) == 1 else f"one of the providers {names}"


@asynccontextmanager
async def open_ticket(settings: Settings) -> AsyncIterator[Backend]:
    """Join the mesh of the ticket as a client; no weights are loaded."""
    from meshllm.node.client import open_mesh_client

    async with open_mesh_client(settings.join or "", state_path(settings)) as mesh:
        yield mesh


def _announce(reader: str) -> None:
    render.print_message(render.dim(f"the prompt leaves this machine: it goes to {reader}"))


def _announce_local(chosen: Settings) -> None:
    """Say that this process answers, where a node has run or was meant to."""
    folder = state_path(chosen)
    found = "no node is running at" if folder.exists() else "no node has used"
    text = f"{found} `{render.one_line(str(folder))}`: {_here(chosen)} answers"
    render.print_message(render.dim(text))


def _inviter(chosen: Settings) -> str:
    """Name the inviter of a client's ticket; raise for one that cannot be used."""
    from meshllm.names import short
    from meshllm.node.membership.bootstrap import check_client_ticket

    return short(check_client_ticket(chosen.join or "", state_path(chosen)).inviter)


def _reader_of(status: "MeshStatus", model: "ModelStatus | None") -> str | None:
    """Name the mesh, and the entries, that read a prompt in place of the running node."""
    others = {each.node: each.name for each in status.nodes if not each.is_self}
    entries = [ring.entry for ring in _rings_of(status, model)] or [status.ring.entry]
    if not others or set(entries) == {status.node}:
        return None
    named = [f"`{render.one_line(others[entry])}`" for entry in entries if entry in others]
    mesh = f"mesh {status.mesh[:12]}"
    if not named:
        return mesh
    return f"{'the entry' if len(entries) == 1 else 'an entry, such as'} {named[0]} of {mesh}"


def _rings_of(status: "MeshStatus", model: "ModelStatus | None") -> list["ServedRing"]:
    return [ring for ring in status.rings if model and ring.model == model.name and ring.entry]


def _fetch_status(chosen: Settings) -> "MeshStatus":
    import asyncio

    return asyncio.run(NodeClient(socket_path(chosen)).status())


def _model_of(status: "MeshStatus", name: Scalar) -> "ModelStatus | None":
    """Return the model that is asked: the first of the mesh unless named."""
    from meshllm.status import find_model

    of_rings = status.models or ((status.model,) if status.model else ())
    served = (*of_rings, *status.provided)
    if name is None or not served:
        return served[0] if served else None
    if (found := find_model(served, str(name))) is None:
        listed = ", ".join(f"`{each.name}`" for each in served)
        raise UserError(
            f"The running node serves {listed}, not `{name}`",
            hint="omit `--model`, or add `--nodes 1` to run a ring in this process",
        )
    return found


def _of_first(chosen: Settings, flags: Mapping[str, Scalar]) -> Settings:
    """Choose the first of the models that a node can hold, unless a flag names one."""
    if flags["model"] is not None:
        return chosen
    return change(chosen, {"model": (listed(chosen.model) or (chosen.model,))[0]})


def _here(chosen: Settings) -> str:
    return f"a ring of {chosen.nodes} in this process"


def _size_of(status: "MeshStatus", model: "ModelStatus | None") -> str:
    """Say how many nodes answer, if that is known."""
    is_of_own = model is None or status.model is None or model.name == status.model.name
    own = status.ring.stages if is_of_own else ()
    stages = next((ring.stages for ring in _rings_of(status, model)), own)
    return f", in a ring of {len(stages)}" if stages else ""


def _awaited(status: "MeshStatus", model: "ModelStatus | None") -> str:
    """Return what the rings of a model wait for; empty if one of them serves."""
    rings = [ring for ring in status.rings if model and ring.model == model.name]
    states = [ring.state for ring in rings] or [status.ring.state]
    if "serving" in states:
        return ""
    if not rings:
        return render.one_line(status.ring.reason)
    own = rings[0].status  # which knows more than others of the mesh
    return render.one_line((own and own.reason) or rings[0].reason)


def _refuse_beside_nodes(flags: Mapping[str, Scalar]) -> None:
    for name in ("join", "state"):
        if flags[name] is not None:
            raise UserError(
                f"`--nodes`, a ring in this process, cannot be combined with `--{name}`",
                hint="omit one of them",
            )


def _refuse(flags: Mapping[str, Scalar], names: tuple[str, ...], reason: str, hint: str) -> None:
    for name in names:
        if flags[name] is not None:
            raise UserError(f"`--{name.replace('_', '-')}` has no effect: {reason}", hint=hint)
