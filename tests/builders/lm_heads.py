"""LM heads of tiny models, whole or in parts."""

from typing import Any

from meshllm.model.files.source import Source
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.names import Span

LAYERS, VOCABULARY = 6, 128
PARTS = range(64), range(64, VOCABULARY)


def head_of(source: Source, outputs: range | None, **options: Any) -> Shard:
    end = Span(LAYERS, LAYERS)
    return load_shard(source, end, embed=False, head=True, outputs=outputs, **options)
