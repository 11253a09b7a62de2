"""The report of `meshllm ring plan --workload`: a placement of several models, and why."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import isfinite
from typing import Any

from meshllm.cli.ring.workload_spec import WorkloadSpec
from meshllm.cli.terminal import render
from meshllm.names import Quant
from meshllm.scheduler.placement import ReplicaOption
from meshllm.scheduler.reasons import why_slower
from meshllm.scheduler.schedule import (
    Assessment,
    OneMore,
    Schedule,
    SearchMethod,
    is_same_placement,
    one_more,
    schedule,
)
from meshllm.scheduler.simulator import Latencies

_REPLICAS = ("model", "replicas", "machines", "layers", "requests/s each", "KV tokens")
_MODELS = (
    "model", "asked/s", "refused", "first token s", "95 %", "ms per token", "95 %",
    "request s", "95 %",
)  # fmt: skip

_SEARCHED = {
    SearchMethod.EXACT: "search: exact",
    SearchMethod.LOCAL: "search: local; machines with `meshllm[plan]` may find another placement",
    SearchMethod.SOLVER: (
        "search: local and by OR-tools; machines without `meshllm[plan]`, or with another version"
        " of OR-tools, may find another placement"
    ),
}


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """A placement with its alternatives."""

    spec: WorkloadSpec
    found: Schedule
    more: tuple[OneMore, ...]

    @classmethod
    def make(cls, spec: WorkloadSpec) -> "WorkloadReport":
        """Schedule a workload; raise `ModelError` if a model does not fit."""
        found = schedule(spec.workload, spec.requests)
        return cls(spec, found, tuple(one_more(spec.workload, found.best, spec.requests)))

    def rings(self) -> dict[tuple[str, Quant], list[int]]:
        """Return the machines of each ring of nodes, by model; engines have no rings."""
        found = defaultdict[tuple[str, Quant], list[int]](list)
        for option in self.found.best.replicas:
            if not any(self.spec.workload.kinds[kind].is_provider for kind in option.kinds):
                model = self.spec.workload.models[option.model].architecture
                found[model.name, model.quant].append(option.machines)
        return dict(found)

    def fields(self) -> dict[str, Any]:
        """Lay it out for ``--json``."""
        best, up, memory = self.found.best, self.found.runner_up, self.found.proportional
        return {
            "placement": self._placement(best),
            "runner_up": up and self._placement(up) | {"reason": self._reason(up)},
            "by_memory": self._placement(memory) | {"reason": self._reason(memory)},
            "one_more": [
                {
                    "machine": each.kind,
                    "request_s": each.mean_s,
                    "tokens_per_s": each.tokens_per_s,
                }
                for each in self.more
            ],
            "unused": [{"machine": kind, "count": count} for count, kind in self._unused(best)],
            "searched": self.found.searched.value,
            "assumed": list(self.spec.assumed),
        }

    def text(self) -> str:
        """Lay it out as text."""
        best, up = self.found.best, self.found.runner_up
        spare = ", ".join(f"{count} {kind}" for count, kind in self._unused(best))
        return "\n".join(
            [
                render.table(_REPLICAS, self._replicas(best)),
                "",
                render.table(_MODELS, self._models(best)),
                "",
                *([f"unused: {spare}"] if spare else []),
                f"{best.mean_s:.2f} s per request, {best.tokens_per_s:.0f} tokens/s",
                *([f"runner-up, {self._lost(up)}"] if up else []),
                f"by memory alone, {self._lost(self.found.proportional)}",
                *(
                    f"one more {each.kind}: {each.mean_s:.2f} s per request"
                    f" ({each.mean_s / best.mean_s - 1:+.0%})"
                    for each in self.more
                ),
                _SEARCHED[self.found.searched],
                *(f"assumed: {each}" for each in self.spec.assumed),
            ]
        )

    def _unused(self, assessed: Assessment) -> list[tuple[int, str]]:
        """Return the machines that would save no time, by kind."""
        used = [sum(each) for each in zip(*(each.uses for each in assessed.replicas), strict=True)]
        pairs = zip(self.spec.workload.kinds, used, strict=True)
        return [(kind.count - use, kind.name) for kind, use in pairs if use < kind.count]

    def _lost(self, other: Assessment) -> str:
        if is_same_placement(other, self.found.best):
            return "the same"
        machines = "; ".join(
            f"{self._name(option)} {count}x {self._machines(option)}"
            for option, count in _counted(other)
        )
        time = f"{other.mean_s:.2f} s per request" if isfinite(other.mean_s) else "incomplete"
        return f"{time}: {self._reason(other)} ({machines})"

    def _reason(self, other: Assessment) -> str:
        return why_slower(self.spec.workload, self.found.best, other)

    def _replicas(self, assessed: Assessment) -> list[tuple[object, ...]]:
        return [
            (
                self._name(option),
                count,
                self._machines(option),
                " ".join(str(len(span)) for span in option.spans),
                assessed.capacities[assessed.replicas.index(option)],
                option.engine.room_tokens,
            )
            for option, count in _counted(assessed)
        ]

    def _models(self, assessed: Assessment) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        workload = self.spec.workload
        for name, served, found in zip(
            workload.names, workload.models, assessed.models, strict=True
        ):
            first, token, total = found.ttft_s, found.token_s, found.total_s
            rows.append(
                (name, served.load.rate, found.refused, first[0], first[2],
                 token[0] * 1e3, token[2] * 1e3, total[0], total[2])
            )  # fmt: skip
        return rows

    def _placement(self, assessed: Assessment) -> dict[str, Any]:
        workload = self.spec.workload
        models = zip(workload.names, workload.models, assessed.models, strict=True)
        return {
            "request_s": assessed.mean_s if isfinite(assessed.mean_s) else None,
            "tokens_per_s": assessed.tokens_per_s,
            "replicas": [
                {
                    "model": self._name(option),
                    "machines": [self.spec.workload.kinds[kind].name for kind in option.kinds],
                    "layers": [str(span) for span in option.spans],
                    "requests_per_s": capacity,
                    "room_tokens": option.engine.room_tokens,
                }
                for option, capacity in zip(assessed.replicas, assessed.capacities, strict=True)
            ],
            "models": [
                {"model": name, "rate": served.load.rate} | _times(found)
                for name, served, found in models
            ],
        }

    def _name(self, option: ReplicaOption) -> str:
        return self.spec.workload.names[option.model]

    def _machines(self, option: ReplicaOption) -> str:
        return "+".join(self.spec.workload.kinds[kind].name for kind in option.kinds)


def _counted(assessed: Assessment) -> list[tuple[ReplicaOption, int]]:
    """Return the replicas in order of model, equal ones once."""
    ordered = sorted(assessed.replicas, key=lambda each: (each.model, each.kinds, each.spans))
    return list(Counter(ordered).items())


def _times(found: Latencies) -> dict[str, Any]:
    def spread(times: tuple[float, float, float], scale: float) -> dict[str, float]:
        return dict(zip(("mean", "median", "p95"), (each * scale for each in times), strict=True))

    return {
        "served": found.served,
        "refused": found.refused,
        "tokens": found.tokens,
        "ttft_ms": spread(found.ttft_s, 1e3),
        "ms_per_token": spread(found.token_s, 1e3),
        "request_s": spread(found.total_s, 1.0),
    }
