"""Memory lessons: facts that users tell about themselves and ask for some turns later."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tests.builtin.training.grammar import (
    SLOT,
    Turn,
    everyday,
    expand,
    made_up,
    names,
    rough,
    section,
    words,
)
from tests.builtin.training.name_like import name_like

PET = "¤"  # stands for the kind of animal


def _person(rng: random.Random) -> str:
    return rng.choice(names()[0]) if rng.random() < 0.4 else name_like(rng)


def _pet_name(rng: random.Random) -> str:
    people, pets = names()
    return rng.choice(pets + people) if rng.random() < 0.5 else name_like(rng)


def _of(kind: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(words(kind)) if rng.random() < 0.9 else made_up(rng)


def _city(rng: random.Random) -> str:
    return rng.choice(words("city")) if rng.random() < 0.5 else name_like(rng)


def _word(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < 0.4 else rng.choice(everyday())


def _number(rng: random.Random) -> str:
    return str(rng.randint(1, 999) if rng.random() < 0.5 else rng.randint(1, 50))


DRAW: dict[str, Callable[[random.Random], str]] = {
    "name": _person,
    "color": _of("color"),
    "city": _city,
    "age": lambda rng: str(rng.randint(5, 99)),
    "food": _of("food"),
    "hobby": _of("hobby"),
    "job": _of("job"),
    "number": _number,
    "word": _word,
    "friend": _person,
    "sister": _person,
    "brother": _person,
}


@cache
def _wordings(kind: str) -> dict[str, str]:
    """Read one block of facts.txt, by letter."""
    return {line[0]: line[2:] for line in section("facts.txt", kind)}


def _pick(rng: random.Random, patterns: str) -> str:
    return expand(rng, rng.choice(patterns.split("/"))).replace(" 's", "'s")


def _say(rng: random.Random, text: str, *, mark: str = ".") -> str:
    return rough(rng, text, mark=mark, swap=False)


@dataclass(slots=True)
class Told:
    """One fact as it appears in a conversation."""

    tell: str
    confirm: str
    asks: list[tuple[str, str]]


def fact(rng: random.Random, kind: str) -> Told:
    """Draw a fact of one kind, with its wordings."""
    if kind == "pet":
        return _pet(rng)
    known = _wordings(kind)
    value = DRAW[kind](rng)
    value = value.lower() if rng.random() < 0.15 else value
    ask = _say(rng, _pick(rng, known["A"]), mark="?")
    tell = _pick(rng, known["T"])
    return Told(
        tell.replace(SLOT, value),
        known["C"].replace(SLOT, value),
        [(ask, known["R"].replace(SLOT, value))],
    )


def _pet(rng: random.Random) -> Told:
    known = _wordings("pet")
    kind = rng.choice(known["K"].split()) if rng.random() < 0.75 else rng.choice(words("animal"))
    name = _pet_name(rng)
    tell = _pick(rng, known["T"]).replace(PET, kind).replace(SLOT, name)
    ask = _pick(rng, known["A"]).replace(SLOT, "").replace(PET, kind)
    asks = [(_say(rng, ask, mark="?"), f"Your {kind} is called {name}.")]
    ask = _say(rng, _pick(rng, known["B"]), mark="?")
    asks.append((ask, f"You have a {kind} called {name}."))
    if rng.random() < 0.35:
        asks.reverse()
    return Told(tell, f"Got it: your {kind} is called {name}.", asks[:1])


def _kinds(rng: random.Random, count: int) -> list[str]:
    weights = {"name": 6, "color": 4, "pet": 5}
    every = [*DRAW, "pet"]
    found: dict[str, None] = {}
    while len(found) < count:
        found[rng.choices(every, [weights.get(kind, 1) for kind in every])[0]] = None
    return list(found)


def _tell_all(rng: random.Random, facts: list[Told]) -> list[list[Turn]]:
    """Tell facts one by one, or several in one message."""
    told: list[list[Turn]] = []
    rest = list(facts)
    while rest:
        count = rng.choice([1, 1, 1, 2, 3]) if len(rest) > 1 else 1
        now, rest = rest[:count], rest[count:]
        joint = rng.choice([" and ", ". ", ", ", " and ", ". "])
        text = _say_fact(rng, joint.join(each.tell for each in now))
        told.append([("user", text), ("assistant", " ".join(each.confirm for each in now))])
    return told


def _say_fact(rng: random.Random, text: str) -> str:
    if rng.random() < 0.25:
        before = ["hi,", "hello,", "hey,", "so", "well,", "by the way,", "ok,", "hi!"]
        text = f"{rng.choice(before)} {text}"
    if rng.random() < 0.1:
        text += rng.choice([", remember that", ", please remember it", ", don't forget", " ok?"])
    if rng.random() < 0.55:
        text += rng.choice([".", ".", ".", "!", "..."])
    return text[0].upper() + text[1:] if rng.random() < 0.55 else text


def recall(rng: random.Random, other: Callable[[random.Random], list[Turn]]) -> list[Turn]:
    """Tell facts, talk about other things, ask for the facts."""
    if rng.random() < 0.08:
        return _never_told(rng, other)
    facts = [fact(rng, kind) for kind in _kinds(rng, rng.choice([1, 1, 2, 2, 3, 4]))]
    turns: list[Turn] = []
    for group in _tell_all(rng, facts):
        turns += group
        if rng.random() < 0.35:
            turns += other(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        turns += other(rng)
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    for each in asked:
        for ask, answer in each.asks:
            turns += [("user", ask), ("assistant", answer)]
        if rng.random() < 0.2:
            turns += other(rng)
    return turns


def _never_told(rng: random.Random, other: Callable[[random.Random], list[Turn]]) -> list[Turn]:
    kind = rng.choice([*DRAW, "name", "name", "color"])
    known = _wordings(kind)
    turns = other(rng) if rng.random() < 0.4 else []
    extra = _kinds(rng, 1)[0]
    if extra != kind and rng.random() < 0.6:
        told = fact(rng, extra)
        turns += [("user", _say_fact(rng, told.tell)), ("assistant", told.confirm)]
    ask = _say(rng, _pick(rng, known["A"]), mark="?")
    return [*turns, ("user", ask), ("assistant", known["U"])]
