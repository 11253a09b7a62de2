"""Embeddings of a ring are those of the whole model."""

import base64
import json
import math
import shutil
import struct
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshllm.errors import ContextTooLong, ModelError, UserError
from meshllm.model.files.source import resolve
from meshllm.model.text.pooling import Pooling, PoolingMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.session.embedding import RowPool
from meshllm.node.session.entry import EntryNode
from meshllm.request import Answer, Event, Prefilled, Request, Turn
from meshllm.strict_json import WrongField

TEXT = "Once upon a time there was a fox that slept by the river. " * 6
ASKED = Request(raw=TEXT, embeds=True, max_tokens=0)
ROWS = torch.tensor([[3.0, 0.0], [1.0, 0.0], [3.0, 4.0]])


def options(nodes: int, *, speculation: bool = True) -> RingOptions:
    inference = InferenceConfig(dtype="float32", threads=1, speculation=speculation)
    return RingOptions(nodes=nodes, inference=inference)


async def embedded(ring: LocalRing, request: Request) -> tuple[Tensor, Answer, list[Event]]:
    *events, answer = [event async for event in ring.generate(request)]
    assert isinstance(answer, Answer)
    data = base64.b64decode(answer.embedding)
    return torch.tensor(struct.unpack(f"<{len(data) // 4}f", data)), answer, events


def final_rows(ring: LocalRing, tokens: list[int]) -> Tensor:
    """Return the rows [T, D] after the final norm of the stock model."""
    return _final_rows(ring.model.source.folder, tuple(tokens))


@cache
def _final_rows(folder: Path, tokens: tuple[int, ...]) -> Tensor:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows: Tensor = stock.model(torch.tensor([tokens])).last_hidden_state[0]
    return rows


def pooled(rows: Tensor, mode: PoolingMode) -> Tensor:
    match mode:
        case PoolingMode.LAST:
            return rows[-1]
        case PoolingMode.MEAN:
            return rows.mean(0)
        case PoolingMode.FIRST:
            return rows[0]


