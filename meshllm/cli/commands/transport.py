"""`meshllm transport`: which transports are installed; loads none of them."""

from dataclasses import asdict

import typer

from meshllm.cli.shared.options import Json
from meshllm.cli.terminal import render

app = typer.Typer(help="See what carries hidden states between nodes.", rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Keep `list` a command of its own even while it is the only one."""


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the installed transports."""
    from meshllm.transport.registry import Registry

    offers = Registry.discover().describe()
    if as_json:
        render.dump({"transports": [asdict(offer) for offer in offers]})
        return
    rows = [(offer.name, offer.distribution, offer.version, offer.value) for offer in offers]
    render.out(render.table(("name", "distribution", "version", "made by"), rows))
