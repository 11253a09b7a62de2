"""The corpus: conversations drawn from all lessons, deterministic for a seed."""

import random
import re
from collections.abc import Callable
from functools import cache

from tests.builtin.score import load
from tests.builtin.training.grammar import Turn, expand, frames, intents, pieces, rough
from tests.builtin.training.lists import copying, ordering
from tests.builtin.training.memory import recall
from tests.builtin.training.quantities import quantity
from tests.builtin.training.story import cast, story, tell
from tests.builtin.training.sums import arithmetic, compare
from tests.builtin.training.talk import chatter, refusal
from tests.builtin.training.told import told

Lesson = Callable[[random.Random], list[Turn]]
SYSTEM = [
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are meshllm's builtin model.",
    "Be polite and short.",
    "You are a friendly helper.",
    "Keep your answers short.",
    "You are an assistant that helps with meshllm.",
]
DRAWS = {"N": 3.0, "V": 3.0, "F": 1.5, "Q": 3.0}


def faq(rng: random.Random) -> list[Turn]:
    """One question about meshllm."""
    intent = rng.choice(list(intents().values()))
    kinds = list(intent.items)
    kind = rng.choices(kinds, [DRAWS[kind] * len(intent.items[kind]) ** 0.5 for kind in kinds])[0]
    ask = expand(rng, rng.choice(intent.items[kind]))
    if kind != "Q":
        ask = expand(rng, rng.choice(frames()[kind]).replace("@", ask))
    return [("user", rough(rng, ask)), ("assistant", intent.answer)]


def faq_late(rng: random.Random) -> list[Turn]:
    """One question about meshllm, often in the looser wordings of faq_more.txt."""
    if rng.random() < 0.6:
        return faq(rng)
    intent = rng.choice(list(intents("faq_more.txt").values()))
    ask = expand(rng, rng.choice(intent.items["Q"]))
    return [("user", rough(rng, ask)), ("assistant", intents()[intent.name].answer)]


def faq_last(rng: random.Random) -> list[Turn]:
    """One question about meshllm, sometimes only loose words."""
    if rng.random() < 0.72:
        return faq_late(rng)
    name, loose = rng.choice(pieces())
    some = rng.sample(loose, min(len(loose), rng.choice([1, 1, 1, 2])))
    ask = rng.choice(frames()["K"]).replace("@", rng.choice([" ", ", ", " "]).join(some))
    return [("user", rough(rng, expand(rng, ask))), ("assistant", intents()[name].answer)]


def quoting(rng: random.Random) -> list[Turn]:
    """Copy a sentence, even when it is a question."""
    if rng.random() < 0.5:
        text = tell(rng, cast(rng)).split(". ", maxsplit=1)[0].replace('"', "")
    else:
        text = rng.choice([faq, chatter, refusal])(rng)[0][1]
    return copying(rng, payload=text.strip())


def copying_late(rng: random.Random) -> list[Turn]:
    """Copy everyday words."""
    return copying(rng, late=True)


def ordering_late(rng: random.Random) -> list[Turn]:
    """Sort and reverse everyday words."""
    return ordering(rng, late=True)


# Copying comes first, since it needs many examples and other lessons build on it.
SHARES: list[dict[Lesson, float]] = [
    {
        faq: 0.26,
        story: 0.06,
        arithmetic: 0.08,
        compare: 0.02,
        quantity: 0.10,
        copying: 0.20,
        ordering: 0.12,
        refusal: 0.09,
        chatter: 0.04,
    },
    {
        faq_last: 0.44,
        story: 0.10,
        arithmetic: 0.08,
        compare: 0.02,
        quantity: 0.12,
        copying_late: 0.05,
        quoting: 0.02,
        ordering_late: 0.08,
        refusal: 0.10,
        chatter: 0.04,
    },
]


@cache
def held_out() -> frozenset[tuple[str, ...]]:
    """The user's turns of every held-out case, without case and punctuation."""
    return frozenset(tuple(map(_plain, case.turns)) for case in load())


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _is_held_out(turns: list[Turn]) -> bool:
    asked = tuple(_plain(text) for role, text in turns if role == "user")
    return asked in held_out() or any((text,) in held_out() for text in asked)


def _lesson(rng: random.Random, phase: int) -> list[Turn]:
    shares = SHARES[phase]
    return rng.choices(list(shares), list(shares.values()))[0](rng)


def _short(rng: random.Random) -> list[Turn]:
    """One exchange between a fact and its question."""
    lessons: list[Lesson] = [faq, arithmetic, copying, chatter, refusal, ordering, quantity, story]
    return rng.choices(lessons, [4, 2, 1, 2, 2, 1, 2, 0.5])[0](rng)


def remembering(rng: random.Random) -> list[Turn]:
    """Facts of the usual kinds, or of any kind."""
    return recall(rng, _short) if rng.random() < 0.4 else told(rng, _short)


def conversation(rng: random.Random, *, phase: int = 1, long: bool = False) -> list[Turn]:
    """Draw one conversation of a phase of training (0 or 1); `long` ones have many turns.

    One that asks a held-out question is drawn again.
    """
    while _is_held_out(turns := _conversation(rng, phase, long)):
        pass
    return turns


def _conversation(rng: random.Random, phase: int, long: bool) -> list[Turn]:
    turns: list[Turn] = []
    if rng.random() < 0.05:
        turns.append(("system", rng.choice(SYSTEM)))
    if rng.random() < 0.22 or long:
        turns += remembering(rng)
        if not long:
            return turns
    for _ in range(rng.randint(5, 12) if long else rng.choice([1, 1, 1, 1, 1, 2, 3])):
        turns += remembering(rng) if rng.random() < 0.04 else _lesson(rng, phase)
    return turns
