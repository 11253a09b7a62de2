"""The attention kernel: exact weights, any number of threads, and refused shapes."""

import pytest
import torch

from meshllm.model.kernels import attention as native_attention
from meshllm.model.steps.attention import decode_attention
from tests.builders.attention import drawn, reference


def test_the_number_of_threads_changes_no_bit() -> None:
    asked, count = drawn((8, 4, 128), 5, 900, torch.bfloat16), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(decode_attention(*asked, 0.1))
    torch.set_num_threads(count)

    assert asked[1].numel() * 5 > native_attention.THREADED
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("size", [1e-30, 1.0, 300.0, 1e6])
def test_softmax_takes_scores_of_any_size(size: float) -> None:
    query, key, value = drawn((2, 1, 16), 1, 40, torch.float32)
    key *= size

    attended = decode_attention(query, key, value, 1.0)

    assert torch.allclose(attended, reference(query * 4, key, value), atol=1e-4)


def test_mismatched_tensors_are_refused() -> None:
    query, key, value = drawn((4, 2, 16), 2, 40, torch.bfloat16)

    for strange in (
        (query[:, :3], key, value),
        (query, key[..., :8], value),
        (query, key[:, :, :39], value),
        (query, key[:, :, :1], value[:, :, :1]),
        (query, key, value.float()),
        (query[:, :, :0], key, value),
        (query.expand(2, -1, -1, -1), key, value),
        (query, key, value.expand(2, -1, -1, -1)),
        (query, key, value[:0]),
    ):
        with pytest.raises(ValueError, match="attention of"):
            decode_attention(*strange, 1.0)
    for window in (0, -1):
        with pytest.raises(ValueError, match="attention of"):
            decode_attention(query, key, value, 1.0, window)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00001, 0xFFC001FF - (1 << 32)])
def test_no_nan_payload_becomes_a_number(bits: int) -> None:
    query, key, value = drawn((2, 1, 16), 1, 40, torch.float32)
    key.view(torch.int32)[:, :, 20] = bits

    assert decode_attention(query, key, value, 1.0).isnan().all()


def test_many_values_add_up_exactly() -> None:
    query, key, value = drawn((1, 1, 16), 1, 200_000, torch.bfloat16)
    key.zero_()
    value.fill_(1.0)

    assert torch.equal(decode_attention(query, key, value, 1.0), torch.ones(1, 1, 1, 16).bfloat16())


def test_softmax_weights_are_exact() -> None:
    """A key that scores x next to one that scores 0 has the weight 1 / (1 + exp(-x))."""
    lacks = -torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 80
    query, key = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 2, 1)
    value = torch.tensor([[[[0.0], [1.0]]]])
    shares = []
    for lack in lacks:
        key[0, 0, 1] = lack
        shares.append(decode_attention(query, key, value, 1.0).double().flatten())

    exact = 1 / (1 + (-lacks.double()).exp())
    assert ((torch.cat(shares) - exact).abs() <= 5 * 2**-24 * exact).all()
