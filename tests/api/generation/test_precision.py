from dataclasses import replace

import httpx2

from tests.builders.bodies import BODY, PATH
from tests.builders.fake_node import FOX, FakeNode


async def test_a_model_of_unknown_precision_meets_none(
    client: httpx2.AsyncClient, door: FakeNode
) -> None:
    door.provided = (replace(FOX, precision=""),)

    said = await client.post(
        PATH, json=BODY | {"model": "fox", "meshllm": {"min_precision": "int4"}}
    )

    assert "of unknown precision" in said.json()["error"]["message"]
