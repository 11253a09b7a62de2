"""`meshllm ring trace`: where the time of one answer goes."""

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.shared.answer import as_fields
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar
from meshllm.errors import PeerFault
from meshllm.request import Answer, Request, Turn

if TYPE_CHECKING:
    from meshllm.cli.shared.client import NodeClient

EXAMPLES = """\b
Examples:
  meshllm ring trace
  meshllm ring trace "What is a ring?" --tokens 64
  meshllm ring trace --json
"""
PROMPT = "Tell me a story about a fox and a crow."  # one that the builtin model answers at length
NAME = 12  # characters of a name in the table
SHORTEST_BAR = 10

_MARKS = {"█": "compute", "▓": "serialise", "·": "queue", "▒": "wire", "░": "the rest"}


@takes("state")
def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Length of the answer.")] = 32,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Time one answer of the running ring, hop by hop.

    The answer itself is not shown. A bar is what a hop takes of each token: the time in the model
    there, between bytes and tensors, in wait for its turn, and on the wire to the next.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, door_path

    turn: Turn = {"role": "user", "content": prompt}
    request = Request(turns=(turn,), max_tokens=tokens)
    with render.Status(sys.stderr) as status:
        status.show(f"timing an answer of {tokens} tokens")
        answer = asyncio.run(_ask(NodeClient(door_path(settings(flags))), request))
    if as_json:
        fields = as_fields(answer)
        render.dump({name: fields[name] for name in fields if name not in {"text", "tokens"}})
        return
    from meshllm.cli.ring.picture import drawable

    text = lay_out(answer, shutil.get_terminal_size().columns)
    render.out(drawable(text, sys.stdout.encoding))


def lay_out(answer: Answer, columns: int) -> str:
    """Lay out the hops of an answer with a bar each, in at most so many columns if names allow."""
    token_ms = answer.ms_per_token
    if not token_ms:  # the steps after the first token are what is measured
        return render.statistics(answer)
    rows = list(_rows(answer))
    header = ("hop", "node", "layers", "compute", "serialise", "queue", "wire")
    facts = render.table(header, [row.cells for row in rows]).split("\n")
    width = max(map(len, facts))
    room = max(columns - width - len("  100 %  "), SHORTEST_BAR)
    scale = room / max(sum(row.times) for row in rows)
    lines = [f"{render.PER_TOKEN}:", f"{facts[0]}  of a token"]
    for fact, row in zip(facts[1:], rows, strict=True):
        share = f"{sum(row.times) / token_ms * 100:3.0f} %"
        bar = _bar(row.times, scale)
        lines.append(f"{fact:<{width}}  {share}  {bar}".rstrip())
    legend = "  ".join(f"{mark} {word}" for mark, word in _MARKS.items())
    return "\n".join([*lines, legend, "", *render.statistics(answer).split("\n")[:2]])


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[object, ...]
    times: tuple[float, ...]
    """What each of the marks stands for; ms per token."""


def _bar(times: Iterable[float], scale: float) -> str:
    """Round where parts end, not how long they are: the whole is as long as it should be."""
    ends = [0, *(round(end * scale) for end in accumulate(times))]
    return "".join(mark * (b - a) for mark, (a, b) in zip(_MARKS, pairwise(ends), strict=True))


def _rows(answer: Answer) -> Iterator[_Row]:
    """Yield what each hop takes of a token, and last what no hop accounts for."""
    for hop in answer.hops:
        times = render.parts(hop)
        name = " ".join(render.safe(hop.node).split())[:NAME]
        yield _Row((hop.rank, name, str(hop.span), *times), (*times, 0))
    rest = answer.ms_per_token - sum(sum(render.parts(hop)) for hop in answer.hops)
    if rest > 0:
        yield _Row((None, "between", *[None] * 5), (0, 0, 0, 0, rest))


async def _ask(client: "NodeClient", request: Request) -> Answer:
    """Return the answer, whose hops have the names of their nodes instead of their ids."""
    async with aclosing(client.generate(request)) as events:
        answers = [event async for event in events if isinstance(event, Answer)]
    if not answers:
        raise PeerFault("The node ended without an answer")
    names = {each.short: each.name for each in (await client.status()).nodes if each.name}
    hops = (replace(hop, node=names.get(hop.node, hop.node)) for hop in answers[-1].hops)
    return replace(answers[-1], hops=tuple(hops))
