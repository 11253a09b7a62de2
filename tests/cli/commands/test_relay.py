import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from subprocess import PIPE
from typing import Any

import pytest

from meshllm.cli.commands import relay
from meshllm.cli.shared.events import Notice
from meshllm.names import show
from meshllm.protocol.trust.identity import NodeKey
from meshllm_quic.net.address import RELAY_PORT
from meshllm_quic.relay import relay_server
from meshllm_quic.relay.relay import Refusal, RelayLimits, Statistics
from meshllm_quic.wire.packets import AddressRequest
from tests.cli.conftest import Invoke
from tests.manual.__main__ import generate

NODE, OTHER = NodeKey(bytes(32)).node, NodeKey(b"\1" * 32).node
CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")


@dataclass
class FakeSocket:
    port: int
    host: str = "8.8.8.8"

    def hosts(self) -> list[str]:
        return [self.host, "127.0.0.1"]


@dataclass
class FakeRelay:
    """Replaces `open_relay`: records its arguments, then sends a signal."""

    udp: FakeSocket = field(default_factory=lambda: FakeSocket(8790))
    observer: FakeSocket = field(default_factory=lambda: FakeSocket(8791))
    statistics: Statistics = field(default_factory=Statistics)
    error: OSError | None = None
    last: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)
    place: tuple[str | None, int] | None = None
    allow: Callable[[bytes], bool] = lambda _: False
    limits: RelayLimits = field(default_factory=RelayLimits)
    is_open: bool = False

    @asynccontextmanager
    async def __call__(
        self, _: object, host: str | None, port: int, *, allow: Any, limits: RelayLimits
    ) -> AsyncIterator["FakeRelay"]:
        self.place, self.allow, self.limits = (host, port), allow, limits
        if self.error is not None:
            raise self.error
        self.is_open = True
        asyncio.get_running_loop().call_soon(self.last)
        yield self
        self.is_open = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRelay:
    made = FakeRelay()
    monkeypatch.setattr(relay_server, "open_relay", made)
    return made


def test_the_command_for_the_nodes_is_all_of_stdout(meshllm: Invoke, fake: FakeRelay) -> None:
    result = meshllm("relay")

    assert result.exit_code == 0
    assert result.stdout == "meshllm node --relay 8.8.8.8:8790\n"
    assert CLOCK.sub("", result.stderr) == (
        "listening on UDP 8790 and 8791 and TCP 8790; allow them in the firewall\n"
    )
    assert fake.place == (None, RELAY_PORT)
    assert not fake.is_open


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_relay(meshllm: Invoke, fake: FakeRelay, number: signal.Signals) -> None:
    fake.last = lambda: os.kill(os.getpid(), number)

    assert meshllm("relay").exit_code == 0
    assert not fake.is_open


def test_an_ipv6_address_has_brackets(meshllm: Invoke, fake: FakeRelay) -> None:
    fake.udp.host = "2606:4700::1"

    assert meshllm("relay").stdout.endswith(" --relay [2606:4700::1]:8790\n")


@pytest.mark.parametrize("host", ["192.168.0.7", "127.0.0.1", "fd00::1"])
def test_a_private_address_is_reported(meshllm: Invoke, fake: FakeRelay, host: str) -> None:
    fake.udp.host = host

    result = meshllm("relay")

    assert f"{host} is not a public address" in result.stderr


def test_json_is_one_object(meshllm: Invoke, fake: FakeRelay) -> None:
    told = json.loads(meshllm("relay", "--json").stdout)

    assert told == {
        "schema": 1,
        "relay": "8.8.8.8:8790",
        "port": 8790,
        "observer_port": 8791,
        "node_command": "meshllm node --relay 8.8.8.8:8790",
    }


def test_the_log_may_be_json(meshllm: Invoke, fake: FakeRelay) -> None:
    fake.udp.host = "10.0.0.1"

    lines = [
        json.loads(line)
        for line in meshllm("relay", "--log-format", "json").stderr.split("\n")[:-1]
    ]

    assert [line["logger"] for line in lines] == ["meshllm.events.relay"] * 2
    assert [line["fields"] for line in lines] == [
        {"event": "ready", "port": 8790, "observer_port": 8791},
        {"event": "private", "host": "10.0.0.1"},
    ]


