"""A probe stands for a module: its shape, and sums that cancel."""

from meshllm.model.modules import linear_onednn as module
from meshllm.model.modules.probe import probe_matrix
from tests.builders.linears import linear


def test_a_probe_has_the_shape_of_the_module() -> None:
    plain, x = probe_matrix(linear(8, 7, bias=True))

    assert plain.weight.shape == (8, 7)
    assert plain.bias is not None
    assert x.shape == (max(module.ROWS), 7)
    assert plain(x).abs().max() < 1e-3
