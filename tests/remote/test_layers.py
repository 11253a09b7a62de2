"""Batches through the layers of a ring: what comes out, and what a lost node costs."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.errors import Busy, LinkLost, ModelError, TimedOut
from meshllm.model.files.source import Source
from meshllm.model.training.lora import applied, pair_name, read_adapters
from meshllm.names import Span
from meshllm.protocol.training.codec import Direction
from meshllm.remote import layers as remote
from meshllm.remote.layers import RemoteLayers, Sequences
from meshllm.testing.models import stock_model
from tests.builders.frozen_ring import FrozenRing

FORWARD, BACKWARD, KEEPING = Direction.FORWARD, Direction.BACKWARD, Direction.FORWARD_KEEPING


@pytest.fixture
def width(source: Source) -> int:
    return int(source.config.hidden_size)


def adapter(width: int, *indices: int) -> dict[str, Tensor]:
    """Make an adapter of rank 2 of each of the layers."""
    found = {}
    for index in indices:
        name = pair_name(index, "self_attn.o_proj", 0)
        found[f"{name}.a"] = torch.randn(2, width).requires_grad_()
        found[f"{name}.b"] = torch.randn(width, 2).requires_grad_()
    return found


def whole(
    source: Source, hidden: Tensor, adapters: Mapping[str, Tensor], mask: Tensor | None = None
) -> Tensor:
    """Run the layers of the stock model with adapters, up to its last norm."""
    model: Any = stock_model(source)
    model.requires_grad_(False)
    model.model.norm = torch.nn.Identity()
    with applied(dict(enumerate(model.model.layers)), read_adapters(dict(adapters))):
        found: Tensor = model.model(
            inputs_embeds=hidden, attention_mask=mask, use_cache=False
        ).last_hidden_state
    return found


def grads(output: Tensor, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    grad = torch.randn(output.shape).to(output)
    return list(torch.autograd.grad(output, list(inputs.values()), grad))


def test_hidden_states_and_gradients_are_those_of_one_process(
    source: Source, ring: FrozenRing, layers: RemoteLayers, width: int
) -> None:
    hidden, adapters = torch.randn(3, 5, width, requires_grad=True), adapter(width, 1, 4)
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[0, :2] = 0
    inputs = {"hidden": hidden, **adapters}

    here = layers(hidden, sequences=Sequences(mask), adapters=adapters)

    there = whole(source, hidden, adapters, mask)
    assert torch.equal(here, there)
    for own, its in zip(grads(here, inputs), grads(there, inputs), strict=True):
        torch.testing.assert_close(own, its)
    low, high = ring.cuts
    assert ring.passes == [(low, KEEPING), (high, KEEPING), (high, BACKWARD), (low, BACKWARD)]


def test_micro_batches_give_the_same_numbers(
    source: Source, layers: RemoteLayers, width: int, small_batches: Callable[[int], None]
) -> None:
    small_batches(10)
    hidden, adapters = torch.randn(5, 5, width, requires_grad=True), adapter(width, 0)
    mask = torch.ones(5, 5, dtype=torch.int64)
    mask[4, :3] = 0
    inputs = {"hidden": hidden, **adapters}

    here = layers(hidden, sequences=Sequences(mask), adapters=adapters)

    there = whole(source, hidden, adapters, mask)
    torch.testing.assert_close(here, there)
    for own, its in zip(grads(here, inputs), grads(there, inputs), strict=True):
        torch.testing.assert_close(own, its)


def test_a_sequence_longer_than_a_micro_batch_is_not_cut(
    ring: FrozenRing, layers: RemoteLayers, width: int, small_batches: Callable[[int], None]
) -> None:
    small_batches(4)

    layers(torch.randn(2, 5, width))

    assert len(ring.passes) == 2 * len(ring.cuts)


def test_any_span_of_layers_can_be_asked_for(
    source: Source, ring: FrozenRing, layers: RemoteLayers, width: int
) -> None:
    hidden = torch.randn(1, 5, width)

    parts = layers(layers(layers(hidden, Span(0, 1)), Span(1, 5)), Span(5, 6))

    assert torch.equal(parts, whole(source, hidden, {}))
    assert layers(hidden, Span(3, 3)) is hidden
    assert layers(hidden[:0]).shape == (0, 5, width)
    assert [span for span, _ in ring.passes] == [Span(0, 1), Span(1, 2), Span(2, 5), Span(5, 6)]
    with pytest.raises(ModelError, match="beyond the 6 layers"):
        layers(hidden, Span(5, 7))


def test_nothing_is_kept_or_sent_back_below_the_lowest_adapter(
    ring: FrozenRing, layers: RemoteLayers, width: int
) -> None:
    adapters = adapter(width, 3)

    found = grads(layers(torch.randn(1, 5, width), adapters=adapters), adapters)

    low, high = ring.cuts
    assert ring.passes == [(low, FORWARD), (high, KEEPING), (high, BACKWARD)]
    assert len(found) == len(adapters)


def test_without_gradients_nothing_is_kept(
    ring: FrozenRing, layers: RemoteLayers, width: int
) -> None:
    with torch.no_grad():
        layers(torch.randn(1, 5, width, requires_grad=True))

    assert {direction for _, direction in ring.passes} == {FORWARD}


def test_a_lost_node_costs_one_repetition(
    source: Source, ring: FrozenRing, layers: RemoteLayers, naps: list[float], width: int
) -> None:
    hidden = torch.randn(1, 5, width, requires_grad=True)
    ring.faults = [None, LinkLost("gone"), TimedOut("no ring"), None, None, Busy("later")]

    output = layers(hidden)
    (grad,) = grads(output, {"hidden": hidden})

    there = whole(source, hidden, {})
    assert torch.equal(output, there)
    torch.testing.assert_close(grad, grads(there, {"hidden": hidden})[0])
    assert ring.asked == 3  # how the ring is cut: at first, and after each loss
    assert naps == [remote.FIRST_RETRY_S, remote.BACKOFF * remote.FIRST_RETRY_S]


def test_a_gradient_goes_back_through_a_ring_that_was_cut_otherwise(
    source: Source, ring: FrozenRing, layers: RemoteLayers, width: int
) -> None:
    hidden, adapters = torch.randn(2, 5, width, requires_grad=True), adapter(width, 1, 3, 5)
    inputs = {"hidden": hidden, **adapters}
    output = layers(hidden, adapters=adapters)
    ring.cuts = [Span(0, 1), Span(1, 4), Span(4, 6)]
    ring.forget()
    ring.faults = [LinkLost("gone")]

    found = grads(output, inputs)

    for own, its in zip(found, grads(whole(source, hidden, adapters), inputs), strict=True):
        torch.testing.assert_close(own, its)


def test_what_a_node_does_not_keep_any_more_is_computed_again(
    source: Source, ring: FrozenRing, layers: RemoteLayers, naps: list[float], width: int
) -> None:
    hidden = torch.randn(1, 5, width, requires_grad=True)
    output = layers(hidden)
    ring.forget()

    (grad,) = grads(output, {"hidden": hidden})

    torch.testing.assert_close(grad, grads(whole(source, hidden, {}), {"hidden": hidden})[0])
    assert not naps


def test_a_node_that_stays_lost_ends_the_pass(
    ring: FrozenRing, layers: RemoteLayers, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", -1.0)
    ring.faults = [LinkLost("gone")]

    with pytest.raises(LinkLost, match="gone"):
        layers(torch.randn(1, 5, width))


def test_a_batch_that_is_refused_is_not_repeated(
    ring: FrozenRing, layers: RemoteLayers, naps: list[float], width: int
) -> None:
    ring.faults = [ModelError("too long")]

    with pytest.raises(ModelError, match="too long"):
        layers(torch.randn(1, 5, width))
    assert not naps


def test_an_error_ends_the_other_micro_batches(layers: RemoteLayers) -> None:
    ended = threading.Event()

    def waits(stop: threading.Event) -> None:
        stop.wait()
        ended.set()

    def fails(_stop: threading.Event) -> None:
        raise ModelError("too long")

    with pytest.raises(ModelError):
        layers.in_parallel([fails, waits])
    assert ended.wait(60)


def test_the_dtype_of_the_caller_is_kept(layers: RemoteLayers, width: int) -> None:
    hidden = torch.randn(1, 5, width, dtype=torch.bfloat16, requires_grad=True)

    output = layers(hidden)
    (grad,) = grads(output, {"hidden": hidden})

    assert (output.dtype, grad.dtype) == (torch.bfloat16, torch.bfloat16)
