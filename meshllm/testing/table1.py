"""Table 1 of the HyperCluster paper again: rings of 1, 2, 3 nodes beside plain transformers.

The weights are random with the published dimensions: speed is real, text is noise. Every round
measures each contestant once, one after the other, so that a busy machine slows all of them; the
ratios are medians over rounds of ratios inside a round. Knows nothing about printing.
"""

import asyncio
import gc
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from meshllm.errors import MeshError, UserError
from meshllm.model.skeleton import quiet
from meshllm.model.source import BUILTIN, Source, resolve
from meshllm.model.text import Text
from meshllm.node.ring import Ring, RingOptions, open_ring
from meshllm.node.worker import compute_thread
from meshllm.request import Request, Sampling
from meshllm.testing.fleet import Fleet, open_fleet

TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure."""

    model: str
    nodes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    threads: int | None
    dtype: torch.dtype = torch.bfloat16
    processes: bool = False
    """Every node is a process of its own, linked over WebSocket, encrypted."""


@dataclass(frozen=True, slots=True)
class Run:
    """One generation, measured from outside."""

    ttft_ms: float
    ms_per_token: float
    hop_ms: float = 0.0
    """Time of a token that no rank computes, divided by the hops: messages, wires and waiting."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over all rounds."""

    name: str
    ttft_ms: float
    ms_per_token: float
    tokens_per_second: float
    decode_ratio: float
    """Speed against transformers in the same round, median."""
    decode_ratio_one: float
    """Speed against the ring of the fewest nodes in the same round, median."""
    ttft_ratio: float
    """Time to first token against transformers in the same round, median."""
    hop_ms: float
    """Milliseconds per hop and token beside the computing, median; 0 where it is not measured."""


def _qwen3() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )  # fmt: skip


def _llama() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=131_072,
    )  # fmt: skip


def _small() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip


DIMENSIONS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-0.6b": _qwen3,
    "llama-3.2-1b": _llama,
    "tiny": _small,
}
"""Published dimensions by name; `tiny` shows the shape of the table in a second."""


Contestant: TypeAlias = Callable[[], Awaitable[Run]]

WORD = "ring "
"""A token of the builtin model's tokenizer, which the random models borrow; text begins with one
more."""


@contextmanager
def random_model(name: str, dtype: torch.dtype) -> Iterator[Path]:
    """Write a model of published dimensions and random weights; gone afterwards."""
    if name not in DIMENSIONS:
        known = ", ".join(f"`{known}`" for known in DIMENSIONS)
        raise UserError(f"no dimensions for `{name}`", hint=f"one of {known}")
    with TemporaryDirectory(prefix="meshllm-bench-") as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(DIMENSIONS[name](), dtype=dtype)
        with quiet():
            model.save_pretrained(folder)
        del model
        gc.collect()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve(BUILTIN).folder / file, folder)
        yield Path(folder)


def _plain(model: Any, prompt: Sequence[int], new_tokens: int) -> Run:
    """Run ``transformers.generate`` greedily and stamp every token as it comes."""
    stamps: list[float] = []

    class Stamps:
        """What `generate` calls with the prompt, then with each token."""

        def put(self, _: object) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.tensor([list(prompt)])
    begin = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=Stamps(),
    )
    return _run(begin, stamps[1:])


def _run(begin: float, stamps: Sequence[float]) -> Run:
    later = (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
    return Run((stamps[0] - begin) * 1e3, later * 1e3)


async def _ring(ring: Ring, prompt: Sequence[int], new_tokens: int) -> Run:
    begin = time.perf_counter()
    tokens = ring.tokens(prompt, Sampling(), new_tokens)
    return _run(begin, [time.perf_counter() async for _ in tokens])


async def _measure(case: Case, source: Source, told: Callable[[str], None]) -> dict[str, list[Run]]:
    threads = case.threads or torch.get_num_threads()  # the same for everyone
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(compute_thread(threads))
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=case.dtype).eval()
        form = _fleets if case.processes else _rings
        prompt, rings = await form(stack, case, source, threads, told)

        async def plain() -> Run:
            return await worker.run(_plain, model, prompt, case.new_tokens)

        contestants = {TRANSFORMERS: plain, **rings}
        names = list(contestants)
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for round_ in range(case.rounds + 1):
            told(f"round {round_} of {case.rounds}" if round_ else "warming up")
            turn = round_ % len(names)  # nobody always runs after the same one
            lap = {name: await contestants[name]() for name in names[turn:] + names[:turn]}
            if round_:
                for name, run in lap.items():
                    runs[name].append(run)
    return runs


