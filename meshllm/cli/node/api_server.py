"""The API server on TCP, from the settings of `meshllm serve` and `meshllm node --serve`."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.cli.shared.options import with_state
from meshllm.cli.terminal import render
from meshllm.config import Settings, expanded, state_path
from meshllm.log import event, is_json
from meshllm.units import listed, parse_address

if TYPE_CHECKING:
    from meshllm.api.tcp import ApiServer
    from meshllm.status import ModelStatus

SETTINGS = ("key_file", "require_key", "tls_cert", "tls_key", "origins", "trace")


@contextmanager
def opened_api_server(chosen: Settings, address: str) -> Iterator["ApiServer"]:
    """Open the API server at `HOST:PORT`; it is announced once its models are known."""
    from meshllm.api.access.accounts import Accounts
    from meshllm.api.tcp import ApiServerOptions, open_api_server
    from meshllm.traces.file import TraceFile
    from meshllm.traces.recorder import Recorder

    options = ApiServerOptions(
        *parse_address(address),
        require_key=chosen.require_key,
        key_file=_path(chosen.key_file),
        tls_cert=_path(chosen.tls_cert),
        tls_key=_path(chosen.tls_key),
        origins=listed(chosen.origins) or (),
        create=with_state("meshllm key create NAME", state_path(chosen)),
    )
    with ExitStack() as stack:
        path = _path(chosen.trace)
        recorder = Recorder(stack.enter_context(TraceFile.open(path))) if path else None
        accounts = stack.enter_context(Accounts.open(state_path(chosen)))
        api_server = stack.enter_context(open_api_server(options, accounts, recorder))
        if api_server.is_readable:
            text = "warning: without `--tls-cert` others on the network can read keys and text"
            tell("readable", text)
        yield api_server


def announce(
    api_server: "ApiServer", served: Sequence["ModelStatus"], model: str | None = None
) -> None:
    """Print how to use an API server, with the first model that it serves, or else ``model``.

    stdout is the URL, the variables of OpenAI's clients, and a request to try.
    """
    render.out(_announcement(api_server, served[0].name if served else model or "MODEL"))
    page, host = api_server.url.removesuffix("v1"), _host_for_others(api_server)
    tell("open", f"page: {page}", url=api_server.url, page=page)
    if host:
        url = api_server.url_at(host)
        tell("reachable", f"from other machines: {url}", url=url)


def tell(name: str, text: str, **facts: str) -> None:
    """Write a message to stderr: where the log is JSON, as an event with its facts."""
    if is_json():
        event("api", event=name, **(facts or {"text": text}))
    else:
        render.print_message(text)


def _host_for_others(api_server: "ApiServer") -> str | None:
    """Return the most reachable address of this machine, if the server listens on all of them."""
    from ipaddress import ip_address

    from meshllm.transport.interfaces import hosts

    bound = ip_address(api_server.bound.getsockname()[0])
    if not bound.is_unspecified:
        return None
    found = (host for host in hosts() if ip_address(host).version == bound.version)
    return next((host for host in found if not ip_address(host).is_loopback), None)


def _announcement(api_server: "ApiServer", model: str) -> str:
    needs_key = api_server.policy.needs_key
    key = "$OPENAI_API_KEY" if needs_key else "none"
    chat = {"model": model, "messages": [{"role": "user", "content": "What is a ring?"}]}
    shown = f" -H 'authorization: Bearer {key}'".replace("'", '"') if needs_key else ""
    return "\n".join(
        (
            api_server.url,
            f"OPENAI_BASE_URL={api_server.url} OPENAI_API_KEY={'KEY' if needs_key else key}",
            f"curl {api_server.url}/chat/completions{shown} -H 'content-type: application/json'"
            f" -d {shlex.quote(json.dumps(chat, ensure_ascii=True))}",
        )
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else expanded(text)
