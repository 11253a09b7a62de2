"""Messages and bytes per token on the wire: `python -m tests.bench.budget`.

Counted on the links of rings of 1 to 4 nodes, with a random model.
"""

import asyncio
from dataclasses import dataclass
from itertools import product

import torch

from meshllm.bench.ring_table import random_model
from meshllm.model.files.source import Source, resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.protocol.planning.plan import Ends
from meshllm.request import Sampling
from meshllm.testing.counting import CountingTransport
from meshllm.transport.contract import Channel
from meshllm_loopback import LoopbackTransport
from tests.bench.report import Report, parser_of

FEW, MANY = 4, 24  # tokens; the difference excludes the cost of the prompt


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of a token in one ring."""

    nodes: int
    ends: Ends
    messages_per_token: float
    bytes_per_hop: float
    beside_tensor: float


async def count(source: Source, nodes: int, ends: Ends, tokens: int) -> tuple[int, int]:
    """Return the number of Data messages and their bytes for an answer of ``tokens`` tokens."""
    transport = CountingTransport(LoopbackTransport())
    options = RingOptions(
        nodes=nodes, ends=ends, inference=InferenceConfig(threads=1, speculation=False)
    )
    async with open_local_ring(source, options, transport) as ring:
        async for _ in ring.tokens([1, 2, 3], Sampling(), tokens):
            pass
    sizes = [size for channel, size in transport.sent if channel is Channel.DATA]
    return len(sizes), sum(sizes)


def main() -> None:
    """Print the table."""
    report = Report(parser_of("budget", __doc__).parse_args(), threads=1)
    rows: list[Row] = []
    with random_model("tiny", torch.bfloat16) as folder:
        source = resolve(str(folder))
        row = source.config.hidden_size * 2
        report.say(
            f"hidden state of one token: {row} B\n",
            "| nodes | ends | messages per token | bytes per hop | besides the tensor |",
            "|---|---|---|---|---|",
        )
        for nodes, ends in product((1, 2, 3, 4), Ends):
            few = asyncio.run(count(source, nodes, ends, FEW))
            many = asyncio.run(count(source, nodes, ends, MANY))
            messages = (many[0] - few[0]) / (MANY - FEW)
            size = (many[1] - few[1]) / (many[0] - few[0]) if messages else 0
            beside = size - row if messages else 0
            rows.append(Row(nodes, ends, messages, size, beside))
            report.say(f"| {nodes} | {ends} | {messages:g} | {size:g} | {beside:g} |")
    report.write(rows, tensor_bytes=row)


if __name__ == "__main__":
    main()