@pytest.mark.parametrize(
    ("listen", "place"),
    [
        ("203.0.113.7:443", ("203.0.113.7", 443)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[2001:db8::1]:8790", ("2001:db8::1", 8790)),
        ("[::]:9", (None, 9)),
        (":9", (None, 9)),
        ("relay.example.org:65535", ("relay.example.org", 65535)),
    ],
)
def test_a_listen_address_is_parsed(
    meshllm: Invoke, fake: FakeRelay, listen: str, place: tuple[str | None, int]
) -> None:
    meshllm("relay", "--listen", listen)

    assert fake.place == place


@pytest.mark.parametrize(
    "listen", ["8790", "host", "host:", "h:65536", "::1:8790", "[x]:1", "a b:1"]
)
def test_an_invalid_address_is_refused(meshllm: Invoke, fake: FakeRelay, listen: str) -> None:
    result = meshllm("relay", "--listen", listen)

    assert result.exit_code == 2
    assert f"error: Invalid listen address `{listen}`\nhint: write it as" in result.stderr
    assert fake.place is None


def test_every_node_is_served_by_default(meshllm: Invoke, fake: FakeRelay) -> None:
    meshllm("relay")

    assert fake.allow(NODE)
    assert fake.limits == RelayLimits()


def test_the_rate_is_chosen(meshllm: Invoke, fake: FakeRelay) -> None:
    meshllm("relay", "--rate", "500KB")

    assert fake.limits == RelayLimits(rate=500_000)


def test_an_invalid_rate_is_refused(meshllm: Invoke, fake: FakeRelay) -> None:
    result = meshllm("relay", "--rate", "fast")

    assert result.exit_code == 2
    assert "error: Invalid rate `fast`\nhint: write it as `500KB`" in result.stderr


def test_only_some_nodes_are_served(meshllm: Invoke, fake: FakeRelay) -> None:
    third = NodeKey(b"\2" * 32).node

    meshllm("relay", "--allow", show(NODE), "--allow", show(OTHER).replace("-", ""))

    assert [fake.allow(node) for node in (NODE, OTHER, third)] == [True, True, False]


def test_an_invalid_node_id_is_refused(meshllm: Invoke, fake: FakeRelay) -> None:
    result = meshllm("relay", "--allow", "abc")

    assert result.exit_code == 2
    assert "Invalid node id `abc`" in result.stderr


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EADDRINUSE, "error while attempting to bind"), "address already in use"),
        (OSError(errno.EACCES, "no"), "permission denied"),
        (OSError(-2, "Name or service not known"), "name or service not known"),
        (  # of asyncio in Python 3.13, and of uvloop
            OSError("could not bind on any address out of [('192.0.2.1', 8790)]"),
            "cannot assign requested address",
        ),
        (OSError("No such plug"), "no such plug"),
        (OSError(), "unknown error"),
    ],
)
def test_a_listen_error_has_a_hint(
    meshllm: Invoke, fake: FakeRelay, error: OSError, reason: str
) -> None:
    fake.error = error

    result = meshllm("relay")

    assert result.exit_code == 2
    assert f"Cannot listen on `[::]:8790`: {reason}\nhint: choose another" in result.stderr
    assert result.stdout == ""


def test_forwarded_bytes_are_logged_periodically(
    meshllm: Invoke, fake: FakeRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "REPORT_S", 0.0)
    done, summarise, summaries = fake.statistics, relay._summary, count()

    def work() -> None:
        done.registered, done.forwarded_bytes = 1, 3 << 20
        done.refused[Refusal.RATE] += 1

    def summary(statistics: Statistics) -> Notice:
        if next(summaries) == 3:  # at first, and after each interval
            os.kill(os.getpid(), signal.SIGINT)
        return summarise(statistics)

    monkeypatch.setattr(relay, "_summary", summary)
    fake.last = work

    lines = meshllm("relay").stderr.splitlines()

    assert [CLOCK.sub("", line) for line in lines[1:]] == [
        "1 node registered, 3.0 MiB forwarded, 1 refused"
    ]


def test_forwarded_bytes_are_logged_at_the_end(meshllm: Invoke, fake: FakeRelay) -> None:
    def work() -> None:
        fake.statistics.refused[Refusal.QUOTA] += 1
        os.kill(os.getpid(), signal.SIGINT)

    fake.last = work

    lines = meshllm("relay", "--log-format", "json").stderr.splitlines()

    assert json.loads(lines[-1])["fields"] == {
        "event": "figures", "registered": 0, "bytes": 0, "refused": 1,
    }  # fmt: skip


def test_the_default_port_is_that_of_the_relay() -> None:
    assert "[default: [::]:8790]" in generate()["man/man1/meshllm-relay.1"].replace("\\-", "-")


@pytest.mark.socket
@pytest.mark.skipif(sys.platform != "linux", reason="asks at 127.0.0.2")
def test_it_runs_without_a_model_answers_from_where_it_is_asked_and_stops_on_sigterm() -> None:
    code = (
        "import sys\n"
        "from meshllm.cli.app import main\n"
        "sys.argv = ['meshllm', 'relay', '--listen', '0.0.0.0:0', '--json']\n"
        "try: main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
    ):
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        asking.settimeout(10)
        asking.sendto(AddressRequest(b"nonce567").encode(), ("127.0.0.2", port))
        _, answered = asking.recvfrom(2048)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()

    assert answered == ("127.0.0.2", port)
    assert rest == "None []\n"
