from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.node.provider.engine_json import offers_of
from meshllm.protocol.membership.records import ModelOffer
from meshllm.status import ModelStatus, ProviderOffer
from tests.builders.fake_node import FOX, FakeNode

OBJECT = {"object": "model", "created": 0, "owned_by": "meshllm"}
MODEL = OBJECT | {"id": "builtin", "meshllm": {"precision": "bfloat16", "rings": 1}}


async def test_models_are_listed(client: httpx2.AsyncClient) -> None:
    said = (await client.get("/v1/models")).json()

    assert said == {"object": "list", "data": [MODEL]}


async def test_one_model_is_shown(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v1/models/builtin")).json() == MODEL


@pytest.mark.parametrize(
    ("provided", "said"),
    [
        (FOX, {"max_model_len": 2048, "meshllm": {"precision": "bf16", "providers": ["gpu"]}}),
        (replace(FOX, precision="", context=0), {"meshllm": {"providers": ["gpu"]}}),
    ],
    ids=["known", "unknown"],
)
async def test_a_model_of_an_engine_names_provider_precision_and_context(
    client: httpx2.AsyncClient, api_server: FakeNode, provided: ModelStatus, said: dict[str, Any]
) -> None:
    api_server.provided = (provided,)

    listed = (await client.get("/v1/models")).json()["data"]

    assert listed == [MODEL, OBJECT | {"id": "fox"} | said]
    assert (await client.get("/v1/models/fox")).json() == listed[1]


async def test_each_of_several_providers_says_what_it_has(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    known = ProviderOffer("gpu", "bf16", 8192), ProviderOffer("desk", "int4", 2048)
    offers = (*known, ProviderOffer("attic"))
    names = tuple(each.provider for each in offers)
    api_server.provided = (replace(FOX, precision="", providers=names, offers=offers),)

    listed = (await client.get("/v1/models/fox")).json()

    assert listed["max_model_len"] == 2048
    assert listed["meshllm"] == {
        "providers": ["gpu", "desk", "attic"],
        "offers": [
            {"provider": "gpu", "precision": "bf16", "context": 8192},
            {"provider": "desk", "precision": "int4", "context": 2048},
            {"provider": "attic"},
        ],
    }


KEY = "0123456789abcdef"


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake node serve a model with an alias and a key."""

    async def models(node: FakeNode) -> list[ModelStatus]:
        known = node.report().model
        assert known
        return [FOX, replace(known, aliases=("b", "base"), key=KEY, replicas=3, rings=2)]

    monkeypatch.setattr(FakeNode, "models", models)


@pytest.mark.usefixtures("keyed")
async def test_a_model_of_rings_tells_aliases_key_and_rings(client: httpx2.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]

    said = {"precision": "bfloat16", "aliases": ["b", "base"], "key": KEY, "rings": 2}
    assert listed[1] == MODEL | {"meshllm": said}
    for name in ("builtin", "base", KEY):
        assert (await client.get(f"/v1/models/{name}")).json() == listed[1]


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize("name", ["builtin", "base", KEY, KEY[:6]])
async def test_a_request_names_a_model_as_it_is_listed(
    client: httpx2.AsyncClient, api_server: FakeNode, name: str
) -> None:
    said = await client.post("/v1/completions", json={"model": name, "prompt": "hello"})

    assert said.status_code == 200
    assert [each.model for each in api_server.requests] == ["builtin"]


async def test_what_an_api_server_lists_can_be_provided_to_another_mesh(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.served, api_server.provided = None, (FOX,)

    listed = (await client.get("/v1/models")).json()

    assert offers_of(listed, "bf16") == (ModelOffer("fox", "bf16", 2048),)


async def test_a_name_with_a_slash_is_one_name(client: httpx2.AsyncClient) -> None:
    said = await client.get("/v1/models/Qwen/Qwen3-0.6B")

    error = said.json()["error"]
    assert (said.status_code, error["code"]) == (404, "model_not_found")
    assert "`Qwen/Qwen3-0.6B`" in error["message"]


async def test_a_client_tries_again_while_nothing_is_served(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.served = ""

    said = await client.get("/v1/models/builtin")

    assert (said.status_code, said.headers["retry-after"]) == (503, "2")
    assert said.json()["error"]["message"] == "No model is served yet; see `meshllm ring status`"
