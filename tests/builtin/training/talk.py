"""Lessons of small talk, and of polite refusals of what a model this small cannot know."""

import random
import re
from functools import cache

from tests.builtin.training.grammar import (
    Turn,
    everyday,
    expand,
    lines,
    made_up,
    rough,
    vocabulary,
    words,
)

DRAW = re.compile(r"<([a-z?!]+)>")
REFUSALS = {"news": 2, "weather": 2, "time": 1.5, "code": 4, "translate": 3, "facts": 12}
REFUSALS |= {"gibberish": 1.0}


@cache
def topics() -> dict[str, tuple[str, list[str]]]:
    """Read talk.txt: answer and wordings of each topic."""
    found: dict[str, tuple[str, list[str]]] = {}
    name = ""
    for line in lines("talk.txt"):
        if line.startswith("["):
            name = line.strip("[]")
        elif line.startswith("A "):
            found[name] = (line[2:], [])
        else:
            found[name][1].append(line)
    return found


def _noise_word(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return made_up(rng)
    return "".join(rng.choice("asdfghjklqwertyuiopzxcvbnm") for _ in range(rng.randint(2, 8)))


def _draw(rng: random.Random, kind: str) -> str:
    if kind == "!":
        return _noise_word(rng)
    if kind == "?":
        return rng.choice(everyday() if rng.random() < 0.5 else vocabulary())
    return rng.choice(words(kind))


def _turns(rng: random.Random, topic: str) -> list[Turn]:
    answer, wordings = topics()[topic]
    ask = expand(rng, rng.choice(wordings))
    ask = DRAW.sub(lambda match: _draw(rng, match[1]), ask)
    return [("user", rough(rng, ask, swap=False)), ("assistant", answer)]


def chatter(rng: random.Random) -> list[Turn]:
    """Greetings, thanks and the like."""
    return _turns(rng, rng.choice([name for name in topics() if name not in REFUSALS]))


def refusal(rng: random.Random) -> list[Turn]:
    """Something that this model cannot know."""
    return _turns(rng, rng.choices(list(REFUSALS), list(REFUSALS.values()))[0])
