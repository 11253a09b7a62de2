"""Names of policies, links without a delay, and a unit of memory."""

from meshllm.protocol.planning.plan import Links

NEAR = Links()
EXACT_POLICIES = ["fastest", "throughput"]
POLICIES = [*EXACT_POLICIES, "auto", "proportional"]

GIB = 1 << 30
