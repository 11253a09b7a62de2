"""Time breakdown of a decode step: ``python -m tests.bench.where [--nodes 1,2,3] [--quant int8]``.

Rings of processes, with encrypted WebSocket links, generate an answer token by token without
speculative decoding. Nodes measure *in place*: compute, and serialisation with its hash; the wait
for the compute thread, including its wake-up; and the way to the next rank, from thread to thread.
Parts that are too short for clocks in the hot path are measured *apart*, by this process in the
same round with messages of the same size, and subtracted from the part that contains them: hashing
and checking a row, encrypting and decrypting a message, waking the event loop after a job. The wire
is the rest of the way: framing, the kernel and the event loops of both ends. The rest is
unaccounted time. The parts sum up to the time of a token, in the round of the median.
"""

import asyncio
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from meshllm.bench.fleet import Fleet, open_fleet
from meshllm.bench.ring_table import DIMENSIONS, WORD, random_model
from meshllm.model.files.source import open_folder
from meshllm.names import SESSION_ID_BYTES, Quant, SessionId
from meshllm.node.compute.worker import Worker, compute_thread
from meshllm.protocol.session.blob import check, seal, session_key
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.cipher import KEY_BYTES, Seal, Unseal
from meshllm.request import Answer, Request
from tests.bench.report import Report, counts, parser_of

PROMPT_TOKENS = 64
TIMES = 500  # repetitions of a short operation; the median counts
WAKES = 50
JOB_S = 0.002  # s of a job, so that the event loop sleeps when it ends


@dataclass(frozen=True, slots=True)
class Parts:
    """Time of a token in one ring, in milliseconds, summed over all hops."""

    compute: float
    serialise: float
    """Serialisation without the hash."""
    queue: float
    hash: float
    encrypt: float
    wake: float
    wire: float
    rest: float


APART = {"hash", "encrypt", "wake"}
"""Parts that are measured by this process."""


@dataclass(frozen=True, slots=True)
class Row:
    """One ring in the round of its median."""

    nodes: int
    ms_per_token: float
    bytes_per_hop: float
    hop_ms: float
    """Time besides compute, per hop."""
    parts: Parts


def split(answer: Answer, hashing_ms: float, sealing_ms: float, waking_ms: float) -> Row:
    """Return the parts of a token, given the time of one hash, seal and wake-up."""
    ranks, hops = len(answer.hops), len(answer.hops) if len(answer.hops) > 1 else 0
    compute, serialise, queue, way = (
        sum(getattr(hop, name) for hop in answer.hops)
        for name in ("compute_ms", "serialise_ms", "queue_ms", "wire_ms")
    )
    between = answer.ms_per_token - compute - serialise - queue - way
    hashing, sealing = hashing_ms * hops, sealing_ms * hops
    behind = waking_ms * (ranks - 1)  # ranks that include it in their way
    return Row(
        ranks,
        answer.ms_per_token,
        statistics.mean(hop.bytes_per_token for hop in answer.hops),
        (answer.ms_per_token - compute) / ranks,
        Parts(
            compute=compute,
            serialise=serialise - hashing,
            queue=queue,
            hash=hashing,
            encrypt=sealing,
            wake=behind + waking_ms,
            wire=way - sealing - behind,
            rest=between - waking_ms,
        ),
    )


def hashing_ms(row_bytes: int) -> float:
    """Measure the time to hash a row and to check it."""
    key, row = session_key(SessionId(bytes(SESSION_ID_BYTES))), bytes(row_bytes)
    shape = (1, 1, row_bytes // 2)
    return _median_ms(lambda: check(key, seal(key, DType.BFLOAT16, shape, row)))


def sealing_ms(message_bytes: int) -> float:
    """Measure the time to encrypt a message and to decrypt it."""
    ours, theirs, message = Seal(bytes(KEY_BYTES)), Unseal(bytes(KEY_BYTES)), bytes(message_bytes)

    def there() -> None:
        theirs.open(b"".join(ours.seal([message])))
        ours.sent()

    return _median_ms(there)


async def waking_ms(worker: Worker) -> float:
    """Measure the time from the end of a job until the event loop handles it."""

    def work() -> float:
        time.sleep(JOB_S)
        return time.perf_counter()

    seconds = []
    for _ in range(WAKES):
        done = await worker.run(work)
        seconds.append(time.perf_counter() - done)
    return statistics.median(seconds) * 1e3


async def measure(folder: Path, options: Namespace) -> list[Row]:
    """Measure the rings in turns, and return the median round of each."""
    row_bytes = open_folder(folder.name, folder).config.hidden_size * torch.bfloat16.itemsize
    request = Request(raw=WORD * (PROMPT_TOKENS - 1), max_tokens=options.tokens)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(compute_thread())
        fleets: dict[int, Fleet] = {}
        for nodes in options.nodes:
            forming = open_fleet(folder, nodes, options.threads, options.quant)
            fleets[nodes] = await stack.enter_async_context(forming)
        rounds: dict[int, list[Row]] = {nodes: [] for nodes in fleets}
        for number in range(options.rounds + 1):
            for nodes, fleet in fleets.items():
                answer = await fleet.answer(request)
                size = round(max(hop.bytes_per_token for hop in answer.hops))
                waking = await waking_ms(worker)
                if number:  # the first round is warm-up
                    row = split(answer, hashing_ms(row_bytes), sealing_ms(size), waking)
                    rounds[nodes].append(row)
    return [_middle(rows) for rows in rounds.values()]


def lay_out(rows: Sequence[Row]) -> str:
    """Format the parts as a table with a column per ring."""
    line = ("{:<16} {:<9}" + " {:>9}" * len(rows)).format
    body = []
    for name in (field.name for field in fields(Parts)):
        how = "apart" if name in APART else "in place"
        body.append((name, how, *(f"{getattr(row.parts, name):.3f}" for row in rows)))
    whole = ("ms per token", "", *(f"{row.ms_per_token:.3f}" for row in rows))
    beside = ("besides, per hop", "", *(f"{row.hop_ms:.3f}" for row in rows))
    head = ("part", "measured", *(f"ring of {row.nodes}" for row in rows))
    return "\n".join(line(*cells) for cells in [head, *body, whole, beside])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("where", __doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=DIMENSIONS)
    parser.add_argument("--nodes", default=(1, 2, 3), type=counts, help="sizes of rings, as 1,2,3")
    parser.add_argument("--quant", default=Quant.NONE, type=Quant, choices=Quant)
    parser.add_argument("--threads", type=int, default=1, help="of each node")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    report = Report(options)
    with random_model(options.model, torch.bfloat16) as folder:
        rows = asyncio.run(measure(folder, options))
    report.say(f"{options.model}, {options.quant}, {options.threads} threads", lay_out(rows))
    report.write(rows, model=options.model, quant=options.quant)
    return 0


def _middle(rows: Sequence[Row]) -> Row:
    return sorted(rows, key=lambda row: row.ms_per_token)[len(rows) // 2]


def _median_ms(function: Callable[[], None]) -> float:
    seconds = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    sys.exit(main())
