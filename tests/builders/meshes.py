"""Meshes to schedule: published models and machines, with loads that they can about serve."""

from dataclasses import replace
from random import Random

from meshllm.names import NodeId
from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.estimate import Estimate
from meshllm.scheduler.load import Lengths, ModelLoad
from meshllm.scheduler.machine import MachineKind
from meshllm.scheduler.placement import ServedModel, Workload
from meshllm.scheduler.proportional import memory_proportional

QWEN_06B = Architecture("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, is_tied=True)
LLAMA_1B = Architecture("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, is_tied=True)
LLAMA_8B = Architecture("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256)
QWEN_32B = Architecture("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936)
LLAMA_13B = Architecture("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000)
CODELLAMA_34B = Architecture("codellama-34b", 48, 8192, 64, 8, 128, 22016, 32000)
LLAMA_70B = Architecture("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256)
ARCHITECTURES = (QWEN_06B, LLAMA_1B, LLAMA_8B, QWEN_32B, LLAMA_70B)

GIB = 1 << 30
A100 = MachineKind("a100", 80 * GIB, 312e12, 2.039e12)
GH200 = MachineKind("gh200", 96 * GIB, 989e12, 4.0e12)
KINDS = (
    A100,
    GH200,
    MachineKind("4090", 24 * GIB, 165e12, 1.008e12),
    MachineKind("m2-ultra", 128 * GIB, 27e12, 0.8e12),
    MachineKind("desktop", 32 * GIB, 1.5e12, 0.06e12),
    MachineKind("laptop", 12 * GIB, 0.8e12, 0.04e12),
)
"""Public peak figures in bfloat16, dense."""
NODE = NodeId(bytes(32))

CHAT = ModelLoad(1.0, Lengths.lognormal(300, 1000), Lengths.lognormal(200, 500))


def mesh(*models: ServedModel, kinds: tuple[MachineKind, ...] = (A100,)) -> Workload:
    """Make a mesh on a fast network."""
    return Workload(models, kinds, {}, LinkSpeed(0.0001, 12.5e9))


def served(architecture: Architecture, rate: float = 1.0, load: ModelLoad = CHAT) -> ServedModel:
    """Make a model with the load of a chat."""
    return ServedModel(architecture, replace(load, rate=rate))


def random_mesh(seed: int, *, kinds: int = 4, count: int = 6, models: int = 3) -> Workload:
    """Draw two models and two kinds of machines or more, their links and loads.

    All models fit. Rates are 0.3 to 1.2 times what the placement by memory can serve, and at most
    30 times the smallest.
    """
    random = Random(seed)
    while True:
        chosen = random.sample(KINDS, random.randint(2, kinds))
        machines = tuple(replace(kind, count=random.randint(1, count)) for kind in chosen)
        loads = [
            ModelLoad(
                1.0,
                Lengths.lognormal(median := random.choice([50, 200, 1000, 3000]), 3 * median),
                Lengths.lognormal(median := random.choice([20, 100, 300, 1000]), 3 * median),
            )
            for _ in range(random.randint(2, models))
        ]
        names = [kind.name for kind in machines]
        speeds = {
            (a, b): LinkSpeed(random.choice([1e-4, 1e-3, 0.01, 0.05]), random.choice([1e7, 1e9]))
            for at, a in enumerate(names)
            for b in names[at:]
        }
        architectures = random.sample(ARCHITECTURES, len(loads))
        found = Workload(tuple(map(ServedModel, architectures, loads)), machines, speeds)
        if (loaded := _loaded(found, random)) is not None:
            return loaded


def _loaded(found: Workload, random: Random) -> Workload | None:
    """Set the rates; None if a model does not fit."""
    placed = memory_proportional(found)
    rates = []
    for number, each in enumerate(found.models):
        own = [option for option in placed if option.model == number]
        capacity = sum(Estimate(option.engine, each.load).capacity for option in own)
        rates.append(capacity * random.uniform(0.3, 1.2))
    if not all(rates):
        return None
    most = 30 * min(rates)
    models = (
        replace(each, load=replace(each.load, rate=min(rate, most)))
        for each, rate in zip(found.models, rates, strict=True)
    )
    return replace(found, models=tuple(models))
