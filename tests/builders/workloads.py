"""Workload files, and meshes whose nodes have measured cost tables."""

from dataclasses import replace

from meshllm.status import CostTable, MeshStatus
from tests.builders.status import status_of, with_node

PAIR = """
[[model]]
name = "builtin"
rate = 50.0
prompt = [10, 100]
answer = 60
[[model]]
name = "big"
config = "big.json"
quant = "int8"
rate = 0.2
prompt = {median = 200, p90 = 600}
answer = 100
[[machine]]
name = "desktop"
count = 3
memory = "16GB"
tflops = 2
gb_s = 60
[[machine]]
name = "laptop"
memory = "8GB"
tflops = 1
gb_s = 40
[[link]]
a = "desktop"
b = "laptop"
latency_ms = 2
mbit_s = 100
"""

COSTS = CostTable("builtin", ((1, 2.0), (8, 2.5), (32, 9.0)), 1.0)


def mesh_with_costs(costs: CostTable | None = COSTS) -> MeshStatus:
    status = status_of(2)
    assert status.model is not None
    named = replace(status, model=replace(status.model, name="builtin"))
    return with_node(named, 1, costs=costs)


def without_load(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(each for each in lines if not each.startswith(("rate", "prompt", "answer")))
