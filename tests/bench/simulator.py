"""Speed of the simulator of workloads: ``python -m tests.bench.simulator``.

Three replicas of Llama-3.1-8B each: engines of their own, nodes alone, and rings of three. A row
has the processor seconds for all requests, and the share of the predicted capacity.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshllm.scheduler.estimate import Estimate
from meshllm.scheduler.load import sample
from meshllm.scheduler.placement import LayerAllocation, make_option
from meshllm.scheduler.simulator import SimulatedReplica, simulate
from tests.bench.report import Report, parser_of
from tests.builders.meshes import A100, CHAT, LLAMA_8B, mesh, served

REPLICAS = 3
SHARE = 0.7
"""Of the predicted capacity, that is asked for."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One kind of replicas."""

    name: str
    requests: int
    processor_s: float


def measure(name: str, machines: int, requests: int, *, provider: bool = False) -> Simulated:
    """Simulate requests on equal replicas."""
    where = mesh(served(LLAMA_8B), kinds=(replace(A100, is_provider=provider),))
    option = make_option(where, 0, (0,) * machines, LayerAllocation.BALANCED)
    assert option is not None
    rate = SHARE * REPLICAS * Estimate(option.engine, CHAT).capacity
    asked = sample([replace(CHAT, rate=rate)], requests)
    began = time.process_time()
    simulate([SimulatedReplica(0, option.engine)] * REPLICAS, asked)
    return Simulated(name, len(asked), time.process_time() - began)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("simulator", __doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args(arguments)
    report = Report(options)
    rows = [
        measure("providers", 1, options.requests, provider=True),
        measure("nodes", 1, options.requests),
        measure("rings of 3", 3, options.requests),
    ]
    report.say(
        *(f"{row.name:<10}  {row.requests:>7} requests  {row.processor_s:>5.1f} s" for row in rows)
    )
    report.write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
