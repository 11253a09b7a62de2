"""What a user sees of losses in the middle of an answer: `python -m tests.bench.chaos`.

Three processes form a ring and a client asks a fourth one, which holds no layers. When the answer
has so many tokens, the fault happens to a rank. It is killed (`kill -9`), killed and started again
at once, stopped (`SIGSTOP`, `SIGCONT`) for 1, 2, 5 or 20 s, or told to leave (`SIGTERM`); or it has
left before, and joins a ring of two in the middle of the answer. In network namespaces it is cut
off both ways, for 8 s or for a gap of 1 s, one way, or with another node; all paths take 200 ms or
lose 5 % of the packets; or the disk of its state is full. The table shows the longest pause between
two tokens, how long the process took to leave, how many rows were computed again (a row in one
layer counts 1), when the loss was noticed, how long agreeing on a plan, loading, linking and the
next token took (the median of each), and whether the answer is that of the undisturbed ring, token
for token. The rows are those of the worst run, each beside the loss that its node found. An answer
that ends with an error, is too short, or repeats or drops a token that was shown fails the command.
Other tokens behind the loss are counted, and do not fail it: another ring may round another way.

With `--all-at-once MINUTES`, clients ask without a break before, in and after each fault: short and
long prompts and chats, greedy and sampled. Every answer is compared with the undisturbed one. They
rest until the ring is whole again: its plan takes a node back only while nobody asks. The memory of
each node is shown before, once each rank was stopped and lost, and at the end. Each time, the nodes
have rested, so that they have released what only their start needs, and as many different texts as
the prefix cache keeps have filled it and evicted others. What a node names (weights, caches, sent
rows) has limits of its own; the command fails if a node takes more than `MAX_MORE` for what it
does not name. What is `anonymous` of all resident memory has no file to be read from again.

`--fault relay`, by itself: the nodes have QUIC and a relay, by which alone the rank is reached; the
relay is killed, and started again after 8 s.
"""

import json
import random
import shutil
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from pathlib import Path
from threading import Event

import httpx2
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshllm.api.unix import SOCKET
from meshllm.model.files.source import resolve
from meshllm.protocol.kv_cache.prefix_index import MAX_KEPT
from tests.bench.nemesis import (
    ENDS_PROCESS,
    IS_NEW,
    OF_NETWORKS,
    OF_PROCESSES,
    RELAY,
    Ground,
    leave,
    open_ground,
)
from tests.bench.report import Report, counts, parser_of
from tests.bench.startup import IDLE_S
from tests.processes.fleet import ALONE, Node, Waited, open_fleet, until

RANKS = ("attic", "bench", "cellar")
INGRESS = "ingress"
ROLES = ("entry", "middle", "last")
PHASES = ("noticed", "agreed", "loaded", "linked", "first token")
"""What happens after a fault, each after the last."""
KILLS = ("kill", "restart")
TIMEOUT_S = 120.0
WHOLE_TRIES = 4  # times that a ring may take as long as `until` waits
CLIENTS = 4
TEXTS = 6  # different requests of the clients: each kind, greedy and not
BEGINNING = "Once upon a time there was a ring of nodes that"
CHAT = ("user", "What is a ring?"), ("assistant", "Nodes in a circle."), ("user", "And a mesh?")
LONG = 600  # tokens of a prompt
CALM_S = 5.0  # s at most from the first request to a fault, and from its end to the last one
REST_S = 0.2
WARM_UP = "stop 5"  # the fault by which each rank is lost once before memory is compared
MAX_EARLY = 3  # answers in a row that are computed before the fault
MAX_MORE = 0.05  # of the memory before


