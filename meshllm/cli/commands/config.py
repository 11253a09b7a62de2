"""`meshllm config`: the settings and their origins."""

from typing import Annotated

import typer

from meshllm.cli.shared.options import Json, help_of
from meshllm.cli.terminal import render
from meshllm.config import current, files, keys, load

app = typer.Typer(help="Show settings and where they come from.", rich_markup_mode=None)


@app.callback()
def group() -> None:
    """Keep `show` a subcommand although it is the only one."""


@app.command()
def show(
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show every setting."""
    config = load({})
    values = {name: current(config.settings, name) for name in keys()}
    if as_json:
        settings = [
            {"name": name, "value": value, "origin": config.origins[name]}
            for name, value in values.items()
        ]
        render.dump({"settings": settings, "files": [str(path) for path in files()]})
        return
    rows = [
        (name, render.plain(value), config.origins[name] if origin else help_of(keys()[name]))
        for name, value in values.items()
    ]
    render.out(render.table(("setting", "value", "origin" if origin else "meaning"), rows))
