"""`meshllm help`: the help of a command, or a manual page of section 7."""

import os
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from meshllm.cli.terminal.render import out
from meshllm.errors import UserError

EXAMPLES = """\b
Examples:
  meshllm help
  meshllm help ring plan
  meshllm help networking
"""

_FOLDER = Path(__file__).parents[1] / "topics"
_WIDEST = 100  # columns; longer lines are hard to read


def topics() -> dict[str, str]:
    """Return the Markdown page of each topic; its heading is ``name: summary``."""
    return {page.stem: page.read_text("utf-8") for page in _FOLDER.glob("*.md")}


def summary(page: str) -> str:
    """Return the summary in the heading of a page."""
    return page.partition("\n")[0].partition(": ")[2]


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    commands = getattr(context.find_root().command, "commands", {})
    return [name for name in (*commands, *topics()) if name.startswith(incomplete)]


def show_help(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC", help="Show this command or topic.", autocompletion=_complete
        ),
    ] = None,
) -> None:
    """Show the help of a command or a page of the manual.

    Without TOPIC it lists both. A terminal gets a formatted page, a pipe gets
    Markdown.
    """
    root = context.find_root()
    pages = topics()
    if not words:
        listed = "\n".join(f"  {name:12} {summary(page)}" for name, page in sorted(pages.items()))
        out(f"{root.get_help()}\n\nTopics of `meshllm help TOPIC`:\n{listed}")
    elif words[0] in getattr(root.command, "commands", {}):
        root.command.main([*words, "--help"], prog_name="meshllm")
    elif len(words) == 1 and (page := pages.get(words[0])):
        _show(page)
    else:
        known = ", ".join(f"`{name}`" for name in sorted(pages))
        hint = f"name a command, or a topic: {known}"
        names = (*pages, *getattr(root.command, "commands", {}))
        if close := get_close_matches(words[0], names, n=1):
            hint = f"did you mean `meshllm help {close[0]}`?"
        raise UserError(f"No help on `{' '.join(words)}`", hint=hint)


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        out(page, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(_WIDEST, shutil.get_terminal_size().columns))
    formatted = Markdown(page)
    if shutil.which("less"):
        os.environ.setdefault("LESS", "-FRX")  # show colours, exit at once if it fits
        with console.pager(styles=True):
            console.print(formatted)
    else:
        console.print(formatted)
