"""`meshllm serve`: the API on TCP, of the running node or of one that it starts."""

from collections.abc import Mapping
from typing import Annotated

import typer

from meshllm.cli.node.door import SETTINGS as DOOR_SETTINGS
from meshllm.cli.node.door import opened_door
from meshllm.cli.node.node import SETTINGS, Transports, run_node
from meshllm.cli.shared.client import NodeClient, is_running, socket_path
from meshllm.cli.shared.options import takes
from meshllm.config import Scalar, Settings, change, load
from meshllm.errors import UserError

HOST, PORT = "127.0.0.1", 7780

EXAMPLES = """\b
Examples:
  meshllm serve
  meshllm serve --model Qwen/Qwen3-0.6B --port 8080
  meshllm key create laptop
  meshllm serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
  meshllm serve --origins https://chat.example
"""

_OF_NODE = tuple(name for name in SETTINGS if name not in {*DOOR_SETTINGS, "state", "log_format"})


@takes(*(name for name in SETTINGS if name != "serve"))
def serve(
    invocation: typer.Context,
    host: Annotated[str, typer.Option(metavar="HOST", help="Listen on this address.")] = HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Listen on this TCP port.")
    ] = PORT,
    transport: Transports = None,
    no_discovery: Annotated[
        bool, typer.Option("--no-discovery", help="Disable discovery on the local network.")
    ] = False,
    **flags: Scalar,
) -> None:
    """Serve the OpenAI-compatible API on TCP.

    The node running on this machine answers, and this command only opens its door; without one it
    runs a node as `meshllm node` does. stdout is the URL, the variables of OpenAI's clients and a
    `curl` command. On a loopback address no key is needed. On any other every request needs one of
    `meshllm key create`, or of `--key-file`. Ctrl-C or SIGTERM closes the door.

    The root of the same address is a web page that shows the mesh as it is and chats with its
    model. Where a key is needed, the page asks for it, and shows no names of machines.
    """
    given = {**flags, "transport": transport, "discovery": False if no_discovery else None}
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    config = load({**given, "serve": address})
    if is_running(config.settings):
        _refuse(given)
        import asyncio

        asyncio.run(_serve_running(config.settings, address))
    else:
        run_node(invocation, config)


async def _serve_running(chosen: Settings, address: str) -> None:
    """Serve the running node until a signal; the door stays open while that node restarts."""
    import asyncio

    from meshllm.cli.shared.signals import draining

    client = NodeClient(socket_path(chosen))
    served = await client.models()
    shown = change(chosen, {"model": served[0].name}) if served else chosen
    with draining() as drain, opened_door(shown, address) as door:
        serving = asyncio.ensure_future(door.serve(client))

        def leave() -> None:
            serving.cancel()

        drain.leave = leave
        await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()


def _refuse(given: Mapping[str, Scalar]) -> None:
    """Raise `UserError` for a setting of a node, which runs already."""
    for name in (*_OF_NODE, "transport", "discovery"):
        if given.get(name) is not None:
            raise UserError(
                f"`--{name.replace('_', '-')}` has no effect: a node is already running",
                hint="omit it, or choose another folder with `--state`",
            )
