"""JSON lines of a request, of its events and of its error.

::

    {"waiting": {"reason": ...}}                              what the request waits for
    {"prefilled": [128, 512]}                                 progress
    {"prompt": {"start": 0, "tokens": [1, 2, ...]}}           ids of the prompt, if requested
    {"resumable": {...}}                                      how to go on if the ring is lost
    {"interruption": {...}}                                   a loss that the answer survived
    {"piece": "text", "ids": [1], "logprobs": [...]}          new text and tokens
    {"piece": "", "reasoning": "text", "calls": [...]}        text before the answer; tool calls
    {"tokens": [1, 2, ...]}                                   ids of a long answer, between nodes
    {"answer": {...}}                                         the last line of an answer
    {"error": {"message": ..., "code": "link_lost", ...}}     the last line of a failure

Between nodes each line is bounded, however long the answer: the last line does not repeat the text,
and excess token ids go in lines before it (`event_to_lines`, `AnswerReader`).
Unknown lines and fields, which a later version may send, are ignored; so are unknown error codes.
"""

import json
import math
import re
import struct
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, assert_never

from meshllm.errors import (
    Busy,
    ContextTooLong,
    IntegrityFault,
    Leaving,
    LinkLost,
    MeshError,
    ModelError,
    ModelMissing,
    NotAuthorised,
    NotServed,
    PeerFault,
    PluginError,
    QuotaUsed,
    TimedOut,
    UserError,
)
from meshllm.json_shape import check_shape
from meshllm.names import GROUP_BYTES
from meshllm.protocol.kv_cache.prefix_scope import MAX_SCOPE_CHARS
from meshllm.request import (
    Answer,
    Event,
    Interruption,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    TokenLogprobs,
    ToolCallDelta,
    Waiting,
    Written,
)
from meshllm.strict_json import WrongField, build, lay_out, parse

REQUEST_BYTES = 4 << 20  # a million tokens of text
REQUEST_NUMBER_BYTES = 1 << 20  # token ids so far: more than 100,000
EVENT_BYTES = 4 << 20  # the answer line to the owner of a node has every token id
LINE_TOKENS = 16_384  # ids in a line between nodes: 180 KiB at most
TOKEN_LIMIT = 1 << 32  # vocabularies have less than a million
PADDED_BYTES = 128  # lines with text are multiples; one with a token has 50 bytes or less
LINE_CHARS = 65_536  # characters in a line between nodes: 384 KiB at most, escaped
MAX_TOKENS = 1 << 24  # of an answer; the limit of a session, too
MAX_CHARS = 4 * MAX_TOKENS  # of an answer, with its reasoning and calls
MAX_CALLS = 4096  # of an answer
MAX_COUNT = 1 << 32  # of tokens in one number of an answer, which has those of all its sessions
MESSAGE_CHARS = 4096
MAX_RETRY_S = 86_400

_GROUP = re.compile(f"([0-9a-f]{{{2 * GROUP_BYTES}}})?")  # in hex; the id of the first is empty

