"""Errors of the public API: OpenAI's error object, its codes and its HTTP statuses.

https://platform.openai.com/docs/guides/error-codes
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from meshllm.api.request_id import request_id
from meshllm.api.respond import BodyEncoded, BodyTooLarge, BodyTooSlow
from meshllm.errors import (
    Busy,
    ContextTooLong,
    Leaving,
    LinkLost,
    MeshError,
    ModelMissing,
    NotAuthorised,
    NotServed,
    QuotaUsed,
    TimedOut,
    UserError,
)
from meshllm.strict_json import WrongField

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_S = 2  # s; generations end every few seconds, and a ring forms in about as much
JSON = "application/json"
ERRORS = (MeshError, HTTPException, ClientDisconnect, Exception)
"""What an application responds to by `on_error`."""
MESSAGES = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """An HTTP status and OpenAI's error object."""

    status: int
    type: str
    code: str | None
    param: str | None = None
    retry_s: int | None = None
    """Seconds after which the request may succeed; None if it will not."""


class Refused(UserError):
    """A request that the API refuses before it reaches the mesh."""

    def __init__(self, message: str, failure: Failure, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failure = failure


_TOO_LONG = "context_length_exceeded"
_PROMPTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/responses": "input"}
"""The field of the prompt, where it is not `messages`."""
LATER = Failure(503, SERVER, "service_unavailable", retry_s=RETRY_S)
"""Nothing can answer now, but soon."""
_FAILURES: dict[type[MeshError], Failure] = {
    ContextTooLong: Failure(400, INVALID, _TOO_LONG, "messages"),
    BodyTooLarge: Failure(413, INVALID, "request_too_large"),
    BodyEncoded: Failure(415, INVALID, "unsupported_encoding"),
    BodyTooSlow: Failure(408, INVALID, "request_timeout"),
    UserError: Failure(400, INVALID, None),
    ModelMissing: Failure(404, INVALID, "model_not_found", "model"),
    Busy: Failure(429, "requests", "rate_limit_exceeded", retry_s=RETRY_S),
    Leaving: LATER,
    LinkLost: LATER,
    TimedOut: LATER,
    NotAuthorised: LATER,
    MeshError: Failure(500, SERVER, "internal_error"),
}


def failure_of(error: MeshError) -> Failure:
    """Return how an error is reported."""
    match error:
        case Refused():
            return error.failure
        case WrongField():
            return Failure(400, INVALID, error.code, error.name or None)
        case QuotaUsed():
            return Failure(429, "tokens", "rate_limit_exceeded", retry_s=error.retry_s)
        case NotServed():
            return replace(LATER, retry_s=error.retry_s)
        case _:
            return next(_FAILURES[each] for each in type(error).__mro__ if each in _FAILURES)


def error_object(error: MeshError, path: str = "") -> bytes:
    """Write OpenAI's error object for a route; a hint becomes part of the message."""
    failure = failure_of(error)
    param = _PROMPTS.get(path, failure.param) if failure.code == _TOO_LONG else failure.param
    fields = {
        "message": message_of(error),
        "type": failure.type,
        "param": param,
        "code": failure.code,
    }
    return compact({"error": fields})


def messages_error(error: MeshError) -> bytes:
    """Write Anthropic's error object; a hint becomes part of the message."""
    kind = _KINDS.get(failure_of(error).status, "api_error")
    fields = {"type": kind, "message": message_of(error)}
    return compact({"type": "error", "error": fields, "request_id": request_id() or None})


def compact(fields: Mapping[str, object] | Sequence[object]) -> bytes:
    """Write JSON without spaces."""
    return json.dumps(fields, separators=(",", ":")).encode()


def message_of(error: MeshError) -> str:
    """Return the text of an error with its hint."""
    return f"{error}; {error.hint}" if error.hint else str(error)


def response_of(error: MeshError, path: str = "") -> Response:
    """Return the response that reports an error, in the dialect of a path."""
    failure = failure_of(error)
    is_anthropics = path.startswith(MESSAGES)
    body = messages_error(error) if is_anthropics else error_object(error, path)
    headers = {} if failure.retry_s is None else {"retry-after": str(failure.retry_s)}
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body, failure.status, headers, JSON)


async def on_error(request: Request, error: Exception) -> Response:
    """Respond with an error; of a bug, with its type only."""
    path = request.scope.get("path", "")
    match error:
        case MeshError():
            return response_of(error, path)
        case HTTPException(status_code=404):
            text = f"Unknown request URL: {request.method} {path[:200]}"
            return response_of(Refused(text, Failure(404, INVALID, "unknown_url")), path)
        case HTTPException(status_code=405):
            text = f"{request.method} is not allowed on {path[:200]}"
            response = response_of(
                Refused(text, Failure(405, INVALID, "method_not_supported")), path
            )
            response.headers.update(error.headers or {})
            return response
        case ClientDisconnect():
            return Response(status_code=400)  # never read
        case _:
            logger.error("request %s: %s", request_id(), type(error).__name__)
            return response_of(MeshError(f"This is a bug in meshllm: {type(error).__name__}"), path)
