"""Starts nodes as forks of one process that has imported what a node does: that takes seconds."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

MOST_BYTES = 65536  # of a request
PR_SET_CHILD_SUBREAPER = 36


class Fork(subprocess.Popen[bytes]):
    """A process that this one has not started, but is the parent of."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        """Set what `Popen` sets when it has started a process."""
        self.args, self.pid = words, pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        self._communication_started = False


class ForkServer:
    """A process whose forks run commands of meshllm, as children of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it, and become the parent of what its forks leave behind."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests, which end their nodes
                env=environment,
            )

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], out: BinaryIO, err: BinaryIO
    ) -> Fork:
        """Run a command of meshllm."""
        request = json.dumps([list(words), dict(environment)]).encode()
        socket.send_fds(self._requests, [request], [out.fileno(), err.fileno()])
        return Fork(int(self._requests.recv(MOST_BYTES)), words)

    def close(self) -> None:
        """End it; its forks go on."""
        self._requests.close()
        self._process.wait()


def main() -> None:
    """Fork for each request; in a fork, return when the command has ended."""
    from meshllm.cli.shared.local import import_heavy

    import_heavy("meshllm.node.preparation", "meshllm.node.ring.runtime")
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 2)
        if not request:
            return
        read, write = os.pipe()
        if not (middle := os.fork()):
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            for file in (read, write, requests.detach()):
                os.close(file)
            words, environment = json.loads(request)
            _run(words, environment, files)
            return
        os.waitpid(middle, 0)  # with its end, the tests are the parent of the node
        requests.send(os.read(read, MOST_BYTES))
        for file in (read, write):
            os.close(file)
        for file in files:
            os.close(file)


def _run(words: list[str], environment: dict[str, str], files: Sequence[int]) -> None:
    from meshllm.cli.app import main as run

    for number, file in enumerate(files, 1):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    run()


if __name__ == "__main__":
    main()
