"""A node inside a batch job: no root, no D-Bus, one writable folder, limits, a walltime signal."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, ask, asking

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'
ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
LIMITS = ("prlimit", f"--as={8 << 30}", "--cpu=600", "--nofile=256")
HOMELESS = (
    "env", "-u", "DBUS_SESSION_BUS_ADDRESS", "-u", "XDG_RUNTIME_DIR", "-u", "XDG_CACHE_HOME",
    "-u", "XDG_CONFIG_HOME", "-u", "XDG_STATE_HOME", "-u", "TMPDIR", "HOME=/dev/null",
)  # fmt: skip


def job_in(folder: Path) -> tuple[str, ...]:
    """Return a command that runs another one as an ordinary user who may write to one folder."""
    mounts = "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, str(folder)
    return *HOMELESS, *mounts, *ORDINARY, *LIMITS


def test_a_batch_job_serves_and_leaves_in_order_at_its_end(fleet: Fleet, answers: Answers) -> None:
    if shutil.which("unshare") is None or shutil.which("prlimit") is None:
        pytest.skip("needs `unshare` and `prlimit`")
    job = fleet.node("job")
    within = job_in(job.folder)
    stray = job.folder.with_name("stray")
    tried = subprocess.run(
        (*within, "sh", "-c", f"touch {stray} 2>&1; id -u"),
        check=False,
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip("this machine allows no user namespaces with mounts")
    assert "Read-only file system" in tried.stdout
    assert tried.stdout.endswith("\n1000\n")
    job.start(*ALONE, "--model", "builtin", within=within)
    fleet.form()

    whole = ask(job, QUESTION)
    with asking(job, QUESTION) as chat:
        job.send(signal.SIGTERM)  # what batch systems send before the walltime is over
        last = chat.answer()

    assert whole == last == answers[QUESTION]
    assert job.ended() == 0, job.stderr
    assert "Permission denied" not in job.stderr
    assert "Read-only" not in job.stderr
