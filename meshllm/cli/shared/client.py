"""HTTP client of the running node, over its unix socket."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshllm.config import Settings, state_path
from meshllm.errors import LinkLost, MeshError, PeerFault, TimedOut
from meshllm.request import Answer, Event, Request

if TYPE_CHECKING:
    from httpx2 import Response

    from meshllm.node.options import ModelOptions
    from meshllm.protocol.trust.ticket import Ticket
    from meshllm.status import (
        Change,
        Members,
        MeshStatus,
        ModelStatus,
        PlannedRing,
        PlanTerms,
        Removed,
    )

Fields = dict[str, Any]  # an undecoded JSON object

DESCRIBE_S = 600.0  # s; hashing the weights of a large model from a disk takes minutes
REPLY_S = 30.0  # s; these requests need no inference, and the event loop runs none


def socket_path(settings: Settings) -> Path:
    """Return the path of the node's socket in the state folder."""
    from meshllm.api.unix import SOCKET

    return state_path(settings) / SOCKET


def start_command(socket: Path) -> str:
    """Return the command that starts the node of a socket."""
    from meshllm.cli.shared.options import with_state

    return with_state("meshllm node", socket.parent)


def is_running(settings: Settings) -> bool:
    """Return whether a node of the state folder accepts connections.

    Raises:
        UserError: the user has named a folder that no node can use.
    """
    from meshllm.api.unix import check_usable, is_answered

    path = socket_path(settings)
    if settings.state is not None:
        check_usable(path)
    return is_answered(path)


def client_ticket(settings: Settings) -> "Ticket | None":
    """Return the ticket of the settings if it is for a client; raise `UserError` if it is invalid.

    What such a ticket opens is asked also where a node runs, which may be one of another mesh.
    """
    if not settings.join:
        return None
    from meshllm.protocol.trust.credential import Role
    from meshllm.protocol.trust.ticket import parse_ticket

    ticket = parse_ticket(settings.join)
    return ticket if ticket.role is Role.CLIENT else None


@asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator["NodeClient"]:
    """Yield the client of the running node as a backend."""
    yield NodeClient(socket_path(settings))


