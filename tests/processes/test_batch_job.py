"""A node inside a batch job: no root, no D-Bus, one writable folder, limits, a walltime signal."""

import shutil
import signal
import subprocess

import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, ask, asking

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
LIMITS = ("prlimit", f"--as={8 << 30}", "--cpu=600", "--nofile=256")
HOMELESS = (
    "env", "-u", "DBUS_SESSION_BUS_ADDRESS", "-u", "XDG_RUNTIME_DIR", "-u", "XDG_CACHE_HOME",
    "-u", "XDG_CONFIG_HOME", "-u", "XDG_STATE_HOME", "HOME=/dev/null",
)  # fmt: skip


def test_a_batch_job_serves_and_leaves_in_order_at_its_end(fleet: Fleet, answers: Answers) -> None:
    if shutil.which("unshare") is None or shutil.which("prlimit") is None:
        pytest.skip("needs `unshare` and `prlimit`")
    if subprocess.run((*ORDINARY, "true"), check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    job = fleet.node("job")
    job.start(*ALONE, "--model", "builtin", within=(*HOMELESS, *ORDINARY, *LIMITS))
    fleet.form()

    whole = ask(job, QUESTION)
    with asking(job, QUESTION) as chat:
        job.send(signal.SIGTERM)  # what batch systems send before the walltime is over
        last = chat.answer()

    assert whole == last == answers[QUESTION]
    assert job.ended() == 0, job.stderr
    assert "Permission denied" not in job.stderr
