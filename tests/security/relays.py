"""Strangers that take the places of a relay."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_bytes
from tempfile import TemporaryDirectory
from urllib.request import urlopen

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from meshllm_quic.net.network import Address
from meshllm_quic.net.udp import UdpNetwork
from meshllm_quic.relay.registration import Registration, SendToRelay
from meshllm_quic.wire.packets import decode
from tests.processes.fleet import MESHLLM, environment, free_address, until
from tests.security.attack import Attack, Outcome

HOSTS = [f"127.1.0.{number}" for number in range(1, 13)]
KEYS = 60  # of each host, which may have 64
MOST = 512  # of all of them, which are one network
STREAMS = 8  # of each host
CLOSED_S = 15.0  # s; a relay closes a stream without a registration after 10 s
WAIT_S = 0.5  # s for an answer
OTHER = "127.9.0.1"
TRIES = 20
UPGRADE = (
    b"GET /relay HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def idle_streams() -> Outcome:
    """Open streams on which nobody registers, and count those that are still open later."""
    with _relay() as address, ExitStack() as stack:
        host, _, port = address.rpartition(":")
        for each in HOSTS * STREAMS:
            uri = f"ws://{host}:{port}/relay"
            stack.enter_context(connect(uri, source_address=(each, 0), compression=None))
        time.sleep(CLOSED_S)
        with connect(f"ws://{host}:{port}/relay", compression=None):
            left = _metric(address, "meshllm_relay_streams")
    opened = len(HOSTS) * STREAMS
    effect = f"{left - 1:.0f} of {opened} open after {CLOSED_S:.0f} s"
    return Outcome(effect, "closed after 10 s", held=left <= 1)


def all_streams() -> Outcome:
    """Hold all streams from 14 hosts of seven networks, and let others open one."""
    with _relay() as address, ExitStack() as stack:
        host, _, port = address.rpartition(":")
        held = list[socket.socket]()
        for source in [f"127.{number}.0.{last}" for number in range(2, 9) for last in (1, 2)] * 64:
            held.append(stack.enter_context(socket.socket()))
            held[-1].bind((source, 0))
            with suppress(OSError):
                held[-1].connect((host, int(port)))
                held[-1].sendall(UPGRADE)
        opened = sum(_answers(f"ws://{host}:{port}/relay", source=OTHER) for _ in range(TRIES))
    return Outcome(f"{TRIES - opened} of {TRIES} others kept out", "none", held=opened == TRIES)


def many_registrations() -> Outcome:
    """Register more keys than one network may."""
    with _relay() as address:
        asyncio.run(_register_all(address))
        taken = _metric(address, "meshllm_relay_registered")
    effect = f"{len(HOSTS) * KEYS} keys of a network take {taken:.0f} of 10,000"
    return Outcome(effect, "64 a host, 512 a network", held=0 < taken <= MOST)


async def _register_all(address: str) -> None:
    host, _, port = address.rpartition(":")
    await asyncio.gather(*(_register(each, (host, int(port))) for each in HOSTS))


async def _register(host: str, relay: Address) -> None:
    """Register keys from one host, a few at a time."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def receive(batch: Sequence[tuple[bytes, Address]]) -> None:
        for data, _ in batch:
            heard.put_nowait(data)

    own = await UdpNetwork().open(host, 0, receive)
    for _ in range(KEYS):
        key = Ed25519PrivateKey.from_private_bytes(token_bytes(32))
        node = Registration(relay, key.public_key().public_bytes_raw(), key.sign)
        now = asyncio.get_running_loop().time()
        actions = node.start(now)
        while not node.is_registered:
            for action in actions:
                if isinstance(action, SendToRelay):
                    own.send([action.packet.encode()], relay)
            try:
                async with asyncio.timeout(WAIT_S):
                    actions = node.receive(decode(await heard.get()), now)
            except TimeoutError:
                break
    own.close()


@contextmanager
def _relay() -> Iterator[str]:
    """Run a relay in a process; yield its address."""
    address = free_address()
    host, _, port = address.rpartition(":")
    with TemporaryDirectory() as folder, (Path(folder) / "err").open("wb") as err:
        command = [sys.executable, *MESHLLM, "relay", "--listen", address]
        with subprocess.Popen(command, stdout=err, stderr=err, env=environment()) as process:
            try:
                until(lambda: _answers(f"ws://{host}:{port}/relay"))
                yield address
            finally:
                process.kill()


def _answers(uri: str, source: str = "127.0.0.1") -> bool:
    try:
        with connect(uri, source_address=(source, 0), compression=None):
            return True
    except (OSError, WebSocketException):
        return False


def _metric(address: str, name: str) -> float:
    with urlopen(f"http://{address}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


ATTACKS = (
    Attack("all streams of a relay", "others kept out", all_streams),
    Attack("idle streams at a relay", "all 800 held for over 32 s", idle_streams),
    Attack("registrations at a relay", "9,998 of 10,000 in 17 s", many_registrations),
)