_ERRORS: dict[str, type[MeshError]] = {
    "mesh_error": MeshError,
    "user_error": UserError,
    "link_lost": LinkLost,
    "model_error": ModelError,
    "model_missing": ModelMissing,
    "not_authorised": NotAuthorised,
    "timed_out": TimedOut,
    "peer_fault": PeerFault,
    "integrity_fault": IntegrityFault,
    "plugin_error": PluginError,
    "busy": Busy,
    "context_too_long": ContextTooLong,
    "leaving": Leaving,
    "quota_used": QuotaUsed,
}
_CODES = {kind: code for code, kind in _ERRORS.items()}


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error: the fields of OpenAI's error object, plus `hint` and `exit_code`."""

    message: str
    code: str
    type: str = ""
    param: str | None = None
    hint: str | None = None
    exit_code: int = 1
    retry_s: int | None = None


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of an answer: exactly one field is set."""

    waiting: Waiting | None = None
    prompt: PromptTokens | None = None
    prefilled: tuple[int, ...] | None = None
    resumable: Resumable | None = None
    interruption: Interruption | None = None
    piece: str | None = None
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] | None = None
    answer: Answer | None = None
    error: _Failure | None = None


def request_to_json(request: Request) -> bytes:
    """Encode a request as one line, without newline.

    Raises:
        UserError: too long, too many values, or not valid text.
    """
    fields = lay_out(request).items()
    data = _write({name: value for name, value in fields if value is not None})
    _check_limits(data)
    return data


def request_from_json(data: bytes) -> Request:
    """Decode a request.

    Raises:
        UserError: too long, too many values, malformed JSON, or a missing or invalid field.
    """
    _check_limits(data)
    request = build(Request, parse(data), strict=False)
    if sum((request.raw is not None, bool(request.turns), bool(request.ids))) > 1:
        text = "`raw`, `turns` and `ids` cannot be combined"
        raise WrongField("raw", text, hint="give one of them")
    if len(request.scope) > MAX_SCOPE_CHARS:
        raise WrongField("scope", f"`scope` has more than {MAX_SCOPE_CHARS} characters")
    for name in ("max_tokens", "bound", "deadline_ms"):
        if (value := getattr(request, name)) is not None and value < 0:
            raise WrongField(name, f"`{name}` is {value}, not at least 0")
    most = math.inf if request.max_tokens is None else request.max_tokens
    if len(request.given) > most and not request.scores_prompt:
        text = f"`given` has {len(request.given)} tokens, more than `max_tokens`"
        raise WrongField("given", text)
    if request.group is not None and not _GROUP.fullmatch(request.group):
        text = f"`group` is not the id of a ring: {2 * GROUP_BYTES} hex digits, or none"
        raise WrongField("group", text)
    return request


def event_to_json(event: Event) -> bytes:
    """Encode an event as one line, without newline."""
    match event:
        case Waiting(reason):
            return _write({"waiting": {"reason": reason[:MESSAGE_CHARS]}})
        case PromptTokens():
            return _write({"prompt": lay_out(event)})
        case Prefilled(done, total):
            return _write({"prefilled": [done, total]})
        case Resumable():
            return _write({"resumable": lay_out(event)})
        case Interruption():
            return _write({"interruption": lay_out(event)})
        case Piece(text):
            fields = lay_out(event)
            more = {"ids": fields.pop("tokens"), **fields}
            return _write({"piece": text, **{n: v for n, v in more.items() if v and n != "text"}})
        case Answer():
            return _write({"answer": lay_out(event)})
        case _:
            assert_never(event)


def event_to_lines(event: Event) -> Iterator[bytes]:
    """Encode an event for `AnswerReader` as lines, each without newline.

    Lines with text are padded: who sees the lengths of encrypted messages in a row could guess the
    text from those of its tokens (Weiss et al., 2024).
    """
    match event:
        case Piece():
            yield from (_padded(event_to_json(piece)) for piece in _split(event))
        case Answer(tokens=tokens):
            at = 0
            for at in range(LINE_TOKENS, len(tokens), LINE_TOKENS):
                yield _write({"tokens": tokens[at - LINE_TOKENS : at]})
            short = replace(event, text="", reasoning="", calls=(), tokens=tokens[at:])
            yield event_to_json(short)
        case _:
            yield event_to_json(event)


def _padded(line: bytes) -> bytes:
    return line.ljust(-(-len(line) // PADDED_BYTES) * PADDED_BYTES)


def _split(piece: Piece) -> Iterator[Piece]:
    """Split a piece, so that none has more than `LINE_CHARS` characters; the last has tokens."""
    pieces = [Piece(part) for part in _parts(piece.text)]
    pieces += [Piece("", reasoning=part) for part in _parts(piece.reasoning)]
    for call in piece.calls:
        first, *rest = _parts(call.arguments) or [""]
        pieces.append(Piece("", calls=(replace(call, arguments=first),)))
        pieces += [Piece("", calls=(ToolCallDelta(call.index, arguments=part),)) for part in rest]
    if sum(map(len, (piece.text, piece.reasoning, *(each.arguments for each in piece.calls)))) <= (
        LINE_CHARS
    ):
        pieces = [piece] if piece.has_text or piece.tokens else []
    for each in pieces[:-1]:
        yield each
    for each in pieces[-1:]:
        yield replace(each, tokens=piece.tokens, logprobs=piece.logprobs)


def _parts(text: str) -> list[str]:
    return [text[at : at + LINE_CHARS] for at in range(0, len(text), LINE_CHARS)]


def error_to_json(error: MeshError) -> bytes:
    """Encode the last line of a failed answer, without newline."""
    return _write({"error": error_to_fields(error)})


def _check_limits(data: bytes) -> None:
    if len(data) > REQUEST_BYTES:
        raise UserError(f"The request is {len(data)} bytes long; the limit is {REQUEST_BYTES}")
    check_shape(data, number_bytes=REQUEST_NUMBER_BYTES)


def event_from_json(data: bytes) -> Event | None:
    """Decode one line of an answer; None for a kind that this version does not know.

    Raises:
        MeshError: the error that the line carries.
        PeerFault: the line is malformed.
    """
    line = _read_line(data)
    return None if line.tokens is not None else _event_of(line)


class AnswerReader:
    """Decodes the lines of one answer that `event_to_lines` encoded."""

    def __init__(self) -> None:
        self._written = Written()
        self._tokens: list[int] = []
        self._ids = self._chars = 0  # of pieces

    def take(self, data: bytes) -> Event | None:
        """Decode the next line as `event_from_json` does; None if it completes no event."""
        line = _read_line(data)
        self._tokens += line.tokens or ()
        self._ids += len(line.ids)
        if max(len(self._tokens), self._ids) > MAX_TOKENS:
            raise PeerFault(f"The answer has more than {MAX_TOKENS} tokens")
        if line.tokens is not None:
            return None
        event = _event_of(line)
        match event:
            case Piece():
                self._count(event)
                self._written.add(event)
            case Answer(tokens=tokens):
                whole = self._written.complete(event)
                return replace(whole, tokens=(*self._tokens, *tokens))
        return event

    def _count(self, piece: Piece) -> None:
        """Raise `PeerFault` for more than an answer can have: all of it is kept until its end."""
        written = (each for call in piece.calls for each in (call.name, call.arguments))
        self._chars += sum(map(len, (piece.text, piece.reasoning, *written)))
        if self._chars > MAX_CHARS:
            raise PeerFault(f"The answer has more than {MAX_CHARS} characters")
        if not all(0 <= call.index < MAX_CALLS for call in piece.calls):
            raise PeerFault(f"A call is not one of the first {MAX_CALLS} of the answer")


def _read_line(data: bytes) -> _Line:
    if len(data) > EVENT_BYTES:
        raise PeerFault(f"A line of an answer has {len(data)} bytes; the limit is {EVENT_BYTES}")
    try:
        return build(_Line, parse(data), strict=False)
    except UserError as error:
        raise PeerFault(f"Malformed line of an answer: {error}") from None


def _event_of(line: _Line) -> Event | None:
    waiting = line.waiting and Waiting(line.waiting.reason[:MESSAGE_CHARS])
    whole = waiting, line.prompt, line.resumable, line.interruption, line.answer
    found: list[Event] = [each for each in whole if each is not None]
    if line.prompt:
        _check_tokens(line.prompt.tokens)
    if line.answer:
        _check_counts(line.answer)
        _check_embedding(line.answer.embedding)
    match line.prefilled:
        case None:
            pass
        case (done, total):
            _check_count(done, total)
            found.append(Prefilled(done, total))
        case numbers:
            raise PeerFault(f"Malformed line of an answer: {len(numbers)} numbers of progress")
    if line.piece is not None:
        piece = Piece(line.piece, line.ids, line.logprobs, line.reasoning, line.calls)
        found.append(piece)
    if len(found) + (line.error is not None) > 1:
        raise PeerFault("Malformed line of an answer: several fields are set")
    if line.error is not None:
        raise _error_of(line.error)
    return found[0] if found else None


def _check_tokens(tokens: Sequence[int]) -> None:
    """Raise `PeerFault` for token ids of a prompt that no entry reports."""
    if len(tokens) > LINE_TOKENS:
        raise PeerFault(f"A line has {len(tokens)} token ids, more than {LINE_TOKENS}")
    if not all(0 <= each < TOKEN_LIMIT for each in tokens):
        raise PeerFault(f"A token id of a prompt is not between 0 and {TOKEN_LIMIT}")


def _check_counts(answer: Answer) -> None:
    """Raise `PeerFault` for numbers that no answer has: they count for limits, and are stored."""
    _check_count(answer.prompt_tokens, answer.cached_tokens, answer.reasoning_tokens)
    _check_count(answer.counted or 0)


def _check_embedding(embedding: str) -> None:
    """Raise `PeerFault` for what is not a whole number of finite float32 in base64."""
    try:
        data = b64decode(embedding, validate=True)
        is_valid = all(map(isfinite, struct.unpack(f"<{len(data) // 4}f", data)))
    except (ValueError, struct.error):
        is_valid = False
    if not is_valid:
        raise PeerFault("An embedding is not base64 of finite numbers of 32 bits")


def _check_count(*counts: int) -> None:
    if not all(0 <= each <= MAX_COUNT for each in counts):
        raise PeerFault(f"A number of tokens is not between 0 and {MAX_COUNT}")


def error_to_fields(error: MeshError) -> dict[str, Any]:
    """Return the fields of OpenAI's error object for an error, plus our hint and exit code."""
    kind = next(each for each in type(error).__mro__ if each in _CODES)
    failure = _Failure(
        message=str(error),
        code=_CODES[kind],
        type="invalid_request_error"
        if issubclass(kind, UserError | ModelMissing)
        else "server_error",
        param=error.name if isinstance(error, WrongField) else None,
        hint=error.hint,
        exit_code=error.exit_code,
    )
    fields: dict[str, Any] = lay_out(failure)
    del fields["retry_s"]
    if isinstance(error, QuotaUsed | NotServed):
        fields["retry_s"] = error.retry_s
    return fields


def error_from_fields(fields: object) -> MeshError:
    """Return the error of fields from `error_to_fields`; a `PeerFault` if they are malformed."""
    try:
        return _error_of(build(_Failure, fields, "error", strict=False))
    except UserError as error:
        return PeerFault(f"Malformed error object: {error}")


def _error_of(failure: _Failure) -> MeshError:
    # An unknown code comes from a newer version: its message still helps.
    kind = _ERRORS.get(failure.code, MeshError)
    hint = failure.hint[:MESSAGE_CHARS] if failure.hint else None
    message = failure.message[:MESSAGE_CHARS]
    if kind is UserError and failure.param is not None:
        return WrongField(failure.param[:MESSAGE_CHARS], message, hint=hint)
    retry_s = min(max(0, failure.retry_s or 0), MAX_RETRY_S)
    if kind is QuotaUsed:
        return QuotaUsed(message, hint=hint, retry_s=retry_s)
    if kind is TimedOut and failure.retry_s is not None:
        return NotServed(message, hint=hint, retry_s=retry_s)
    return kind(message, hint=hint)


def _write(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The request contains an unpaired surrogate at character {error.start} of its JSON"
        ) from None
