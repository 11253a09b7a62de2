"""Settings, merged from files, environment and flags, with the origin of each value.

Precedence, lowest first: default, user file, project file, environment, flag. The project file is
`meshllm.toml` in the working directory only: one in a parent may belong to another user. It comes
with folders that others wrote, so it sets `PROJECT_KEYS` only: nothing that says where a prompt
goes, which model is loaded or what is kept.
"""

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, cast, get_args, get_type_hints

from platformdirs import user_cache_path, user_config_path, user_state_path

from meshllm.errors import UserError
from meshllm.local_files import hint_of, read_regular, reason_of
from meshllm.names import Span
from meshllm.request import MODEL_SAMPLING, RANGES, Sampling
from meshllm.units import parse_address, parse_duration, parse_memory, parse_share

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
TRANSPORTS = ("websocket", "quic")  # of a node; a ring inside one process uses loopback
MAX_FILE_BYTES = 1 << 20

_RANGES: dict[str, tuple[float, float]] = {
    "nodes": (1, 1024),  # more than any model has layers
    "members": (0, 64),
    "replicas": (1, 16),
    "context": (16, 10_000_000),
    "threads": (1, 4096),
    "max_tokens": (1, 10_000_000),
    **RANGES,
}
_FORMS: dict[str, Callable[[str], object]] = {
    "memory": lambda text: parse_share(text) or parse_memory(text),
    "prefix_cache": lambda text: text == "0" or parse_share(text) or parse_memory(text),
    "keep": parse_duration,
    "layers": Span.parse,
    "serve": lambda text: text == "" or parse_address(text),  # "" is the default, none
}
"""Parsers of texts that have a form."""
PATHS = frozenset({"state", "key_file", "tls_cert", "tls_key", "trace"})
"""Settings that name a file or a folder."""
_LIBRARIES = (
    *("ATEN_", "TORCH_", "MKL_", "ONEDNN_", "DNNL_"),
    *("OMP_", "GOMP_", "KMP_", "LD_", "CUDA_", "HIP_"),
)
"""Prefixes of the variables of torch, BLAS, OpenMP, the loader and GPUs."""
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; a field name gives the flag, the environment variable and the file key."""

    model: str = "builtin"
    """Model: `builtin`, a folder, or a Hugging Face name."""
    nodes: int = 1
    """Number of ring nodes, all in this process."""
    transport: str = "loopback"
    """Transport between the nodes."""
    ends: Ends = "entry"
    """Which side holds the embedding and the LM head."""
    dtype: Dtype = "auto"
    """Data type of the weights; `auto` is as stored."""
    quant: QuantName = "none"
    """Quantise the weights to 8 or 4 bits: smaller, faster, lossy."""
    device: str = "auto"
    """Compute device: `auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = None
    """CPU threads; measured when not set."""
    speculation: Speculation = "auto"
    """Speculative decoding: draft tokens, verify them together."""
    draft: str | None = None
    """Draft model for speculative decoding, named as `--model`."""
    exact: bool = False
    """Compute with plain torch, bit-identically to transformers."""
    wire: WireName = "exact"
    """Encoding of hidden states; `int8` is smaller but lossy."""
    prefix_cache: str | None = None
    """Memory for the prefix cache: `2GiB`, `10%` of free, or 0."""
    system: str | None = None
    """System prompt of the conversation."""
    state: str | None = None
    """Folder of the node's key, membership and socket."""
    listen: str | None = None
    """Address to listen on; first free port from 7700 if not set."""
    advertise: str | None = None
    """More addresses of this node, such as that of a proxy."""
    relay: str | None = None
    """Relays to register with, separated by commas."""
    join: str | None = None
    """Ticket of the mesh to join."""
    name: str | None = None
    """Name of this node; the host name when not set."""
    memory: str | None = None
    """Memory limit of the process: `8GiB`, or `50%` of free."""
    layers: str | None = None
    """Hold exactly the layers A:B."""
    policy: PolicyName = "auto"
    """Objective by which the ring is planned."""
    members: int | None = None
    """Number of ring nodes; 0 lets the policy choose, as at first."""
    replicas: int | None = None
    """Rings of the model, if nodes suffice; they may share nodes."""
    auto: bool = False
    """Hold the model that lacks nodes most, whatever `model` says."""
    keep: str = "10m"
    """Keep a model in memory at least this long after a request."""
    exclude: str | None = None
    """Nodes to give no layers: names or ids, with commas."""
    prefer: str | None = None
    """Nodes to use if any layer fits: names or ids, with commas."""
    entry: str | None = None
    """Who may read prompts: ids or names, with commas, or `self`."""
    trust: str | None = None
    """Who may see prompts asked here: ids or names, with commas."""
    context: int = 4096
    """Context length of one session that the ring must hold."""
    discovery: bool = True
    """Discover nodes of the mesh on the local network."""
    serve: str | None = None
    """Serve the API on TCP at HOST:PORT, too."""
    key_file: str | None = None
    """File of API keys, one on a line; makes keys required."""
    require_key: bool = False
    """Require an API key on a loopback address, too."""
    tls_cert: str | None = None
    """Certificate chain of the API in PEM: serve it over TLS."""
    tls_key: str | None = None
    """Private key of the certificate, if in another file."""
    origins: str | None = None
    """Origins of web pages that may use the API, with commas."""
    trace: str | None = None
    """Record requests of the API in this file, without text."""
    log_format: LogFormat = "text"
    """Format of the log on stderr."""
    plain: bool = False
    """Show answers as written, without rendering Markdown."""
    history: bool = True
    """Save the lines typed in a conversation."""
    debug: bool = False
    """Show the traceback of an error."""
    max_tokens: int | None = None
    """Maximum tokens of an answer; no limit when not set."""
    sampling: Sampling = field(default_factory=Sampling)
    unset: frozenset[str] = frozenset((*MODEL_SAMPLING, "seed"))
    """Sampling parameters that are not set: the model recommends them, and a seed is drawn."""


@dataclass(frozen=True, slots=True)
class Key:
    """The description of one setting."""

    name: str
    owner: type
    """The dataclass that documents it."""
    kind: Any
    """Its type without ``None``: str, int, float, bool or a Literal."""
    default: Scalar

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings and the origin of each."""

    settings: Settings
    origins: Mapping[str, str]
    """By setting: `default`, a file, a variable or a flag."""


PROJECT_KEYS = frozenset({"max_tokens", "context", "log_format", "debug", "plain"}) | {
    each.name for each in fields(Sampling)
}
"""Settings that a project file may contain: sampling, limits and display."""


@cache
def keys() -> Mapping[str, Key]:
    """Return every setting by name, in the order of the dataclasses."""
    return {key.name: key for owner in (Settings, Sampling) for key in _keys_of(owner)}


def find_key(name: str, origin: str) -> Key:
    """Return a setting by name; raise `UserError` that names the ``origin`` if there is none."""
    known = keys()
    if name in known:
        return known[name]
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`man meshllm` lists them"
    raise UserError(f"Unknown setting `{name}` ({origin})", hint=hint)


def load(
    flags: Mapping[str, Scalar],
    *,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Config:
    """Merge the settings of every origin; a flag that is None was not given.

    Raises:
        UserError: a file is invalid, a key unknown, or a value of the wrong type or out of range.
    """
    values: dict[str, Scalar] = {}
    origins = dict.fromkeys(keys(), DEFAULT)
    for name, value, origin in _given(flags, environ, folder):
        values[name], origins[name] = check(name, value, origin), origin
    return Config(change(Settings(), values), origins)


def change(settings: Settings, values: Mapping[str, Scalar]) -> Settings:
    """Return the settings with these values replaced; None unsets a sampling parameter."""
    unset = {name for name in values.keys() & Settings().unset if values[name] is None}
    inner: dict[str, Any] = {
        name: getattr(Sampling(), name) if name in unset else values[name]
        for name in values.keys() & _names(Sampling)
    }
    outer: dict[str, Any] = {name: values[name] for name in values.keys() - inner.keys()}
    sampling = replace(settings.sampling, **inner)
    return replace(
        settings, **outer, sampling=sampling, unset=(settings.unset - values.keys()) | unset
    )


def current(settings: Settings, name: str) -> Scalar:
    """Read one setting by name; None if it is not set."""
    if name in settings.unset:
        return None
    owner = settings.sampling if name in _names(Sampling) else settings
    value: Scalar = getattr(owner, name)
    return value


def check(name: str, value: object, origin: str) -> Scalar:
    """Return the validated value of a setting; raise `UserError` that names its ``origin``."""
    key = find_key(name, origin)
    if key.kind is float and type(value) is int:
        value = _as_float(value)
    choices = get_args(key.kind)
    if choices and value not in choices:
        hint = f"one of {_list(choices)}"
        raise UserError(f"Invalid value {_shown(value)} for `{name}` ({origin})", hint=hint)
    if not choices and type(value) is not key.kind:
        raise UserError(f"`{name}` is {_shown(value)}, not {_WORDS[key.kind]} ({origin})")
    if isinstance(value, str):
        _check_text(name, value, origin)
    low, high = _RANGES.get(name, (-inf, inf))
    if isinstance(value, int | float) and not low <= value <= high:
        raise UserError(f"`{name}` is {_shown(value)}, not between {low} and {high} ({origin})")
    return cast("Scalar", value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # a whole number in another notation than the decimal one
        return "a number of thousands of digits"


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:  # it has more than 308 digits
        return inf if value > 0 else -inf


def _check_text(name: str, value: str, origin: str) -> None:
    """Raise `UserError` for a text that no such setting can be.

    That is an empty path, a NUL, an argument or a variable not in UTF-8, or an invalid amount.
    """
    if not value and name in PATHS:  # it would be the working directory
        raise UserError(f"`{name}` is empty ({origin})", hint="name one, or leave it out")
    if "\0" in value:
        raise UserError(f"`{name}` has a NUL character ({origin})", hint="remove it")
    try:
        value.encode()
        _FORMS.get(name, str)(value)
    except UnicodeEncodeError as error:
        raise UserError(f"`{name}` is not UTF-8 at character {error.start} ({origin})") from None
    except UserError as error:
        raise UserError(f"{error} for `{name}` ({origin})", hint=error.hint) from None


def parse(name: str, text: str, origin: str) -> Scalar:
    """Parse the text of a setting from the environment or ``/set``."""
    key = find_key(name, origin)
    if key.kind is bool:
        return check(name, _BOOLEANS.get(text.lower(), text), origin)
    if key.kind in (int, float):
        try:
            return check(name, key.kind(text), origin)
        except ValueError:
            return check(name, text, origin)
    return check(name, text, origin)


def files(folder: Path | None = None) -> list[Path]:
    """List the files that are read if they exist, the highest precedence last.

    Raises:
        UserError: the working directory was deleted.
    """
    user = user_config_path("meshllm", appauthor=False) / "config.toml"
    return [user, (folder or _working_folder()) / PROJECT_FILE]


def read_file(path: Path) -> dict[str, Any]:
    """Return what a file sets, unchecked; nothing if it is missing.

    Raises:
        UserError: it cannot be read, or is not TOML.
    """
    try:
        return _parse_file(path, read_regular(path, MAX_FILE_BYTES))
    except (FileNotFoundError, NotADirectoryError):  # as below a home of `/dev/null`
        return {}
    except OSError as error:
        text = f"Cannot read `{path}`: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None


def check_file(path: Path, text: str) -> None:
    """Raise `UserError` unless a file of this text would be valid."""
    for name, value in _parse_file(path, text.encode(errors="surrogateescape")).items():
        check_place(name, path)
        check(name, value, str(path))


def state_path(settings: Settings) -> Path:
    """Return the folder of the node's key, membership and socket."""
    if settings.state is not None:
        return expanded(settings.state).absolute()
    return user_state_path("meshllm", appauthor=False)


def expanded(text: str) -> Path:
    """Return the path of a text, with the `~` that shells leave in ``--state=~/mesh``.

    Raises:
        UserError: it begins with the home folder of a user that is not known.
    """
    path = Path(os.path.expanduser(text))  # noqa: PTH111  # leaves what it does not know
    if text.startswith("~") and path.parts[0].startswith("~"):
        raise UserError(f"`{path.parts[0]}` is not known", hint="write the whole path")
    return path


def cache_path() -> Path:
    """Return the folder of reproducible data, shared by all nodes of this user."""
    return user_cache_path("meshllm", appauthor=False)


def c_compiler() -> str | None:
    """Return the C compiler that the environment names, by the usual variable."""
    return os.environ.get("CC")


def library_environment() -> tuple[str, ...]:
    """Return the variables by which the libraries that compute are configured, as NAME=VALUE."""
    return tuple(
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_LIBRARIES)
    )


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        text = f"The working directory cannot be used: {reason_of(error)}"
        raise UserError(text, hint="it may have been deleted; change to another one") from None


_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _given(
    flags: Mapping[str, Scalar], environ: Mapping[str, str] | None, folder: Path | None
) -> Iterator[tuple[str, Scalar, str]]:
    for path in files(folder):
        for name, value in read_file(path).items():
            check_place(name, path)
            yield name, value, str(path)
    for variable, text in sorted((os.environ if environ is None else environ).items()):
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            yield name, parse(name, text, variable), variable
    for name, value in flags.items():
        if value is not None:
            yield name, value, f"--{name.replace('_', '-')}"


def _parse_file(path: Path, data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors begin a file with a mark
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # not UTF-8, not TOML, or a number of thousands of digits
        reason = str(error).partition(";")[0]  # without advice to programmers
    option = " --project" if path.name == PROJECT_FILE else ""
    hint = f"repair it with `meshllm config edit{option}`"
    raise UserError(f"Cannot read `{path}`: {reason}", hint=hint)


def check_place(name: str, path: Path) -> None:
    """Raise `UserError` if a project file may not contain a setting."""
    if find_key(name, str(path)).name not in PROJECT_KEYS and path.name == PROJECT_FILE:
        raise UserError(
            f"`{name}` cannot be set by a project file ({path})",
            hint=f"set it in `{files()[0]}`, as `{keys()[name].variable}` or as a flag",
        )


def _keys_of(owner: type) -> Iterator[Key]:
    hints = get_type_hints(owner)
    for each in fields(owner):
        if each.name in {"sampling", "unset"}:
            continue
        kind = hints[each.name]
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        default = None if each.name in Settings().unset else cast("Scalar", each.default)
        yield Key(each.name, owner, kind, default)


def _names(owner: type) -> set[str]:
    return {each.name for each in fields(owner)}


def _list(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
