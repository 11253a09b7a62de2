"""Traces of a forward, and the reasons why a forward cannot be traced."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshllm.model.kernels import jit
from meshllm.model.kernels.jit import JitFunction
from meshllm.model.kernels.rms_norm import norm
from meshllm.model.modules.linear_onednn import PackedLinear
from meshllm.model.steps.trace import Attend, KernelCall, NotReplayable, Op, Trace, Tracer

aten = torch.ops.aten
HALF = torch.bfloat16


@torch.inference_mode()
def record(forward: Callable[[Tensor, Tensor], Tensor]) -> Trace:
    inputs = torch.randn(1, 2, 64).to(HALF), torch.arange(2)[None]
    tracer = Tracer(inputs)
    with tracer:
        output = forward(*inputs)
    return tracer.end(output)


def functions(recording: Trace) -> list[object]:
    return [item.function for item in recording.items if isinstance(item, Op)]


def test_views_are_no_operations() -> None:
    recording = record(lambda x, _: x.view(2, 64).transpose(0, 1)[:32].reshape(4, 8, 2) * 2)

    assert functions(recording) == [aten.mul.Tensor]
    assert recording.output.shape == (4, 8, 2)


def test_unused_results_are_left_out() -> None:
    def forward(x: Tensor, places: Tensor) -> Tensor:
        unused = places + 1
        _ = unused * 2
        return functional.silu(x) + x

    assert functions(record(forward)) == [aten.silu.default, aten.add.Tensor]


def test_in_place_writes_are_kept() -> None:
    def forward(x: Tensor, _: Tensor) -> Tensor:
        room = x.new_empty(1, 2, 64)
        room.copy_(x)
        return room.mul_(2)

    assert functions(record(forward)) == [aten.copy_.default, aten.mul_.Tensor]


@pytest.mark.parametrize("is_written", [False, True])
def test_an_unmodified_clone_may_be_compared_with_its_source(*, is_written: bool) -> None:
    def forward(x: Tensor, _: Tensor) -> Tensor:
        y = x + 1
        copy = y.clone()
        if is_written:
            y.mul_(1)
        return y * 2 if torch.equal(copy, y) else y

    if is_written:
        with pytest.raises(NotReplayable, match=r"aten.equal.default is data-dependent"):
            record(forward)
    else:
        assert functions(record(forward)) == [aten.add.Tensor, aten.mul.Tensor]


UNTRACEABLE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "looks": (lambda x, places: x[:, : int(places.max())] * 2, "is data-dependent"),
    "asks": (lambda x, _: x * 2 if torch.equal(x + 0, x) else x, "is data-dependent"),
    "draws": (lambda x, _: x + torch.rand(64).to(HALF), "is data-dependent or random"),
    "picks": (lambda x, _: x[x > 0] * 2, "is data-dependent or random"),
    "elsewhere": (lambda x, _: x.to("meta"), "another layout or device"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_forward_that_cannot_be_traced_says_why(name: str) -> None:
    forward, reason = UNTRACEABLE[name]

    with pytest.raises(NotReplayable, match=reason):
        record(forward)


def test_an_external_tensor_is_not_an_output() -> None:
    before = torch.ones(3)

    with pytest.raises(NotReplayable, match="this forward did not make"):
        record(lambda _x, _places: before)


def test_a_packed_matrix_is_an_external_tensor() -> None:
    try:
        linear = PackedLinear(torch.nn.Linear(64, 32, dtype=HALF))
    except RuntimeError:
        pytest.skip("this processor has no kernel for packed matrices")

    recording = record(lambda x, _: linear(x * 2))

    assert functions(recording)[-1] is linear._multiply


@pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")
def test_kernel_calls_are_traced_with_their_addresses() -> None:
    weight, before = torch.ones(64, dtype=HALF), torch.ones(1, 2, 64, dtype=HALF)

    recording = record(lambda x, _: norm(x * 2, weight, 1e-5))
    (call,) = [item for item in recording.items if isinstance(item, KernelCall)]

    assert call.values[1] == weight.data_ptr()
    assert not isinstance(call.values[0], int)
    with pytest.raises(NotReplayable, match="kernel argument `rows` points to a temporary"):
        record(lambda x, _: norm(before, weight, 1e-5) + x)


@pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")
@pytest.mark.parametrize("name", ["scales", "given"])
def test_an_address_is_trusted_because_the_kernel_declares_it(name: str) -> None:
    trusting = JitFunction((f"*{name}",), lambda *_: None, held=[name])
    other = JitFunction((f"*{name}",), lambda *_: None)
    there = torch.ones(1)  # made outside the trace

    def forward(kernel: JitFunction) -> Callable[[Tensor, Tensor], Tensor]:
        def call(x: Tensor, _: Tensor) -> Tensor:
            kernel(1, 1, there.data_ptr())
            return x * 2

        return call

    (call,) = [each for each in record(forward(trusting)).items if isinstance(each, KernelCall)]
    assert call.values == (there.data_ptr(),)
    with pytest.raises(NotReplayable, match=f"kernel argument `{name}` points to a temporary"):
        record(forward(other))


def attend(tracer: Tracer, x: Tensor, kept: str = "") -> Tensor:
    """Do what a layer does: update a cache and attend over it."""
    key, held = (x * 2)[:, None], [torch.zeros(1, 1, 5, 64, dtype=HALF)] * 2
    if kept != "no cache":
        tracer.update(lambda *_: tuple(held))(key, key, 7)
    if kept == "twice":
        tracer.update(lambda *_: tuple(held))(key, key, 8)
    seen = (held[0], held[1]) if kept != "others" else (held[0] + 1, held[1])
    with tracer.paused():
        out = torch.zeros(1, 2, 1, 64, dtype=HALF)
    if kept != "never":
        tracer.attended((x + 1)[:, None], seen, out, 0.5, None)
    return out[:, :, 0] + x


@pytest.mark.parametrize("kept", ["", "no cache", "twice", "others", "never"])
@torch.inference_mode()
def test_attention_reads_the_updated_cache(kept: str) -> None:
    x, places = torch.randn(1, 2, 64).to(HALF), torch.arange(2)[None]
    tracer = Tracer([x, places])
    with tracer:
        output = attend(tracer, x, kept)

    if kept:
        with pytest.raises(NotReplayable, match="atten"):
            tracer.end(output)
    else:
        (item,) = [each for each in tracer.end(output).items if isinstance(each, Attend)]
        assert (item.layer, item.scale, item.window) == (7, 0.5, None)
        assert item.key.shape == (1, 1, 2, 64)


def test_nothing_is_traced_after_the_block() -> None:
    tracer = Tracer([torch.ones(3)])
    with pytest.raises(ZeroDivisionError), tracer:
        raise ZeroDivisionError
    torch.ones(3).add(1)

    assert not tracer._items
