"""A process that has imported what a node needs, and forks nodes: importing takes seconds.

    with open_fork_server() as server:
        process = server.start(["node"], environment, out, err)
        done = server.run(["chat"], environment, "What is a ring?")

A child runs ``python -m meshllm`` with arguments, variables and files of its own; it inherits
modules, and no state. Processes that start ``within`` a command import for themselves, as do those
of benchmarks.
"""

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from tempfile import TemporaryFile
from threading import Lock
from typing import IO

NAME = "tests.processes.fork_server"
IMPORTED = (
    "meshllm.api.access.revocations",
    "meshllm.api.serve",
    "meshllm.cli.node.node",
    "meshllm.cli.ring.status",
    "meshllm.model.text.tokenizer",
    "meshllm.node.control",
    "meshllm.node.node",
    "meshllm.node.preparation",
    "meshllm.node.ring.local_ring",
    "meshllm_quic.link.dialer",
    "meshllm_websocket.transport",
    "pydantic.types",
    "transformers.models.llama.modeling_llama",
)
MAX_BYTES = 1 << 18  # of a request: arguments and variables
POLL_S = 0.02
STREAMS = 1, 2, 0
"""The file descriptors of a child to which the files of a request go, in this order."""


@dataclass
class ForkedProcess:
    """A child of the server, used like a `subprocess.Popen`."""

    pid: int
    server: "ForkServer"
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.returncode = self.server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float = inf) -> int:
        """Wait for the end; raise `subprocess.TimeoutExpired` after so many seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(NAME, timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended; its id is not reused before `poll`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process as a power cut would."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The other side of the server."""

    def __init__(self, channel: socket.socket) -> None:
        """Use a connection to a server."""
        self._channel = channel
        self._lock = Lock()

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], *files: IO[bytes]
    ) -> ForkedProcess:
        """Fork a process that runs ``python -m meshllm`` with these words.

        ``files`` are its stdout, its stderr, and, unless that is empty, its stdin.
        """
        asked = json.dumps([*words, dict(environment)]).encode()
        return ForkedProcess(int(self._ask(asked, *(each.fileno() for each in files))), self)

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], stdin: str, timeout: float = inf
    ) -> subprocess.CompletedProcess[str]:
        """Wait for the end of such a process; raise `subprocess.TimeoutExpired` if that is late."""
        with TemporaryFile() as out, TemporaryFile() as err, TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            process = self.start(words, environment, out, err, given)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                said = [_read(each) for each in (out, err)]
                raise subprocess.TimeoutExpired([NAME, *words], timeout, *said) from None
            said = [_read(each) for each in (out, err)]
        return subprocess.CompletedProcess([NAME, *words], code, *said)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a child; None while it runs."""
        code: int | None = json.loads(self._ask(str(pid).encode()))
        return code

    def _ask(self, message: bytes, *files: int) -> bytes:
        with self._lock:
            socket.send_fds(self._channel, [message], files)
            if answer := self._channel.recv(MAX_BYTES):
                return answer
        raise AssertionError("the fork server has ended")


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@contextmanager
def open_fork_server(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    """Run a server; its children outlive it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    command = [sys.executable, "-m", NAME, str(number)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[number]):
        theirs.close()
        with ours:
            yield ForkServer(ours)


def main() -> None:
    """Serve; a child leaves with its words, and runs meshllm."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the tests
    if (words := _serve(channel)) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:] = words
        runpy.run_module("meshllm", run_name="__main__", alter_sys=True)


def _import_all() -> None:
    from meshllm.cli.app import limit_spinning
    from meshllm.cli.shared.local import import_heavy

    limit_spinning()
    import_heavy(*IMPORTED)
    gc.freeze()


def _serve(channel: socket.socket) -> list[str] | None:
    """Fork, and report exit codes, until the channel is closed; return the words of a child."""
    while True:
        message, files, *_ = socket.recv_fds(channel, MAX_BYTES, len(STREAMS))
        if not message:
            return None
        match json.loads(message):
            case int(pid):
                ended, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
                channel.send(json.dumps(code).encode())
            case [*words, variables]:
                if child := os.fork():
                    channel.send(str(child).encode())
                else:
                    channel.close()
                    _become(variables, files)
                    return words
        for each in files:
            os.close(each)


def _become(variables: Mapping[str, str], files: Sequence[int]) -> None:
    """Take over variables and files."""
    os.environ.clear()
    os.environ.update(variables)
    for number, file in zip(STREAMS, files, strict=False):  # stdin stays that of the server
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
