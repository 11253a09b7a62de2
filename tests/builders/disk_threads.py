"""Which threads use the state folders of nodes."""

import threading
from pathlib import Path

import pytest

from meshllm.node.membership import state_store


def note_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the threads that read or write state in a folder from now on."""
    threads = list[int]()
    read, draft = state_store._read, state_store._draft

    def note(path: Path) -> None:
        if path.is_relative_to(folder):
            threads.append(threading.get_ident())

    def note_reading(path: Path) -> state_store.Content | None:
        note(path)
        return read(path)

    def note_writing(path: Path, data: bytes) -> Path:
        note(path)
        return draft(path, data)

    monkeypatch.setattr(state_store, "_read", note_reading)
    monkeypatch.setattr(state_store, "_draft", note_writing)
    return threads
