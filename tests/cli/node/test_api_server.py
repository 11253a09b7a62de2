"""What is printed about an open API server of the API."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.cli.node.api_server import announce, opened_api_server
from meshllm.config import Settings
from meshllm.log import setup
from meshllm.status import ModelStatus
from tests.builders.fake_node import FOX

pytestmark = pytest.mark.socket


@pytest.mark.parametrize(
    ("bound", "hosts", "told"),
    [
        ("0.0.0.0", ["2001:db8::7", "203.0.113.7", "10.0.0.7", "127.0.0.1"], "203.0.113.7"),
        ("[::]", ["203.0.113.7", "2001:db8::7", "::1"], "[2001:db8::7]"),
        ("0.0.0.0", ["2001:db8::7", "127.0.0.1"], None),
        ("127.0.0.1", ["203.0.113.7", "127.0.0.1"], None),
    ],
)
def test_an_api_server_on_every_address_names_the_one_for_other_machines(
    bound: str,
    hosts: list[str],
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("meshllm.transport.interfaces.hosts", lambda: hosts)
    chosen = replace(Settings(), state=str(tmp_path / "state"))
    with Accounts.open(tmp_path / "state") as accounts:
        accounts.create("a", KeyLimits(), 0.0)

    with opened_api_server(chosen, f"{bound}:0") as api_server:
        announce(api_server, ())
        port = api_server.bound.getsockname()[1]

    lines = [line for line in capsys.readouterr().err.splitlines() if "other machines" in line]
    assert lines == ([f"from other machines: http://{told}:{port}/v1"] if told else [])


def test_messages_are_records_where_the_log_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshllm.transport.interfaces.hosts", lambda: ["203.0.113.7"])
    chosen = replace(Settings(), state=str(tmp_path / "state"), log_format="json")
    with Accounts.open(tmp_path / "state") as accounts:
        accounts.create("a", KeyLimits(), 0.0)
    setup(1, json=True)

    with opened_api_server(chosen, "0.0.0.0:0") as api_server:
        announce(api_server, ())
        url = api_server.url

    records = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    facts = [each["fields"] for each in records]
    assert [each["event"] for each in facts] == ["readable", "open", "reachable"]
    assert facts[1]["url"] == url


def test_a_name_of_another_machine_ends_no_word_of_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "fox'; touch taken; '\x1b"
    chosen = replace(Settings(), state=str(tmp_path / "state"))

    with opened_api_server(chosen, "127.0.0.1:0") as api_server:
        announce(api_server, (replace(FOX, name=name),))
        curl = capsys.readouterr().out.splitlines()[2]

    words = shlex.split(curl)
    assert words[-2] == "-d"
    assert json.loads(words[-1])["model"] == name
    assert "\x1b" not in curl


@pytest.mark.parametrize(
    ("served", "given", "told"),
    [((FOX,), "cow", "fox"), ((), "cow", "cow"), ((), None, "MODEL")],
)
def test_the_request_to_try_names_what_is_served(
    served: tuple[ModelStatus, ...],
    given: str | None,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened_api_server(replace(Settings(), state=str(tmp_path)), "127.0.0.1:0") as api_server:
        announce(api_server, served, given)

    assert json.loads(shlex.split(capsys.readouterr().out)[-1])["model"] == told
