"""Small models that many tests share; written once per run."""

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshllm.model.lean import lean

with lean():  # as the command line does
    from meshllm.testing.models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two processes with two threads each stall each other on two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _draws(request: pytest.FixtureRequest) -> None:
    """Draw a test's numbers by its name: the same in any order, beside any other tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """Undo what a command set: how much is logged, and where."""
    root, ours = logging.getLogger(), logging.getLogger("meshllm")
    handlers, level = list(root.handlers), ours.level
    ours.setLevel(logging.NOTSET)
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what meshllm remembers out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 layers, float32, without a tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("llama")).folder
