"""Profiling of a node: resolve its model, hash its weights, measure its speed."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from meshllm.errors import ModelError, ModelMissing, OutOfMemory
from meshllm.model.capacity import shape_of
from meshllm.model.device import CPU, choose, is_out_of_memory
from meshllm.model.files.manifest import config_digest, hash_files, manifest
from meshllm.model.files.parts import ModelParts, check_parts, most_bytes
from meshllm.model.files.source import Source, open_folder, resolve
from meshllm.model.shape import process_memory
from meshllm.model.timing import measure_speed, memory_budget
from meshllm.names import Digest, ModelKey, Quant
from meshllm.node.charter_options import amend, create_charter, refuse_layers, refuse_other
from meshllm.node.compute.worker import Worker
from meshllm.node.membership.saved_models import LocalModel
from meshllm.node.options import FIRST_MODEL, InferenceConfig, NodeOptions
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.shape import reserved_bytes
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.weights.holders import name_of

RUNTIME_BYTES = 256 << 20  # overhead of a serving process, whatever the model

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preparation:
    """Loads and profiles the model of a node, on its compute thread."""

    options: NodeOptions
    worker: Worker
    cache: Path
    """Folder of cached digests and measurements."""
    described: list[LocalModel] = field(default_factory=list)
    """Models that the owner of this node let the mesh serve, which it can hold too.

    Beside `--quant` in this quantisation only; else it is None, and any will do.
    """

    async def check_layers(self) -> None:
        """Raise `UserError` if each model that the options name lacks layers that they name.

        Called before a ticket is used. Models that are not here, which may be fetched, have any.
        """
        options = self.options
        own = (options.model, *options.more_models) if options.model else ()
        if options.layers is None or not own:
            return
        try:
            sources = [await self._resolve(name) for name in own]
            shapes = [
                await self._run(each.name, shape_of, each, None, Quant.NONE, self.cache)
                for each in sources
            ]
        except ModelError:
            return
        refuse_layers(options, max(shapes, key=lambda each: each.layers))

    async def open_founding_model(self) -> tuple[ModelRuntime, Charter]:
        """Open the model of a new mesh, and create its charter.

        Raises:
            ModelError: the model is not found locally, or cannot be run.
            OutOfMemory: there is no memory to open it.
            UserError: it has fewer layers than this node is to hold.
        """
        source = await self._resolve(self.options.model or FIRST_MODEL)
        model = await self._open(source, self.options.inference)
        refuse_layers(self.options, model.shape)
        charter = create_charter(self.options, model.shape, await self._digest(source))
        return model, amend(charter, self.options, {}, model.shape.context)

    async def join(
        self, charter: Charter, folder: Path | None = None, *, is_further: bool = False
    ) -> ModelRuntime:
        """Open the model of a ring, in a folder if it is not found by its name.

        The charter may be amended meanwhile, but its model does not change. A further ring has no
        draft model: its share of the memory has no room for one.

        Raises:
            ModelMissing: the model is not found locally.
            ModelError: the options name different ones.
            OutOfMemory: there is no memory to open it, or one of those that the options name.
        """
        inference = self.options.inference
        if folder is None:
            source = await self._find(charter)
        else:
            source = await self._find_in(folder, charter)
        config = replace(inference, dtype=charter.dtype.name.lower(), quant=charter.quant)
        config = replace(config, draft=None) if is_further else config
        return await self._open(source, config)

    async def held(self, charters: Sequence[Charter]) -> tuple[ModelKey, ...]:
        """Return the keys of those models that this node has locally, and may hold."""
        keys = []
        for charter in charters:
            try:
                await self._find(charter)
            except OutOfMemory:  # for now: if it is to serve it, this node tries again
                keys.append(charter.key)
            except ModelError as error:
                logger.debug("cannot hold `%s`: %s", charter.shape.name, error)
            else:
                keys.append(charter.key)
        return tuple(keys)

    async def room(self, profile: Profile) -> Profile:
        """Complete the profile by the memory for a model that is yet to be chosen."""
        options = self.options.inference
        device = await self.worker.run(choose, options.device, torch.float32, Quant.NONE)
        memory, own = self._memory(device)
        return replace(profile, memory_bytes=memory, reserve_bytes=own)

    async def describe(self, name: str, quant: Quant, context: int) -> Charter:
        """Return the charter of a further model for the mesh.

        Raises:
            ModelError: the model is not found locally, or cannot be run.
        """
        source = await self._resolve(name)
        inference = replace(self.options.inference, quant=quant, dtype=None, draft=None)
        shape = (await self._open(source, inference)).shape
        asked = replace(self.options, context=context, inference=inference)
        charter = create_charter(asked, shape, await self._digest(source))
        holds = name, quant if self.options.inference.quant else None
        if holds not in self.described:
            self.described.append(holds)
        return charter

    async def longest(self, charter: Charter) -> int:
        """Return the most tokens of a session that a served model takes.

        Raises:
            ModelError: this node neither has its configuration nor has fetched it.
        """
        try:
            source = await self._find(charter, of_any_quant=True)  # all have the same context
        except ModelError:
            charter = replace(charter, quant=self.options.inference.quant or charter.quant)
            try:
                source = await self._find_in(self.cache / "weights" / name_of(charter), charter)
            except ModelError:
                raise ModelMissing(
                    f"This node does not know how long a context `{charter.shape.name}` takes",
                    hint="do this on a node that has this model",
                ) from None
        shape = await self.worker.run(shape_of, source, None, Quant.NONE, self.cache)
        return shape.context

    async def offer(
        self, model: ModelRuntime, profile: Profile, *, is_further: bool = False
    ) -> Profile:
        """Measure the speed and memory that this node offers; return its completed profile.

        The model of a further ring runs with the threads that were chosen for the first one.

        Raises:
            ModelError: its weights are damaged.
            OutOfMemory: there is no memory to measure one layer.
        """
        run, options = self.worker.run, self.options
        dtype: torch.dtype = getattr(torch, model.shape.dtype)
        what = model.source, dtype, self.cache, model.quant, model.device
        with _reporting_memory(model.source.name):
            if not is_further:
                await model.calibrate()
            weights = await run(manifest, model.source, self.cache)
            speed = await run(measure_speed, *what)
        memory, own = self._memory(model.device)
        return replace(
            profile,
            memory_bytes=max(0, memory - (model.draft.bytes if model.draft else 0)),
            reserve_bytes=own + reserved_bytes(model.shape),
            layer_s=speed.layer_s,
            head_s=speed.head_s,
            span=options.layers,
            model=model.source.name,
            weights=weights,
        )

    def _memory(self, device: torch.device) -> tuple[int, int]:
        """Return the memory for models on a device, and what of it the process takes already."""
        own = process_memory() + RUNTIME_BYTES if device == CPU else 0
        limit = self.options.inference.memory_bytes
        return memory_budget(limit=limit, device=device, own=own), own

    async def _find(self, charter: Charter, *, of_any_quant: bool = False) -> Source:
        """Find the model of a charter: one of the node's own, or without any by its name.

        Raises:
            ModelError: it is not found, or none of the node's own has its configuration.
            OutOfMemory: there is no memory to read one that may have it.
        """
        options, error = self.options, None
        quant = options.inference.quant
        own = (options.model, *options.more_models) if options.model else ()
        named = [*((each, quant) for each in own), *self.described]
        others = () if own else ((charter.shape.name, quant),)
        for name, its_quant in (*named, *others):
            try:
                source = await self._resolve(name, is_own=(name, its_quant) in named)
                digest = await self._digest(source)
                refuse_other(charter, source.name, digest, None if of_any_quant else its_quant)
            except OutOfMemory:
                raise
            except ModelError as found:
                error = error or found
            else:
                return source
        assert error is not None  # of the first one
        raise error

    async def _find_in(self, folder: Path, charter: Charter) -> Source:
        """Open the model of a charter in a folder; raise `ModelError` if it is not there."""
        name = charter.shape.name
        source = await self._run(name, open_folder, name, folder)
        quant = self.options.inference.quant
        refuse_other(charter, source.name, await self._digest(source), quant)
        return source

    async def hash_weights(self, model: ModelRuntime) -> tuple[bytes, ...]:
        """Return the manifest of the weights that are here now."""
        return await self.worker.run(manifest, model.source, self.cache)

    async def part_sizes(self, model: ModelRuntime) -> list[int]:
        """Return the most bytes of the file of each part."""
        return await self.worker.run(most_bytes, model.source)

    async def parts(self, model: ModelRuntime) -> ModelParts:
        """Read the headers of the weights, to send them to other nodes."""
        return await self.worker.run(ModelParts, model.source)

    async def digest_folder(self, name: str, folder: Path) -> Digest:
        """Return the digest of the configuration in a folder; raise `ModelError` without one."""
        return await self._digest(await self.worker.run(open_folder, name, folder))

    async def check_parts(self, name: str, folder: Path, weights: Mapping[str, int]) -> None:
        """Check the part of each tensor that a peer listed; raise `PeerFault` if one is wrong."""
        await self.worker.run(
            check_parts, await self.worker.run(open_folder, name, folder), weights
        )

    async def _open(self, source: Source, config: InferenceConfig) -> ModelRuntime:
        draft = await self._resolve(config.draft) if config.draft else None
        config = replace(config, cache=self.cache)
        with _reporting_memory(source.name):
            hashing = asyncio.ensure_future(asyncio.to_thread(hash_files, source, self.cache))
            try:
                return await ModelRuntime.open(source, self.worker, config, draft)
            finally:
                await hashing

    async def _resolve(self, model: str, *, is_own: bool = True) -> Source:
        return await self._run(model, partial(resolve, model, offline=True, is_own=is_own))

    async def _digest(self, source: Source) -> Digest:
        return Digest(await self._run(source.name, config_digest, source))

    async def _run(
        self, model: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Read something of a model on the compute thread."""
        with _reporting_memory(model):
            return await self.worker.run(function, *args, **kwargs)


@contextmanager
def _reporting_memory(model: str) -> Iterator[None]:
    """Raise `OutOfMemory` for an allocation that failed: it may succeed later."""
    try:
        yield
    except OutOfMemory:
        raise
    except (MemoryError, RuntimeError, OSError, ModelError) as error:
        if (lack := _find_lack(error)) is None:
            raise
        reason = f": {lack}" if str(lack) else ""  # Python's own has no text
        raise OutOfMemory(
            f"Not enough memory to prepare `{model}`{reason}",
            hint="free memory, or raise its limit",
        ) from error


def _find_lack(error: BaseException) -> BaseException | None:
    """Return the failed allocation that an error is, or follows from, as its traceback shows.

    transformers raises some errors in handlers of others, without naming a cause.
    """
    found: BaseException | None = error
    while found is not None and not is_out_of_memory(found):
        context = None if found.__suppress_context__ else found.__context__
        found = found.__cause__ or context
    return found
