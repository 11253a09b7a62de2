"""An engine that a provider starts, watches, restarts and stops."""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from meshllm.node.provider import launch

FIRST_RESTART_S, LAST_RESTART_S = 1.0, 60.0
STABLE_S = 60.0  # s after which a new failure restarts at once
STDERR = 2
STOP_S = 10.0  # s to stop before the engine is killed
STOP_POLL_S = 0.05  # s between two looks at whether children of it are left

logger = logging.getLogger(__name__)


class EngineProcess:
    """A command that serves OpenAI's API on a port of this machine."""

    def __init__(self, command: Sequence[str]) -> None:
        """Take a command; `{port}` in it becomes a free port, another one for each start."""
        self.port = _free_port()
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        running = self._process
        return running.pid if running and running.returncode is None else None

    @property
    def url(self) -> str:
        """The URL of the API; another program may be there while there is no process."""
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """Kill the process and its children, and do not wait for their end."""
        if self._process is not None:  # it may have ended before its children
            _signal(self._process.pid, signal.SIGKILL)

    async def run(self, ended: Callable[[str], None] = lambda _: None) -> None:
        """Run the command, again whenever it ends, with backoff; stop it when cancelled.

        ``ended`` is called each time it ends, before its children have, or cannot be started, with
        what happened, which names no path of this machine.
        """
        clock, delay = asyncio.get_running_loop().time, FIRST_RESTART_S
        while True:
            begin = clock()
            code = await self._run_once(ended)
            delay = FIRST_RESTART_S if clock() - begin > STABLE_S else delay
            logger.warning("the engine ended with %s, restarting in %.0f s", code, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RESTART_S)

    async def _run_once(self, ended: Callable[[str], None]) -> str:
        """Run the command; return with what it ended."""
        if shutil.which(self._command[0]) is None:
            ended("is not installed any more")
            return f"{os.strerror(errno.ENOENT)}: {self._command[0]}"
        try:
            self._process = process = await self._start()
        except (OSError, RuntimeError) as error:  # too many processes, threads or open files
            ended("cannot be started")
            return getattr(error, "strerror", None) or str(error)
        try:
            code = await process.wait()
            ended(f"ended with code {code}")
            return f"code {code}"
        finally:
            await _stop(process)
            self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        self.port = _free_port()  # the one before may be in use by now
        command = [each.replace("{port}", str(self.port)) for each in self._command]
        # A group of its own: Ctrl-C must not stop it before its requests are finished.
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=STDERR,  # stdout is for results of the command, here none
            start_new_session=True,
        )


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop the process and its children; kill those that do not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.shield(process.wait())
                while _has_orphans(process.pid):  # noqa: ASYNC110
                    await asyncio.sleep(STOP_POLL_S)
            return


def _has_orphans(group: int) -> bool:
    """Return whether processes of a group are left whose leader has ended.

    Those that have ended count too, until their parent waits for them. That is this process if it
    is the first one of a container.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    return _signal(group, 0)


def _signal(group: int, number: int) -> bool:
    """Send a signal to the processes of a group; return whether there was one to take it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: only processes that have ended are left
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
