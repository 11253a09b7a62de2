"""Every field that the API takes is in its manual."""

import re
from dataclasses import fields

import pytest

from meshllm.api.v1 import embeddings, generating, messages, responses
from meshllm.api.v1.chat import Chat
from meshllm.api.v1.completions import Completion
from meshllm.api.v1.embeddings import Embeddings
from meshllm.api.v1.messages import Messages
from meshllm.api.v1.responses import Responses
from meshllm.cli.commands.help import topics

NAMED = set(re.findall(r"`([a-z_]+)`", topics()["api"]))


@pytest.mark.parametrize("body", [Chat, Completion, Embeddings, Messages, Responses])
def test_every_field_is_documented(body: type) -> None:
    assert {each.name for each in fields(body)} - NAMED == set()


def test_what_is_ignored_is_documented() -> None:
    kinds = embeddings, generating, messages, responses
    ignored = set().union(*(each.HARMLESS for each in kinds))
    assert ignored - NAMED == set()
