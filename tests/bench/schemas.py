"""Answers that follow random JSON schemas: `python -m tests.bench.schemas`.

The embedded model answers with each schema and seed on rings of 1 and 3 nodes, with and without
speculation. The table counts answers that are valid, that ended at their length, and that are the
same text on every ring; anything else fails the command. Eight are computed at a time. What a mask
costs is shown by `tests.bench.masks`.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from jsonschema import Draft202012Validator

from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.request import Answer, FinishReason, Request, Sampling, Turn
from tests.bench.report import Report, parser_of
from tests.builders.json_schemas import draw_schema

TOGETHER = 8  # sessions
QUESTION = (Turn(role="user", content="Tell me about a fox, in JSON."),)


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one ring."""

    nodes: int
    speculation: bool
    answers: int
    valid: int
    length: int
    same: int


async def ask(ring: LocalRing, requests: Iterable[Request]) -> list[Answer]:
    """Return the answers to requests, several at a time: a step of several takes hardly longer."""
    places = asyncio.Semaphore(TOGETHER)

    async def one(request: Request) -> Answer:
        async with places:
            *_, answer = [event async for event in ring.generate(request)]
        assert isinstance(answer, Answer)
        return answer

    return await asyncio.gather(*map(one, requests))


def is_valid(schema: str, text: str) -> bool:
    """Return whether a text is JSON that satisfies a schema."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(Draft202012Validator(json.loads(schema)).is_valid(value))


async def run(
    nodes: int, requests: list[Request], right: list[str], *, speculation: bool
) -> tuple[Row, list[str]]:
    """Ask a ring; compare with the texts of the first ring, if there are any."""
    inference = InferenceConfig(threads=1, speculation=speculation)
    options = RingOptions(nodes=nodes, inference=inference)
    async with open_local_ring(resolve("builtin"), options) as ring:
        answers = await ask(ring, requests)
    texts = [answer.text for answer in answers]
    ended = [answer.finish_reason is FinishReason.LENGTH for answer in answers]
    valid = sum(
        is_valid(request.schema or "", text)
        for request, text, is_cut in zip(requests, texts, ended, strict=True)
        if not is_cut
    )
    same = sum(text == other for text, other in zip(texts, right or texts, strict=True))
    return Row(nodes, speculation, len(texts), valid, sum(ended), same), texts


def main() -> None:
    """Print the table."""
    parser = parser_of("schemas", __doc__)
    parser.add_argument("--schemas", type=int, default=200, metavar="N")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    options = parser.parse_args()
    draw, report = Random(0), Report(options)
    schemas = [json.dumps(draw_schema(draw)) for _ in range(options.schemas)]
    requests = [
        Request(QUESTION, sampling=Sampling(1.0, seed=seed), max_tokens=120, schema=schema)
        for schema in schemas
        for seed in range(options.seeds)
    ]
    report.say(
        "| ring | speculation | answers | valid | ended at length | same text |",
        "|---|---|---|---|---|---|",
    )
    rows, right = list[Row](), list[str]()
    for nodes, speculation in ((1, False), (1, True), (3, False), (3, True)):
        row, texts = asyncio.run(run(nodes, requests, right, speculation=speculation))
        rows.append(row)
        right = right or texts
        cells = nodes, "on" if speculation else "off", row.answers, row.valid, row.length, row.same
        report.say(f"| {' | '.join(map(str, cells))} |")
    report.write(rows)
    wrong = [row for row in rows if row.valid + row.length < row.answers or row.same < row.answers]
    sys.exit("\n".join(map(str, wrong)) or 0)


if __name__ == "__main__":
    main()