@dataclass(frozen=True, slots=True)
class NodeClient:
    """Sends requests to the node behind a socket.

    Every method raises `LinkLost` if no node is running or the connection is lost, `TimedOut` if
    the node does not respond, `PeerFault` if its response is invalid, and the node's own error.
    """

    socket: Path

    async def status(self) -> "MeshStatus":
        """Fetch the status report of the node."""
        from meshllm.status import MeshStatus, from_json

        return from_json(MeshStatus, await self._get("/mesh/status"))

    async def models(self) -> "Sequence[ModelStatus]":
        """Fetch the models that the node serves."""
        from meshllm.status import Models, from_json

        return from_json(Models, await self._get("/mesh/models")).models

    async def members(self) -> "Members":
        """Fetch the members of the mesh."""
        from meshllm.status import Members, from_json

        return from_json(Members, await self._get("/mesh/members"))

    async def try_plan(self, terms: "PlanTerms") -> "PlannedRing":
        """Plan with other terms; nothing moves."""
        from meshllm.status import PlannedRing, from_json, to_json

        return from_json(PlannedRing, await self._post("/mesh/plan", to_json(terms)))

    async def invite(self, role: str, expires_s: int, uses: int, **limits: int) -> str:
        """Request a ticket from the node; ``limits`` are those of a client."""
        from meshllm.status import NewTicket, from_json

        wish = {"role": role, "expires_s": expires_s, "uses": uses, **limits}
        return from_json(NewTicket, await self._post("/mesh/ticket", wish)).ticket

    async def remove(self, node: str, spare: Sequence[str] = ()) -> "Removed":
        """Permanently remove a member from the mesh, and whom it invited except those to spare."""
        from meshllm.status import Removed, from_json

        return from_json(
            Removed, await self._post("/mesh/remove", {"node": node, "spare": list(spare)})
        )

    async def serve(self, asked: "ModelOptions") -> "ModelStatus":
        """Let the mesh serve a model, or change how it does."""
        from meshllm.status import ModelStatus, from_json

        body = json.dumps(
            {name: value for name, value in asdict(asked).items() if value is not None}
        )
        # The node may read and hash its weights first.
        reply = await self._fetch("POST", "/mesh/models", body.encode(), timeout_s=DESCRIBE_S)
        return from_json(ModelStatus, _object(reply))

    async def stop(self, model: str) -> str:
        """Let the mesh no longer serve a model; return what to call it, see `Stopped`."""
        from meshllm.status import Stopped, from_json

        body = json.dumps({"model": model}).encode()
        reply = await self._fetch("DELETE", "/mesh/models", body)
        return from_json(Stopped, _object(reply)).model

    async def revoke(self, tags: Sequence[bytes]) -> None:
        """Let the node tell its mesh which API keys its owner revoked, the newest last."""
        await self._post("/mesh/revoked", {"tags": [each.hex() for each in tags]})

    async def events(self) -> AsyncGenerator["Change", None]:
        """Yield changes of the mesh as they happen."""
        from meshllm.status import Change, from_json

        async with aclosing(self._lines("/mesh/events")) as lines:
            async for line in lines:
                yield from_json(Change, _object(line))

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield progress, pieces, and the answer last; closing it cancels the request."""
        from meshllm.node.requests.request_json import event_from_json, request_to_json

        async with aclosing(self._lines("/mesh/ask", request_to_json(request))) as lines:
            async for line in lines:
                if event := event_from_json(line):
                    yield event
                if isinstance(event, Answer):
                    return
        raise LinkLost("The node closed the connection before the answer was complete")

    async def _get(self, path: str) -> Fields:
        return _object(await self._fetch("GET", path))

    async def _post(self, path: str, fields: Fields) -> Fields:
        return _object(await self._fetch("POST", path, json.dumps(fields).encode()))

    async def _lines(self, path: str, body: bytes | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a response: GET without a body, else POST. Closing it disconnects."""
        method = "GET" if body is None else "POST"
        rest = b""
        async with self._open(method, path, body, timeout_s=None) as response:
            async for chunk in response.aiter_raw():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    yield line

    async def _fetch(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> bytes:
        async with self._open(method, path, body, timeout_s=timeout_s or REPLY_S) as response:
            return await response.aread()

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float | None
    ) -> AsyncIterator["Response"]:
        """Send a request and yield its response; translate failures into `MeshError`."""
        import ssl

        import httpx2

        # An empty context: the socket is unencrypted, and the default one loads every certificate.
        transport = httpx2.AsyncHTTPTransport(
            uds=str(self.socket), verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        try:
            async with (
                httpx2.AsyncClient(
                    transport=transport, base_url="http://meshllm", timeout=timeout_s
                ) as client,
                client.stream(method, path, content=body) as response,
            ):
                if response.is_error:
                    raise _error(response.status_code, await response.aread())
                yield response
        except httpx2.ConnectError:
            from meshllm.api.unix import check_usable

            check_usable(self.socket)  # such as a folder of another user
            hint = f"start one with `{start_command(self.socket)}`"
            raise LinkLost(f"No node is running at `{self.socket}`", hint=hint) from None
        except httpx2.TimeoutException:
            raise TimedOut(f"The node did not answer within {timeout_s} s") from None
        except httpx2.TransportError as error:
            raise LinkLost(f"The connection to the node was lost: {error}") from None


def _object(body: bytes) -> Fields:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PeerFault("The response of the node is not a JSON object")
    return found


def _error(status: int, body: bytes) -> MeshError:
    """Return the error that a response reports."""
    from meshllm.node.requests.request_json import error_from_fields

    try:
        return error_from_fields(_object(body)["error"])
    except (PeerFault, KeyError):
        return PeerFault(f"The node responded with HTTP status {status}")
