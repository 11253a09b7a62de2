"""Connection of a Python process to the node on its machine; used by several threads."""

import json
import ssl
import weakref
from pathlib import Path
from typing import Any

import httpx2

from meshllm.api.unix import check_usable, is_answered
from meshllm.errors import LinkLost, MeshError, PeerFault, UserError
from meshllm.names import Digest, Span
from meshllm.node.requests.request_json import error_from_fields
from meshllm.protocol.training.codec import Direction
from meshllm.status import LayerSpans, from_json

CONNECT_S = 10.0  # s; a batch takes as long as it takes, and the node watches over its peers


class NodeConnection:
    """Sends batches to the node behind a socket.

    Every method raises `LinkLost` if no node is running or the connection is lost, and the node's
    own error.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        if not is_answered(socket):
            raise self._no_node()
        # An empty context: the socket is unencrypted.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(socket), verify=context),
            base_url="http://meshllm",
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
        )
        self.close = weakref.finalize(self, self._client.close)
        """Close the connection; what drops it last does so, too."""

    def spans(self, model: Digest) -> list[Span]:
        """Return the spans of the ring that holds a model, in order."""
        body = self._fetch("GET", {"model": model.hex()})
        try:
            return [Span.parse(each) for each in from_json(LayerSpans, json.loads(body)).spans]
        except (ValueError, UserError):
            raise PeerFault("The node does not say how the layers are split") from None

    def compute(self, model: Digest, span: Span, direction: Direction, data: bytes) -> bytes:
        """Send a batch through layers that one node has; return what comes out."""
        query = {"model": model.hex(), "span": str(span), "direction": direction.name.lower()}
        return self._fetch("POST", query, data)

    def _fetch(self, method: str, query: dict[str, str], body: bytes | None = None) -> bytes:
        try:
            response = self._client.request(method, "/mesh/layers", params=query, content=body)
        except httpx2.ConnectError:
            raise self._no_node() from None
        except httpx2.TransportError as error:
            raise LinkLost(f"The connection to the node was lost: {error}") from None
        if response.is_error:
            raise _error(response)
        content: bytes = response.content
        return content

    def _no_node(self) -> LinkLost:
        check_usable(self._socket)  # such as a folder of another user
        hint = "start one with `meshllm node`"
        return LinkLost(f"No node is running at `{self._socket}`", hint=hint)


def _error(response: Any) -> MeshError:
    try:
        return error_from_fields(response.json()["error"])
    except (ValueError, KeyError, TypeError, PeerFault):
        return PeerFault(f"The node responded with HTTP status {response.status_code}")
