"""The lines of a trace: one JSON object for each request, and one for each new key."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from meshllm.errors import UserError
from meshllm.local_files import hint_of, read_regular, reason_of
from meshllm.request import Sampling
from meshllm.strict_json import WrongField, build, lay_out, parse
from meshllm.traces.buckets import BUCKET, MAX_BUCKETS

MAX_BYTES = 1 << 30  # of a trace that is read
MAX_LINE_TOKENS = 1 << 24

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request: when, how long, and which prefixes it shares with others of its trace."""

    at: float
    """Unix time of the request in seconds."""
    model: str
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt taken from the prefix cache."""
    new_tokens: int
    """Generated tokens."""
    max_tokens: int | None
    """None if the request set no limit."""
    ttft_ms: float | None
    """Time from the request to the first token; None without one."""
    total_ms: float
    """Time from the request to its end."""
    finish_reason: Finish
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters that the request sets, but the seed."""
    buckets: str | None = None
    """Ids of the whole buckets of the prompt and, if it ended, of the answer after it, in order:
    the next prompt of a chat begins with both. None if the tokens are not known here."""

    @property
    def ids(self) -> Sequence[str]:
        """The ids, each for itself."""
        return (self.buckets or "").split()

    def to_json(self) -> bytes:
        """Encode as one line."""
        return _encode(lay_out(self))


def rotation(at: float) -> bytes:
    """Encode the line before the first request under a new key."""
    return _encode({"rotated": at})


def sampling_of(sampling: Sampling) -> dict[str, float]:
    """Return the parameters that are not at their defaults; a seed may identify its user."""
    return {
        each.name: value
        for each in fields(Sampling)
        if each.name != "seed" and (value := getattr(sampling, each.name)) != each.default
    }


def read_trace(path: Path) -> list[TraceLine]:
    """Read the requests of a trace, in the order of their times.

    Raises:
        UserError: the file cannot be read, or a line is invalid.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        raise UserError(
            f"Cannot read the trace `{path}`: {reason_of(error)}",
            hint="record one with `meshllm serve --trace FILE`" if is_missing else hint_of(error),
        ) from None
    return sorted(_lines(path, data), key=lambda line: line.at)


def _lines(path: Path, data: bytes) -> Iterator[TraceLine]:
    for number, text in enumerate(data.splitlines(), start=1):
        try:
            found = parse(text)
            if not (isinstance(found, dict) and "rotated" in found):
                yield _checked(build(TraceLine, found, strict=False))
        except UserError as error:
            raise UserError(f"Invalid line {number} of the trace `{path}`: {error}") from None


def _checked(line: TraceLine) -> TraceLine:
    for name in ("prompt_tokens", "cached_tokens", "new_tokens"):
        if not 0 <= getattr(line, name) <= MAX_LINE_TOKENS:
            raise WrongField(name, f"`{name}` is not between 0 and {MAX_LINE_TOKENS}")
    if len(line.ids) > min((line.prompt_tokens + line.new_tokens) // BUCKET, MAX_BUCKETS):
        raise WrongField("buckets", f"`buckets` has {len(line.ids)} ids, more than the tokens")
    return line


def _encode(found: object) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"
