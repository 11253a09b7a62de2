"""What a replay sends its requests to: a backend, or an OpenAI-compatible API."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import httpx2

from meshllm.errors import LinkLost, MeshError, ModelError, NotAuthorised, PeerFault, UserError
from meshllm.node.requests.request_json import MESSAGE_CHARS
from meshllm.request import Answer, Backend, Piece, Request, Sampling
from meshllm.status import ModelStatus
from meshllm.strict_json import build, parse

_EVENT = "data: "
_DONE = "[DONE]"
_URL_HINT = "give the base URL that `meshllm serve` prints, with `/v1`"


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """What a target says of an answer."""

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    tokens: tuple[int, ...] = ()
    """Their ids, if the target tells them."""


class Target(Protocol):
    """Answers the requests of a replay, each by the model that it names."""

    async def ask(self, request: Request, begun: Callable[[], None]) -> TargetAnswer:
        """Answer a request; call ``begun`` for the first token, and any number of times later.

        Raises:
            MeshError: it is not answered.
        """


@dataclass(frozen=True, slots=True)
class BackendTarget:
    """A node or a ring as a target."""

    backend: Backend

    async def ask(self, request: Request, begun: Callable[[], None]) -> TargetAnswer:
        """Answer a request, see `Target`."""
        async with aclosing(self.backend.generate(request)) as events:
            async for event in events:
                match event:
                    case Piece() if event.tokens or event.has_text:  # an engine tells no tokens
                        begun()
                    case Answer():
                        counts = event.prompt_tokens, event.cached_tokens, event.completion_tokens
                        return TargetAnswer(*counts, event.tokens)
        raise LinkLost("The answer has no end")


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """An OpenAI-compatible API as a target: its `/v1/completions` takes token ids."""

    client: httpx2.AsyncClient
    """Of its base URL, without a timeout or a limit of connections."""

    async def ask(self, request: Request, begun: Callable[[], None]) -> TargetAnswer:
        """Answer a request, see `Target`; the first text counts as the first token."""
        usage: _Usage | None = None
        async for found in self._events(self._body(request)):
            if found.get("choices"):
                begun()
            if reported := found.get("usage"):
                usage = build(_Usage, reported, "usage", strict=False)
        if usage is None:
            raise PeerFault("The server reported no usage")
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        return TargetAnswer(usage.prompt_tokens, cached or 0, usage.completion_tokens)

    def _body(self, request: Request) -> dict[str, object]:
        sampling = {
            each.name: value
            for each in fields(Sampling)
            if (value := getattr(request.sampling, each.name)) != each.default
        }
        return {
            "model": request.model,
            "prompt": request.ids,
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignores_end,
            "temperature": request.sampling.temperature,
            **sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def models(self) -> tuple[ModelStatus, ...]:
        """List the models that are served, by their names only.

        Raises:
            MeshError: nothing answers there, it needs a key, or it serves no model.
        """
        url = self.client.base_url
        try:
            response = await self.client.get("models")
        except httpx2.TransportError as error:
            raise LinkLost(f"Nothing answers at `{url}`: {error}", hint=_URL_HINT) from None
        if response.status_code == httpx2.codes.UNAUTHORIZED:
            reason = f"`{url}` requires a valid API key"
            raise NotAuthorised(reason, hint="`--key-file FILE` reads one")
        if response.is_error:
            raise _refusal(response.status_code, response.content)
        found = build(_Models, _object(response.text), strict=False).data
        if not found:
            raise ModelError(f"No model is served at `{url}`", hint="wait until its ring serves")
        return tuple(
            ModelStatus(each.id, 0, 0, it.precision, "", aliases=it.aliases, key=it.key)
            for each in found
            for it in (each.meshllm,)
        )

    async def _events(self, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream; raise `MeshError` for an error in or before it."""
        try:
            async with self.client.stream("POST", "completions", json=body) as response:
                if response.is_error:
                    raise _refusal(response.status_code, await response.aread())
                async for line in lines(response):
                    if line.startswith(_EVENT) and line != _EVENT + _DONE:
                        yield _object(line.removeprefix(_EVENT))
        except httpx2.TransportError as error:
            raise LinkLost(f"The connection was lost: {error or type(error).__name__}") from None


async def lines(response: httpx2.Response) -> AsyncGenerator[str, None]:
    """Yield the lines of a response, without their ends; JSON may have other separators inside.

    Bytes that are not UTF-8 are replaced.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").removesuffix("\r")
    if rest:
        yield rest.decode(errors="replace")


@asynccontextmanager
async def open_http_target(url: str, key: str | None) -> AsyncIterator[HttpTarget]:
    """Yield the API at a base URL, as `http://127.0.0.1:7780/v1`.

    Raises:
        UserError: the URL is invalid.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    unlimited = httpx2.Limits(max_connections=None)
    try:
        async with httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=None, limits=unlimited
        ) as client:
            yield HttpTarget(client)
    except httpx2.InvalidURL as error:
        raise UserError(f"Invalid URL `{url}`: {error}", hint=_URL_HINT) from None


@dataclass(frozen=True, slots=True)
class _Ours:
    """What meshllm says of a model, if it is the server; see `ModelStatus`."""

    aliases: tuple[str, ...] = ()
    key: str = ""
    precision: str = ""


@dataclass(frozen=True, slots=True)
class _Model:
    id: str
    meshllm: _Ours = _Ours()


@dataclass(frozen=True, slots=True)
class _Models:
    data: tuple[_Model, ...]


@dataclass(frozen=True, slots=True)
class _Details:
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Usage:
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


def _object(text: str) -> dict[str, Any]:
    """Parse an object; raise the error that it reports."""
    found = parse(text.encode())
    if not isinstance(found, dict):
        raise PeerFault("The server sent no JSON object")
    if error := _reported(found):
        raise error
    return found


def _refusal(status: int, body: bytes) -> MeshError:
    """Return the error of a response, with what the server says of it if that is JSON."""
    try:
        error = _reported(parse(body))
    except UserError:  # such as a page of HTML
        error = None
    return error or PeerFault(f"The server responded with HTTP status {status}")


def _reported(found: object) -> MeshError | None:
    """Return the error that an object reports: servers agree on its message only."""
    match found:
        case {"error": {"message": str(text)} | str(text)}:
            return MeshError(text[:MESSAGE_CHARS])
    return None
