"""Table 1 of the HyperCluster paper: rings of 1, 2, 3 nodes against plain transformers.

The weights are random with the published dimensions: speed is real, text is noise. Every round
measures each contestant once, in sequence, so that load on the machine slows all of them; the
ratios are medians over rounds of ratios within a round.
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
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from meshllm.bench.fleet import Fleet, open_fleet
from meshllm.errors import UserError
from meshllm.model.device import default_threads
from meshllm.model.files.source import Source, load_stock, resolve
from meshllm.model.locate import BUILTIN
from meshllm.model.split.meta_model import quiet
from meshllm.model.split.onemkl import warm_up_onemkl
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.model.text.tokenizer import Text
from meshllm.names import Quant
from meshllm.node.compute.worker import compute_thread
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Request, Sampling

TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class RingBenchmark:
    """What to measure."""

    model: str
    nodes: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    threads: int | None
    dtype: torch.dtype = torch.bfloat16
    quants: tuple[Quant, ...] = (Quant.NONE,)
    """Quantisations; each is measured with each ring size."""
    processes: bool = False
    """Run every node in its own process, over encrypted WebSocket links."""
    device: str = "cpu"
    """Device of all contestants, see `model.device.choose`."""

    def tokens_of(self, number: int) -> int:
        """Return the new tokens of a round; in round 0, the warm-up, replay begins."""
        return self.new_tokens if number else max(self.new_tokens, STEPS_BEFORE_REPLAY + 1)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A ring, or transformers."""

    nodes: int = 0
    """Nodes of the ring; 0 is transformers."""
    quant: Quant = Quant.NONE

    @property
    def name(self) -> str:
        """Its name in the table."""
        if not self.nodes:
            return TRANSFORMERS
        ring = f"ring of {self.nodes}"
        return ring if self.quant is Quant.NONE else f"{ring}, {self.quant}"


@dataclass(frozen=True, slots=True)
class Run:
    """One generation, measured by the client."""

    ttft_ms: float
    ms_per_token: float
    hop_ms: float = 0.0
    """Time of a token outside of the ranks' forward passes, per hop: messages, network, queues."""


@dataclass(frozen=True, slots=True)
class RingRow:
    """Results of one contestant."""

    name: str
    nodes: int
    """Nodes of the ring; 0 is transformers."""
    quant: Quant
    ttft_ms: float
    ms_per_token: float
    tokens_per_second: float
    decode_ratio: float
    """Speed against transformers in the same round, median."""
    decode_ratio_one: float
    """Speed against the smallest ring of the same quantisation in the same round, median."""
    ttft_ratio: float
    """Time to first token against transformers in the same round, median."""
    hop_ms: float
    """Overhead in milliseconds per hop and token, median; 0 if not measured."""


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


def _qwen3_8b() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=32_000, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )  # fmt: skip


def _pythia() -> PretrainedConfig:
    return GPTNeoXConfig(
        vocab_size=50_304, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=8, tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip


def _small() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip


DIMENSIONS: dict[str, Callable[[], PretrainedConfig]] = {
    "pythia-70m": _pythia,
    "qwen3-0.6b": _qwen3,
    "llama-3.2-1b": _llama,
    "qwen3-8b-4-layers": _qwen3_8b,
    "tiny": _small,
}
"""Published dimensions by name, the largest with fewer layers; `tiny` runs in a second."""


Turn: TypeAlias = Callable[[int], Awaitable[Run]]
"""Runs the prompt of a round; prompts differ, so that no prefix cache hits."""

PACKED = "packed"  # folder of quantised matrices, shared by the rings of a quantisation

WORD = "ring "
"""One token of the builtin model's tokenizer, which the random models use; a text begins with one
more token."""
NUMBER_TOKENS = 4
"""Tokens of a two-digit number with the surrounding spaces."""


@contextmanager
def random_model(name: str, dtype: torch.dtype, layers: int | None = None) -> Iterator[Path]:
    """Write a model of published dimensions and random weights; remove it at the end.

    Fewer ``layers`` give rows of the same width with less compute, as on a faster machine.
    """
    if name not in DIMENSIONS:
        known = ", ".join(f"`{known}`" for known in DIMENSIONS)
        raise UserError(f"Unknown model dimensions `{name}`", hint=f"one of {known}")
    warm_up_onemkl()
    with TemporaryDirectory(prefix="meshllm-bench-") as folder:
        torch.manual_seed(0)
        config = DIMENSIONS[name]()
        if layers:
            config = type(config)(
                **config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
            )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with quiet():
            model.save_pretrained(folder)
        del model
        gc.collect()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve(BUILTIN).folder / file, folder)
        yield Path(folder)


def _plain(model: Any, prompt: Sequence[int], new_tokens: int) -> Run:
    """Run ``transformers.generate`` greedily and record the time of every token."""
    stamps: list[float] = []

    class Stamps:
        """The streamer of `generate`: called with the prompt, then with each token."""

        def put(self, _: object) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.tensor([list(prompt)], device=model.device)
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


async def _ring(
    ring: LocalRing, prompts: Sequence[list[int]], case: RingBenchmark, number: int
) -> Run:
    begin = time.perf_counter()
    tokens = ring.tokens(prompts[number], Sampling(), case.tokens_of(number))
    return _run(begin, [time.perf_counter() async for _ in tokens])