async def _rings(
    stack: AsyncExitStack, case: Case, source: Source, threads: int, told: Callable[[str], None]
) -> tuple[list[int], dict[str, Contestant]]:
    """Form rings inside this process."""
    prompt = [(7 * i + 3) % 500 for i in range(case.prompt_tokens)]
    rings: dict[str, Contestant] = {}
    for nodes in case.nodes:
        told(f"a ring of {nodes} loads")
        options = RingOptions(nodes=nodes, threads=threads, dtype=case.dtype, drafting=None)
        ring = await stack.enter_async_context(open_ring(source, options))
        rings[_name(nodes)] = partial(_ring, ring, prompt, case.new_tokens)
    return prompt, rings


async def _fleets(
    stack: AsyncExitStack, case: Case, source: Source, threads: int, told: Callable[[str], None]
) -> tuple[list[int], dict[str, Contestant]]:
    """Form rings of processes; they get the prompt as text, and transformers the same tokens."""
    raw = WORD * (case.prompt_tokens - 1)
    prompt = Text.load(source.folder).encode(raw)
    if len(prompt) != case.prompt_tokens:
        raise UserError(f"No prompt has {case.prompt_tokens} tokens", hint="choose 2 or more")
    request = Request(raw=raw, max_tokens=case.new_tokens)
    rings: dict[str, Contestant] = {}
    for nodes in case.nodes:
        told(f"{nodes} processes load")
        fleet = await stack.enter_async_context(open_fleet(source.folder, nodes, threads))
        rings[_name(nodes)] = partial(_asked, fleet, request)
    return prompt, rings


async def _asked(fleet: Fleet, request: Request) -> Run:
    """Take the figures of the entry, and check that the answer was not cut short."""
    answer = await fleet.answer(request)
    if len(answer.tokens) != request.max_tokens:
        raise MeshError(f"An answer of {len(answer.tokens)} tokens, not {request.max_tokens}")
    computed = sum(hop.compute_ms for hop in answer.hops)
    rest = (answer.ms_per_token - computed) / len(answer.hops)
    return Run(answer.ttft_ms, answer.ms_per_token, rest)


def _name(nodes: int) -> str:
    return f"ring of {nodes}"


def table(runs: dict[str, list[Run]]) -> list[Row]:
    """Reduce the runs to medians and paired ratios."""
    plain = runs[TRANSFORMERS]
    one = runs[next((name for name in runs if name != TRANSFORMERS), TRANSFORMERS)]

    def row(name: str, mine: list[Run]) -> Row:
        per_token = statistics.median(run.ms_per_token for run in mine)
        return Row(
            name=name,
            ttft_ms=statistics.median(run.ttft_ms for run in mine),
            ms_per_token=per_token,
            tokens_per_second=1e3 / per_token,
            decode_ratio=_paired(plain, mine, lambda run: run.ms_per_token),
            decode_ratio_one=_paired(one, mine, lambda run: run.ms_per_token),
            ttft_ratio=1 / _paired(plain, mine, lambda run: run.ttft_ms),
            hop_ms=statistics.median(run.hop_ms for run in mine),
        )

    return [row(name, mine) for name, mine in runs.items()]


def _paired(base: list[Run], mine: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(b) / figure(m) for b, m in zip(base, mine, strict=True))


def measure(case: Case, told: Callable[[str], None]) -> list[Row]:
    """Make the model, run every contestant ``case.rounds`` times, and reduce."""
    with random_model(case.model, case.dtype) as folder:
        return table(asyncio.run(_measure(case, resolve(str(folder)), told)))
