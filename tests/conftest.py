"""Fixtures of all tests: isolation of global state, and small shared models."""

import gc
import logging
import os
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.hypothesis_settings  # noqa: F401

RINGS = "api", "cli", "integration", "node"
"""The folders of tests that form rings."""
WARM = "bench", "builtin"
"""The same, of rings that may warm up."""
PROCESSES = "tests/processes/"
OWN_CACHES = "tests/processes/test_weights.py"


def pytest_configure(config: pytest.Config) -> None:
    """Set the cache folder, and import the model before a test imports transformers whole.

    Workers share the cache, so that kernels are compiled and measured once for all of them. What a
    test module asks of the CPU while it is collected is kept in this folder, too, not the user's.
    The model is imported as the command line does; a process that only divides tests among workers
    imports no test.
    """
    # Ignored if a script or `nohup` has started the tests; processes of tests inherit it.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="meshllm-tests-")
        config.add_cleanup(cache.cleanup)
        os.environ["XDG_CACHE_HOME"] = cache.name  # workers inherit it
    if config.getoption("dist", "no") != "no" and "PYTEST_XDIST_WORKER" not in os.environ:
        return
    gc.disable()  # until `_freeze`: nothing that is imported becomes garbage
    from meshllm.model.without_compiler import without_compiler

    with without_compiler():
        import meshllm.model.steps.runner
        import meshllm.testing.models  # noqa: F401
        from meshllm.model.split.onemkl import warm_up_onemkl
    warm_up_onemkl()  # tests run stock models, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of processes first, others in random order.

    So one worker runs them all, and starts what they share once; the others meanwhile use the cores
    that its processes leave, and nothing long is left at the end. Nodes that copy what was measured
    on this machine come after those that measure it.
    """
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(PROCESSES),
            item.nodeid.startswith(OWN_CACHES),
        )
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Limit torch to one thread: two processes with two threads each contend for two cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _freeze() -> None:
    """Leave what was imported out of full garbage collections, and do fewer of them.

    Each would take 0.3 s; and the fewer objects there are, the sooner the next one begins.
    """
    gc.freeze()
    gc.set_threshold(700, 10, 40)
    gc.enable()


@pytest.fixture(autouse=True)
def _draws(request: pytest.FixtureRequest) -> None:
    """Seed torch with the test's name, so that its numbers do not depend on other tests."""
    import torch

    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """Restore the log level and handlers that a command changed."""
    root, ours = logging.getLogger(), logging.getLogger("meshllm")
    handlers, level = list(root.handlers), ours.level
    ours.setLevel(logging.NOTSET)
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Refuse a test that leaves a signal handler behind, which would fail a later one."""
    handled = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.getsignal(each) for each in handled]
    yield
    assert [signal.getsignal(each) for each in handled] == before


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep meshllm's state and config out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


class NoWarmUp:
    """Stands for `meshllm.node.compute.warm_up.WarmUp`."""

    def __init__(self, *_: object) -> None:
        """Take what is not warmed up."""

    async def run(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module", autouse=True)
def _trials(request: pytest.FixtureRequest, _state: None) -> Iterator[None]:
    """Let rings try the kernels of each kind of layer once for all workers, and never warm up.

    What a trial finds is tested in `tests/model`, where each load runs one; a warm-up in
    `tests/node/compute/test_warm_up.py`. Nodes of processes warm up. The shape of a model is
    measured once, too, and code stays mapped.
    """
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in (*RINGS, *WARM):
        yield
        return
    from meshllm.config import cache_path
    from meshllm.model.steps.trial import CachedTrial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshllm.model.steps.runner.try_steps", CachedTrial(cache_path()))
        if folder in RINGS:
            from meshllm.model.capacity import shape_of

            def known_shape(source: Any, dtype: Any, quant: Any, _: Path | None) -> Any:
                return shape_of(source, dtype, quant, cache_path())

            patch.setattr("meshllm.node.ring.runtime.WarmUp", NoWarmUp)
            patch.setattr("meshllm.node.ring.model_runtime.shape_of", known_shape)
            patch.setattr("meshllm.model.shape._unmap_code", lambda: None)
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 layers, float32, without a tokenizer."""
    from meshllm.testing.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("llama")).folder
