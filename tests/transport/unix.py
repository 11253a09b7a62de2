"""A transport over unix sockets: all that a plugin for a byte stream needs."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import ClassVar

from meshllm.errors import LinkLost, UserError
from meshllm.transport.contract import Link, Listener
from meshllm.transport.stream import StreamListener, StreamWire

_NUMBERS = itertools.count()


class UnixTransport:
    """Links over unix sockets; addresses are ``unix:PATH``, which nodes do not dial."""

    name: ClassVar[str] = "unix"
    schemes: ClassVar[tuple[str, ...]] = ("unix",)

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        """Accept links at ``unix:PATH``, or at a path in the folder for temporary files."""
        address = address or f"unix:{gettempdir()}/meshllm-{id(self)}-{next(_NUMBERS)}"
        path = _path(address)
        if path.exists():  # asyncio would replace it
            raise UserError(f"`{path}` is in use")
        listener = StreamListener(address)
        try:
            server = await asyncio.get_running_loop().create_unix_server(listener.accept, path)
        except OSError as error:
            raise UserError(f"Cannot listen at `{path}`: {error.strerror}") from error
        try:
            yield listener
        finally:
            server.close()
            path.unlink()
            await listener.close()

    async def dial(self, address: str) -> Link:
        """Open a link to ``unix:PATH``."""
        loop, path = asyncio.get_running_loop(), _path(address)
        try:
            _, wire = await loop.create_unix_connection(lambda: StreamWire(address), str(path))
        except OSError as error:
            raise LinkLost(f"Cannot reach `{address}`: {error.strerror}") from error
        return await wire.accepted()


def _path(address: str) -> Path:
    scheme, _, path = address.partition(":")
    if scheme != "unix" or not path:
        raise UserError(f"Invalid address `{address}`", hint="write it as `unix:PATH`")
    return Path(path)
