"""What a node finds out before it offers anything: model, weights, speed; knows no links."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshllm.model.manifest import config_digest, manifest
from meshllm.model.source import Source, resolve
from meshllm.model.speed import measure_speed, memory_budget
from meshllm.names import Digest, NodeId, Quant
from meshllm.node.engine import Decoding, Engine
from meshllm.node.founding import amend, found_charter, refuse_other
from meshllm.node.options import NodeOptions
from meshllm.node.worker import Worker, calibrate
from meshllm.protocol.charter import Charter
from meshllm.protocol.records import Profile

FIRST_MODEL = "builtin"  # of a mesh whose founder names none


@dataclass(frozen=True, slots=True)
class Preparation:
    """Looks at the model of one node, on its compute thread."""

    options: NodeOptions
    worker: Worker
    cache: Path
    """Folder for digests and measurements that are not made twice."""

    async def found(self) -> tuple[Engine, Charter]:
        """Choose the model of a new mesh, and write its charter.

        Raises:
            ModelError: the model is not here, or cannot be run.
        """
        source = await self._resolve(self.options.model or FIRST_MODEL)
        name = self.options.dtype
        dtype: torch.dtype | None = None if name in (None, "auto") else getattr(torch, name)
        engine = await self._open(source, dtype, Quant(self.options.quant or Quant.NONE))
        charter = found_charter(self.options, engine.shape, await self._digest(source))
        return engine, amend(charter, self.options, {}, engine.shape.context)

    async def join(
        self, charter: Charter, profiles: dict[NodeId, Profile]
    ) -> tuple[Engine, Charter]:
        """Take the model of the mesh; return its charter with what the options change in it.

        Raises:
            ModelError: the model is not here, or another one was asked for.
            UserError: the options name a node that nobody knows.
        """
        source = await self._resolve(self.options.model or charter.shape.name)
        refuse_other(charter, source.name, await self._digest(source), self.options.quant)
        dtype: torch.dtype = getattr(torch, charter.dtype.name.lower())
        engine = await self._open(source, dtype, charter.quant)
        return engine, amend(charter, self.options, profiles, engine.shape.context)

    async def offer(self, engine: Engine, profile: Profile) -> Profile:
        """Measure what this node has for the ring, and fill it into its profile."""
        run, shape = self.worker.run, engine.shape
        dtype: torch.dtype = getattr(torch, shape.dtype)
        if self.options.threads is None and engine.device.type == "cpu":
            await run(calibrate, self.worker.cores, shape.hidden_size, dtype)
        weights = await run(manifest, engine.source, self.cache)
        what = engine.source, dtype, self.cache, engine.quant, engine.device
        speed = await run(measure_speed, *what)
        memory = memory_budget(limit=self.options.memory_bytes, device=engine.device)
        return replace(
            profile,
            memory_bytes=max(0, memory - (engine.draft.bytes if engine.draft else 0)),
            layer_s=speed.layer_s,
            head_s=speed.head_s,
            span=self.options.layers,
            model=engine.source.name,
            weights=weights,
        )

    async def _open(self, source: Source, dtype: torch.dtype | None, quant: Quant) -> Engine:
        options = self.options
        draft = await self._resolve(options.draft) if options.draft else None
        decoding = Decoding(
            quant,
            self.cache,
            options.exact,
            options.speculation,
            wire=options.wire,
            draft=draft,
            prefix_bytes=options.prefix_bytes,
            device=options.device,
            memory_bytes=options.memory_bytes,
        )
        return await Engine.open(source, self.worker, dtype, decoding)

    async def _resolve(self, model: str) -> Source:
        return await self.worker.run(resolve, model, offline=True)

    async def _digest(self, source: Source) -> Digest:
        return Digest(await self.worker.run(config_digest, source))
