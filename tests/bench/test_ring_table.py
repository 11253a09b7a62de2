from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshllm.bench.fleet import Fleet
from meshllm.bench.ring_table import (
    TRANSFORMERS,
    Contestant,
    RingBenchmark,
    Run,
    measure,
    random_model,
    table,
)
from meshllm.errors import UserError
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.names import Quant
from meshllm.node.ring.local_ring import LocalRing
from meshllm.request import Answer, Request, Sampling

PLAIN, ONE, TWO = Contestant(), Contestant(1), Contestant(2)


def test_every_contestant_gets_a_row() -> None:
    report: list[str] = []
    quants = Quant.NONE, Quant.INT8

    rows = measure(
        RingBenchmark("tiny", (2,), 8, 4, rounds=2, threads=1, quants=quants), report.append
    )

    assert [(row.name, row.nodes, row.quant) for row in rows] == [
        (TRANSFORMERS, 0, "none"),
        ("ring of 2", 2, "none"),
        ("ring of 2, int8", 2, "int8"),
    ]
    assert all(row.ttft_ms > 0 and row.ms_per_token > 0 for row in rows)
    assert report[2:] == ["warming up", "round 1 of 2", "round 2 of 2"]


def test_onemkl_is_warmed_up_before_a_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    build = AutoModelForCausalLM.from_config

    def building(*args: object, **options: object) -> object:
        calls.append("build")
        return build(*args, **options)

    monkeypatch.setattr(
        "meshllm.bench.ring_table.warm_up_onemkl", lambda: calls.append("warm"), raising=False
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", building)

    with random_model("tiny", torch.float32):
        pass

    assert calls == ["warm", "build"]


def test_a_ring_settles_its_steps_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    tokens = LocalRing.tokens

    def noting(
        ring: LocalRing, ids: Sequence[int], sampling: Sampling, most: int
    ) -> AsyncIterator[int]:
        asked.append(most)
        return tokens(ring, ids, sampling, most)

    monkeypatch.setattr(LocalRing, "tokens", noting)

    measure(RingBenchmark("tiny", (1,), 8, 2, rounds=1, threads=1), lambda _: None)

    assert asked == [STEPS_BEFORE_REPLAY + 1, 2]


@pytest.mark.socket
def test_a_ring_of_processes_is_measured_against_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Request] = []
    answer = Fleet.answer

    async def noting(fleet: Fleet, request: Request) -> Answer:
        asked.append(request)
        return await answer(fleet, request)

    monkeypatch.setattr(Fleet, "answer", noting)
    case = RingBenchmark(
        "tiny", (2,), 16, 4, rounds=1, threads=1, quants=(Quant.INT8,), processes=True
    )

    plain, ring = measure(case, lambda _: None)

    assert (plain.name, ring.name) == (TRANSFORMERS, "ring of 2, int8")
    assert ring.ms_per_token > 0
    assert (plain.hop_ms, ring.hop_ms > 0) == (0.0, True)
    assert [each.max_tokens for each in asked] == [STEPS_BEFORE_REPLAY + 1, 4]
    assert [len(each.ids) for each in asked] == [16, 16]  # transformers tokenizes nothing either
    assert asked[0].ids != asked[1].ids


def test_ratios_are_medians_of_pairs() -> None:
    plain = [Run(10, 100), Run(10, 200), Run(10, 100)]
    mine = [Run(20, 50), Run(20, 100), Run(20, 100)]

    first, one = table({PLAIN: plain, ONE: mine})

    assert (first.decode_ratio, first.decode_ratio_one, first.ttft_ratio) == (1.0, 0.5, 1.0)
    assert (one.decode_ratio, one.decode_ratio_one, one.ttft_ratio) == (2.0, 1.0, 2.0)
    assert (one.ttft_ms, one.ms_per_token, one.tokens_per_second) == (20, 100, 10)


def test_a_ring_is_compared_with_the_smallest_of_its_quantisation() -> None:
    runs = {
        PLAIN: [Run(10, 100)],
        TWO: [Run(10, 50)],
        ONE: [Run(10, 40)],
        Contestant(2, Quant.INT8): [Run(10, 30)],
        Contestant(1, Quant.INT8): [Run(10, 15)],
    }

    rows = table(runs)

    assert [row.decode_ratio_one for row in rows] == [0.4, 0.8, 1.0, 0.5, 1.0]


def test_unknown_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match="Unknown model dimensions `gpt-9`"):
        measure(RingBenchmark("gpt-9", (1,), 8, 4, rounds=1, threads=1), lambda _: None)


def test_a_too_short_prompt_of_processes_is_refused() -> None:
    with pytest.raises(UserError, match="Cannot make a prompt of 3 tokens"):
        measure(
            RingBenchmark("tiny", (2,), 3, 4, rounds=1, threads=1, processes=True), lambda _: None
        )
