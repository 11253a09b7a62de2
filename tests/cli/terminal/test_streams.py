import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest


@pytest.mark.parametrize("place", ["closed", "broken", "full"])
def test_what_stderr_does_not_take_changes_neither_stdout_nor_exit_code(
    place: str, tmp_path: Path
) -> None:
    reader, broken = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "meshllm", *words, "--state", str(tmp_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr={"broken": broken, "full": full}.get(place),
            text=True,
            check=False,
            preexec_fn=partial(os.close, 2) if place == "closed" else None,
        )

    made, failed = run("key", "create", "laptop"), run("key", "revoke", "phone")
    os.close(broken)
    os.close(full)

    assert (made.returncode, made.stdout.count("\n"), made.stdout[:3]) == (0, 1, "sk-")
    assert (failed.returncode, failed.stdout) == (2, "")