@dataclass(frozen=True, slots=True)
class Case:
    """What happens, and when."""

    fault: str
    role: str
    at: int
    """Tokens before the fault."""
    seed: int
    """Of the prompt and of the answer."""
    first_s: float
    """Time to the first token of the undisturbed answer, whose prompt was not cached."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer with one fault."""

    case: Case
    pause_s: float
    """The longest time between two tokens after it."""
    same: int
    """Tokens that are those of the undisturbed answer, from the first on."""
    tokens: int
    left_s: float
    """Time that the process took to leave; 0 for other faults."""
    recomputed: dict[str, int]
    """Rows that were computed again, times layers, but not by a victim that has ended, by the cause
    of the loss."""
    phases: tuple[float, ...]
    """Seconds of each of `PHASES`."""
    error: str = ""
    is_early: bool = False
    """Whether the error is only that the whole answer was computed before the fault."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The nodes, and how they are asked."""

    ground: Ground
    model: str
    temperature: float
    tokens: int
    prompt: int
    """Tokens of the prompt; 0 is a short one."""

    @property
    def ingress(self) -> Node:
        """The node that is asked, which holds no layers."""
        return self.ground.node(INGRESS)

    def restart(self, name: str) -> None:
        """Start a rank that has ended."""
        self.ground.start(name, "--model", self.model, *ALONE)

    def answer(self, seed: int) -> Iterator[list[int]]:
        """Yield the new tokens of an answer."""
        text: dict[str, object] = {"raw": BEGINNING}
        if self.prompt:
            text = {"ids": ids_of(seed, self.prompt)}
        return self._ask(text, seed, self.temperature)

    def mixed(self, seed: int) -> Iterator[list[int]]:
        """Yield an answer to a text, a long prompt or a chat, every other one greedy."""
        texts: list[dict[str, object]] = [
            {"raw": f"{BEGINNING} {seed}"},
            {"ids": ids_of(seed, LONG)},
            {"turns": [{"role": role, "content": f"{seed}: {text}"} for role, text in CHAT]},
        ]
        return self._ask(texts[seed % len(texts)], seed, self.temperature * (seed % 2))

    def _ask(self, text: dict[str, object], seed: int, temperature: float) -> Iterator[list[int]]:
        sampling = {"temperature": temperature, "seed": seed}
        rest = {"max_tokens": self.tokens, "sampling": sampling, "ignores_end": True}
        return ask(self.ingress, {**text, **rest})

    def rank(self, role: str) -> str:
        """Return the name of the node with a role."""
        names = {node["rank"]: node["name"] for node in self.ingress.status()["nodes"]}
        name = names[ROLES.index(role)]
        assert isinstance(name, str)
        return name


def ids_of(seed: int, count: int) -> list[int]:
    """Return made-up tokens of a prompt."""
    return random.Random(seed).choices(range(1000, 2000), k=count)


def random_model(folder: Path) -> Path:
    """Write a model of 12 random layers, about 100 MB, with the embedded tokenizer."""
    source = resolve("builtin").folder
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 12, 512, 2048
    config.layer_types = ["full_attention"] * 12
    config.max_position_embeddings = 4096
    config.num_attention_heads, config.num_key_value_heads = 8, 4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@contextmanager
def client(node: Node) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=str(node.state / SOCKET))
    with httpx2.Client(transport=transport, base_url="http://node", timeout=TIMEOUT_S) as opened:
        yield opened


def ask(node: Node, request: dict[str, object]) -> Iterator[list[int]]:
    """Yield the new tokens of an answer as they come; raise `RuntimeError` for an error."""
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


def recomputed(nodes: list[Node]) -> Counter[str]:
    """Return the rows times layers that nodes have computed again, by the cause of the loss."""
    rows = Counter[str]()
    for node in nodes:
        for lost in node.status()["sessions"]["losses"]:
            rows[lost["cause"]] += lost["rows"]
    return rows


def left_after(striking: Future[float] | None, count: int) -> tuple[float, str]:
    """Return after how many seconds a node had left, and why the fault did not happen."""
    if striking is None:
        return 0.0, f"the answer ended after {count} tokens, before the fault"
    return striking.result(), ""


def disturb(ring: Ring, case: Case, victim: str, right: list[int], pool: Executor) -> Outcome:
    """Ask, let a fault happen, and compare the answer."""
    ground, fault = ring.ground, case.fault
    others = [ground.node(name) for name in RANKS if name != victim or fault not in IS_NEW]
    if fault == "join":
        leave(ground.node(victim))
        whole(ring, len(RANKS) - 1)
    before = recomputed(others)
    got: list[int] = []
    pause, last, error = 0.0, 0.0, ""
    struck, resumed = 0.0, 0.0
    striking: Future[float] | None = None
    try:
        for tokens in ring.answer(case.seed):
            now = time.monotonic()
            if striking and now - last > pause:
                pause, resumed = now - last, now
            got, last = got + tokens, now
            if striking is None and len(got) >= case.at:
                struck = now
                striking = pool.submit(ground.strike, fault, victim, ring.restart)
    except (RuntimeError, httpx2.HTTPError) as failure:
        error = str(failure) or type(failure).__name__
    left_s, missed = left_after(striking, len(got))
    rows = recomputed(others) - before
    if fault in KILLS and striking and not rows:
        missed = f"the answer of {len(got)} tokens was computed before the fault"
    took = phases([history(node) for node in others], struck, resumed)
    if fault in ENDS_PROCESS and striking:
        ring.restart(victim)
    same, is_early = agreed(got, right), bool(missed and not error and got == right)
    return Outcome(case, pause, same, len(got), left_s, rows, took, error or missed, is_early)


