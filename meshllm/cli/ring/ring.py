"""`meshllm ring`: status, plans, membership and timing."""

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.ring import members, plan, trace
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar

if TYPE_CHECKING:
    from meshllm.cli.shared.client import NodeClient
    from meshllm.status import MeshStatus

app = typer.Typer(help="Show, plan and manage the ring.", rich_markup_mode=None)


@app.command(
    epilog="""\b
Examples:
  meshllm ring status
  meshllm ring status --watch
  meshllm ring status --watch --json | jq .ring.state
"""
)
@takes("state")
def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the output whenever something changes.")
    ] = False,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Show the ring, its nodes, links and timings.

    The report comes from the node running on this machine. With `--watch` a terminal is redrawn in
    place until Ctrl-C; a pipe, or a terminal that cannot be redrawn, gets the text, or one line of
    JSON, each time something changes.
    When the node restarts, it is watched again.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path

    client = NodeClient(socket_path(settings(flags)))
    if not watch:
        found = asyncio.run(client.status())
        if as_json:
            from meshllm.status import to_json

            render.dump(to_json(found))
        else:
            render.out(_text(found))
    elif render.can_redraw() and not as_json:
        _watch_live(client)
    else:
        from meshllm.cli.ring.watch import changes, follow

        show = changes(lambda it: render.out(_line(it) if as_json else f"{_text(it)}\n"))
        asyncio.run(follow(client, show, render.print_message))


app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("ticket", epilog=members.TICKET_EXAMPLES)(members.ticket)
app.command("members")(members.members)
app.command("remove", epilog=members.REMOVE_EXAMPLES)(members.remove)
app.command("trace", epilog=trace.EXAMPLES)(trace.trace)


def _watch_live(client: "NodeClient") -> None:
    import asyncio

    from rich.live import Live
    from rich.text import Text

    from meshllm.cli.ring.watch import follow
    from meshllm.cli.shared.signals import unwinding_on_signals

    # Unredirected, stdout keeps its encoding; nothing else writes to it.
    screen = Live(screen=True, auto_refresh=False, redirect_stdout=False)
    with unwinding_on_signals(), screen as live:

        def show(status: "MeshStatus") -> None:
            live.update(Text(_text(status, live.console.height)), refresh=True)

        def away(message: str) -> None:
            live.update(Text(message), refresh=True)

        asyncio.run(follow(client, show, away))


def _line(status: "MeshStatus") -> str:
    from meshllm.status import to_json

    return render.as_json(to_json(status))


def _text(status: "MeshStatus", rows: int | None = None) -> str:
    from meshllm.cli.ring.picture import drawable
    from meshllm.cli.ring.status import clean, lay_out

    columns = shutil.get_terminal_size().columns
    text = lay_out(clean(status), columns, rows, is_whole=not sys.stdout.isatty())
    return drawable(text, sys.stdout.encoding)