@pytest.mark.parametrize(
    ("nodes", "speculation"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        (3, True),
    ],
)
async def test_every_ring_embeds_as_the_whole_model(nodes: int, speculation: bool) -> None:
    async with open_local_ring(resolve("builtin"), options(nodes, speculation=speculation)) as ring:
        text = await ring.model.text()
        tokens = text.encode(TEXT)
        rows = final_rows(ring, tokens)

        for mode in PoolingMode:
            text.pooling = Pooling(mode)
            vector, answer, _ = await embedded(ring, ASKED)
            text.pooling = Pooling(mode, normalises=False)
            plain, *_ = await embedded(ring, replace(ASKED, raw=None, ids=tuple(tokens)))

            torch.testing.assert_close(plain, pooled(rows, mode), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(vector, plain / plain.norm())
            assert (answer.prompt_tokens, answer.tokens, answer.text) == (len(tokens), (), "")
            assert ring.entry.sessions == 0


async def test_dimensions_are_the_first_ones_normalised_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_local_ring(resolve("builtin"), options(1)) as ring:
        whole, *_ = await embedded(ring, ASKED)
        short, *_ = await embedded(ring, replace(ASKED, dimensions=16))
        most, *_ = await embedded(ring, replace(ASKED, dimensions=len(whole)))

        torch.testing.assert_close(short, whole[:16] / whole[:16].norm())
        assert torch.equal(most, whole)
        monkeypatch.delattr(EntryNode, "generate")  # wrong ones are refused before
        for wrong in (0, len(whole) + 1):
            with pytest.raises(WrongField, match=f"`dimensions` is {wrong}, not between 1 and"):
                await embedded(ring, replace(ASKED, dimensions=wrong))


async def test_a_long_text_reports_its_progress() -> None:
    async with open_local_ring(resolve("builtin"), options(2)) as ring:
        text = await ring.model.text()
        text.pooling = Pooling(PoolingMode.MEAN)

        _, answer, events = await embedded(ring, ASKED)

        total = answer.prompt_tokens
        assert events == [Prefilled(done, total) for done in range(64, total + 1, 64)]
        assert total > 64


async def test_the_folder_of_a_model_says_how_it_pools(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("builtin").folder, folder)
    kinds = [{"type": "models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')

    async with open_local_ring(resolve(str(folder)), options(1)) as ring:
        vector, *_ = await embedded(ring, ASKED)
        rows = final_rows(ring, ring.text.encode(TEXT))

    torch.testing.assert_close(vector, rows.mean(0), atol=1e-4, rtol=1e-4)


async def test_an_embedding_that_is_closed_leaves_nothing() -> None:
    async with open_local_ring(resolve("builtin"), options(2)) as ring:
        text = await ring.model.text()
        text.pooling = Pooling(PoolingMode.MEAN)

        async with aclosing(ring.generate(ASKED)) as events:
            assert isinstance(await anext(events), Prefilled)
            assert ring.entry.sessions == 1

        assert ring.entry.sessions == 0
        assert ring.entry.budget.live_bytes == 0
        assert [stage.budget.live_bytes for stage in ring.stages] == [0]


async def test_an_embedding_leaves_the_prefix_cache_to_answers() -> None:
    async with open_local_ring(resolve("builtin"), options(2)) as ring:
        first, *_ = await embedded(ring, ASKED)
        assert ring.entry.budget.kept_bytes == 0
        prompt = replace(ASKED, embeds=False, max_tokens=1)
        assert [event async for event in ring.generate(prompt)]
        kept = ring.entry.budget.kept_bytes

        again, answer, _ = await embedded(ring, ASKED)

        assert torch.equal(again, first)
        assert answer.cached_tokens == 0
        assert ring.entry.budget.kept_bytes == kept > 0


@pytest.mark.parametrize(
    "mode",
    [
        PoolingMode.LAST,
        PoolingMode.MEAN,
        pytest.param(PoolingMode.FIRST, marks=pytest.mark.slow),
    ],
)
async def test_a_text_as_long_as_the_context_is_refused_and_never_cut(mode: PoolingMode) -> None:
    async with open_local_ring(resolve("builtin"), options(1)) as ring:
        text = await ring.model.text()
        text.pooling = Pooling(mode)
        whole = replace(ASKED, raw=None, ids=(5,) * ring.entry.context)

        with pytest.raises(ContextTooLong):
            await embedded(ring, whole)
        _, answer, _ = await embedded(ring, replace(whole, ids=whole.ids[1:]))
        assert answer.prompt_tokens == ring.entry.context - 1


async def test_what_has_no_embedding_is_refused() -> None:
    async with open_local_ring(resolve("builtin"), options(1)) as ring:
        text, chat = await ring.model.text(), (Turn(role="user", content="hi"),)

        for wrong, kind, told in (
            (replace(ASKED, raw=None, turns=chat), WrongField, "A chat has no embedding"),
            (replace(ASKED, raw=None), UserError, "The prompt is empty"),
            (replace(ASKED, raw="ring " * 20_000), ContextTooLong, "tokens"),
            (replace(ASKED, raw=None, ids=(10**6,)), WrongField, "not in the vocabulary"),
        ):
            with pytest.raises(kind, match=told):
                await embedded(ring, wrong)
        text.pooling = Pooling(obstacle="The model needs a `Dense` module")
        with pytest.raises(UserError, match="needs a `Dense` module, which embeddings"):
            await embedded(ring, ASKED)


@pytest.mark.parametrize(
    ("mode", "values"),
    [
        (PoolingMode.LAST, [3.0, 4.0]),
        (PoolingMode.MEAN, [7 / 3, 4 / 3]),
        (PoolingMode.FIRST, [3.0, 0.0]),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_rows_are_pooled_as_they_come(mode: PoolingMode, values: list[float], cut: int) -> None:
    pool, rows = RowPool(mode), ROWS[:1] if mode is PoolingMode.FIRST else ROWS
    parts = [rows[-1:]] if mode is PoolingMode.LAST else [*torch.split(rows, cut)]

    for part in parts:
        pool.take(part)

    assert pool.vector(None, normalises=False) == pytest.approx(values)
    norm = math.hypot(*values)
    assert pool.vector(1, normalises=True) == [1.0]
    assert pool.vector(2, normalises=True) == pytest.approx([each / norm for each in values])


def test_a_value_that_is_not_finite_is_an_error() -> None:
    pool = RowPool(PoolingMode.MEAN)

    pool.take(torch.tensor([[1.0, float("nan")]]))

    with pytest.raises(ModelError, match="not finite"):
        pool.vector(None, normalises=False)
