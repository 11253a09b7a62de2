"""Explains why one placement of a workload is slower than another."""

from math import inf

from meshllm.scheduler.placement import Workload
from meshllm.scheduler.schedule import Assessment

_SAME = 0.01  # of the time of a request: a smaller difference is none
_BUSY = 0.95  # of the capacity, from which on queues get long


def why_slower(workload: Workload, best: Assessment, other: Assessment) -> str:
    """Return one clause about the model that the other placement serves worse.

    Both are judged by one random sample of the load; placements are chosen by several.
    """
    if other.mean_s < best.mean_s * (1 - _SAME):
        return "it is faster for this random sample of the load, but not for several"
    if other.mean_s <= best.mean_s * (1 + _SAME):
        more = other.machines - best.machines
        return f"it is as fast with {more} more of the machines" if more > 0 else "it is as fast"
    held = {each.model for each in other.replicas}
    losses = [
        (served.load.rate * (theirs.total_s[0] - ours.total_s[0]), model)
        if (theirs.served or not theirs.refused) and model in held
        else (inf, model)
        for model, (served, ours, theirs) in enumerate(
            zip(workload.models, best.models, other.models, strict=True)
        )
    ]
    _, model = max(losses)
    name = f"`{workload.names[model]}`"
    ours, theirs = best.models[model], other.models[model]
    if theirs.refused:
        return f"it refuses {theirs.refused} of {theirs.refused + theirs.served} for {name}"
    if model not in held:
        return f"it has no replica of {name}"
    waits, steps = theirs.ttft_s[0] - ours.ttft_s[0], theirs.token_s[0] - ours.token_s[0]
    answer = workload.models[model].load.answer.mean
    if waits >= steps * answer:
        return (
            f"the first token of {name} comes after {_seconds(theirs.ttft_s[0])},"
            f" not {_seconds(ours.ttft_s[0])}{_queue(workload, other, model)}"
        )
    return (
        f"a token of {name} takes {theirs.token_s[0] * 1e3:.1f} ms,"
        f" not {ours.token_s[0] * 1e3:.1f} ms"
    )


def _queue(workload: Workload, other: Assessment, model: int) -> str:
    pairs = zip(other.replicas, other.capacities, strict=True)
    capacity = sum(each for replica, each in pairs if replica.model == model)
    load = workload.models[model].load.rate / capacity
    return f", as its replicas are {load:.0%} busy" if load > _BUSY else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
