"""`meshllm ring trace`: timings of one answer, hop by hop."""

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
from meshllm.cli.terminal.wrap import width_of
from meshllm.config import Scalar
from meshllm.errors import PeerFault, UserError
from meshllm.names import counted
from meshllm.request import Answer, Request, Turn

if TYPE_CHECKING:
    from meshllm.cli.shared.client import NodeClient

EXAMPLES = """\b
Examples:
  meshllm ring trace
  meshllm ring trace "What is a ring?" --tokens 64
  meshllm ring trace --json
"""
PROMPT = "Tell me a story about a fox and a crow."  # the builtin model answers it at length
NAME = 12  # characters of a name in the table
SHORTEST_BAR = 10

_MARKS = {"█": "compute", "▓": "serialise", "·": "queue", "▒": "wire", "░": "other"}


@takes("state")
def trace(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Send this prompt.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Generate up to N tokens.")] = 32,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Time one answer of the running ring, hop by hop.

    The answer itself is not shown. Each bar is the time of a hop per token: compute in the model,
    serialise between bytes and tensors, queue for the compute thread, and wire to the next node.
    Drafts overlap on the way, so that the shares may add up to more than 100 %.
    """
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path

    if not prompt:
        raise UserError("The prompt is empty", hint=f"give another, or none for `{PROMPT}`")
    turn: Turn = {"role": "user", "content": prompt}
    request = Request(turns=(turn,), max_tokens=tokens)
    with render.Status(sys.stderr) as status:
        status.show(f"timing an answer of {counted(tokens, 'token')}")
        answer, names = asyncio.run(_ask(NodeClient(socket_path(settings(flags))), request))
    if as_json:
        fields = as_fields(answer)
        hops = [{**hop, "name": names.get(hop["node"])} for hop in fields["hops"]]
        written = {"text", "tokens", "reasoning"}
        render.dump({name: fields[name] for name in fields if name not in written} | {"hops": hops})
        return
    from meshllm.cli.ring.picture import drawable

    named = (replace(hop, node=names.get(hop.node, hop.node)) for hop in answer.hops)
    answer = replace(answer, hops=tuple(named))
    text = lay_out(answer, shutil.get_terminal_size().columns)
    render.out(drawable(text, sys.stdout.encoding))


def lay_out(answer: Answer, columns: int) -> str:
    """Lay out the hops of an answer, a bar each, at most ``columns`` wide if names allow it."""
    token_ms = answer.ms_per_token
    if not token_ms:  # only steps after the first token are timed
        return render.statistics(answer)
    rows = list(_rows(answer))
    header = ("hop", "node", "layers", "compute", "serialise", "queue", "wire")
    facts = render.table(header, [row.cells for row in rows]).split("\n")
    width = max(map(width_of, facts))
    room = max(columns - width - len("  100 %  "), SHORTEST_BAR)
    scale = room / max(sum(row.times) for row in rows)
    lines = [f"{render.PER_TOKEN}:", f"{facts[0]}  share"]
    for fact, row in zip(facts[1:], rows, strict=True):
        share = f"{sum(row.times) / token_ms * 100:3.0f} %"
        bar = _bar(row.times, scale)
        lines.append(f"{fact}{' ' * (width - width_of(fact))}  {share}  {bar}".rstrip())
    legend = "  ".join(f"{mark} {word}" for mark, word in _MARKS.items())
    return "\n".join([*lines, legend, "", *render.statistics(answer).split("\n")[:2]])


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[object, ...]
    times: tuple[float, ...]
    """The ms per token of each mark."""


def _bar(times: Iterable[float], scale: float) -> str:
    """Draw a bar; rounding the ends of its parts, not their lengths, keeps the total exact."""
    ends = [0, *(round(end * scale) for end in accumulate(times))]
    return "".join(mark * (b - a) for mark, (a, b) in zip(_MARKS, pairwise(ends), strict=True))


def _rows(answer: Answer) -> Iterator[_Row]:
    """Yield the times of each hop, then the time that no hop accounts for."""
    for hop in answer.hops:
        times = render.parts(hop)
        name = " ".join(render.safe(hop.node).split())[:NAME]
        yield _Row((hop.rank, name, str(hop.span), *times), (*times, 0))
    rest = answer.ms_per_token - sum(sum(render.parts(hop)) for hop in answer.hops)
    if rest > 0:
        yield _Row((None, "other", *[None] * 5), (0, 0, 0, 0, rest))


async def _ask(client: "NodeClient", request: Request) -> tuple[Answer, dict[str, str]]:
    """Return the answer, and the names of nodes by their short ids."""
    async with aclosing(client.generate(request)) as events:
        answers = [event async for event in events if isinstance(event, Answer)]
    if not answers:
        raise PeerFault("The node ended the stream without an answer")
    names = {each.short: each.name for each in (await client.status()).nodes if each.name}
    return answers[-1], names
