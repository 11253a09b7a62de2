"""What a forked process shares with a new interpreter."""

import signal
from pathlib import Path

import pytest

from meshllm import __version__
from tests.processes.fleet import WAIT_S, environment
from tests.processes.fork_server import ForkedProcess, ForkServer

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]


def start(server: ForkServer, folder: Path, *words: str, **variables: str) -> ForkedProcess:
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        return server.start(words, environment() | variables, out, err)


def test_its_output_and_exit_code_are_its_own(server: ForkServer, tmp_path: Path) -> None:
    assert start(server, tmp_path, "--version").wait(WAIT_S) == 0
    assert (tmp_path / "out").read_text() == f"meshllm {__version__}\n"

    assert start(server, tmp_path, "nonsense").wait(WAIT_S) == 2
    assert (tmp_path / "err").read_text().startswith("error: ")


def test_its_input_is_its_own(server: ForkServer, tmp_path: Path) -> None:
    words = "key", "revoke", "-", "--state", str(tmp_path)
    none, key = (server.run(words, environment(), stdin, WAIT_S) for stdin in ("", "a-key\n"))

    assert (none.returncode, none.stdout, key.returncode, key.stdout) == (2, "", 0, "")
    assert none.stderr.startswith("error: stdin has no key of ")
    assert key.stderr.startswith("the key is revoked here; ")


def test_its_variables_are_its_own(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "config", "show", "--origin", MESHLLM_NODES="7")

    assert process.wait(WAIT_S) == 0
    assert "MESHLLM_NODES" in (tmp_path / "out").read_text()


def test_a_signal_ends_it(server: ForkServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "relay", "--listen", "127.0.0.1:0")
    assert process.poll() is None

    process.kill()

    assert process.wait(WAIT_S) == -signal.SIGKILL
    process.kill()  # does nothing
