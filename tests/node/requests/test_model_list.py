import json
from dataclasses import replace

import pytest

from meshllm.errors import PeerFault
from meshllm.node.requests.model_list import MAX_VALUES, models_from_json, models_to_json
from meshllm.protocol.membership.codec import MAX_MODEL_LIST_BYTES
from meshllm.status import ModelStatus, ProviderOffer
from tests.builders.fake_node import FOX

RING = ModelStatus(
    "builtin", 8, 256, "bfloat16", "none", 2048, "fp_1", aliases=("b",), key="ab", epoch=3
)


def test_a_list_keeps_what_models_are() -> None:
    fox = replace(FOX, offers=(ProviderOffer("gpu", "bf16", 2048),))

    assert models_from_json(models_to_json([RING, fox])) == (RING, fox)
    assert models_from_json(models_to_json([])) == ()


@pytest.mark.parametrize("aliases", [(), ("x" * 500, "é" * 500)])
def test_a_list_that_would_be_too_long_has_the_first_models(aliases: tuple[str, ...]) -> None:
    many = [replace(RING, name=f"model {number}", aliases=aliases) for number in range(1000)]

    data = models_to_json(many)

    listed = models_from_json(data)
    assert len(data) <= MAX_MODEL_LIST_BYTES
    assert listed == tuple(many[: len(listed)])
    assert len(models_to_json(many[: len(listed) + 1])) == len(data)  # one more does not fit


def test_offers_are_left_out_before_models() -> None:
    offers = tuple(ProviderOffer(f"node {number}", "bf16", 2048) for number in range(5000))
    models = [replace(RING, beside=offers), replace(FOX, offers=offers), replace(RING, name="last")]

    listed = models_from_json(models_to_json(models))

    assert [each.name for each in listed] == ["builtin", FOX.name, "last"]
    assert not any(each.offers or each.beside for each in listed)

    one = replace(RING, beside=offers[:1])
    listed = models_from_json(models_to_json([one, replace(FOX, offers=offers)]))

    assert listed == (one, replace(FOX, offers=()))


def test_fields_of_a_later_version_are_ignored() -> None:
    fields = json.loads(models_to_json([FOX]))
    fields["models"][0]["colour"] = "red"

    assert models_from_json(json.dumps(fields).encode()) == (FOX,)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"models": [1]}',
        b'{"models": [{"name": "x"}]}',
        b'{"models": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"models": [' + b"{}," * MAX_VALUES + b"{}]}",
        b'{"models": [], "later": ' + b"1" * (65 << 10) + b"}",
    ],
    ids=["empty", "list", "none", "bytes", "number", "lacking", "deep", "many", "digits"],
)
def test_a_malformed_list_is_a_fault_of_the_peer(data: bytes) -> None:
    with pytest.raises(PeerFault):
        models_from_json(data)
