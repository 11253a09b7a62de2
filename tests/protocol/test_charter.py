"""What a mesh agreed on: it comes back, and every limit holds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import NodeId
from meshllm.protocol.charter import MAX_SESSIONS, MAX_VERSION, MAX_WIDTH, Charter
from meshllm.protocol.codec import MAX_POSITION
from meshllm.protocol.messages import DType
from meshllm.protocol.plan import MAX_NAME_BYTES
from meshllm.protocol.records import MAX_BYTES, MAX_LAYERS, MAX_MEMBERS
from tests.property.mesh_strategies import charters
from tests.protocol.people import CHARTER, SHAPE

NODE = NodeId(bytes(32))


@given(charters())
def test_a_charter_comes_back_from_its_bytes(charter: Charter) -> None:
    assert Charter.decode(charter.encode()) == charter


@given(st.binary())
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFault):
        Charter.decode(b"\x01" + data + b"\xff" * 99_999)


def test_one_byte_more_or_less_is_refused() -> None:
    for data in (CHARTER.encode() + b"\0", CHARTER.encode()[:-1]):
        with pytest.raises(PeerFault):
            Charter.decode(data)


@pytest.mark.parametrize(
    "fields",
    [
        {"members": MAX_MEMBERS + 1},
        {"version": MAX_VERSION + 1},
        {"sessions": 0},
        {"sessions": MAX_SESSIONS + 1},
        {"exclude": (NODE,) * (MAX_MEMBERS + 1)},
        {"prefer": (NodeId(bytes(31)),)},
        {"dtype": 0},
        {"dtype": DType.FLOAT32_INT8},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_charter_beyond_a_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        Charter.decode(replace(CHARTER, **fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n" * (MAX_NAME_BYTES + 1)},
        {"layer_bytes": (MAX_BYTES + 1,) * 4},
        {"kv_bytes_per_token": (MAX_BYTES + 1,) * 4},
        {"layer_bytes": (1,) * (MAX_LAYERS + 1), "kv_bytes_per_token": (1,) * (MAX_LAYERS + 1)},
        {"embed_bytes": MAX_BYTES + 1},
        {"head_bytes": MAX_BYTES + 1},
        {"hidden_size": 0},
        {"hidden_size": MAX_WIDTH + 1},
        {"itemsize": 0},
        {"context": 0},
        {"context": MAX_POSITION + 1},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_shape_beyond_a_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PeerFault):
        Charter.decode(replace(CHARTER, shape=replace(SHAPE, **fields)).encode())


@pytest.mark.parametrize(
    "place", [9, 10, 11, 12, 13], ids=["dtype", "policy", "ends", "tied", "quant"]
)
def test_a_code_that_is_not_known_is_refused(place: int) -> None:
    data = bytearray(CHARTER.encode())
    data[place] = 9

    with pytest.raises(PeerFault):
        Charter.decode(bytes(data))


def test_a_charter_without_layers_is_refused() -> None:
    data = bytearray(CHARTER.encode())
    data[13:15] = bytes(2)

    with pytest.raises(PeerFault, match="0 layers"):
        Charter.decode(bytes(data))
