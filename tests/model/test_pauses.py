"""Pauses call what was set, in a state of torch as outside of what pauses."""

import torch

from meshllm.model.pauses import pause, pausing


def test_a_pause_calls_what_was_set_and_nothing_in_it_pauses() -> None:
    seen: list[str] = []

    def call() -> None:
        seen.append("call")
        pause()

    pause()
    with pausing(call):
        pause()
        with pausing(None):
            pause()
        pause()
    pause()

    assert seen == ["call"] * 2


def test_tensors_made_in_a_pause_are_no_inference_tensors_and_have_no_gradients() -> None:
    made: list[torch.Tensor] = []

    with pausing(lambda: made.append(torch.ones(2) * 2)), torch.inference_mode():
        pause()
        assert torch.ones(1).is_inference()

    assert not made[0].is_inference()
    assert not made[0].requires_grad
    made[0] += 1  # as a KV cache is extended later


def test_nothing_is_computed_with_the_default_dtype_or_device_of_what_pauses() -> None:
    seen: list[torch.dtype] = []

    with pausing(lambda: seen.append(torch.ones(1).dtype)):
        with torch.device("meta"):
            pause()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            pause()
        finally:
            torch.set_default_dtype(before)
        pause()

    assert seen == [torch.float32]
