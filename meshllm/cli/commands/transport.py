"""`meshllm transport`: lists the installed transports without loading them."""

from dataclasses import asdict

import typer

from meshllm.cli.shared.options import Json
from meshllm.cli.terminal import render

app = typer.Typer(
    help="List the transports between nodes.",
    rich_markup_mode=None,
    epilog="""\b
Examples:
  meshllm transport list
  meshllm transport list --json
""",
)


@app.callback()
def group() -> None:
    """Keep `list` a subcommand although it is the only one."""


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the installed transports."""
    from meshllm.transport.registry import Registry

    offers = Registry.discover().describe()
    if as_json:
        render.dump({"transports": [asdict(offer) for offer in offers]})
        return
    rows = [(offer.name, offer.distribution, offer.version, offer.value) for offer in offers]
    render.out(render.table(("name", "distribution", "version", "entry point"), rows))
