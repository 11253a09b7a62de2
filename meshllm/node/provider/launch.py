"""Become a command that ends when its parent does: ``python launch.py PARENT COMMAND...``.

A script that imports only the standard library, so that it takes milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main(parent: int, command: list[str]) -> None:
    """Ask Linux to end this process with its parent, then replace it; other systems do not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:  # else the parent ended before it was asked
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
