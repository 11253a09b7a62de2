from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshllm.model.parity import cases
from meshllm.model.parity.cases import CASES, REFERENCES, RingSession, divide, layout, unequal
from meshllm.model.split.meta_model import Part
from meshllm.model.split.shard import Shard
from meshllm.names import Span

IDS = torch.arange(32).reshape(2, 16)


class Tracer:
    """A session that returns its tokens and records its calls."""

    def __init__(self, trace: list[tuple[str, int]]) -> None:
        self.length = 0
        self.trace = trace

    def write(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or mask.shape[1] == self.length + ids.shape[1]
        self.trace.append(("write", ids.shape[1]))
        self.length += ids.shape[1]
        return ids.unsqueeze(-1).float()

    def crop(self, count: int) -> None:
        self.trace.append(("crop", count))
        self.length -= count


class Idle:
    """A shard that does nothing, with an empty cache."""

    def new_cache(self) -> object:
        return object()

    def forward(self, rows: Tensor, _cache: object, **_named: Tensor) -> Tensor:
        return rows.float()


class Adding(Idle):
    """A shard that adds one and has no memory."""

    def forward(self, rows: Tensor, _cache: object, **_named: Tensor) -> Tensor:
        return rows.float() + 1


def tracer(trace: list[tuple[str, int]]) -> Callable[[], Tracer]:
    return lambda: Tracer(trace)


@pytest.mark.parametrize("count", range(1, 8))
def test_parts_tile_the_layers(count: int) -> None:
    parts = divide(7, count)

    assert [layer for part in parts for layer in range(part.span.start, part.span.stop)] == list(
        range(7)
    )
    assert all(part.span for part in parts)
    assert [part.embed for part in parts] == [True] + [False] * (count - 1)
    assert [part.head for part in parts] == [False] * (count - 1) + [True]


def test_one_part_holds_everything() -> None:
    assert layout("1", 6) == (Part(Span(0, 6), embed=True, head=True),)


def test_l_parts_hold_one_layer_each() -> None:
    assert [len(part.span) for part in layout("L", 6)] == [1] * 6


def test_the_entry_layout_has_a_separate_head() -> None:
    *_, last = layout("entry", 6)

    assert last == Part(Span(6, 6), embed=False, head=True)
    assert [part.head for part in layout("entry", 6)] == [False, False, True]


def test_the_ends_layout_has_separate_ends() -> None:
    first, *inner, last = layout("ends", 6)

    assert first == Part(Span(0, 0), embed=True, head=False)
    assert [part.span for part in inner] == [Span(layer, layer + 1) for layer in range(6)]
    assert last == Part(Span(6, 6), embed=False, head=True)


@pytest.mark.parametrize("name", CASES)
def test_case_and_reference_write_the_same_rows(name: str) -> None:
    case = CASES[name](tracer([]), IDS)
    reference = REFERENCES[name](tracer([]), IDS)

    assert unequal(reference, case) is None


def test_a_crop_removes_each_count_and_writes_on() -> None:
    trace: list[tuple[str, int]] = []

    cases.cropped((1, 8))(tracer(trace), IDS)

    steps = [("write", 10), ("crop", 1), ("write", 1), ("write", 10), ("crop", 8), ("write", 1)]
    assert trace == [("write", 6), *steps]


def test_one_flipped_bit_is_unequal() -> None:
    logits = torch.ones(1, 2, 3)
    other = logits.clone()
    other[0, 1, 2] += torch.finfo(torch.float32).eps

    assert unequal([logits, logits], [logits, logits]) is None
    assert unequal([logits, logits], [logits, other]) == "logits differ by 1.2e-07 in write 1"


def test_another_shape_is_unequal() -> None:
    gap = unequal([torch.ones(1, 2, 3)], [torch.ones(1, 1, 3)])

    assert gap == "logits have shape (1, 1, 3), not (1, 2, 3)"


def test_nan_is_never_equal() -> None:
    nothing = torch.full((1, 1, 1), torch.nan)

    assert unequal([nothing], [nothing]) is not None


@pytest.mark.parametrize(
    ("shard", "damage"),
    [(Idle(), "skipping a part is not detected"), (Adding(), "losing a cache is not detected")],
)
def test_a_blind_comparison_is_detected(shard: Shard, damage: str) -> None:
    assert cases.undetected_damage([shard, shard, shard], IDS) == damage


def test_a_ring_carries_the_rows_through_every_part() -> None:
    shard: Shard = Adding()  # type: ignore[assignment]  # duck-typed
    session = RingSession([shard, shard])

    rows = session.write(IDS[:, :3])

    assert torch.equal(rows, IDS[:, :3].float() + 2)
    assert session.length == 3
