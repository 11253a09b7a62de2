"""Command-line options made from settings.

A setting is defined once, in its dataclass: type, default and help text come from there.
"""

import ast
import inspect
import shlex
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

import typer

from meshllm.cli.shared import complete
from meshllm.cli.terminal.render import plain
from meshllm.config import Key, Scalar, Settings, current, keys, load, state_path
from meshllm.errors import UserError
from meshllm.names import Quant, WireMode
from meshllm.request import MODEL_SAMPLING, Request
from meshllm.units import parse_memory, parse_share

if TYPE_CHECKING:
    from meshllm.node.options import InferenceConfig

Command = TypeVar("Command", bound=Callable[..., object])

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_METAVARS = {str: "TEXT", int: "N", float: "X"}
_VALUES = {
    "MODEL": ("model", "draft"),
    "NAME": ("transport", "device", "name"),
    "SIZE": ("prefix_cache", "memory"),
    "FOLDER": ("state",),
    "ADDRESS": ("listen",),
    "ADDRESSES": ("advertise", "relay"),
    "HOST:PORT": ("serve",),
    "TICKET": ("join",),
    "A:B": ("layers",),
    "TIME": ("keep",),
    "NODES": ("exclude", "prefer", "entry", "trust"),
    "FILE": ("key_file", "tls_cert", "tls_key", "trace"),
    "ORIGINS": ("origins",),
}
"""What the text of a setting is, in its help."""
_METAVAR_OF = {setting: metavar for metavar, names in _VALUES.items() for setting in names}
_UNSET = dict.fromkeys(MODEL_SAMPLING, "the model's") | {"seed": "random", "max_tokens": "no limit"}
_COMPLETERS = {
    "model": complete.models,
    "draft": complete.models,
    "device": complete.devices,
    "transport": complete.transports,
}


@cache
def docs(owner: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass at the top level of its module."""
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
    """Add an option for each setting to a command; each is a keyword, None when not given."""

    def decorate(command: Command) -> Command:
        known = keys()
        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        options = [_option(known[name]) for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # inspect reads it first
        return command

    return decorate


def settings(flags: dict[str, Scalar]) -> Settings:
    """Merge the options of a command with the other sources of settings."""
    return load(flags).settings


def is_given(invocation: typer.Context, name: str) -> bool:
    """Return whether the command line has an option, which may have its default as value."""
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_state(command: str, state: Path) -> str:
    """Return a command for a hint, with `--state` where it would use another folder without it."""
    if state == state_path(load({}).settings):
        return command
    return f"{command} --state {shlex.quote(str(state))}"


def check_draft(chosen: Settings) -> None:
    """Raise `UserError` if a draft model is set and speculation is disabled."""
    if chosen.draft is None or (chosen.speculation == "auto" and not chosen.exact):
        return
    other = "--exact" if chosen.exact else "--speculation off"
    raise UserError(
        f"`--draft` cannot be combined with `{other}`, which disables speculation",
        hint="omit one of them",
    )


def memory_bytes(text: str, chosen: Settings) -> int:
    """Parse `8GiB`, or `50%` of the free memory; raise `UserError` for anything else."""
    share = parse_share(text)
    return parse_memory(text) if share is None else int(_free_bytes(chosen) * share)


def _free_bytes(chosen: Settings) -> int:
    """Return the free memory of the chosen device."""
    if chosen.device != "cpu":
        import torch

        from meshllm.model import device

        found = device.choose(chosen.device, torch.float32, Quant(chosen.quant))
        if found != device.CPU:
            return device.free_bytes(found)
    import psutil  # type: ignore[import-untyped]  # ships no types

    return int(psutil.virtual_memory().available)


def inference_config(
    chosen: Settings, *, cache: Path | None = None, of_mesh: bool = False
) -> "InferenceConfig":
    """Return how to run a model; ``of_mesh`` leaves the quantisation to the mesh.

    Raises:
        UserError: an invalid amount of memory.
    """
    from meshllm.node.options import InferenceConfig

    prefixes = chosen.prefix_cache
    return InferenceConfig(
        dtype=None if chosen.dtype == "auto" else chosen.dtype,
        quant=None if of_mesh else Quant(chosen.quant),
        device=chosen.device,
        threads=chosen.threads,
        exact=chosen.exact,
        speculation=chosen.speculation == "auto",
        draft=chosen.draft,
        wire=WireMode(chosen.wire),
        memory_bytes=_amount(chosen.memory, chosen),
        prefix_bytes=0 if prefixes == "0" else _amount(prefixes, chosen),
        cache=cache,
    )


def _amount(text: str | None, chosen: Settings) -> int | None:
    return None if text is None else memory_bytes(text, chosen)


def _option(key: Key) -> inspect.Parameter:
    kind = key.kind
    option = typer.Option(
        f"--{key.name.replace('_', '-')}",
        help=_help(key),
        metavar=_METAVAR_OF.get(key.name) or _METAVARS.get(kind) or "|".join(get_args(kind)),
        autocompletion=_COMPLETERS.get(key.name),
        show_default=False,
    )
    return inspect.Parameter(
        key.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def shown(chosen: Settings, name: str) -> str:
    """Return the value of a setting as text."""
    value = current(chosen, name)
    is_unset = name in chosen.unset or (value is None and name in _UNSET)
    return _UNSET[name] if is_unset else plain(value)


def help_of(key: Key) -> str:
    """Return the help text of a setting: the docstring of its field."""
    return docs(key.owner).get(key.name) or docs(Request)[key.name]


def _help(key: Key) -> str:
    default = _UNSET.get(key.name) or (None if key.default is None else plain(key.default))
    extra = [f"default: {default}"] if default else []
    return f"{help_of(key)}  [{'; '.join([*extra, f'env: {key.variable}'])}]"
