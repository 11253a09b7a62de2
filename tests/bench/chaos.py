"""What a user sees of losses in the middle of an answer: `python -m tests.bench.chaos`.

Three processes form a ring and a client asks a fourth one, which holds no layers. When the answer
has so many tokens, the fault happens: a rank is killed (`kill -9`), stopped for two seconds
(`SIGSTOP`, `SIGCONT`), or told to leave (`SIGTERM`). The table shows the longest pause between two
tokens, how long the process took to leave, how many rows the other nodes computed again (a row in
one layer counts 1), and whether the answer is that of the undisturbed ring, token for token. An
answer that ends with an error, is too short, or repeats or drops a token that was shown fails the
command. Other tokens behind the loss are counted, and do not fail it: another ring may round
another way.
"""

import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx2
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshllm.api.unix import SOCKET
from meshllm.model.files.source import resolve
from tests.bench.report import Report, counts, parser_of
from tests.processes.fleet import ALONE, Fleet, Node, open_fleet, until

RANKS = ("attic", "bench", "cellar")
INGRESS = "door"
ROLES = ("entry", "middle", "last")
FAULTS = ("kill", "stop", "leave")
STOP_S = 2.0
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer with one fault."""

    fault: str
    role: str
    at: int
    """Tokens before the fault."""
    pause_s: float
    """The longest time between two tokens after it."""
    same: int
    """Tokens that are those of the undisturbed answer, from the first on."""
    tokens: int
    left_s: float
    """Time that the process took to leave; 0 for other faults."""
    recomputed: int
    """Rows that nodes other than the victim computed again, times layers."""
    error: str = ""


def random_model(folder: Path) -> Path:
    """Write a model of 12 random layers, about 100 MB, with the embedded tokenizer."""
    source = resolve("builtin").folder
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 12, 512, 2048
    config.layer_types = ["full_attention"] * 12
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def client(node: Node) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=str(node.state / SOCKET))
    with httpx2.Client(transport=transport, base_url="http://node", timeout=TIMEOUT_S) as opened:
        yield opened


def ask(node: Node, tokens: int, temperature: float, seed: int) -> Iterator[list[int]]:
    """Yield the new tokens of an answer as they come; raise `RuntimeError` for an error."""
    request = {
        "raw": "Once upon a time there was a ring of nodes that",
        "max_tokens": tokens,
        "sampling": {"temperature": temperature, "seed": seed},
    }
    shown: list[int] = []
    with client(node) as opened, opened.stream("POST", "/mesh/ask", json=request) as reply:
        for line in reply.iter_lines():
            event = json.loads(line)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if "answer" in event and event["answer"]["tokens"] != shown:
                raise RuntimeError("the answer is not what was shown")
            if tokens := event.get("ids"):
                shown += tokens
                yield tokens


def strike(node: Node, fault: str) -> float:
    """Let the fault happen; return how long the process took to leave."""
    began = time.monotonic()
    match fault:
        case "kill":
            node.kill()
        case "leave":
            node.send(signal.SIGTERM)
            if code := node.ended():
                raise RuntimeError(f"{node.name} left with exit status {code}")
            return time.monotonic() - began
        case _:
            node.send(signal.SIGSTOP)
            time.sleep(STOP_S)
            node.send(signal.SIGCONT)
    return 0.0


def recomputed(nodes: list[Node]) -> int:
    return sum(node.status()["sessions"]["recomputed"] for node in nodes)


def disturb(
    fleet: Fleet, model: str, fault: str, role: str, at: int, right: list[int], heat: float,
    pool: Executor,
) -> Outcome:  # fmt: skip
    """Ask, let a fault happen after ``at`` tokens, and compare the answer."""
    ingress = fleet.node(INGRESS)
    names = {node["rank"]: node["name"] for node in ingress.status()["nodes"]}
    victim = fleet.node(names[ROLES.index(role)])
    others = [fleet.node(name) for name in RANKS if name != victim.name]
    before = recomputed(others)
    got: list[int] = []
    pause, last, error = 0.0, 0.0, ""
    striking: Future[float] | None = None
    left_s = 0.0
    try:
        for tokens in ask(ingress, len(right), heat, at):
            now = time.monotonic()
            if striking:
                pause = max(pause, now - last)
            got, last = got + tokens, now
            if striking is None and len(got) >= at:
                striking = pool.submit(strike, victim, fault)
        if striking:
            left_s = striking.result()
    except (RuntimeError, httpx2.HTTPError) as failure:
        error = str(failure) or type(failure).__name__
    rows = recomputed(others) - before
    if fault != "stop":
        victim.start("--model", model, *ALONE)
    same = next(
        (i for i, pair in enumerate(zip(got, right, strict=False)) if len(set(pair)) > 1), None
    )
    agreed = len(got) if same is None else same
    return Outcome(fault, role, at, pause, agreed, len(got), left_s, rows, error)


def whole(fleet: Fleet) -> None:
    """Wait until the ring of three is whole and its ingress knows it."""
    nodes = [fleet.node(name) for name in (*RANKS, INGRESS)]

    def is_whole() -> bool:
        rings = [status["ring"] for node in nodes if (status := node.status())]
        return len(rings) == len(nodes) and all(
            ring["state"] == "serving" and len(ring["stages"]) == len(RANKS) for ring in rings
        )

    until(is_whole, fleet.told)


def main() -> None:
    """Print the table."""
    parser = parser_of("chaos", __doc__)
    parser.add_argument("--times", type=int, default=3, metavar="N")
    parser.add_argument("--at", type=counts, default=(15, 60, 280), metavar="N,...")
    parser.add_argument("--tokens", type=int, default=320, metavar="N")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--embedded", action="store_true", help="use the model inside")
    options = parser.parse_args()
    report, outcomes, heat = Report(options), list[Outcome](), options.temperature
    report.say(
        "| fault | rank | after tokens | runs | same tokens | errors | pause p50, s | worst, s |"
        " left after, s | rows again |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    with ThreadPoolExecutor(1) as pool, open_fleet() as fleet:
        (fleet.folder / "model").mkdir()
        model = "builtin" if options.embedded else str(random_model(fleet.folder / "model"))
        ticket = fleet.found(RANKS[0])
        common = ("--join", ticket, "--model", model, *ALONE)
        for name in RANKS:
            fleet.node(name).start(*common, "--members", str(len(RANKS)))
        ingress = fleet.node(INGRESS)
        ingress.start(*common, "--exclude", INGRESS)
        whole(fleet)
        for fault in options.fault or FAULTS:
            for at in options.at:
                for role in ROLES:
                    rows = []
                    right = [*chain.from_iterable(ask(ingress, options.tokens, heat, at))]
                    for _ in range(options.times):
                        rows.append(disturb(fleet, model, fault, role, at, right, heat, pool))
                        whole(fleet)
                    outcomes += rows
                    report.say(line(rows, len(right)))
    report.write(outcomes)
    wrong = [it for it in outcomes if it.error or it.same < it.at]
    sys.exit("\n".join(map(str, wrong)) or 0)


def line(rows: list[Outcome], length: int) -> str:
    """Lay out the outcomes of one fault."""
    first, pauses = rows[0], [row.pause_s for row in rows]
    same, errors = sum(row.same == length for row in rows), sum(bool(row.error) for row in rows)
    cells = [first.fault, first.role, first.at, len(rows), same, errors]
    seconds = statistics.median(pauses), max(pauses), max(row.left_s for row in rows)
    cells += [*(f"{it:.2f}" for it in seconds), max(row.recomputed for row in rows)]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