def run_case(ring: Ring, case: Case, right: list[int], pool: Executor) -> Outcome:
    """Let a fault happen; that of the relay to a rank that others reach by it only.

    An answer that was computed before the fault, which shows nothing, is asked again.
    """
    for left in reversed(range(MAX_EARLY)):
        whole(ring)
        victim = ring.rank(case.role)
        with ring.ground.hiding(victim) if case.fault == RELAY else nullcontext():
            whole(ring)
            outcome = disturb(ring, case, victim, right, pool)
        if not (outcome.is_early and left):
            break
    return outcome


History = list[tuple[str, float]]
"""States of a node in its ring, and when they began."""


def history(node: Node) -> History:
    states, now = node.status()["ring"]["history"], time.monotonic()
    return [(each["state"], now - each["ago_s"]) for each in states]


def phases(histories: Sequence[History], struck: float, resumed: float) -> tuple[float, ...]:
    """Divide the time from a fault to the next token; a phase that no node went through takes 0."""
    happened = [(state, at) for each in histories for state, at in each if struck <= at <= resumed]
    begun = ["backoff", "loading"], ["loading"], ["waiting"], ["open"]
    ends = [struck]
    for states, choose in zip(begun, (min, max, max, max), strict=True):
        times = [at for state, at in happened if state in states]
        ends.append(max(ends[-1], choose(times, default=ends[-1])))
    ends.append(max(ends[-1], resumed))
    return tuple(end - begin for begin, end in pairwise(ends))


def agreed(got: Sequence[int], right: Sequence[int]) -> int:
    """Count the first tokens that are the right ones."""
    pairs = enumerate(zip(got, right, strict=False))
    return next((at for at, pair in pairs if len(set(pair)) > 1), min(len(got), len(right)))


def whole(ring: Ring, ranks: int = len(RANKS)) -> None:
    """Wait until the ring of so many nodes is whole and its ingress knows it."""
    nodes = [ring.ground.node(name) for name in (*RANKS, INGRESS)]

    def is_whole() -> bool:
        rings = [status["ring"] for node in nodes if (status := node.status())]
        return len(rings) == ranks + 1 and all(
            ring["state"] == "serving" and len(ring["stages"]) == ranks for ring in rings
        )

    for left in reversed(range(WHOLE_TRIES)):
        try:
            until(is_whole, ring.ground.fleet.told)
        except Waited:
            if not left:
                raise
        else:
            return


