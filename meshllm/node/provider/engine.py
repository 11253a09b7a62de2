"""An engine with OpenAI's API as a backend: vLLM, SGLang, llama.cpp, Ollama and others."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2

from meshllm.errors import Busy, LinkLost, MeshError, ModelMissing, PeerFault, TimedOut, UserError
from meshllm.node.provider.engine_json import AnswerState, call_of, offers_of
from meshllm.protocol.membership.client_quota import estimate
from meshllm.protocol.membership.records import ModelOffer
from meshllm.request import Answer, Event, Request, Written

CONNECT_S = 5.0
LIST_S = 5.0  # s for the list of models
IDLE_S = 600.0  # s without a byte; covers a queue and the prefill of a long prompt
MAX_LINE_BYTES = 4 << 20
MAX_ERROR_BYTES = 64 << 10
MESSAGE_CHARS = 1000

_ERRORS: dict[int, type[MeshError]] = {
    400: UserError, 413: UserError, 422: UserError, 404: ModelMissing, 429: Busy, 503: Busy,
    502: LinkLost, 504: TimedOut,  # of a proxy before an engine that is gone or hangs
}  # fmt: skip


class EngineClient:
    """An endpoint with OpenAI's API, such as `http://127.0.0.1:11434/v1`."""

    def __init__(
        self,
        url: str,
        key: str = "",
        precision: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Name the endpoint, its key, and the precision of its models for people.

        ``precision`` has at most `MAX_LABEL_BYTES`, as in records.
        ``names`` maps the models to offer to the engine's names; None offers those that it lists.

        Raises:
            UserError: the URL is invalid, or the key cannot be sent in a header.
        """
        scheme = _checked_scheme(url, key)
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._precision = precision
        self._names = names
        # Made once: the default context reads every certificate, and plain HTTP needs none.
        self._tls = (
            ssl.create_default_context()
            if scheme == "https"
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    async def models(self) -> tuple[ModelOffer, ...]:
        """List the models; raise `MeshError` if the engine does not answer.

        If they were named, an error of the list is ignored: not every engine lists what it serves.
        """
        try:
            listed = await self._listed()
        except (LinkLost, TimedOut, Busy):  # it does not serve yet
            raise
        except MeshError:
            if self._names is None:
                raise
            listed = ()
        if self._names is None:
            return listed
        known = {each.model: each for each in listed}
        return tuple(
            replace(known.get(name) or ModelOffer(name, self._precision), model=model)
            for model, name in self._names.items()
        )

    async def _listed(self) -> tuple[ModelOffer, ...]:
        async with self._open("GET", "/models", None, timeout_s=LIST_S) as response:
            return offers_of(_parsed(await _read(response, MAX_LINE_BYTES)), self._precision)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the pieces of an answer and the `Answer`, see `Backend`; token ids are unknown."""
        path, body = call_of(request)
        if self._names is not None:
            body["model"] = self._names.get(request.model, request.model)
        clock, written, state = asyncio.get_running_loop().time, Written(), AnswerState()
        begin = first = last = clock()
        bound = request.bound if request.max_tokens is None else None
        async with self._open("POST", path, body, timeout_s=IDLE_S) as response:
            async for chunk in _events(response):
                if piece := state.take(chunk):
                    last = clock()
                    first = last if state.pieces == 1 else first
                    written.add(piece)
                    yield piece
                if bound is not None and state.cut(bound):
                    break
        if state.finish is None:
            raise LinkLost("The engine closed the connection before the answer was complete")
        counted = state.completion_tokens
        count = state.pieces if counted is None else counted
        token_s = (last - first) / (count - 1) if count > 1 else 0.0
        answer = Answer(
            text="",
            tokens=(),
            prompt_tokens=estimate(request) if state.is_cut else state.prompt_tokens,
            finish_reason=state.finish,
            ttft_ms=(first - begin) * 1e3,
            ms_per_token=token_s * 1e3,
            tokens_per_second=1 / token_s if token_s else 0.0,
            tokens_per_step=0.0 if counted is None else 1.0,
            hops=(),
            cached_tokens=state.cached_tokens,
            counted=count,
            reasoning_tokens=state.reasoning_tokens,
            stop_text=state.stop_text if state.stop_text in request.stop else "",
        )
        yield written.complete(answer)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield its response; translate failures into `MeshError`."""
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        url, headers = self.url + path, self._headers
        try:
            async with (
                httpx2.AsyncClient(
                    timeout=timeout, trust_env=False, headers=headers, verify=self._tls
                ) as client,
                client.stream(method, url, json=body) as response,
            ):
                if not response.is_success:
                    raise _refusal(response, await _read(response, MAX_ERROR_BYTES))
                yield response
        except httpx2.ConnectError:
            raise LinkLost(f"No engine answers at `{self.url}`") from None
        except httpx2.TimeoutException:
            raise TimedOut(f"The engine at `{self.url}` sent nothing for too long") from None
        except httpx2.HTTPError as error:
            raise LinkLost(f"The connection to the engine was lost: {error}") from None


def _checked_scheme(url: str, key: str) -> str:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL()
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise UserError(f"Invalid URL `{url}`", hint="such as http://127.0.0.1:11434/v1")
    if not (key.isascii() and key.isprintable()):
        text = "The key of the engine has characters other than printable ASCII"
        raise UserError(text, hint="check its variable for a line break")
    return parsed.scheme


async def _read(response: httpx2.Response, most: int) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_bytes():
        data += chunk
        if len(data) > most:
            raise PeerFault(f"The engine sent more than {most} bytes")
    return bytes(data)


async def _events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the data of server-sent events, up to `[DONE]`; raise the error that one carries."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise PeerFault(f"The engine sent a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            found = _parsed(data)
            if not isinstance(found, dict):
                raise PeerFault("The engine sent an event that is not a JSON object")
            if error := found.get("error"):
                raise MeshError(f"The engine failed: {_message(error)}")
            yield found


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise PeerFault("The engine sent invalid JSON") from None


def _refusal(response: httpx2.Response, data: bytes) -> MeshError:
    """Return the error of a response, also of a redirect: a key must not follow it."""
    try:
        found = _parsed(data)
    except PeerFault:
        found = data.decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    if response.has_redirect_location:
        error = f"moved to {response.headers['location']}"
    status = response.status_code
    return _ERRORS.get(status, MeshError)(f"The engine refused ({status}): {_message(error)}")


def _message(error: object) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:MESSAGE_CHARS]
