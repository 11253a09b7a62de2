"""The corpus: conversations drawn from all lessons, deterministic for a seed."""

import random
from collections.abc import Callable

from tests.builtin.training.grammar import Turn, expand, frames, intents, pieces, rough
from tests.builtin.training.lists import copying, ordering
from tests.builtin.training.memory import recall
from tests.builtin.training.story import cast, story, tell
from tests.builtin.training.sums import arithmetic, compare
from tests.builtin.training.talk import chatter, refusal

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


# Skills that need many examples come first; the last phases give weak skills a larger share.
SHARES: list[dict[Lesson, float]] = [
    {
        faq: 0.26,
        story: 0.08,
        arithmetic: 0.10,
        compare: 0.02,
        copying: 0.24,
        ordering: 0.16,
        refusal: 0.09,
        chatter: 0.05,
    },
    {
        faq: 0.44,
        story: 0.10,
        arithmetic: 0.14,
        compare: 0.03,
        copying: 0.05,
        ordering: 0.10,
        refusal: 0.10,
        chatter: 0.04,
    },
    {
        faq: 0.36,
        story: 0.10,
        arithmetic: 0.19,
        compare: 0.03,
        copying_late: 0.09,
        ordering_late: 0.16,
        refusal: 0.09,
        chatter: 0.05,
    },
    {
        faq_late: 0.40,
        story: 0.10,
        arithmetic: 0.18,
        compare: 0.03,
        copying_late: 0.06,
        quoting: 0.03,
        ordering_late: 0.14,
        refusal: 0.10,
        chatter: 0.05,
    },
    {
        faq_last: 0.38,
        story: 0.09,
        arithmetic: 0.19,
        compare: 0.03,
        copying_late: 0.08,
        quoting: 0.03,
        ordering_late: 0.17,
        refusal: 0.09,
        chatter: 0.04,
    },
]


def _lesson(rng: random.Random, phase: int) -> list[Turn]:
    shares = SHARES[phase]
    return rng.choices(list(shares), list(shares.values()))[0](rng)


def _short(rng: random.Random) -> list[Turn]:
    """One exchange between a fact and its question."""
    lesson = rng.choices([faq, arithmetic, copying, chatter, refusal, ordering], [4, 3, 1, 2, 2, 1])
    return lesson[0](rng)


def conversation(rng: random.Random, *, phase: int = 1, long: bool = False) -> list[Turn]:
    """Draw one conversation of a phase of training (0 to 4); `long` ones have many turns."""
    turns: list[Turn] = []
    if rng.random() < 0.05:
        turns.append(("system", rng.choice(SYSTEM)))
    if rng.random() < 0.11 or long:
        turns += recall(rng, _short)
        if not long:
            return turns
    for _ in range(rng.randint(5, 12) if long else rng.choice([1, 1, 1, 1, 1, 2, 3])):
        turns += recall(rng, _short) if rng.random() < 0.04 else _lesson(rng, phase)
    return turns