def table(ring: Ring, faults: Sequence[str], options: Namespace, report: Report) -> list[Outcome]:
    """Let each fault happen to each rank by itself."""
    outcomes = list[Outcome]()
    report.say(
        "| fault | rank | after tokens | runs | same tokens | errors | pause p50, s | worst, s |"
        f" p50 / first token | left after, s | rows again | {', '.join(PHASES)}, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    )
    with ThreadPoolExecutor(1) as pool:
        cases = product(faults, options.at, options.role or ROLES)
        for seed, (fault, at, role) in enumerate(cases):
            rows = []
            begin, answer = time.monotonic(), ring.answer(seed)
            right = [*next(answer)]
            case = Case(fault, role, at, seed, time.monotonic() - begin)
            right += chain.from_iterable(answer)
            for _ in range(options.times):
                rows.append(run_case(ring, case, right, pool))
                whole(ring)
            outcomes += rows
            report.say(line(rows, len(right)))
    return outcomes


def line(rows: list[Outcome], length: int) -> str:
    """Lay out the outcomes of one fault."""
    case, pauses = rows[0].case, [row.pause_s for row in rows]
    same, errors = sum(row.same == length for row in rows), sum(bool(row.error) for row in rows)
    cells = [case.fault, case.role, case.at, len(rows), same, errors]
    pause, left_s = statistics.median(pauses), max(row.left_s for row in rows)
    shown = pause, max(pauses), pause / case.first_s, left_s
    cells += [*(f"{it:.2f}" for it in shown), rows_again([row.recomputed for row in rows])]
    took = zip(*(row.phases for row in rows), strict=True)
    cells.append(" + ".join(f"{statistics.median(each):.2f}" for each in took))
    return f"| {' | '.join(map(str, cells))} |"


def rows_again(runs: Sequence[dict[str, int]]) -> str:
    """Lay out the rows of the worst run, by cause."""
    worst = max(runs, key=lambda run: sum(run.values()))
    return ", ".join(f"{count} {cause}" for cause, count in worst.items() if count) or "0"


@dataclass(slots=True)
class Asking:
    """What clients asked while faults happened."""

    right: dict[int, list[int]]
    """The undisturbed answers, by the seed."""
    stop: Event = field(default_factory=Event)
    goes_on: Event = field(default_factory=Event)
    """Unset, the clients ask nothing new."""
    pauses: list[float] = field(default_factory=list)
    """The longest of each answer."""
    wrong: list[str] = field(default_factory=list)
    """Answers that failed, or have other tokens."""

    def run(self, ring: Ring, draw: random.Random) -> None:
        """Ask until stopped."""
        while not self.stop.is_set():
            if self.goes_on.wait(REST_S):
                self.ask(ring, draw.choice(sorted(self.right)))

    def ask(self, ring: Ring, seed: int) -> None:
        """Ask for one answer, and compare it."""
        got, pause, last, right = list[int](), 0.0, time.monotonic(), self.right[seed]
        try:
            for tokens in ring.mixed(seed):
                now = time.monotonic()
                got, pause, last = got + tokens, max(pause, now - last), now
        except (RuntimeError, httpx2.HTTPError) as error:
            self.wrong.append(f"{seed}, {len(got)} tokens: {error or type(error).__name__}")
        else:
            if got != right:
                self.wrong.append(f"{seed} differs from token {agreed(got, right)} on")
        self.pauses.append(pause)


def warm_up(ring: Ring, asking: Asking, pool: Executor) -> None:
    """Let each rank be lost once, and fill the prefix cache, as later texts evict earlier ones.

    What nodes keep from then on is not growth.
    """
    for victim in RANKS:
        answers = [pool.submit(asking.ask, ring, seed) for seed in range(CLIENTS)]
        ring.ground.strike(WARM_UP, victim, ring.restart)
        for answer in answers:
            answer.result()
        whole(ring)
    fill(ring, pool, TEXTS + MAX_KEPT)


def fill(ring: Ring, pool: Executor, first: int) -> None:
    """Ask for as many texts as the prefix cache keeps, numbered from ``first``."""
    list(pool.map(lambda seed: [*ring.mixed(seed)], range(first, first + MAX_KEPT)))


def all_at_once(
    ring: Ring, faults: Sequence[str], minutes: float, seed: int, report: Report
) -> list[str]:
    """Ask all the time while faults follow each other; return what went wrong."""
    asking = Asking({each: [*chain.from_iterable(ring.mixed(each))] for each in range(TEXTS)})
    struck, draw = Counter[str](), random.Random(seed)
    with ThreadPoolExecutor(CLIENTS) as pool:

        def filled() -> dict[str, dict[str, int]]:
            fill(ring, pool, TEXTS)
            time.sleep(IDLE_S)  # then nodes have returned what the work left unused
            return memory(ring)

        warm_up(ring, asking, pool)
        before = filled()
        clients = [
            pool.submit(asking.run, ring, random.Random(f"{seed} {number}"))
            for number in range(CLIENTS)
        ]
        until_s = time.monotonic() + 60 * minutes
        try:
            while time.monotonic() < until_s:
                fault, victim = draw.choice(faults), draw.choice(RANKS)
                asking.goes_on.set()
                time.sleep(draw.uniform(0, CALM_S))
                struck[fault] += 1
                ring.ground.strike(fault, victim, ring.restart)
                time.sleep(draw.uniform(0, CALM_S))
                if fault in ENDS_PROCESS:
                    ring.restart(victim)
                asking.goes_on.clear()
                whole(ring)
        finally:
            asking.stop.set()
        for each in clients:
            each.result()
        after = filled()
    pauses, wrong = asking.pauses, asking.wrong
    worst = f"{statistics.median(pauses):.2f} s p50, {max(pauses):.2f} s at most"
    report.say(f"{len(pauses)} answers, {len(wrong)} wrong or failed; longest pauses {worst}")
    report.say(f"faults: {', '.join(f'{count} {fault}' for fault, count in struck.items())}")
    for name, now in after.items():
        report.say(f"{name}: {growth(before[name], now)}")
        if (more := unnamed(before[name], now)) > MAX_MORE:
            wrong.append(f"{name} takes {more:.0%} more memory, which it does not name")
    return wrong


def memory(ring: Ring) -> dict[str, dict[str, int]]:
    """Return the resident bytes of each node by use; `other` is what the node does not name."""
    found = {}
    for name in (*RANKS, INGRESS):
        shown = ring.ground.node(name).status()["memory"]
        total, *_ = map(shown.pop, ("process", "kv_room", "waiting_room"))
        found[name] = {"total": total, "anonymous": anonymous(ring.ground.node(name)), **shown}
    return found


def anonymous(node: Node) -> int:
    """Return the resident bytes of a node that belong to no file."""
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def unnamed(before: dict[str, int], after: dict[str, int]) -> float:
    """Return how much more memory a node takes for what it does not name, of all before."""
    return (after["other"] - before["other"]) / before["total"]


def growth(before: dict[str, int], after: dict[str, int]) -> str:
    """Tell how much memory a node takes more than before, and for what."""
    total, now = before["total"], after["total"]
    changes = {part: (after[part] - size) >> 20 for part, size in before.items()}
    parts = ", ".join(
        f"{part} {change:+}" for part, change in changes.items() if change and part != "total"
    )
    share = f"{now / total - 1:+.0%}, {unnamed(before, after):+.0%} without names"
    return f"{total >> 20} MiB, then {now >> 20} ({share}){': ' if parts else ''}{parts}"


@contextmanager
def open_ring(options: Namespace) -> Iterator[Ring]:
    """Start the nodes; yield the ring once it is whole."""
    names, has_relay = (*RANKS, INGRESS), options.fault == [RELAY]
    with open_fleet() as fleet, open_ground(fleet, names, has_relay=has_relay) as ground:
        model = "builtin" if options.embedded else str(random_model(fleet.folder / "model"))
        ticket = ground.ticket(RANKS[0])
        common = ("--join", ticket, "--model", model, *ALONE)
        for name in RANKS:
            ground.start(name, *common, "--members", str(len(RANKS)))
        ground.start(INGRESS, *common, "--exclude", INGRESS)
        ring = Ring(ground, model, options.temperature, options.tokens, options.prompt)
        whole(ring)
        yield ring


def main() -> None:
    """Print the table, or what the faults did all at once."""
    parser = parser_of("chaos", __doc__)
    parser.add_argument("--times", type=int, default=3, metavar="N")
    parser.add_argument("--at", type=counts, default=(15, 60, 280), metavar="N,...")
    parser.add_argument("--tokens", type=int, default=320, metavar="N")
    parser.add_argument("--prompt", type=int, default=0, metavar="TOKENS", help="of the prompt")
    parser.add_argument("--fault", choices=(*OF_PROCESSES, *OF_NETWORKS, RELAY), action="append")
    parser.add_argument("--role", choices=ROLES, action="append")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--embedded", action="store_true", help="use the model inside")
    parser.add_argument("--all-at-once", type=float, metavar="MINUTES")
    parser.add_argument("--seed", type=int, default=0, help="of what happens all at once")
    options = parser.parse_args()
    report = Report(options)
    with open_ring(options) as ring:
        if lacks := ring.ground.lacks:
            report.say(f"no faults of the network: {lacks}")
        faults = [
            each for each in options.fault or ring.ground.faults if each in ring.ground.faults
        ]
        if not faults:
            parser.error("none of these faults can happen here")
        if options.all_at_once:
            faults = [each for each in faults if each != "join"]  # all ranks run between faults
            wrong = all_at_once(ring, faults, options.all_at_once, options.seed, report)
        else:
            outcomes = table(ring, faults, options, report)
            report.write(outcomes)
            wrong = [str(it) for it in outcomes if it.error or it.same < it.case.at]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
