"""The public application on TCP: the API server that OpenAI's clients use."""

import asyncio
import errno
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from meshllm.api.access.accounts import MAX_KEY_CHARS, MAX_KEY_FILE_BYTES, Accounts, keys_in
from meshllm.api.access.gate import LOOPBACK, AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.connection import MAX_OPEN, PublicProtocol
from meshllm.api.generation.service import Service
from meshllm.api.owner import owner_views
from meshllm.api.port import ApiServerPort
from meshllm.api.serve import run_server
from meshllm.errors import UserError, cannot_listen
from meshllm.local_files import hint_of, reason_of
from meshllm.traces.recorder import Recorder

DRAIN_S = 60.0  # s for the requests in progress when it closes, as long as a node takes
MIN_KEY_CHARS = 16
MAX_FILE_KEYS = 1024


@dataclass(frozen=True, slots=True)
class ApiServerOptions:
    """Where to listen, and whom to let in."""

    host: str
    port: int
    """0 is any free one."""
    require_key: bool = False
    """Require a key on a loopback address, too."""
    key_file: Path | None = None
    """File of further keys, one on a line; it makes keys required."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    """None: it is in the file of the certificate."""
    origins: tuple[str, ...] = ()
    create: str = "meshllm key create NAME"
    """The command that creates a key for this API server, for hints."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A bound socket, and the policy for its requests."""

    bound: socket.socket
    policy: AccessPolicy
    accounts: Accounts
    tls: dict[str, Path | None] = field(default_factory=dict)
    """Settings of uvicorn."""
    recorder: Recorder | None = None
    """Of the trace of its requests, if there is one."""

    @property
    def url(self) -> str:
        """The base URL of OpenAI's clients; a wildcard address is shown as loopback."""
        host = self.bound.getsockname()[0]
        address = ip_address(host)
        if address.is_unspecified:
            host = "::1" if address.version == 6 else "127.0.0.1"
        return self.url_at(host)

    def url_at(self, host: str) -> str:
        """Return the base URL at one address of this machine."""
        port = self.bound.getsockname()[1]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"{'https' if self.tls else 'http'}://{place}/v1"

    @property
    def is_readable(self) -> bool:
        """Whether others on the network can read what is sent."""
        return not (self.tls or ip_address(self.bound.getsockname()[0]).is_loopback)

    async def serve(self, node: ApiServerPort, closing: asyncio.Event | None = None) -> None:
        """Serve until cancelled, or until what is in progress when ``closing`` is set has ended.

        That may take `DRAIN_S`.
        """
        service = Service(node, self.accounts, self.recorder)
        owner = owner_views(node, self.accounts, self.policy)
        server = run_server(
            public_application(service, self.policy, owner),
            self.bound,
            http=PublicProtocol,
            limit_concurrency=2 * MAX_OPEN,  # idle ones are closed before
            ssl_certfile=self.tls.get("cert"),
            ssl_keyfile=self.tls.get("key"),
        )
        if closing is None:
            await server
            return
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server)
            await closing.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await service.close()
            serving.cancel()


@contextmanager
def open_api_server(
    options: ApiServerOptions, accounts: Accounts, recorder: Recorder | None = None
) -> Iterator[ApiServer]:
    """Bind the socket of an API server; it is closed at the end.

    Raises:
        UserError: the address cannot be used, a key is needed and there is none, or a file is
            missing or invalid.
    """
    tls = _tls(options)
    file_keys = read_keys(options.key_file) if options.key_file else ()
    with _bound(options.host, options.port) as bound:
        is_local = ip_address(bound.getsockname()[0]).is_loopback
        needs_key = options.require_key or options.key_file is not None or not is_local
        if needs_key and not file_keys and not _has_key(accounts):
            place = "this address" if not is_local else "`--require-key`"
            hint = f"create one with `{options.create}`"
            raise UserError(f"The API needs a key for {place}, and there is none", hint=hint)
        hosts = LOOPBACK | {options.host.lower()}
        policy = AccessPolicy(needs_key, hosts, options.origins, file_keys)
        yield ApiServer(bound, policy, accounts, tls, recorder)


def read_keys(path: Path) -> tuple[str, ...]:
    """Read a private file of keys of an API server, see `read_key_file`.

    Raises:
        UserError: others can read the file, or a key is too short or too long.
    """
    keys = read_key_file(path)
    if any(not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS for key in keys):
        text = f"A key in `{path}` does not have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} characters"
        raise UserError(text, hint="make one with `openssl rand -hex 24`")
    return keys


def read_key_file(path: Path) -> tuple[str, ...]:
    """Read a private file of keys of any API, one on a line; `#` begins a comment.

    Raises:
        UserError: others can read the file, or it has too many keys or none.
    """
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(MAX_KEY_FILE_BYTES + 1)
        text = data.decode("ascii")
    except (OSError, ValueError) as error:
        text = f"Cannot read the key file `{path}`: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"Other users can read the key file `{path}`", hint=f"`chmod 600 {path}`")
    if len(data) > MAX_KEY_FILE_BYTES:
        text = f"The key file `{path}` has more than {MAX_KEY_FILE_BYTES} bytes"
        raise UserError(text, hint="write one key on a line")
    keys = keys_in(text)
    if not 0 < len(keys) <= MAX_FILE_KEYS:
        text = f"The key file `{path}` has {len(keys)} keys, not 1 to {MAX_FILE_KEYS}"
        raise UserError(text, hint="write one key on a line")
    return keys


def _has_key(accounts: Accounts) -> bool:
    now = time.time()
    return any(each.state(now) == "active" for each in accounts.list_keys())


def _tls(options: ApiServerOptions) -> dict[str, Path | None]:
    if options.tls_cert is None:
        if options.tls_key is not None:
            raise UserError("`--tls-key` needs `--tls-cert`", hint="add `--tls-cert FILE`")
        return {}
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = f"`{options.tls_cert}`, `{options.tls_key or options.tls_cert}`"
        raise UserError(
            f"Cannot use the certificate and its key ({files}): {reason_of(error)}",
            hint="give PEM files that belong together, with a key without a password",
        ) from None
    return {"cert": options.tls_cert, "key": options.tls_key}


def _no_password() -> str:
    """Prevent a prompt for the password of an encrypted key."""
    raise ValueError("the key is encrypted")


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        bound = _bind_first([(each[0], str(each[4][0])) for each in found], port)
    except UnicodeError:  # a part of the name is empty, or longer than 63 characters
        hint = "write a host name, or an address of this machine"
        raise UserError(f"Invalid host `{host}`", hint=hint) from None
    except OSError as error:
        raise cannot_listen(f"{host}:{port}", error) from None
    with bound:
        yield bound


def _bind_first(addresses: Sequence[tuple[int, str]], port: int) -> socket.socket:
    """Bind the first address that this machine has: `localhost` may also be one that it lacks."""
    family, address = addresses[0]
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT} or not addresses[1:]:
            raise
    return _bind_first(addresses[1:], port)
