"""A stock model with its layers in a ring of two, trained as any model, against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor

from meshllm.errors import ModelError, UserError
from meshllm.model.files.source import Source
from meshllm.names import Span
from meshllm.remote import from_pretrained, pretrained, remote_layers
from meshllm.testing.models import stock_model, tiny_model
from tests.builders.frozen_ring import FrozenRing

pytestmark = [  # of peft
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True`"),
]

IDS = torch.arange(1, 15).reshape(2, 7)
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0
LORA = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
PROMPTS = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


@pytest.fixture
def remote(ring: FrozenRing, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return a maker of models whose layers are in the ring."""
    monkeypatch.setattr(pretrained, "NodeConnection", lambda _: ring)
    return lambda: from_pretrained(ring.source.folder)


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, attention_mask=MASK, use_cache=False, **options).logits
    return found


def losses(model: Any, config: PeftConfig, steps: int = 3) -> tuple[Any, list[float]]:
    """Train an adapter of a model; return the model with it, and the loss of each step."""
    torch.manual_seed(1)
    tuned = get_peft_model(model, config)
    parameters = [each for each in tuned.parameters() if each.requires_grad]
    for each in parameters:
        torch.nn.init.normal_(each, std=0.1)
    optimizer, found = torch.optim.SGD(parameters, lr=0.5), []
    for _ in range(steps):
        loss = tuned(input_ids=IDS, attention_mask=MASK, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return tuned, found


def test_logits_are_those_of_one_process(source: Source, remote: Callable[[], Any]) -> None:
    assert torch.equal(logits(remote()), logits(stock_model(source)))


def test_positions_are_those_of_the_caller(source: Source, remote: Callable[[], Any]) -> None:
    positions = torch.arange(5, 12)[None]

    here, there = (logits(each, position_ids=positions) for each in (remote(), stock_model(source)))

    assert torch.equal(here, there)


def test_hidden_states_after_each_layer_are_those_of_one_process(
    source: Source, remote: Callable[[], Any]
) -> None:
    def states(model: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            output = model(IDS, output_hidden_states=True, use_cache=False)
        found: tuple[Tensor, ...] = output.hidden_states
        return found

    here, there = states(remote()), states(stock_model(source))

    assert len(here) == len(there) == 7
    assert all(map(torch.equal, here, there))


def test_generate_computes_the_whole_text_for_every_token(
    source: Source, remote: Callable[[], Any]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    other: Any = stock_model(source)

    assert torch.equal(remote().generate(IDS, **options), other.generate(IDS, **options))


@pytest.mark.parametrize("config", [LORA, PROMPTS], ids=["lora", "prompts"])
def test_an_adapter_trains_as_in_one_process_and_is_shared_as_a_file(
    source: Source, remote: Callable[[], Any], config: PeftConfig, tmp_path: Path
) -> None:
    tuned, here = losses(remote(), config)
    _, there = losses(stock_model(source), config)

    assert here == pytest.approx(there, rel=1e-5)
    assert here[-1] < here[0]
    tuned.save_pretrained(tmp_path)
    own: Any = PeftModel.from_pretrained(stock_model(source), str(tmp_path))
    torch.testing.assert_close(logits(tuned), logits(own))
    again = PeftModel.from_pretrained(remote(), str(tmp_path))
    assert torch.equal(logits(again), logits(tuned))


def test_the_layers_have_no_weights_of_their_own_and_do_not_change(
    remote: Callable[[], Any],
) -> None:
    model = remote()
    layer = model.model.layers[3]

    assert all(set(each.stride()) <= {0} for each in layer.parameters())
    assert not any(each.requires_grad for each in model.parameters())
    with pytest.raises(UserError, match="cannot be saved"):
        model.save_pretrained("x")
    with pytest.raises(RuntimeError):
        losses(model, LORA)[0].merge_and_unload()


def test_adapters_that_are_switched_off_are_not_sent(
    source: Source, remote: Callable[[], Any]
) -> None:
    tuned, _ = losses(remote(), LORA, steps=1)

    with tuned.disable_adapter():
        found = logits(tuned)

    assert torch.equal(found, logits(stock_model(source)))


def test_several_active_adapters_add_up(source: Source, remote: Callable[[], Any]) -> None:
    def both(model: Any) -> Tensor:
        torch.manual_seed(1)
        tuned: Any = get_peft_model(model, LORA)
        tuned.add_adapter("other", LORA)
        for name, each in tuned.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(each, std=0.1)
        tuned.base_model.set_adapter(["default", "other"])
        return logits(tuned)

    torch.testing.assert_close(both(remote()), both(stock_model(source)))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), "variant"),
        (LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), "bias"),
        (LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1), "Dropout"),
        (
            LoraConfig(
                r=2,
                target_modules=["q_proj"],
                alora_invocation_tokens=[1],
                task_type="CAUSAL_LM",
            ),
            "variant",
        ),
        (LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"), "has changed"),
        (
            IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
            "cannot be trained in a mesh",
        ),
        (LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["v_proj"]), "v_proj"),
    ],
    ids=["dora", "bias", "dropout", "alora", "pissa", "ia3", "copies"],
)
def test_what_layers_in_a_mesh_cannot_train_is_refused(
    remote: Callable[[], Any], config: PeftConfig, error: str
) -> None:
    tuned = get_peft_model(remote(), config)

    with pytest.raises(ModelError, match=error):
        tuned(input_ids=IDS)


def test_weights_of_the_layers_stay_frozen(remote: Callable[[], Any]) -> None:
    model = remote()
    model.model.layers[2].requires_grad_()

    with pytest.raises(ModelError, match="weights of layer 2 are frozen"):
        model(IDS)


def test_the_head_can_be_trained_here(source: Source, remote: Callable[[], Any]) -> None:
    def gradient(model: Any) -> Tensor:
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        found: Tensor = model.lm_head.weight.grad
        return found

    torch.testing.assert_close(gradient(remote()), gradient(stock_model(source)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"use_cache": True}, "no KV cache"),
        ({"output_attentions": True}, "no attentions"),
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, "attention_mask"),
        ({"position_ids": torch.arange(3)[None]}, "position_ids"),
    ],
)
def test_what_a_ring_does_not_take_is_refused(
    remote: Callable[[], Any], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        remote()(IDS, **options)


def test_the_remote_layers_of_a_model_are_a_module_to_call(
    source: Source, remote: Callable[[], Any]
) -> None:
    model, stock = remote(), stock_model(source)
    hidden = torch.randn(1, 4, source.config.hidden_size)

    found = remote_layers(get_peft_model(model, PROMPTS))(hidden, Span(0, 6))

    assert found.shape == hidden.shape
    with pytest.raises(UserError, match="not in a mesh"):
        remote_layers(stock)


def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be split"):
        from_pretrained(tiny_model(tmp_path, "cpmant").folder)


def test_a_cast_or_another_device_leaves_the_weights_of_the_layers(
    remote: Callable[[], Any],
) -> None:
    tuned: Any = get_peft_model(remote(), LORA)

    tuned.to("meta").double()

    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, each in tuned.named_parameters():
        groups["layers" in name and "lora" not in name].append(each)
    assert {(each.device.type, each.dtype) for each in groups[False]} == {("meta", torch.float64)}
    assert {(each.device.type, each.dtype) for each in groups[True]} == {("cpu", torch.float32)}
    assert all(each.untyped_storage().nbytes() == each.itemsize for each in groups[True])


def test_the_checkpointing_of_transformers_changes_nothing(remote: Callable[[], Any]) -> None:
    model = remote()

    model.gradient_checkpointing_enable()

    assert not any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
