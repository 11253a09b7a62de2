"""What is set, and where it was set.

A later origin wins: default, user file, project file, environment, flag. The project file is
`meshllm.toml` in the working directory only: one further up may belong to somebody else.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, cast, get_args, get_type_hints

from platformdirs import user_cache_path, user_config_path, user_state_path

from meshllm.errors import UserError
from meshllm.request import Request, Sampling

Ends: TypeAlias = Literal["entry", "client"]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
QuantName: TypeAlias = Literal["none", "int8", "int4"]
WireName: TypeAlias = Literal["exact", "plain", "int8", "auto"]
PolicyName: TypeAlias = Literal["auto", "fastest", "throughput", "proportional"]
Speculation: TypeAlias = Literal["auto", "off"]
LogFormat: TypeAlias = Literal["text", "json"]
Scalar: TypeAlias = str | int | float | bool | None

PREFIX = "MESHLLM_"
PROJECT_FILE = "meshllm.toml"
DEFAULT = "default"

_RANGES: dict[str, tuple[float, float]] = {
    "nodes": (1, 1024),  # more than any model has layers
    "members": (1, 64),
    "context": (16, 10_000_000),
    "threads": (1, 4096),
    "max_tokens": (1, 10_000_000),
    "temperature": (0, 100),
    "top_k": (0, 10_000_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),  # it divides, so never 0
    "frequency_penalty": (-100, 100),
    "presence_penalty": (-100, 100),
    "seed": (0, 2**63 - 1),
}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set; the names are those of flags, variables and file keys."""

    model: str = "builtin"
    """Model: `builtin`, a folder, or a Hugging Face name."""
    nodes: int = 1
    """Nodes of the ring, all in this process."""
    transport: str = "loopback"
    """Transport between the nodes."""
    ends: Ends = "entry"
    """Who holds embedding and head."""
    dtype: Dtype = "auto"
    """Number format of the weights; `auto` is as stored."""
    quant: QuantName = "none"
    """Hold weights in 8 or 4 bits: smaller, faster, not the same."""
    device: str = "auto"
    """Where to compute: `auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = None
    """Processor threads; torch decides when not set."""
    speculation: Speculation = "auto"
    """Guess at the next tokens and check several in one trip."""
    draft: str | None = None
    """Let a small model, named as `--model` is, guess too."""
    exact: bool = False
    """Compute each token as transformers does, to the last bit."""
    wire: WireName = "exact"
    """How hidden states travel; `int8`: smaller, not the same."""
    prefix_cache: str | None = None
    """Memory for earlier texts: `2GiB`, `10%` of what is free, 0."""
    system: str | None = None
    """What the model is told before the conversation."""
    state: str | None = None
    """Folder of the node's key, mesh and door."""
    listen: str | None = None
    """Where others reach this node; port 7700 when not set."""
    advertise: str | None = None
    """Other addresses of this node, as of a reverse proxy."""
    relay: str | None = None
    """Relays through which others reach this node, with commas."""
    join: str | None = None
    """Ticket of the mesh to join."""
    name: str | None = None
    """Name of this node; that of the machine when not set."""
    memory: str | None = None
    """Memory of the process: `8GiB`, or `50%` of what is free."""
    layers: str | None = None
    """Hold exactly the layers A:B."""
    policy: PolicyName = "auto"
    """What the ring is to be good at."""
    members: int | None = None
    """Nodes of the ring; the policy chooses when not set."""
    exclude: str | None = None
    """Nodes without layers: names or ids, with commas."""
    prefer: str | None = None
    """Nodes to use if a layer fits: names or ids, with commas."""
    context: int = 4096
    """Tokens of one session for which the ring has room."""
    discovery: bool = True
    """Look for nodes of the mesh on the local network."""
    log_format: LogFormat = "text"
    """Form of the log on stderr."""
    history: bool = True
    """Remember the lines typed in a conversation."""
    debug: bool = False
    """Show where in the code an error was raised."""
    max_tokens: int = Request().max_tokens
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting by its name."""

    name: str
    owner: type
    """The dataclass that documents it."""
    kind: Any
    """Its type without ``None``: str, int, float, bool or a Literal."""
    default: Scalar

    @property
    def variable(self) -> str:
        """Name its environment variable."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in force and the origin of each."""

    settings: Settings
    origins: Mapping[str, str]
    """Setting to `default`, a file, a variable or a flag."""


