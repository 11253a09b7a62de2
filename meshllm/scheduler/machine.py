"""Machines by their measured times or peak speeds, and the cost tables that these give.

A measured cost table takes precedence. For another model its entries are scaled by the ratio of
both models' rooflines at that number of rows, at the speeds that the table shows. Without one, each
operator takes as long as its roofline.

A machine with several devices computes each layer on all of them (tensor parallelism): it is as
fast as all together, apart from two all-reduces per layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Self

from meshllm.names import NodeId
from meshllm.protocol.planning.plan import Offer
from meshllm.scheduler.architecture import ITEM_BYTES, Architecture, Operator

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Rows of the table: dense where a device goes from memory-bound to compute-bound."""

MEASURED_ROWS = 256
MEASURED_TIMES = 4.24
"""Where only one row was measured, `MEASURED_ROWS` rows are assumed to take this many times its
time: Qwen3-0.6B in bf16 on one CPU core."""

ALL_REDUCE_S = 10e-6
"""Seconds that a small all-reduce takes between the devices of one machine (assumed)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a machine measured with one model."""

    model: Architecture
    layer_s: tuple[tuple[int, float], ...]
    """Numbers of rows (ascending), and seconds of a mean layer for them."""
    head_s: float
    """Of the final norm and head for one row."""


@dataclass(frozen=True, slots=True)
class MachineKind:
    """One kind of machine."""

    name: str
    memory_bytes: int
    """For weights and caches, of all devices together."""
    flops: float
    """Peak operations per second in bfloat16, of one device."""
    bandwidth: float
    """Peak bytes per second between memory and one device."""
    count: int = 1
    devices: int = 1
    device_link: float = inf
    """Bytes per second of the link between two devices."""
    is_provider: bool = False
    """It runs an engine of its own, which serves whole models and merges prefill with decode."""
    costs: Costs | None = None
    """What it measured; None takes the peak speeds."""
    models: frozenset[str] | None = None
    """Names of the models that it may hold; None for all."""

    @classmethod
    def with_costs(cls, name: str, memory_bytes: int, costs: Costs, count: int = 1) -> Self:
        """Derive the speeds of a machine from its measured times of one row and of the most."""
        (few, few_s), (many, many_s) = costs.layer_s[0], costs.layer_s[-1]
        moved = sum(each.moved_bytes for each in costs.model.operators(few))
        flops = sum(each.flops for each in costs.model.operators(many))
        return cls(name, memory_bytes, flops / many_s, moved / few_s, count, costs=costs)

    @classmethod
    def measured(
        cls, name: str, memory_bytes: int, layer_s: float, model: Architecture, count: int = 1
    ) -> Self:
        """Derive the speeds of a machine from the seconds of one layer of a model for one row."""
        moved = sum(each.moved_bytes for each in model.operators(1))
        flops = sum(each.flops for each in model.operators(MEASURED_ROWS))
        many_s = layer_s * MEASURED_TIMES
        return cls(name, memory_bytes, flops / many_s, moved / layer_s, count)

    @property
    def whole_bandwidth(self) -> float:
        """Peak bytes per second of all devices together."""
        return self.bandwidth * self.devices

    def may_hold(self, model: Architecture) -> bool:
        """Return whether it may hold layers of a model, if these fit."""
        return self.models is None or not self.models.isdisjoint({model.name, model.precise_name})

    def offer(self, node: NodeId, model: Architecture) -> Offer:
        """Return what it measured for a model, or predict it by the roofline of each operator."""
        if costs := self.costs:
            head_s = costs.head_s * self._ratio(model.head(1), costs.model.head(1))
            layer_s = tuple(
                (rows, seconds * (self._layer_s(model, rows) / self._layer_s(costs.model, rows)))
                for rows, seconds in costs.layer_s
            )
            return Offer(node, self.memory_bytes, layer_s, head_s)
        return Offer(
            node=node,
            memory_bytes=self.memory_bytes,
            layer_s=tuple((rows, self._layer_s(model, rows)) for rows in ROWS),
            head_s=self._seconds([model.head(1)]),
        )

    def _ratio(self, one: Operator, other: Operator) -> float:
        return self._seconds([one]) / self._seconds([other])

    def _layer_s(self, model: Architecture, rows: int) -> float:
        seconds = self._seconds(model.operators(rows))
        if self.devices == 1:
            return seconds
        sent = 2 * (self.devices - 1) / self.devices * rows * model.hidden * ITEM_BYTES
        return seconds + 2 * (ALL_REDUCE_S + sent / self.device_link)

    def _seconds(self, operators: Iterable[Operator]) -> float:
        flops, bandwidth = self.flops * self.devices, self.whole_bandwidth
        return sum(max(each.flops / flops, each.moved_bytes / bandwidth) for each in operators)
