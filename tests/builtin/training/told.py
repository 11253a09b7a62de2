"""Facts that users tell: who is called what, what they do, corrections."""

import random
from collections.abc import Callable
from functools import cache

from tests.builtin.training.grammar import (
    SLOT,
    Turn,
    everyday,
    expand,
    names,
    rough,
    section,
    words,
)
from tests.builtin.training.lists import items
from tests.builtin.training.name_like import name_like

WHO = "¤"  # stands for who or what has the name
FILE = "told.txt"


@cache
def relations() -> dict[str, list[str]]:
    """Who or what may have a name, by group."""
    pairs = (line.split(": ") for line in section(FILE, "relations"))
    return {kind: [w.replace("-", " ") for w in rest.split()] for kind, rest in pairs}


def person(rng: random.Random) -> str:
    """Draw a name of one or two words, known or made up."""
    name = rng.choice(names()[0]) if rng.random() < 0.25 else name_like(rng)
    if rng.random() < 0.12:
        name = f"{name} {name_like(rng)}"
    elif rng.random() < 0.06:
        name = f"{rng.choice(['Mr', 'Mrs', 'Ms', 'Dr', 'Captain', 'Aunt', 'Uncle'])} {name}"
    return name.lower() if rng.random() < 0.15 else name


def _value(rng: random.Random, kinds: str) -> str:
    kind = rng.choice(kinds.split())
    match kind:
        case "number":
            return str(rng.randint(1, rng.choice([10, 100, 100, 1000, 10000])))
        case "place-name":
            return rng.choice(words("city")) if rng.random() < 0.35 else name_like(rng)
        case "word":
            return rng.choice(everyday()) if rng.random() < 0.6 else name_like(rng).lower()
        case "list":
            return " and ".join(items(rng, 2, late=True))
    if "+" in kind or kind == "adjective":
        first, _, second = kind.partition("+")
        return f"{rng.choice(words(first))} {rng.choice(words(second or 'vehicle'))}"
    return rng.choice(words(kind)) if rng.random() < 0.85 else rng.choice(everyday())


def _user(rng: random.Random, text: str, value: str = "", *, mark: str = "") -> Turn:
    said = rough(rng, text, mark=mark or rng.choice([".", "", "!"]), swap=False)
    return ("user", said.replace(SLOT, value))


def _confirm(rng: random.Random, text: str) -> Turn:
    return ("assistant", f"Got it: {text[0].lower()}{text[1:]}")


def named(rng: random.Random, taken: set[str]) -> tuple[list[Turn], list[Turn]]:
    """Someone's name: told, and asked."""
    kinds = relations()
    group = rng.choices(list(kinds), [6, 4, 2, 1])[0]
    who = rng.choice([each for each in kinds[group] if each not in taken])
    taken.add(who)
    pets = names()[1]
    value = rng.choice(pets) if group == "animal" and rng.random() < 0.3 else person(rng)
    tell = expand(rng, rng.choice(section(FILE, "named")).replace(WHO, who)).replace(" ,", ",")
    ask = expand(rng, rng.choice(section(FILE, "ask named")).replace(WHO, who))
    answer = f"Your {who} is called {value}."
    return [_user(rng, tell, value), _confirm(rng, answer)], [
        _user(rng, ask, mark="?"),
        ("assistant", answer),
    ]


def activity(rng: random.Random, taken: set[str]) -> tuple[list[Turn], list[Turn]]:
    """Something that the user does, has or is: told, and asked."""
    every = [line for line in section(FILE, "activities") if line not in taken]
    line = rng.choice(every)
    taken.add(line)
    tell, asks, answer, kinds = line.split(" | ")
    value = _value(rng, kinds)
    answer = answer.replace(SLOT, value)
    return [_user(rng, expand(rng, tell), value), _confirm(rng, answer)], [
        _user(rng, expand(rng, rng.choice(asks.split("/"))), mark="?"),
        ("assistant", answer),
    ]


def own_name(rng: random.Random, taken: set[str]) -> tuple[list[Turn], list[Turn]]:
    """The user's own name, sometimes corrected: told, and asked."""
    taken.add("name")
    known = {line[0]: line[2:] for line in section("facts.txt", "name")}
    value = person(rng)
    tell = expand(rng, rng.choice(known["T"].split("/")))
    turns = [_user(rng, tell, value), ("assistant", known["C"].replace(SLOT, value))]
    if rng.random() < 0.15:
        value = person(rng)
        tell = expand(rng, rng.choice(section(FILE, "correct")))
        turns += [_user(rng, tell, value), ("assistant", known["C"].replace(SLOT, value))]
    ask = expand(rng, rng.choice(known["A"].split("/")))
    return turns, [_user(rng, ask, mark="?"), ("assistant", known["R"].replace(SLOT, value))]


def _both(rng: random.Random, first: list[Turn], second: list[Turn]) -> list[Turn]:
    """Ask two things in one message."""
    ask = rng.choice([" and ", ", and ", ", ", " and also "]).join(
        text.rstrip("?! .") for (_, text), _ in (first, second)
    )
    return [("user", f"{ask}?"), ("assistant", f"{first[1][1]} {second[1][1]}")]


def told(rng: random.Random, other: Callable[[random.Random], list[Turn]]) -> list[Turn]:
    """Tell one to three such facts, talk about other things, ask for some of them."""
    taken: set[str] = set()
    turns: list[Turn] = []
    asks: list[list[Turn]] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        kinds = [named, activity] if "name" in taken else [named, activity, own_name]
        tell, ask = rng.choices(kinds, [4, 4, 5][: len(kinds)])[0](rng, taken)
        turns += tell
        asks.append(ask)
        if rng.random() < 0.2:
            turns += other(rng)
    asked = rng.sample(asks, rng.randint(1, len(asks)))
    if len(asked) > 1 and rng.random() < 0.3:
        asked = [_both(rng, *asked[:2]), *asked[2:]]
    for ask in asked:
        turns += ask
        if rng.random() < 0.15:
            turns += other(rng)
    return turns
