"""What it brings to give answers memory as they grow: ``python -m tests.bench.admission``.

Requests that may have long answers, and mostly have short ones, arrive at random at an entry whose
KV caches have room for a few of the longest. In one row each reserves all that it may need before
it starts, in the other what it needs next, see `meshllm.protocol.kv_cache.admission`. The clock
counts steps of the ring: a step writes a token of every answer that runs. The command fails if
answers wait longer where they grow.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from meshllm.names import SessionId
from meshllm.protocol.kv_cache.admission import QUANTUM, Admission
from meshllm.protocol.kv_cache.budget import KvBudget, KvCapacity
from tests.bench.report import Report, parser_of

PLACES = 16
LONGEST, TYPICAL, SPREAD = 8192, 300, 1.0  # tokens of an answer; lognormal
PROMPT = 500


@dataclass(frozen=True, slots=True)
class Waited:
    """How a load went."""

    name: str
    steps: int
    """Until the last answer had ended."""
    together: float
    """Answers that ran at once, mean."""
    started: float
    """Steps until an answer began, mean, and"""
    late: int
    """of the slowest hundredth."""
    paused: int
    """Answers that had to pause."""


@dataclass(slots=True)
class _Load:
    """The answers that run and wait, on a clock of steps."""

    admission: Admission
    lengths: list[int]
    arrivals: list[int]
    grows: bool
    now: int = 0
    begun: dict[int, int] = field(default_factory=dict)
    """When each answer began."""
    reached: dict[int, int] = field(default_factory=dict)
    """Tokens of each that runs, with its prompt."""
    room: dict[int, int] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    ever_paused: set[int] = field(default_factory=set)

    def run(self, name: str) -> Waited:
        """Step until every answer has ended."""
        left, together = list(range(len(self.lengths))), list[int]()
        while left or self.reached:
            while left and self.arrivals[left[0]] <= self.now:
                self._ask(left.pop(0))
            running = [each for each in self.reached if each not in self.paused]
            together.append(len(running))
            for one in running:
                self._step(one)
            self.now += 1
        waits = sorted(self.begun[each] - self.arrivals[each] for each in self.begun)
        late = waits[-max(1, len(waits) // 100)]
        return Waited(name, self.now, fmean(together), fmean(waits), late, len(self.ever_paused))

    def _ask(self, one: int) -> None:
        answer = LONGEST if self.grows else 0
        tokens = PROMPT + LONGEST
        self._go_on(self.admission.ask(_session(one), tokens, self.now, "key", answer=answer))

    def _step(self, one: int) -> None:
        """Write a token, unless there is no room for it."""
        session = _session(one)
        if self.reached[one] == PROMPT + self.lengths[one]:
            del self.reached[one]
            self._go_on(self.admission.leave(session, self.now))
        elif self.reached[one] == self.room[one]:
            self.paused.add(one)
            self._go_on(self.admission.grow(session, self.room[one] + QUANTUM, self.now))
            self.ever_paused |= {one} & self.paused
        else:
            self.reached[one] += 1

    def _go_on(self, sessions: Sequence[SessionId]) -> None:
        for each in map(int.from_bytes, sessions):
            if each in self.paused:
                self.paused.remove(each)
                self.room[each] += QUANTUM
            else:
                self.begun[each], self.reached[each] = self.now, PROMPT
                self.room[each] = PROMPT + (QUANTUM if self.grows else LONGEST)


def _session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16))


def measure(name: str, requests: int, room: int, every: float, *, grows: bool) -> Waited:
    """Let so many requests arrive, one in ``every`` steps, at KV caches of ``room`` tokens."""
    random = Random(0)
    lengths = [
        min(LONGEST, 1 + round(TYPICAL * random.lognormvariate(0, SPREAD))) for _ in range(requests)
    ]
    arrivals, at = list[int](), 0.0
    for _ in range(requests):
        at += random.expovariate(1 / every)
        arrivals.append(round(at))
    admission = Admission(
        KvBudget([KvCapacity(room, lambda tokens: (tokens, 0))]), PLACES, waiting=requests
    )
    return _Load(admission, lengths, arrivals, grows).run(name)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("admission", __doc__ and __doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, metavar="N")
    parser.add_argument("--room", type=int, default=32_768, metavar="TOKENS", help="of KV caches")
    parser.add_argument("--every", type=float, default=60.0, metavar="STEPS", help="a request")
    options = parser.parse_args(arguments)
    report, load = Report(options), (options.requests, options.room, options.every)
    rows = whole, grown = [
        measure("all at first", *load, grows=False),
        measure("as they grow", *load, grows=True),
    ]
    report.say("room          steps  together  to the start: mean  1 in 100  paused")
    report.say(
        *(
            f"{row.name:<12}  {row.steps:>5}  {row.together:>8.1f}  {row.started:>18.0f}"
            f"  {row.late:>8}  {row.paused:>6}"
            for row in rows
        )
    )
    report.write(rows)
    return int(grown.started > whole.started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
