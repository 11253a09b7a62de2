import socket
from collections.abc import Iterator

import pytest

from meshllm.cli.doctor import netchecks
from meshllm.cli.doctor.finding import Finding
from meshllm.status import NetworkStatus


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is listened on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.socket
def test_a_chosen_port_that_is_taken_fails(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netchecks, "PORT", taken)

    assert netchecks.check_free_port(f"ws://127.0.0.1:{taken}").verdict == "fail"
    assert netchecks.check_free_port(None).verdict == "warn"
    assert netchecks.check_free_port("127.0.0.1:0").verdict == "ok"


@pytest.mark.socket
def test_a_port_is_tried_at_its_host() -> None:
    assert netchecks.check_free_port("ws://192.0.2.1:20000").verdict == "fail"
    assert netchecks.check_free_port("unix:name").verdict == "ok"
    unnamed = netchecks.check_free_port(f"ws://{64 * 'a'}:20000")
    assert unnamed.verdict == "fail"
    assert "cannot be the name of a host" in unnamed.found


@pytest.mark.socket
def test_every_address_is_checked(taken: int) -> None:
    listen = "ws://127.0.0.1:0", f"quic://127.0.0.1:{taken}"
    found = netchecks.check_ports(("websocket", "quic"), listen)

    assert [each.found.partition(" ")[0] for each in found] == ["TCP", "UDP"]


@pytest.mark.parametrize(
    ("listen", "found"),
    [
        (("foo://bar",), "`foo://bar` is not an address of `websocket`"),
        (("ws://127.0.0.1:99999",), "Invalid address `ws://127.0.0.1:99999`"),
        (("ws://127.0.0.1:0", "127.0.0.1:0"), "are both for `websocket`"),
    ],
)
def test_an_address_with_which_a_node_does_not_start_fails(
    listen: tuple[str, ...], found: str
) -> None:
    (only,) = netchecks.check_ports(("websocket",), listen)

    assert only.verdict == "fail"
    assert found in only.found


@pytest.mark.socket
def test_an_own_address_is_dialled(taken: int) -> None:
    assert netchecks.check_listening(f"ws://0.0.0.0:{taken}").verdict == "ok"
    assert netchecks.check_listening("loopback:3").verdict == "ok"
    assert netchecks.check_listening("ws://127.0.0.1:99999").verdict == "ok"
    with socket.socket() as bound:  # bound, not listening
        bound.bind(("127.0.0.1", 0))
        deaf = netchecks.check_listening(f"ws://127.0.0.1:{bound.getsockname()[1]}")
    assert (deaf.verdict, "firewall" in deaf.advice) == ("warn", True)


def test_udp_addresses_are_not_dialled() -> None:
    assert netchecks.check_listening("quic://127.0.0.1:9").verdict == "ok"


@pytest.mark.socket
def test_the_port_of_each_transport_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("0.0.0.0", 0))
        taken = bound.getsockname()[1]
        monkeypatch.setattr(netchecks, "PORT", 0)

        found = list(
            netchecks.check_ports(
                ("websocket", "quic"), (f"quic://0.0.0.0:{taken}", "ws://127.0.0.1:0")
            )
        )

    assert [each.verdict for each in found] == ["ok", "fail"]
    assert found[1].found.startswith(f"UDP port {taken} is not available")


def test_the_network_is_reported() -> None:
    network = NetworkStatus(
        nat="endpoint-independent",
        line="behind a NAT that others can be let through",
        observed=("203.0.113.7:40001",),
        relays=(("192.0.2.9:8790", "registered"), ("192.0.2.10:8790", "silent")),
    )

    assert list(netchecks.check_network(network)) == [
        Finding("ok", "nat", "behind a NAT that others can be let through"),
        Finding("ok", "relay", "192.0.2.9:8790 registered"),
        Finding(
            "warn",
            "relay",
            "192.0.2.10:8790 silent",
            "allow UDP in the firewall, or use another `--relay`",
        ),
    ]


@pytest.mark.socket
def test_a_transport_that_does_not_listen_needs_no_port() -> None:
    found = netchecks.check_ports(("websocket", "quic"), ("ws://127.0.0.1:0",))

    assert [each.found for each in found] == ["TCP port 0 is free"]
