"""Recovery time after the loss of a node: `python -m tests.bench.kills [--times N]`.

Three processes form a ring. One is killed, each in turn, and a prompt is sent at once through
another; after the answer the killed one restarts, and the ring of three recovers before the next
kill. The columns are seconds from the kill until another node reports the lost one as gone, and
until the prompt is answered in full; and seconds from the restart until the node is back in the
ring. The command fails if a node is not reported gone within `GONE_S`, or if an answer differs from
that of a single process.
"""

import sys
import time
from dataclasses import astuple, dataclass
from threading import Thread

from tests.bench.report import Report, parser_of
from tests.processes.fleet import ALONE, Fleet, ask, meshllm, open_fleet, until

QUESTION = "What is a ring?"
NAMES = ("attic", "bench", "cellar")
GONE_S = 3.0


@dataclass(frozen=True, slots=True)
class Loss:
    """One kill, in seconds."""

    name: str
    gone_s: float
    answered_s: float
    back_s: float
    is_right: bool
    is_same: bool
    """Whether it came back with the same id."""


def lose(fleet: Fleet, name: str, right: str) -> Loss:
    """Kill a node, send a prompt to another, and restart the node."""
    lost = fleet.node(name)
    ingress, witness = (fleet.node(other) for other in NAMES if other != name)
    before, said = lost.status()["node"], []
    begin = time.monotonic()
    lost.kill()
    asking = Thread(target=lambda: said.append(ask(ingress, QUESTION)))
    asking.start()
    until(lambda: witness.states()[name] == "down", fleet.told)
    gone = time.monotonic() - begin
    asking.join()
    answered = time.monotonic() - begin
    lost.start(*ALONE)
    back = fleet.form()
    return Loss(name, gone, answered, back, said == [right], lost.status()["node"] == before)


def main() -> None:
    """Print the table."""
    parser = parser_of("kills", __doc__)
    parser.add_argument("--times", type=int, default=10, metavar="N")
    options = parser.parse_args()
    report, times = Report(options), options.times
    right = meshllm("chat", "--nodes", "1", "--threads", "1", QUESTION).stdout
    report.say(
        "| kill of | shown gone, s | answered, s | back in the ring, s | text | id |",
        "|---|---|---|---|---|---|",
    )
    losses = []
    with open_fleet() as fleet:
        ticket = fleet.create_mesh(NAMES[0])
        for name in NAMES:
            fleet.node(name).start("--join", ticket, "--members", str(len(NAMES)), *ALONE)
        fleet.form()
        for number in range(times):
            loss = lose(fleet, NAMES[number % len(NAMES)], right)
            losses.append(loss)
            name, *seconds = astuple(loss)[:4]
            words = ("same" if each else "OTHER" for each in (loss.is_right, loss.is_same))
            row = (name, *(f"{each:.1f}" for each in seconds), *words)
            report.say(f"| {' | '.join(row)} |")
    report.write(losses)
    failed = [it for it in losses if it.gone_s > GONE_S or not (it.is_right and it.is_same)]
    sys.exit(f"{len(failed)} of {times} kills went wrong" if failed else 0)


if __name__ == "__main__":
    main()
