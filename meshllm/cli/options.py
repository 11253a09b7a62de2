"""Settings as options of a command; knows nothing about what a command does with them.

A setting is written once, in its dataclass: type, default and help text come from there.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Annotated, TypeVar, get_args

import typer

from meshllm.cli import complete
from meshllm.cli.render import plain
from meshllm.config import Key, Scalar, Settings, keys, load
from meshllm.request import Request

Command = TypeVar("Command", bound=Callable[..., object])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_METAVARS = {str: "TEXT", int: "N", float: "X"}
_COMPLETERS = {"model": complete.models, "transport": complete.transports}


@cache
def docs(owner: type) -> dict[str, str]:
    """Read the string under each field of a dataclass that stands at the top of its module."""
    classes = [each for each in _parse(owner.__module__).body if isinstance(each, ast.ClassDef)]
    body = next(each.body for each in classes if each.name == owner.__name__)
    return {
        node.target.id: inspect.cleandoc(text)
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(text := after.value.value, str)
    }


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def takes(*names: str) -> Callable[[Command], Command]:
    """Give a command an option for each setting; they arrive as keywords, None when not given."""

    def decorate(command: Command) -> Command:
        known = keys()
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [_option(known[name]) for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # what inspect reads first
        return command

    return decorate


def settings(flags: dict[str, Scalar]) -> Settings:
    """Merge the options of a command with every other origin."""
    return load(flags).settings


def _option(key: Key) -> inspect.Parameter:
    option = typer.Option(
        f"--{key.name.replace('_', '-')}",
        help=_help(key),
        metavar=_METAVARS.get(key.kind) or "|".join(get_args(key.kind)),
        autocompletion=_COMPLETERS.get(key.name),
        show_default=False,
    )
    return inspect.Parameter(
        key.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[key.kind | None, option],
    )


def help_of(key: Key) -> str:
    """Return the text under the field of a setting."""
    return docs(key.owner).get(key.name) or docs(Request)[key.name]


def _help(key: Key) -> str:
    extra = [] if key.default is None else [f"default: {plain(key.default)}"]
    return f"{help_of(key)}  [{'; '.join([*extra, f'env: {key.variable}'])}]"
