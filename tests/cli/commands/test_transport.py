"""`transport list`: parse, call one function, render."""

import json

from tests.cli.conftest import Invoke


def test_transports_are_listed_with_their_distribution(meshllm: Invoke) -> None:
    text = meshllm("transport", "list").stdout
    offers = json.loads(meshllm("transport", "list", "--json").stdout)["transports"]

    assert "loopback   meshllm" in text
    assert "loopback" in [offer["name"] for offer in offers]
