"""A request, its events and its error as lines of JSON; knows nothing about who carries them.

::

    {"prefilled": [128, 512]}                                 progress
    {"piece": "text"}                                         new text
    {"answer": {...}}                                         the last line of an answer
    {"error": {"message": ..., "code": "link_lost", ...}}     the last line of a failure
"""

import json
from dataclasses import dataclass
from typing import Any, assert_never

from meshllm.errors import (
    Busy,
    IntegrityFault,
    LinkLost,
    MeshError,
    ModelError,
    NotAuthorised,
    PeerFault,
    PluginError,
    TimedOut,
    UserError,
)
from meshllm.request import Answer, Event, Piece, Prefilled, Request
from meshllm.strict_json import WrongField, build, lay_out, parse

REQUEST_BYTES = 4 << 20  # a million tokens of text
EVENT_BYTES = 4 << 20  # an answer carries every token id
MESSAGE_LETTERS = 4096

_ERRORS: dict[str, type[MeshError]] = {
    "mesh_error": MeshError,
    "user_error": UserError,
    "link_lost": LinkLost,
    "model_error": ModelError,
    "not_authorised": NotAuthorised,
    "timed_out": TimedOut,
    "peer_fault": PeerFault,
    "integrity_fault": IntegrityFault,
    "plugin_error": PluginError,
    "busy": Busy,
}
_CODES = {kind: code for code, kind in _ERRORS.items()}


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error; the names are those of OpenAI's error object, and `hint` and `exit_code`."""

    message: str
    code: str
    type: str = ""
    param: str | None = None
    hint: str | None = None
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class _Line:
    """One of these."""

    prefilled: tuple[int, ...] | None = None
    piece: str | None = None
    answer: Answer | None = None
    error: _Failure | None = None


def request_to_json(request: Request) -> bytes:
    """Write a request as one line, without its end; raise `UserError` if no text can hold it."""
    data = _write(lay_out(request))
    _check_size(data)
    return data


def request_from_json(data: bytes) -> Request:
    """Read a request.

    Raises:
        UserError: too long, no JSON, or a field that is unknown, missing, or cannot hold.
    """
    _check_size(data)
    request = build(Request, parse(data))
    if request.raw is not None and request.turns:
        raise WrongField("raw", "`raw` and `turns` are both prompts", hint="leave out one of them")
    if request.max_tokens < 1:
        raise WrongField("max_tokens", f"`max_tokens` is {request.max_tokens}, not at least 1")
    return request


def event_to_json(event: Event) -> bytes:
    """Write an event as one line, without its end."""
    match event:
        case Prefilled(done, total):
            return _write({"prefilled": [done, total]})
        case Piece(text):
            return _write({"piece": text})
        case Answer():
            return _write({"answer": lay_out(event)})
        case _:
            assert_never(event)


def error_to_json(error: MeshError) -> bytes:
    """Write the line that ends a failed answer, without its end."""
    return _write({"error": error_to_fields(error)})


def _check_size(data: bytes) -> None:
    if len(data) > REQUEST_BYTES:
        raise UserError(f"The request is {len(data)} bytes long, not at most {REQUEST_BYTES}")


def event_from_json(data: bytes) -> Event:
    """Read one line of an answer.

    Raises:
        MeshError: what the line says went wrong where the answer is made.
        PeerFault: the line is none of ours.
    """
    if len(data) > EVENT_BYTES:
        raise PeerFault(f"A line of {len(data)} bytes in an answer, not at most {EVENT_BYTES}")
    try:
        line = build(_Line, parse(data))
    except UserError as error:
        raise PeerFault(f"A line of an answer is none: {error}") from None
    match line:
        case _Line(prefilled=(done, total), piece=None, answer=None, error=None):
            return Prefilled(done, total)
        case _Line(prefilled=None, piece=str(text), answer=None, error=None):
            return Piece(text)
        case _Line(prefilled=None, piece=None, answer=Answer() as answer, error=None):
            return answer
        case _Line(prefilled=None, piece=None, answer=None, error=_Failure() as failure):
            raise _error_of(failure)
        case _:
            raise PeerFault("A line of an answer says several things, or nothing")


def error_to_fields(error: MeshError) -> dict[str, Any]:
    """Lay an error out as OpenAI's clients expect it, with our hint and exit code."""
    kind = next(each for each in type(error).__mro__ if each in _CODES)
    failure = _Failure(
        message=str(error),
        code=_CODES[kind],
        type="invalid_request_error" if kind in {UserError, ModelError} else "server_error",
        param=error.name if isinstance(error, WrongField) else None,
        hint=error.hint,
        exit_code=error.exit_code,
    )
    fields: dict[str, Any] = lay_out(failure)
    return fields


def error_from_fields(fields: object) -> MeshError:
    """Make the error that `error_to_fields` laid out; a `PeerFault` if it is none."""
    try:
        return _error_of(build(_Failure, fields, "error"))
    except UserError as error:
        return PeerFault(f"An error that is none: {error}")


def _error_of(failure: _Failure) -> MeshError:
    # A code nobody knows is from a newer version: what it says still helps.
    kind = _ERRORS.get(failure.code, MeshError)
    hint = failure.hint[:MESSAGE_LETTERS] if failure.hint else None
    return kind(failure.message[:MESSAGE_LETTERS], hint=hint)


def _write(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"Half a character at letter {error.start} of a request") from None
