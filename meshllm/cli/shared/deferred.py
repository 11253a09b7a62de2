"""Commands that are imported when they are run: a Tab needs their names only."""

from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup


class DeferredCommand(TyperCommand):
    """The name and summary of a command, or of a group of commands, until it is needed."""

    def __init__(self, name: str, place: str, summary: str) -> None:
        """Name a command; ``place`` is `module:attribute`, a function or a `Typer`."""
        super().__init__(name=name, help=summary, rich_markup_mode=None)
        self.place = place

    def load(self) -> TyperCommand | TyperGroup:
        """Import the command; examples and class are `EXAMPLES` and `COMMAND` of its module."""
        path, _, attribute = self.place.partition(":")
        module = import_module(path)
        made, parent = getattr(module, attribute), typer.Typer(rich_markup_mode=None)
        if isinstance(made, typer.Typer):
            parent.add_typer(made, name=self.name)
        else:
            kind = getattr(module, "COMMAND", TyperCommand)
            parent.command(self.name, epilog=module.EXAMPLES, cls=kind)(made)
        command = typer.main.get_group(parent).commands[self.name or ""]
        return cast("TyperCommand | TyperGroup", command)

    def make_context(self, *words: Any, **extra: Any) -> Any:
        """Parse the arguments of the command."""
        command = self.load()
        if extra.get("resilient_parsing"):  # for a Tab
            keep_values(command)
        return command.make_context(*words, **extra)


def keep_values(command: Any) -> None:
    """Let a command keep values as they were parsed: converting them imports pydantic."""
    get_params = command.get_params
    command.get_params = lambda context: [_plain(each) for each in get_params(context)]
    for each in getattr(command, "commands", {}).values():
        keep_values(each)


def _plain(parameter: Any) -> Any:
    callback = parameter.callback
    parameter.process_value = lambda context, value: (
        callback(context, parameter, value) if callback else value
    )
    return parameter
