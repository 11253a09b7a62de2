import httpx2

from tests.builders.fake_node import FakeNode

MODEL = {"id": "builtin", "object": "model", "created": 0, "owned_by": "meshllm"}


async def test_models_are_listed(client: httpx2.AsyncClient) -> None:
    said = (await client.get("/v1/models")).json()

    assert said == {"object": "list", "data": [MODEL]}


async def test_one_model_is_shown(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v1/models/builtin")).json() == MODEL


async def test_a_name_with_a_slash_is_one_name(client: httpx2.AsyncClient) -> None:
    said = await client.get("/v1/models/Qwen/Qwen3-0.6B")

    error = said.json()["error"]
    assert (said.status_code, error["code"]) == (404, "model_not_found")
    assert "`Qwen/Qwen3-0.6B`" in error["message"]


async def test_a_client_tries_again_while_nothing_is_served(
    client: httpx2.AsyncClient, door: FakeNode
) -> None:
    door.served = ""

    said = await client.get("/v1/models/builtin")

    assert (said.status_code, said.headers["retry-after"]) == (503, "2")
    assert said.json()["error"]["message"] == "No model is served yet; see `meshllm ring status`"
