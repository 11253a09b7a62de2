"""A span of a tiny model, loaded in one or more pieces."""

import torch

from meshllm.model.files.source import Source
from meshllm.model.split.session_cache import SentRows
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner, SpanRunner
from meshllm.names import Span

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def runner_of(llama: Source, span: Span) -> Runner:
    return Runner(load_shard(llama, span, embed=span.start == 0, head=span.stop == 6))


def span_runner(source: Source, *spans: str) -> SpanRunner:
    pieces = [runner_of(source, Span.parse(span)) for span in spans]
    return SpanRunner(pieces, SentRows(1 << 30))
