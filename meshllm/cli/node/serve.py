"""`meshllm serve`: the API on TCP, of the running node, of one that it starts, or of a client."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshllm.cli.node.api_server import SETTINGS as API_SETTINGS
from meshllm.cli.node.api_server import announce, opened_api_server, tell
from meshllm.cli.node.node import SETTINGS, Transports, print_unit, run_node, set_up
from meshllm.cli.shared.client import NodeClient, client_ticket, is_running, socket_path
from meshllm.cli.shared.options import is_given, takes
from meshllm.config import Scalar, Settings, load, state_path
from meshllm.errors import UserError
from meshllm.units import parse_address

if TYPE_CHECKING:
    from asyncio import Event, Future

    from meshllm.cli.shared.signals import Drain
    from meshllm.protocol.trust.ticket import Ticket

HOST, PORT = "127.0.0.1", 7780

EXAMPLES = """\b
Examples:
  meshllm serve
  meshllm serve --model Qwen/Qwen3-0.6B --port 8080
  meshllm key create laptop
  meshllm serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
  meshllm serve --origins https://chat.example
  meshllm serve --join "$(cat ticket)"
"""

_OF_NODE = (
    *(name for name in SETTINGS if name not in {*API_SETTINGS, "state", "log_format"}),
    "transport", "discovery",
)  # fmt: skip


@takes(*(name for name in SETTINGS if name != "serve"))
def serve(
    invocation: typer.Context,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Listen on this address; default: that of `serve`.")
    ] = HOST,
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            metavar="PORT",
            help="Listen on this TCP port; default: that of `serve`.",
        ),
    ] = PORT,
    transport: Transports = None,
    no_discovery: Annotated[
        bool, typer.Option("--no-discovery", help="Disable discovery on the local network.")
    ] = False,
    print_service: Annotated[
        bool, typer.Option("--print-service", help="Print a systemd user unit and exit.")
    ] = False,
    **flags: Scalar,
) -> None:
    """Serve the OpenAI- and Anthropic-compatible API on TCP.

    The node running on this machine answers, and this command only starts its API server; without
    one it runs a node as `meshllm node` does. stdout is the URL, the variables of OpenAI's clients
    and a `curl` command. On a loopback address no key is needed. On any other every request needs
    one of `meshllm key create`, or of `--key-file`. Ctrl-C, SIGTERM or the end of its terminal
    closes the API server, once the requests in progress have ended, for a minute at most; the
    second Ctrl-C or SIGTERM exits at once.

    With `--join` and a ticket of `meshllm ring ticket --role client`, the mesh of the ticket
    answers: this machine holds no layers, and its keys and their usage are its own.

    Without `--host` or `--port`, the address or port of the setting `serve` is used, if that is
    set. A running node listens there itself: beside it the defaults are used.

    `--print-service` prints the unit of `meshllm node --serve HOST:PORT`, which does the same.

    The root of the same address is a web page that shows the mesh as it is and chats with its
    models. Where a key is needed, the page asks for it, and names machines to owner's keys only.
    """
    given = {**flags, "transport": transport, "discovery": False if no_discovery else None}
    chosen = load(given).settings
    is_here = not print_service and is_running(chosen)
    address = _address(invocation, host, port, None if is_here else chosen.serve)
    config = load({**given, "serve": address})
    if print_service:
        if client_ticket(config.settings):
            raise UserError(
                "`--print-service` is for a node, and the ticket is for a client",
                hint="write a unit that runs `meshllm serve` with `MESHLLM_JOIN` set",
            )
        print_unit(config)
        return
    ticket = client_ticket(config.settings)
    if is_here or ticket:
        why = "a client holds no layers" if ticket else "a node is already running"
        hint = "omit it" if ticket else "omit it, or choose another folder with `--state`"
        _refuse(given, [each for each in _OF_NODE if each != "join" or not ticket], why, hint)
        set_up(invocation, config)
        from meshllm.node import event_loop

        serving = _serve_mesh(config.settings, ticket, address) if ticket else None
        event_loop.run(serving or _serve_running(config.settings, address))
    else:
        run_node(invocation, config)


def _address(invocation: typer.Context, host: str, port: int, known: str | None) -> str:
    """Return where to listen: what no flag says is as in the setting, if one counts."""
    if known:  # empty is the default
        known_host, known_port = parse_address(known)
        host = host if is_given(invocation, "host") else known_host
        port = port if is_given(invocation, "port") else known_port
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _serve_running(chosen: Settings, address: str) -> None:
    """Serve the running node until a signal; the API server stays open while that node restarts."""
    from meshllm.cli.shared.signals import draining

    client = NodeClient(socket_path(chosen))
    served = await client.models()
    with draining() as drain, opened_api_server(chosen, address) as api_server:
        announce(api_server, served)
        await _until_signal(drain, partial(api_server.serve, client))


async def _serve_mesh(chosen: Settings, ticket: "Ticket", address: str) -> None:
    """Serve the mesh of a client's ticket until a signal."""
    from meshllm.cli.shared.signals import draining
    from meshllm.names import short
    from meshllm.node.client import open_mesh_client
    from meshllm.node.client_control import ClientControl

    with draining() as drain:
        async with open_mesh_client(chosen.join or "", state_path(chosen)) as client:
            node = ClientControl(client)
            status = await node.status()
            with opened_api_server(chosen, address) as api_server:
                announce(api_server, (*status.models, *status.provided))
                inviter = short(ticket.inviter)
                text = f"prompts go to the mesh of node `{inviter}`, which made the ticket"
                tell("client", text, inviter=inviter)
                await _until_signal(drain, partial(api_server.serve, node), client.failed)


async def _until_signal(
    drain: "Drain",
    serve: "Callable[[Event], Coroutine[Any, Any, None]]",
    *failures: "Future[None]",
) -> None:
    """Serve until a signal, which lets requests finish, or until a failure, which is raised."""
    import asyncio

    closing = asyncio.Event()
    serving = asyncio.ensure_future(serve(closing))

    def leave() -> None:
        tell("closing", "finishing requests, then closing; Ctrl-C again exits at once")
        closing.set()

    drain.leave = leave
    await asyncio.wait({serving, *failures}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    await asyncio.wait({serving})
    for each in (serving, *failures):
        if each.done() and not each.cancelled():
            each.result()


def _refuse(given: Mapping[str, Scalar], names: Iterable[str], why: str, hint: str) -> None:
    """Raise `UserError` for a given setting that has no effect."""
    for name in names:
        if given.get(name) is not None:
            flag = "--no-discovery" if name == "discovery" else f"--{name.replace('_', '-')}"
            raise UserError(f"`{flag}` has no effect: {why}", hint=hint)
