"""The process id that a child of an engine wrote, and whether it runs."""

from pathlib import Path


def written_pid(note: Path) -> int:
    """Return the process id that a process wrote; 0 until then."""
    return int(note.read_text() or 0) if note.exists() else 0


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