@cache
def keys() -> Mapping[str, Key]:
    """Name every setting, in the order of the dataclasses."""
    return {key.name: key for owner in (Settings, Sampling) for key in _keys_of(owner)}


def load(
    flags: Mapping[str, Scalar],
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Config:
    """Merge every origin; a flag that is None was not given.

    Raises:
        UserError: a file that is no TOML, a key nobody knows, a value of the wrong type or range.
    """
    values: dict[str, Scalar] = {}
    origins = dict.fromkeys(keys(), DEFAULT)
    for name, value, origin in _given(flags, environ, folder):
        values[name], origins[name] = check(name, value, origin), origin
    return Config(change(Settings(), values), origins)


def change(settings: Settings, values: Mapping[str, Scalar]) -> Settings:
    """Replace the settings of these names."""
    inner: dict[str, Any] = {name: values[name] for name in values.keys() & _names(Sampling)}
    outer: dict[str, Any] = {name: values[name] for name in values.keys() - inner.keys()}
    return replace(settings, **outer, sampling=replace(settings.sampling, **inner))


def current(settings: Settings, name: str) -> Scalar:
    """Read one setting by name."""
    owner = settings.sampling if name in _names(Sampling) else settings
    value: Scalar = getattr(owner, name)
    return value


def check(name: str, value: object, origin: str) -> Scalar:
    """Return the value of a setting, or say what is wrong with it and where it was set."""
    key = _known(name, origin)
    if key.kind is float and type(value) is int:
        value = float(value)
    choices = get_args(key.kind)
    if choices and value not in choices:
        raise UserError(f"`{name}` is {value!r} ({origin})", hint=f"one of {_list(choices)}")
    if not choices and type(value) is not key.kind:
        raise UserError(f"`{name}` is {value!r}, no {_WORDS[key.kind]} ({origin})")
    low, high = _RANGES.get(name, (-inf, inf))
    if isinstance(value, int | float) and not low <= value <= high:
        raise UserError(f"`{name}` is {value}, not between {low:g} and {high:g} ({origin})")
    return cast("Scalar", value)


def parse(name: str, text: str, origin: str) -> Scalar:
    """Read a setting from text, as the environment and ``/set`` give it."""
    key = _known(name, origin)
    if key.kind is bool:
        return check(name, _BOOLEANS.get(text.lower(), text), origin)
    if key.kind in (int, float):
        try:
            return check(name, key.kind(text), origin)
        except ValueError:
            return check(name, text, origin)
    return check(name, text, origin)


def files(folder: Path | None = None) -> list[Path]:
    """List the files that are read when they exist, the strongest last."""
    user = user_config_path("meshllm", appauthor=False) / "config.toml"
    return [user, (folder or Path.cwd()) / PROJECT_FILE]


def state_path(settings: Settings) -> Path:
    """Name the folder of the node's key, mesh and door."""
    if settings.state is not None:
        return Path(settings.state).expanduser().absolute()
    return user_state_path("meshllm", appauthor=False)


def cache_path() -> Path:
    """Name the folder of what can be made again, for all nodes of this user on this machine."""
    return user_cache_path("meshllm", appauthor=False)


_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _given(
    flags: Mapping[str, Scalar], environ: Mapping[str, str] | None, folder: Path | None
) -> Iterator[tuple[str, Scalar, str]]:
    for path in files(folder):
        for name, value in _read(path).items():
            yield name, value, str(path)
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            yield name, parse(name, text, variable), variable
    for name, value in flags.items():
        if value is not None:
            yield name, value, f"--{name.replace('_', '-')}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"`{path}` is not readable: {error}") from None


def _known(name: str, origin: str) -> Key:
    known = keys()
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"one of {_list(known)}"
    raise UserError(f"No setting is named `{name}` ({origin})", hint=hint)


def _keys_of(owner: type) -> Iterator[Key]:
    hints = get_type_hints(owner)
    for each in fields(owner):
        if each.name == "sampling":
            continue
        kind = hints[each.name]
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        yield Key(each.name, owner, kind, cast("Scalar", each.default))


def _names(owner: type) -> set[str]:
    return {each.name for each in fields(owner)}


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