async def _measure(
    case: RingBenchmark, source: Source, report: Callable[[str], None]
) -> dict[Contestant, list[Run]]:
    threads = case.threads or default_threads()  # the same for all
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(compute_thread(threads))
        model = load_stock(source, case.dtype)
        model.to(torch.device(case.device))
        form = _fleets if case.processes else _rings
        prompts, rings = await form(stack, case, source, threads, report)

        async def plain(number: int) -> Run:
            return await worker.run(_plain, model, prompts[number], case.tokens_of(number))

        turns = {Contestant(): plain, **rings}
        order = list(turns)
        runs: dict[Contestant, list[Run]] = {each: [] for each in order}
        for round_ in range(case.rounds + 1):
            report(f"round {round_} of {case.rounds}" if round_ else "warming up")
            first = round_ % len(order)  # rotate, so that each runs first in some rounds
            lap = {each: await turns[each](round_) for each in order[first:] + order[:first]}
            if round_:
                for each, run in lap.items():
                    runs[each].append(run)
    return runs


def _line_up(case: RingBenchmark) -> list[Contestant]:
    return [Contestant(nodes, quant) for quant in case.quants for nodes in case.nodes]


async def _rings(
    stack: AsyncExitStack,
    case: RingBenchmark,
    source: Source,
    threads: int,
    report: Callable[[str], None],
) -> tuple[list[list[int]], dict[Contestant, Turn]]:
    """Open rings in this process."""
    prompts = [
        [(7 * place + 11 * number + 3) % 500 for place in range(case.prompt_tokens)]
        for number in range(case.rounds + 1)
    ]
    rings: dict[Contestant, Turn] = {}
    for each in _line_up(case):
        report(f"loading a {each.name}")
        inference = InferenceConfig(
            dtype=str(case.dtype).removeprefix("torch."),
            quant=each.quant,
            device=case.device,
            threads=threads,
            speculation=False,
            cache=source.folder / PACKED,
        )
        options = RingOptions(each.nodes, inference=inference)
        ring = await stack.enter_async_context(open_local_ring(source, options))
        rings[each] = partial(_ring, ring, prompts, case)
    return prompts, rings


async def _fleets(
    stack: AsyncExitStack,
    case: RingBenchmark,
    source: Source,
    threads: int,
    report: Callable[[str], None],
) -> tuple[list[list[int]], dict[Contestant, Turn]]:
    """Start rings of processes; like transformers, they get the tokens of the prompts."""
    text = Text.load(source.folder)
    words = WORD * (case.prompt_tokens - NUMBER_TOKENS)
    prompts = [text.encode(f"{number:02} {words}") for number in range(case.rounds + 1)]
    if len(prompts[0]) != case.prompt_tokens:
        hint = f"choose {NUMBER_TOKENS} or more"
        raise UserError(f"Cannot make a prompt of {case.prompt_tokens} tokens", hint=hint)
    requests = [
        Request(ids=tuple(ids), max_tokens=case.tokens_of(number))
        for number, ids in enumerate(prompts)
    ]
    rings: dict[Contestant, Turn] = {}
    for each in _line_up(case):
        report(f"starting a {each.name}, one process per node")
        fleet = open_fleet(source.folder, each.nodes, threads, each.quant, device=case.device)
        rings[each] = partial(_asked, await stack.enter_async_context(fleet), requests)
    return prompts, rings


async def _asked(fleet: Fleet, requests: Sequence[Request], number: int) -> Run:
    """Send a request to the entry; take the times from its answer."""
    answer = await fleet.answer(requests[number])
    computed = sum(hop.compute_ms for hop in answer.hops)
    rest = (answer.ms_per_token - computed) / len(answer.hops)
    return Run(answer.ttft_ms, answer.ms_per_token, rest)


def table(runs: dict[Contestant, list[Run]]) -> list[RingRow]:
    """Reduce the runs to medians and paired ratios."""
    plain = runs[Contestant()]

    def row(one: Contestant, mine: list[Run]) -> RingRow:
        per_token = statistics.median(run.ms_per_token for run in mine)
        alike = [each for each in runs if each.nodes and each.quant is one.quant]
        fewest = runs[min(alike, key=lambda each: each.nodes, default=one)]
        return RingRow(
            name=one.name,
            nodes=one.nodes,
            quant=one.quant,
            ttft_ms=statistics.median(run.ttft_ms for run in mine),
            ms_per_token=per_token,
            tokens_per_second=1e3 / per_token,
            decode_ratio=_paired(plain, mine, lambda run: run.ms_per_token),
            decode_ratio_one=_paired(fewest, mine, lambda run: run.ms_per_token),
            ttft_ratio=1 / _paired(plain, mine, lambda run: run.ttft_ms),
            hop_ms=statistics.median(run.hop_ms for run in mine),
        )

    return [row(one, mine) for one, mine in runs.items()]


def _paired(base: list[Run], mine: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(b) / figure(m) for b, m in zip(base, mine, strict=True))


def measure(case: RingBenchmark, report: Callable[[str], None]) -> list[RingRow]:
    """Create the model, run every contestant ``case.rounds`` times, and reduce the runs."""
    with random_model(case.model, case.dtype) as folder:
        return table(asyncio.run(_measure(case, resolve(str(folder)), report)))
