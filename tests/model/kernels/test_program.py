"""Lists of kernel calls run in order, each with its arguments and threads."""

from collections.abc import Mapping

import pytest
import torch
from llvmlite import ir

from meshllm.model.kernels import jit
from meshllm.model.kernels.gemm_int8 import OUTPUTS, dequantise
from meshllm.model.kernels.ir import INT, Code
from meshllm.model.kernels.jit import JitFunction
from meshllm.model.kernels.program import Call, Program
from meshllm.model.modules.int8 import pack
from meshllm.model.steps.lowering import calls_for

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


def test_calls_run_in_order_each_time() -> None:
    x, y = torch.zeros(64), torch.ones(64)
    add = calls_for(aten.add.Tensor, (x, y), {}, [x]) or []
    double = calls_for(aten.mul.Tensor, (x, 2.0), {}, [x]) or []
    program = Program([*add, *double, *add])

    program.run()
    assert x.eq(3.0).all()

    program.run()
    assert x.eq(9.0).all()


@pytest.mark.parametrize("has_team", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_a_call(
    monkeypatch: pytest.MonkeyPatch, threads: int, *, has_team: bool
) -> None:
    if not has_team:
        monkeypatch.setattr(jit, "openmp_parallel", lambda: None)
    packed, calls = pack(torch.randn(8 * OUTPUTS, 96)), list[Call]()
    y = torch.empty(96, 8 * OUTPUTS, dtype=torch.bfloat16)
    with jit.observe_calls(lambda *call: calls.append(Call.of(*call))):
        dequantise(packed["data"], packed["scale"], y)
    expected = y.clone()
    program = Program(calls)

    for _ in range(50):
        y.zero_()
        program.share(0, threads)
        program.run()
        assert torch.equal(y, expected)


@pytest.mark.parametrize("threads", [2, 7])
def test_calls_wait_for_the_blocks_of_those_before(threads: int) -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        after = code.do.urem(code.do.add(block, code.index(1)), fields["blocks"])
        one, other = (code.load(INT, fields["given"], at) for at in (block, after))
        with code.loop(fields["rounds"], code.do.add(one, other)) as loop:  # takes a while
            loop.next = [code.do.add(loop.carried[0], fields["number"])]
        code.store(INT, loop.next[0], fields["to"], block)

    fields = "*given", "*to", "blocks", "rounds", "number"
    native, blocks, rounds, count = JitFunction(fields, write), 3, 20_000, 99
    values = torch.zeros(2, blocks, dtype=torch.int64)
    places = [each.data_ptr() for each in values]
    program = Program(
        [
            Call.of(
                native,
                blocks,
                threads if number % 3 else 1,
                [places[number % 2], places[1 - number % 2], blocks, rounds, number],
            )
            for number in range(count)
        ]
    )
    expected = torch.zeros(blocks, dtype=torch.int64)
    for number in range(count):
        expected = expected + expected.roll(-1) + number * rounds

    for _ in range(20):
        values.zero_()
        program.run()
        assert torch.equal(values[count % 2], expected)


def test_calls_are_observed_only_within_the_block() -> None:
    x, heard = torch.zeros(16), list[object]()
    (call,) = calls_for(aten.add.Tensor, (x, x), {}, [x]) or []

    values = list(call.fields.values())

    with jit.observe_calls(lambda *call: heard.append(call)):
        with jit.observe_calls(None):
            call.native(1, 1, *values)
        assert not heard
        call.native(1, 1, *values)
    call.native(1, 1, *values)

    assert heard == [(call.native, 1, 1, tuple(values))]
