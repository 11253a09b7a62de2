"""Commands that are imported when they are run: a Tab needs their names only.

typer converts values with pydantic, whose import takes a tenth of a second and 11 MB. Most values
are texts, flags and whole numbers: pydantic is imported for others only.
"""

import re
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from meshllm.errors import UserError

_PLAIN = {bool, float, int, str}
_DIGITS = re.compile("[0-9]{1,18}")
_UNKNOWN = object()


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
        refuse_undecodable(command)
        return cast("TyperCommand | TyperGroup", command)

    def make_context(self, *words: Any, **extra: Any) -> Any:
        """Parse the arguments of the command."""
        command = self.load()
        keep_values(command, all_of_them=bool(extra.get("resilient_parsing")))  # for a Tab
        return command.make_context(*words, **extra)


def keep_values(command: Any, *, all_of_them: bool) -> None:
    """Let a command keep values as they were parsed; unless all, only those of `_kept`."""
    get_params = command.get_params
    command.get_params = lambda context: [
        _plain(each, all_of_them=all_of_them) for each in get_params(context)
    ]
    for each in getattr(command, "commands", {}).values():
        keep_values(each, all_of_them=all_of_them)


def refuse_undecodable(command: Any) -> None:
    """Let a command refuse texts that are not UTF-8: they can be neither stored nor sent.

    A path may have any bytes.
    """
    invoke = command.invoke

    def invoke_checked(context: Any) -> Any:
        for parameter in command.params:
            _check(parameter, context.params.get(parameter.name))
        return invoke(context)

    command.invoke = invoke_checked
    for each in getattr(command, "commands", {}).values():
        refuse_undecodable(each)


def _check(parameter: Any, value: object) -> None:
    for text in value if isinstance(value, list | tuple) else (value,):
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            is_option = parameter.opts[0].startswith("-")
            name = parameter.opts[0] if is_option else parameter.metavar
            problem = f"`{name}` is not UTF-8 at character {error.start}"
            raise UserError(problem, hint="set the locale of the terminal to UTF-8") from None


def _plain(parameter: Any, *, all_of_them: bool) -> Any:
    callback, convert = parameter.callback, type(parameter).process_value

    def process(context: Any, value: Any) -> Any:
        kept = value if all_of_them else _kept(parameter, value)
        if kept is _UNKNOWN:
            return convert(parameter, context, value)
        return callback(context, parameter, kept) if callback else kept

    parameter.process_value = process
    return parameter


def _kept(parameter: Any, value: Any) -> Any:
    """Return the text, flag or number that a value is; `_UNKNOWN` if conversion has to find out."""
    descriptor = getattr(parameter, "type_descriptor", None)  # not in early versions of typer
    if descriptor is None or parameter.multiple or parameter.nargs != 1:
        return _UNKNOWN
    if value is None:
        return _UNKNOWN if parameter.required else None
    kind, info = descriptor.annotation, descriptor.parameter_info
    if kind not in _PLAIN or info.parser or descriptor.is_choice or descriptor.is_ranged:
        return _UNKNOWN
    if kind is int and isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    return value if type(value) is kind else _UNKNOWN
