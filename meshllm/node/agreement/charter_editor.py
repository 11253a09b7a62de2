"""Changes of the mesh's charter by this node: by its options, and by `meshllm model serve`."""

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from meshllm.errors import LinkLost, MeshError, ModelError, UserError
from meshllm.names import Quant
from meshllm.node.charter_options import amend, names_in, refuse_layers, serve, stop
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.node_names import resolve_names
from meshllm.node.options import ModelOptions, NodeOptions
from meshllm.node.ring.shape import CONTEXT
from meshllm.node.timer import loop_time
from meshllm.protocol.membership.charter import Charter, differing
from meshllm.protocol.membership.mesh import Mesh

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.node.preparation import Preparation

logger = logging.getLogger(__name__)


class CharterEditor:
    """Amends the charter, and publishes it."""

    def __init__(
        self,
        options: NodeOptions,
        machine: Mesh,
        links: MeshLinks,
        preparation: "Preparation | None",
    ) -> None:
        self.ambiguous = ""
        """Which names in the options mean several nodes; empty if none does."""
        self._options = options
        self._machine = machine
        self._links = links
        self._preparation = preparation
        self._names = resolve_names((), {})
        self._kept: tuple[str, ...] = ()  # terms that the mesh did not take the last time

    async def serve_model(self, asked: ModelOptions) -> Charter:
        """Let the mesh serve a model, or change how it does; return the charter of the model.

        Raises:
            MeshError: this node does not have the model, or the mesh cannot serve it.
        """
        if self._preparation is None:
            raise UserError(
                "A provider loads no models", hint="do this on a node that holds layers"
            )
        quant = None if asked.quant is None else _quant(asked.quant)
        model = self._known().find(asked.model)
        name = model.shape.name if model else asked.model
        if model is not None and quant not in {None, model.quant}:
            model = self._known().find(name, quant)
        if model is None:
            sizes = quant or Quant.NONE, asked.context or CONTEXT
            model = await self._preparation.describe(name, *sizes)
        elif not await self._preparation.held((model,)):
            with suppress(ModelError):  # not by this name: another node holds it
                await self._preparation.describe(asked.model, model.quant, model.shape.context)
        if asked.context is not None and asked.context > model.shape.context:
            longest = await self._preparation.longest(model)
            asked = replace(asked, context=min(asked.context, longest))
        key, whole = model.key, self._known()  # it may have changed
        model = next((each for each in whole.served if each.key == key), model)
        self._change(serve(whole, model, asked), f"model.{key.hex()}")
        return next(each for each in self._known().served if each.key == key)

    def stop_model(self, name: str) -> str:
        """Let the mesh no longer serve a model; return what to call it.

        That is with its precision if another quantisation of its name is still served.

        Raises:
            MeshError: the mesh does not serve it, or cannot stop it.
        """
        known = self._known()
        wanted, stopped = stop(known, name), known.find(name)
        assert stopped is not None  # else there is nothing to stop
        self._change(wanted, "models")
        return stopped.precise_name if self._known().find(stopped.shape.name) else name

    def publish(self, charter: Charter) -> None:
        """Publish a charter; warn of what the mesh does not take, once while that lasts."""
        before, self._kept = self._kept, self._differing(charter)
        for name in self._kept:
            if name not in before:
                logger.warning("the mesh keeps its `%s`: the change cannot be published", name)

    def check_layers(self) -> None:
        """Raise `UserError` if every model of the mesh lacks layers that this node is to hold."""
        deepest = max(self._known().served, key=lambda each: each.shape.layers)
        refuse_layers(self._options, deepest.shape)

    def amend_nodes(self) -> None:
        """Amend the charter by the nodes that the options name: these terms hold for all models.

        Called before there is a model here, so that who may read prompts is published soon, and
        whichever ring this node serves.
        """
        self._amend(_of_nodes(self._options), 0)
        self._resolve()

    def amend(self, longest: int) -> None:
        """Amend the charter by the options of this node; ``longest`` is its model's context.

        The node serves the first model of the mesh, which the other options are about.
        """
        self._amend(self._options, longest)
        self._resolve()

    def amend_again(self) -> None:
        """Amend the charter if the names in the options resolve to other nodes now."""
        if not self._names.is_complete and self._machine.charter and self._resolve():
            self._amend(_of_nodes(self._options), 0)

    def _amend(self, options: NodeOptions, longest: int) -> None:
        charter = self._known()
        amended = amend(charter, options, dict(self._machine.profiles), longest)
        if amended != charter:
            self.publish(amended)

    def _resolve(self) -> bool:
        """Resolve the names in the options; return whether any changed. Warn of those of no node.

        Also of those of several; of each name once while that lasts.
        """
        profiles = self._machine.profiles
        before, names = self._names, resolve_names(names_in(self._options), profiles)
        self._names = names
        for name in names.unknown:
            if name not in before.unknown:
                logger.warning("no node is named `%s` yet", name)
        for name in names.ambiguous:
            if name not in before.ambiguous:
                logger.warning("several nodes match `%s`: give the whole id of one", name)
        several = ", ".join(f"`{name}`" for name in names.ambiguous)
        self.ambiguous = several and f"several nodes match {several}: give whole ids"
        return names != before

    def _change(self, wanted: Charter, what: str) -> None:
        """Publish another charter; raise `MeshError` if the mesh cannot take it."""
        if self._differing(wanted):
            raise MeshError(
                f"The mesh cannot store the change of `{what}`",
                hint="stop models on the node that served them, or begin a new mesh",
            )

    def _differing(self, wanted: Charter) -> tuple[str, ...]:
        """Publish a charter; return the names of what differs in that of the mesh then."""
        now = loop_time()
        self._links.act(self._machine.publish(charter=wanted, now=now))
        found = self._machine.charter
        return tuple(differing(wanted, found)) if found is not None else ()

    def _known(self) -> Charter:
        if self._machine.charter is None:
            raise LinkLost("This node is not in contact with the mesh yet", hint="retry later")
        return self._machine.charter


def _of_nodes(options: NodeOptions) -> NodeOptions:
    """Return options of which the charter takes what is about nodes only."""
    return replace(options, policy=None, members=None, replicas=None, context=None)


def _quant(text: str) -> Quant:
    try:
        return Quant(text)
    except ValueError:
        raise UserError(f"Unknown quantisation `{text[:100]}`", hint=", ".join(Quant)) from None
