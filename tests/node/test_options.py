"""The options of inference."""

import pytest

from meshllm.names import WireMode
from meshllm.node.options import InferenceConfig


@pytest.mark.parametrize(
    ("exact", "wire", "is_exact"),
    [
        (True, WireMode.EXACT, True),
        (True, WireMode.PLAIN, True),
        (True, WireMode.INT8, False),
        (True, WireMode.AUTO, False),
        (False, WireMode.PLAIN, False),
    ],
)
def test_hidden_states_of_an_exact_node_lose_nothing(
    *, exact: bool, wire: WireMode, is_exact: bool
) -> None:
    assert InferenceConfig(exact=exact, wire=wire).is_exact == is_exact
