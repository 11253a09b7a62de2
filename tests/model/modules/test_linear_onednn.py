"""Which matrices are packed, and that packing changes no bit; speed is not tested."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from meshllm.model.modules import linear_onednn as module
from meshllm.model.modules.linear_onednn import PackedLinear, replace_linears, same_bits
from meshllm.model.modules.probe import probe_matrix, probe_outputs
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from meshllm.testing.models import stock_model, tiny_model
from tests.builders.linears import linear


@pytest.fixture(autouse=True)
def _copies_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the compiled modules, which take precedence, and remember no trial."""
    monkeypatch.setattr(module, "has_native", lambda _: False)
    tried = module._gains, module.keeps_bits
    for each in tried:
        each.cache_clear()
    yield
    for each in tried:
        each.cache_clear()


def copy_of(plain: nn.Linear) -> PackedLinear:
    try:
        return PackedLinear(plain)
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"this CPU has no kernel for packed matrices: {error}")


def exact_copy_of(plain: nn.Linear) -> PackedLinear:
    sample, x = probe_matrix(plain)
    if not same_bits(sample, copy_of(sample), x):
        pytest.skip("this CPU sums in another order")
    return PackedLinear(plain)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume that every copy is faster, with the same bits."""
    copy_of(linear())
    monkeypatch.setattr(module, "is_faster", lambda *_: True)
    monkeypatch.setattr(module, "same_bits", lambda *_: True)
    monkeypatch.setattr(module, "SMALLEST", 0)


@pytest.mark.parametrize("bias", [False, True])
def test_an_accepted_copy_gives_the_bits_of_the_matrix(bias: bool) -> None:
    plain = linear(1024, 768, bias=bias)
    packed = exact_copy_of(plain)

    with torch.inference_mode():
        for rows in (1, 3, 4, 33, 100):
            x = torch.randn(1, rows, 768).bfloat16()
            assert torch.equal(packed(x), plain(x))


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_any_shape_give_the_bits_of_the_matrix(bias: bool) -> None:
    plain = linear(512, 512, bias=bias)
    packed = exact_copy_of(plain)
    x = torch.randn(2, 9, 1024).bfloat16()

    with torch.inference_mode():
        for rows in (x[0, 0, :512], x[:, :, :512], x[:1, -1:, 512:], x[:, :, ::2], x[:0, 0, :512]):
            assert torch.equal(packed(rows), plain(rows))
            assert torch.equal(packed(rows.contiguous()), plain(rows.contiguous()))


def test_another_summation_order_is_detected() -> None:
    plain, x = probe_matrix(linear())
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    other = linear()
    other.weight = nn.Parameter(plain.weight[:, order])

    assert same_bits(plain, plain, x)
    assert not same_bits(plain, lambda rows: other(rows[..., order]), x)


@pytest.mark.usefixtures("always")
def test_a_faster_copy_replaces_the_module_and_keeps_its_weights() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear(bias=True))
    names = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}

    replace_linears(model)

    assert [type(part) for part in model] == [PackedLinear, nn.ReLU, PackedLinear]
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == names


@pytest.mark.usefixtures("always")
def test_skipped_modules_are_not_replaced() -> None:
    model = nn.ModuleDict({"head": linear(), "header": linear(), "ends": nn.Sequential(linear())})

    replace_linears(model, skip={"head", "ends"})

    assert type(model["head"]) is nn.Linear
    assert type(model["header"]) is PackedLinear
    assert type(model.get_submodule("ends.0")) is nn.Linear


@pytest.mark.usefixtures("always")
def test_a_module_with_a_hook_is_not_replaced() -> None:
    model = nn.Sequential(linear())
    model[0].register_forward_hook(lambda *_: None)

    replace_linears(model)

    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("other", [linear(64, 64), linear().float(), linear().to("meta")])
def test_small_float32_and_meta_matrices_are_not_replaced(
    other: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_gains", lambda *_, **__: True)
    model = nn.Sequential(other)

    replace_linears(model)

    assert model[0] is other


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("reason", ["same_bits", "is_faster"])
def test_other_bits_or_no_speedup_leave_the_plain_module(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, reason, lambda *_: False)
    model = nn.Sequential(linear())

    replace_linears(model)

    assert type(model[0]) is nn.Linear


def test_a_shape_is_tried_once_by_a_probe_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.Size] = []

    def refuse(plain: nn.Linear) -> None:
        tried.append(plain.weight.shape)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "PackedLinear", refuse)
    large = nn.Linear(1 << 14, 1 << 11, bias=False, dtype=torch.bfloat16)

    for _ in range(2):
        replace_linears(nn.Sequential(large, large, linear()))

    probed = probe_outputs(1 << 11, 1 << 14)
    assert tried == [(probed, 1 << 14), (512, 512)]
    assert 512 * torch.get_num_threads() <= probed < 1 << 11


@pytest.mark.parametrize(
    ("seconds", "calls", "is_faster"),
    [
        ([1.0, 0.5] * 2, 4, True),
        ([9.0, 1.0, *([1.0, 0.95] * 4)], 10, False),  # another program ran in the first trial
        ([1.0, 0.8] * 5, 10, True),
        ([1.0, 0.95] * 5, 10, False),
    ],
)
def test_a_clear_gain_needs_two_trials(
    seconds: list[float], calls: int, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = list(seconds)
    monkeypatch.setattr(module, "_seconds", lambda *_: times.pop(0))
    plain, x = linear(), torch.ones(1, 512, dtype=torch.bfloat16)

    assert module.is_faster(plain, plain, x) is is_faster
    assert len(seconds) - len(times) == calls


def test_a_cpu_without_the_kernel_keeps_the_plain_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: nn.Linear) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "PackedLinear", refuse)
    model = nn.Sequential(linear())

    replace_linears(model)

    assert type(model[0]) is nn.Linear


def test_a_lack_of_memory_says_nothing_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: nn.Linear) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as short:
        short.setattr(module, "PackedLinear", refuse)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            replace_linears(nn.Sequential(linear()))
    before = module.keeps_bits.cache_info().currsize

    replace_linears(nn.Sequential(linear()))

    assert module.keeps_bits.cache_info().currsize == before + 1


@pytest.mark.usefixtures("always")
def test_a_packed_part_gives_the_logits_of_the_whole(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    stock, ids = stock_model(source), torch.arange(3, 10)[None]

    shard = load_shard(source, Span(0, 6), embed=True, head=True)

    assert sum(type(part) is PackedLinear for part in shard.model.modules()) > 6 * 6
    with torch.inference_mode():
        logits = shard.forward(ids, shard.new_cache())
        torch.testing.assert_close(logits, stock(ids).logits, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("always")
def test_a_head_that_only_shares_its_weights_is_not_copied(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "llama", dtype=torch.bfloat16)

    front = load_shard(source, Span(0, 6), embed=True, head=False)
    head = load_shard(source, Span(6, 6), embed=False, head=True, share=front)

    assert type(front.model.lm_head) is nn.Linear
    assert type(head.model.lm_head) is PackedLinear


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("dtype", "packed"), [(torch.float16, True), (torch.bfloat16, False)])
def test_cast_weights_and_those_not_to_be_packed_are_not_copied(
    tmp_path: Path, dtype: torch.dtype, packed: bool
) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)

    shard = load_shard(source, Span(0, 2), embed=True, head=False, dtype=dtype, packed=packed)

    assert not any(isinstance(part, PackedLinear) for part in shard.model.modules())
