"""Frozen layers against the stock model: hidden states forward, gradients backward."""

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.errors import Busy, MeshError, ModelError, PeerFault
from meshllm.model.files.source import Source, open_folder
from meshllm.model.pauses import pausing
from meshllm.model.training import frozen_span
from meshllm.model.training.batch import pack, unpack
from meshllm.model.training.frozen_span import FrozenSpan
from meshllm.model.training.lora import applied, module_shape, pair_name, read_adapters
from meshllm.names import Span
from meshllm.testing.models import stock_model, tiny_model

NO_ROOM = 1 << 62
"""As `KEPT_PART`: no activation is kept."""
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 0, 0, 1, 2], [3, 4, 5, 6, 7]])


@pytest.fixture(params=["float32", "bfloat16"])
def source(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Source:
    if request.param == "float32":
        return open_folder("llama", llama)
    return tiny_model(tmp_path_factory.mktemp("half"), dtype=torch.bfloat16)


@pytest.fixture
def single(llama: Path) -> Source:
    return open_folder("llama", llama)


def hidden_for(source: Source) -> Tensor:
    hidden = torch.randn(2, 5, source.config.hidden_size)
    return hidden.to(next(stock_model(source).parameters()).dtype)


def adapters_of(source: Source, module: str, *layers: int) -> dict[str, Tensor]:
    """Make an adapter of rank 3 of a module in each of some layers."""
    size, found = source.config.hidden_size, dict[str, Tensor]()
    for layer in layers:
        name = pair_name(layer, module, 0)
        found |= {f"{name}.a": torch.randn(3, size) / 8, f"{name}.b": torch.randn(size, 3) / 8}
    return found


def stock_layers(
    source: Source, hidden: Tensor, adapters: Mapping[str, Tensor], **batch: Tensor
) -> Tensor:
    """Run the layers of the stock model, without its last norm."""
    model: Any = stock_model(source)
    model.requires_grad_(False)
    base = model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h
    setattr(base, "norm" if hasattr(base, "norm") else "ln_f", torch.nn.Identity())
    if hasattr(base, "wpe"):
        base.wpe.weight.zero_()
    names = {"mask": "attention_mask", "positions": "position_ids"}
    options = {names[name]: each for name, each in batch.items()}
    with applied(dict(enumerate(layers)), read_adapters(dict(adapters))):
        found: Tensor = base(inputs_embeds=hidden, use_cache=False, **options).last_hidden_state
    return found


def gradients(output: Tensor, inputs: Mapping[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    return dict(zip(inputs, torch.autograd.grad(output, [*inputs.values()], grad), strict=True))


@pytest.mark.parametrize(
    "batch",
    [{}, {"mask": MASK}, {"mask": MASK, "positions": POSITIONS}, {"positions": POSITIONS}],
    ids=["plain", "padded", "positions", "positions only"],
)  # fmt: skip
def test_hidden_states_are_those_of_the_stock_model(
    source: Source, batch: dict[str, Tensor]
) -> None:
    hidden = at = hidden_for(source)

    for span in (Span(0, 2), Span(2, 5), Span(5, 6)):
        at = unpack(FrozenSpan(source, span).forward(pack({"hidden": at, **batch})))["hidden"]

    assert torch.equal(at, stock_layers(source, hidden, {}, **batch))


@pytest.mark.parametrize("way", ["kept", "computed again", "checkpointed"])
def test_gradients_are_those_of_the_stock_model(
    source: Source, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = hidden_for(source)
    adapters = adapters_of(source, "self_attn.o_proj", 0, 4)
    inputs = {each: tensor.requires_grad_() for each, tensor in adapters.items()}
    inputs["hidden"] = hidden.requires_grad_()
    output = stock_layers(source, hidden, adapters, mask=MASK)
    grad = torch.randn_like(output)
    expected = gradients(output, inputs, grad)
    span = FrozenSpan(source, Span(0, 6))
    batch = {"hidden": hidden, "mask": MASK, **adapters}
    if way == "checkpointed":
        monkeypatch.setattr(frozen_span, "KEPT_PART", NO_ROOM)

    there = unpack(span.forward(pack(batch), keeps=True))
    rest = {"kept": there["kept"]} if way == "kept" else batch
    found = unpack(span.backward(pack({"grad": grad, **rest})))

    assert torch.equal(there["hidden"], output)
    assert ("kept" in there) is (way != "checkpointed")
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.equal(each, expected[name]), name


def test_layers_of_gpt_2_are_linear_too(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "gpt2")
    hidden = torch.randn(2, 5, source.config.hidden_size)
    adapters = adapters_of(source, "attn.c_proj", 2)

    data = FrozenSpan(source, Span(0, 6)).forward(pack({"hidden": hidden, **adapters}))

    assert torch.equal(unpack(data)["hidden"], stock_layers(source, hidden, adapters))


def test_what_is_kept_is_used_once(single: Source) -> None:
    span = FrozenSpan(single, Span(1, 3))
    hidden = hidden_for(single)
    kept = unpack(span.forward(pack({"hidden": hidden}), keeps=True))["kept"]
    back = pack({"grad": hidden, "kept": kept})

    span.backward(back)

    for wrong in (back, pack({"grad": hidden, "kept": torch.zeros(16, dtype=torch.uint8)})):
        with pytest.raises(Busy, match="not kept any more"):
            span.backward(wrong)


def test_a_gradient_of_another_shape_is_refused(single: Source) -> None:
    span = FrozenSpan(single, Span(1, 3))
    hidden = hidden_for(single)
    kept = unpack(span.forward(pack({"hidden": hidden}), keeps=True))["kept"]

    with pytest.raises(PeerFault, match="another shape"):
        span.backward(pack({"grad": hidden[:1], "kept": kept}))


def test_the_oldest_activations_make_room(single: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    span = FrozenSpan(single, Span(0, 6))
    data = pack({"hidden": hidden_for(single)})
    size = span_size(span, data)
    monkeypatch.setattr(frozen_span, "free_memory", lambda: 4 * frozen_span.KEPT_PART * size)
    secrets = [unpack(span.forward(data, keeps=True))["kept"] for _ in range(6)]

    outcomes = []
    for kept in secrets:
        try:
            span.backward(pack({"grad": torch.zeros_like(hidden_for(single)), "kept": kept}))
        except Busy:
            outcomes.append(False)
        else:
            outcomes.append(True)

    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False
    assert outcomes[-1] is True


def span_size(span: FrozenSpan, data: bytes) -> int:
    """Return the bytes of the activations of a batch, and forget them."""
    span.forward(data, keeps=True)
    ((_, kept),) = span._kept.items()
    span._kept.clear()
    return kept.size


def test_weights_are_not_counted_as_activations(single: Source) -> None:
    span = FrozenSpan(single, Span(0, 6))
    row = single.config.hidden_size * 4
    weights = sum(each.nbytes for layer in range(6) for each in span._layers[layer].parameters())

    size = span_size(span, pack({"hidden": torch.randn(1, 1, single.config.hidden_size)}))

    assert 6 * row < size < weights


def test_an_adapter_of_a_layer_outside_the_span_is_refused(single: Source) -> None:
    adapter = adapters_of(single, "self_attn.o_proj", 3)

    with pytest.raises(PeerFault, match="not in the span"):
        FrozenSpan(single, Span(0, 2)).forward(pack({"hidden": hidden_for(single), **adapter}))


def test_a_batch_that_goes_forward_has_no_gradient(single: Source) -> None:
    hidden = hidden_for(single)

    with pytest.raises(PeerFault, match="hidden states and no gradient"):
        FrozenSpan(single, Span(0, 2)).forward(pack({"hidden": hidden, "grad": hidden}))


def test_a_batch_that_goes_backward_needs_a_gradient(single: Source) -> None:
    span = FrozenSpan(single, Span(0, 2))

    with pytest.raises(PeerFault, match="has no gradient"):
        span.backward(pack({"hidden": hidden_for(single)}))
    with pytest.raises(PeerFault, match="no gradient"):
        span.forward(pack({"grad": hidden_for(single), "kept": torch.zeros(16, dtype=torch.uint8)}))


def test_missing_weights_are_an_error(single: Source) -> None:
    with pytest.raises(ModelError):
        FrozenSpan(single, Span(5, 9))


def test_activations_that_nobody_asked_for_are_forgotten(
    single: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = FrozenSpan(single, Span(1, 3))
    data = pack({"hidden": hidden_for(single)})
    kept = unpack(span.forward(data, keeps=True))["kept"]
    monkeypatch.setattr(frozen_span, "KEPT_S", -1.0)
    span.forward(data)

    with pytest.raises(Busy, match="not kept any more"):
        span.backward(pack({"grad": hidden_for(single), "kept": kept}))


def test_gradients_of_gpt_2_are_those_of_the_stock_model(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "gpt2")
    hidden = hidden_for(source).requires_grad_()
    adapters = adapters_of(source, "attn.c_proj", 2)
    inputs = {name: each.requires_grad_() for name, each in adapters.items()}
    output = stock_layers(source, hidden, adapters)
    grad = torch.randn_like(output)
    expected = gradients(output, inputs | {"hidden": hidden}, grad)

    batch = pack({"hidden": hidden, "grad": grad, **adapters})
    found = unpack(FrozenSpan(source, Span(0, 6)).backward(batch))

    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert torch.equal(each, expected[name]), name


def test_batches_of_several_clients_do_not_mix(single: Source) -> None:
    span = FrozenSpan(single, Span(1, 4))
    hidden = hidden_for(single)
    batches = [
        {"hidden": hidden * scale, **adapters_of(single, "self_attn.o_proj", layer)}
        for scale, layer in ((1, 1), (2, 2), (3, 3))
    ]
    expected = [span.backward(pack({"grad": hidden, **each})) for each in batches]

    kept = [unpack(span.forward(pack(each), keeps=True))["kept"] for each in batches]
    found = [span.backward(pack({"grad": hidden, "kept": each})) for each in reversed(kept)]

    assert found == expected[::-1]


def test_a_refused_adapter_leaves_nothing_behind(single: Source) -> None:
    span, hidden = FrozenSpan(single, Span(1, 3)), hidden_for(single)
    before = span.forward(pack({"hidden": hidden}))
    adapters = adapters_of(single, "self_attn.o_proj", 1) | adapters_of(single, "missing", 2)

    with pytest.raises(PeerFault, match="no linear module `missing`"):
        span.forward(pack({"hidden": hidden, **adapters}), keeps=True)

    assert span.forward(pack({"hidden": hidden})) == before


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_secret_of_another_length_finds_nothing(single: Source, size: int) -> None:
    span, hidden = FrozenSpan(single, Span(1, 3)), hidden_for(single)
    span.forward(pack({"hidden": hidden}), keeps=True)

    with pytest.raises(Busy, match="not kept any more"):
        span.backward(pack({"grad": hidden, "kept": torch.zeros(size, dtype=torch.uint8)}))


class Probe:
    """Lives as long as the node of autograd that it is attached to."""


def first_node(node: Any) -> Any:
    while earlier := [each for each, _ in node.next_functions if each is not None]:
        node = earlier[0]
    return node


def test_activations_that_are_forgotten_are_freed(single: Source) -> None:
    span = FrozenSpan(single, Span(1, 3))
    span.forward(pack({"hidden": hidden_for(single)}), keeps=True)
    (kept,) = span._kept.values()
    probe = Probe()
    first_node(kept.output.grad_fn).metadata["probe"] = probe
    alive = weakref.ref(probe)

    del probe, kept
    span._kept.clear()
    gc.collect()

    assert alive() is None


@pytest.mark.parametrize("family", ["llama4_text", "jamba"])
def test_an_adapter_of_a_module_that_is_not_called_as_a_linear_one_is_refused(
    family: str, tmp_path: Path
) -> None:
    span = FrozenSpan(tiny_model(tmp_path, family), Span(0, 6))
    width = span._shard.row_format.width
    hidden = torch.randn(1, 3, width).to(span._shard.row_format.dtype)
    failed = list[str]()
    for index, layer in span._layers.items():
        for module, each in layer.named_modules():
            if module and (shape := module_shape(each)):
                name = f"lora.{index}.{module}.0"
                pair = {
                    f"{name}.a": torch.randn(1, shape[0]), f"{name}.b": torch.randn(shape[1], 1)
                }  # fmt: skip
                try:
                    span.backward(pack({"hidden": hidden, "grad": hidden, **pair}))
                except MeshError:
                    pass
                except Exception as error:
                    failed.append(f"{name}: {type(error).__name__}")

    assert not failed


@pytest.mark.parametrize("part", [4, NO_ROOM], ids=["kept", "checkpointed"])
def test_answers_are_computed_between_two_layers_in_both_directions(
    single: Source, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(frozen_span, "KEPT_PART", part)
    span, hidden = FrozenSpan(single, Span(0, 6)), hidden_for(single)
    pauses = list[bool]()

    with pausing(lambda: pauses.append(torch.is_grad_enabled())):
        there = unpack(span.forward(pack({"hidden": hidden}), keeps=True))
        forward = len(pauses)
        rest = {"kept": there["kept"]} if "kept" in there else {"hidden": hidden}
        span.backward(pack({"grad": hidden, **rest}))

    assert forward == 6
    assert len(pauses) - forward >= 6
    assert not any(pauses)
