"""`meshllm relay`: runs a public relay for nodes behind NATs."""

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from datetime import datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.shared.events import Notice
from meshllm.cli.shared.options import Json, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, load
from meshllm.errors import UserError, cannot_listen
from meshllm.log import event, setup
from meshllm.names import counted
from meshllm_quic.net.address import RELAY_PORT as PORT

if TYPE_CHECKING:
    import asyncio

    from meshllm_quic.relay.relay import RelayLimits, Statistics
    from meshllm_quic.relay.relay_server import RelayServer

EXAMPLES = """\b
Examples:
  meshllm relay
  meshllm relay --listen 203.0.113.7:443 --rate 2MB
  meshllm relay --allow aaaaaaa-... --allow bbbbbbb-...
"""

REPORT_S = 600.0
"""Interval of the log line about forwarded bytes; skipped if nothing changed."""
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]*)):(\d{1,5})")


@takes("log_format")
def relay(
    invocation: typer.Context,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Listen here on UDP and TCP; `[::]` is every address.",
        ),
    ] = f"[::]:{PORT}",
    rate: Annotated[
        str,
        typer.Option("--rate", metavar="BYTES", help="Limit what each node may send per second."),
    ] = "4MB",
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="NODE", help="Serve only this node id; repeatable."),
    ] = None,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Run a relay for nodes behind NATs.

    Run it on a public server: it needs no model and sees only encrypted bytes. Nodes that can reach
    each other soon switch to a direct path by hole punching; for the others it forwards, over UDP
    or, if UDP is blocked, WebSocket on the same port number. All nodes together may send 16 times
    `--rate`, and one host 64 GB a day. stdout is the command for the nodes.
    Elsewhere than on Linux a machine with several addresses needs `--listen ADDRESS:PORT`: else
    replies over UDP leave from the one that the system chooses, and nodes that use another stay on
    TCP.
    The TCP port also serves `/metrics` and `/healthz`. Ctrl-C, SIGTERM or the end of
    its terminal stops it.
    """
    is_json = load(flags).settings.log_format == "json"
    verbosity = invocation.find_root().params.get("verbose") or 0
    setup(max(verbosity, 1) if is_json else verbosity, json=is_json)
    host, port = _parse_listen(listen)
    allowed, limits = _admission(allow), _limits(rate)
    from meshllm.node import event_loop
    from meshllm_quic.net.udp import UdpNetwork
    from meshllm_quic.relay.relay_server import open_relay

    opening = open_relay(UdpNetwork(keeps_local=True), host, port, allow=allowed, limits=limits)
    event_loop.run(_run(opening, listen, _log if is_json else _say, as_json=as_json))


async def _run(
    opening: AbstractAsyncContextManager["RelayServer"],
    listen: str,
    notify: Callable[[Notice], None],
    *,
    as_json: bool,
) -> None:
    import asyncio

    from meshllm.cli.shared.signals import draining

    stopped = asyncio.Event()
    with draining() as drain:
        async with AsyncExitStack() as stack:
            try:
                server = await stack.enter_async_context(opening)
            except OSError as error:
                raise cannot_listen(listen, error) from None
            drain.leave = stopped.set
            _announce(server, notify, as_json=as_json)
            await _report(server, stopped, notify)


def _announce(server: "RelayServer", notify: Callable[[Notice], None], *, as_json: bool) -> None:
    port, observer = server.udp.port, server.observer.port
    host = server.udp.hosts()[0]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    text = f"listening on UDP {port} and {observer} and TCP {port}; allow them in the firewall"
    notify(Notice("ready", text, {"port": port, "observer_port": observer}))
    if not ip_address(host).is_global:
        text = f"{host} is not a public address: nodes on other networks need one that is"
        notify(Notice("private", text, {"host": host}))
    command = f"meshllm node --relay {place}"
    if as_json:
        render.dump(
            {"relay": place, "port": port, "observer_port": observer, "node_command": command}
        )
    else:
        render.out(command)


async def _report(
    server: "RelayServer", stopped: "asyncio.Event", notify: Callable[[Notice], None]
) -> None:
    """Log what was forwarded, every `REPORT_S` and at the end."""
    import asyncio

    before = _summary(server.statistics)
    while not stopped.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await stopped.wait()
        after = _summary(server.statistics)
        if after != before:
            notify(after)
        before = after


def _summary(done: "Statistics") -> Notice:
    refused = done.refused.total()
    forwarded = render.bytes_of(done.forwarded_bytes)
    nodes = counted(done.registered, "node")
    text = f"{nodes} registered, {forwarded} forwarded, {refused} refused"
    fields = {"registered": done.registered, "bytes": done.forwarded_bytes, "refused": refused}
    return Notice("figures", text, {**fields})


def _parse_listen(text: str) -> tuple[str | None, int]:
    """Parse ``HOST:PORT``; without a host it is every address, IPv4 and IPv6."""
    found = _LISTEN.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        hint = f"write it as `HOST:PORT`, `[IPV6]:PORT`, or `:{PORT}` for every address"
        raise UserError(f"Invalid listen address `{text}`", hint=hint)
    host = found[1] or found[2]
    return (None if host in {"", "::"} else host), int(found[3])


def _admission(nodes: list[str] | None) -> Callable[[bytes], bool]:
    from meshllm.names import parse_node

    if not nodes:
        return lambda _: True
    return frozenset(map(parse_node, nodes)).__contains__


def _limits(rate: str) -> "RelayLimits":
    from meshllm.units import parse_memory
    from meshllm_quic.relay.relay import RelayLimits

    try:
        return RelayLimits(rate=parse_memory(rate))
    except UserError:
        hint = "write it as `500KB`, `4MB` or `1GiB`: bytes per second"
        raise UserError(f"Invalid rate `{rate}`", hint=hint) from None


def _say(notice: Notice) -> None:
    render.print_message(f"{datetime.now().astimezone():%H:%M:%S} {notice.text}")


def _log(notice: Notice) -> None:
    event("relay", event=notice.event, **notice.fields)
