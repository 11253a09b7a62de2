"""A tiny model whose layers are in a ring of two."""

from collections.abc import Callable
from pathlib import Path

import pytest

from meshllm.model.files.source import Source, open_folder
from meshllm.names import Digest, Span
from meshllm.remote import layers as remote
from meshllm.remote.layers import RemoteLayers
from tests.builders.frozen_ring import FrozenRing

DIGEST = Digest(bytes(32))


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


@pytest.fixture
def ring(source: Source) -> FrozenRing:
    return FrozenRing(source, [Span(0, 2), Span(2, 6)])


@pytest.fixture
def layers(ring: FrozenRing, naps: list[float]) -> RemoteLayers:
    """The layers of the ring; pauses are noted, not made."""
    return RemoteLayers(ring, DIGEST, 6, naps.append)


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many tokens a micro-batch has."""
    return lambda tokens: monkeypatch.setattr(remote, "MICRO_TOKENS", tokens)
