import time

import pytest

from meshllm.node.compute.stopwatch import Stopwatch
from meshllm.protocol.session.messages import JobTimes


def test_each_moment_belongs_to_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0, 5_000, 7_000, 47_000, 50_999])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(moments))

    watch = Stopwatch()
    watch.queued()
    watch.serialised()
    watch.computed()
    watch.serialised()

    assert watch.spent == JobTimes(compute_us=40, serialise_us=5, queue_us=5)
    assert watch.spent.total_us <= 50_999 // 1000
