"""Profiling of a node: resolve its model, hash its weights, measure its speed."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from meshllm.model.device import CPU
from meshllm.model.files.manifest import config_digest, hash_files, manifest
from meshllm.model.files.source import Source, resolve
from meshllm.model.shape import process_memory, workspace_bytes
from meshllm.model.timing import measure_speed, memory_budget
from meshllm.names import Digest
from meshllm.node.compute.worker import Worker
from meshllm.node.founding import amend, found_charter, refuse_other
from meshllm.node.options import InferenceConfig, NodeOptions
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile

RUNTIME_BYTES = 256 << 20  # overhead of a serving process, whatever the model
FIRST_MODEL = "builtin"  # of a mesh whose founder gives no `--model`


@dataclass(frozen=True, slots=True)
class Preparation:
    """Loads and profiles the model of a node, on its compute thread."""

    options: NodeOptions
    worker: Worker
    cache: Path
    """Folder of cached digests and measurements."""

    async def found(self) -> tuple[ModelRuntime, Charter]:
        """Open the model of a new mesh, and create its charter.

        Raises:
            ModelError: the model is not found locally, or cannot be run.
        """
        source = await self._resolve(self.options.model or FIRST_MODEL)
        model = await self._open(source, self.options.inference)
        charter = found_charter(self.options, model.shape, await self._digest(source))
        return model, amend(charter, self.options, {}, model.shape.context)

    async def join(self, charter: Charter) -> ModelRuntime:
        """Open the model of the mesh.

        The charter may be amended meanwhile, but its model does not change.

        Raises:
            ModelError: the model is not found locally, or the options name a different one.
        """
        own = self.options.model
        source = await self._resolve(own or charter.shape.name, is_own=own is not None)
        inference = self.options.inference
        refuse_other(charter, source.name, await self._digest(source), inference.quant)
        config = replace(inference, dtype=charter.dtype.name.lower(), quant=charter.quant)
        return await self._open(source, config)

    async def offer(self, model: ModelRuntime, profile: Profile) -> Profile:
        """Measure the speed and memory that this node offers; return its completed profile."""
        run, options = self.worker.run, self.options
        await model.calibrate()
        weights = await run(manifest, model.source, self.cache)
        dtype: torch.dtype = getattr(torch, model.shape.dtype)
        what = model.source, dtype, self.cache, model.quant, model.device
        speed = await run(measure_speed, *what)
        own = process_memory() + RUNTIME_BYTES if model.device == CPU else 0
        limit = options.inference.memory_bytes
        memory = memory_budget(limit=limit, device=model.device, own=own)
        return replace(
            profile,
            memory_bytes=max(0, memory - (model.draft.bytes if model.draft else 0)),
            reserve_bytes=own + workspace_bytes(model.shape),
            layer_s=speed.layer_s,
            head_s=speed.head_s,
            span=options.layers,
            model=model.source.name,
            weights=weights,
        )

    async def _open(self, source: Source, config: InferenceConfig) -> ModelRuntime:
        draft = await self._resolve(config.draft) if config.draft else None
        config = replace(config, cache=self.cache)
        hashing = asyncio.ensure_future(asyncio.to_thread(hash_files, source, self.cache))
        try:
            return await ModelRuntime.open(source, self.worker, config, draft)
        finally:
            await hashing

    async def _resolve(self, model: str, *, is_own: bool = True) -> Source:
        return await self.worker.run(partial(resolve, model, offline=True, is_own=is_own))

    async def _digest(self, source: Source) -> Digest:
        return Digest(await self.worker.run(config_digest, source))
