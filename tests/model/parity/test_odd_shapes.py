"""Parts of models of odd shapes, with weights at odd offsets, have the bits of the whole."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity.check import Outcome, verify
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from meshllm.testing.models import stock_model
from tests.builders.odd_shapes import odd_model

PROMPT = list(range(3, 10))
SIZES = [7, 1, 1, 3]
"""Rows of the writes: a prompt, tokens, a draft."""


def pieces() -> list[Tensor]:
    return list(torch.split(torch.arange(3, 3 + sum(SIZES))[None], SIZES, dim=1))


def whole(source: Source) -> list[Tensor]:
    with torch.inference_mode():
        model, cache = stock_model(source), None
        logits = []
        for ids in pieces():
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    return logits


def second_half(folder: Path, model_type: str, link: Connection) -> None:
    """Run the last layers and the head on rows received as bytes, at any address."""
    torch.set_num_threads(1)
    source = open_folder(model_type, folder)
    shard = load_shard(source, Span(3, 6), embed=False, head=True)
    cache = shard.new_cache()
    while rows := link.recv_bytes():
        buffer = bytearray(4) + rows
        x = torch.frombuffer(buffer, dtype=torch.float32, offset=4)
        hidden = x.view(1, -1, source.config.hidden_size)
        link.send_bytes(shard.forward(hidden, cache).numpy().tobytes())


@pytest.mark.parametrize("name", ["llama:narrow", "qwen2"])
def test_weights_at_another_offset_give_the_same_bits(name: str) -> None:
    with odd_model(name, torch.float32, 0) as even, odd_model(name, torch.float32, 8) as odd:
        expected, found = whole(even), whole(odd)

    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", ["qwen2", "llama:narrow", "mamba"])
def test_parts_of_an_odd_shape_are_equal_bit_for_bit(name: str) -> None:
    with odd_model(name, torch.float32) as source:
        report = verify(source, prompt=PROMPT)

    assert report.outcome is Outcome.EQUAL


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products have the same bits only with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_parts_in_two_processes_are_equal_bit_for_bit() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with odd_model("qwen2", torch.float32) as source:
        arguments = source.folder, "qwen2", there
        process = context.Process(target=second_half, args=arguments, daemon=True)
        process.start()
        shard = load_shard(source, Span(0, 3), embed=True, head=False)
        cache = shard.new_cache()
        found = []
        for ids in pieces():
            here.send_bytes(shard.forward(ids, cache).numpy().tobytes())
            logits = torch.frombuffer(bytearray(here.recv_bytes()), dtype=torch.float32)
            found.append(logits.view(1, ids.shape[1], -1))
        here.send_bytes(b"")
        process.join(120)
        expected = whole(source)

    assert process.exitcode == 0
    assert all(map(torch.equal, expected, found))
