"""Lessons on lists of words: repeat, sort, reverse, pick, count."""

import random

from tests.builtin.training.grammar import (
    SLOT,
    Turn,
    everyday,
    expand,
    made_up,
    names,
    rough,
    section,
    vocabulary,
    words,
)


def items(rng: random.Random, count: int, *, late: bool = False) -> list[str]:
    """Different words for a list; late in training mostly everyday ones."""
    found: dict[str, None] = {}
    roll = rng.random()
    if late:
        roll = 0.0 if roll < 0.65 else (roll - 0.65) / 0.35
    while len(found) < count:
        if roll < 0.45:
            found[rng.choice(everyday())] = None
        elif roll < 0.7:
            found[rng.choice(vocabulary())] = None
        elif roll < 0.85:
            found[made_up(rng)] = None
        elif roll < 0.93:
            found[rng.choice(words("city") + words("country") + names()[0])] = None
        else:
            mixed = [made_up(rng), rng.choice(everyday()), rng.choice(vocabulary())]
            found[rng.choice(mixed)] = None
    return list(found)


def _joined(rng: random.Random, parts: list[str]) -> str:
    roll = rng.random()
    if roll < 0.55:
        return ", ".join(parts)
    if roll < 0.9:
        return " ".join(parts)
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _asked(rng: random.Random, frames: list[str], payload: str) -> str:
    ask = rough(rng, expand(rng, rng.choice(frames)), mark="", swap=False)
    if rng.random() < 0.12:
        payload = f'"{payload}"'
    return ask.replace(SLOT, payload)


def copying(rng: random.Random, *, late: bool = False, payload: str | None = None) -> list[Turn]:
    """Repeat the same words."""
    if payload is None:
        payload = _to_copy(rng, late)
    return [("user", _asked(rng, section("asks.txt", "copy"), payload)), ("assistant", payload)]


def _to_copy(rng: random.Random, late: bool) -> str:
    count = rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 5] if late else [1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10])
    parts = items(rng, count, late=late)
    joint = rng.choice([" ", " ", ", "])
    if rng.random() < 0.15:
        parts[rng.randrange(len(parts))] = str(rng.randint(0, 999))
    payload = joint.join(parts)
    if rng.random() < 0.2:
        payload = payload[0].upper() + payload[1:] + rng.choice([".", "!", ""])
    return payload


def ordering(rng: random.Random, *, late: bool = False) -> list[Turn]:
    """Sort or reverse a list, or pick from it."""
    count = rng.choice([2, 3, 3, 3, 3, 4, 4] if late else [2, 3, 3, 3, 4, 4, 5])
    parts = items(rng, count, late=late)
    roll = rng.random()
    if roll < 0.12:
        numbers = rng.sample(range(rng.choice([10, 20, 100])), len(parts))
        ask = _asked(
            rng, section("asks.txt", "sort"), _joined(rng, [str(n) for n in numbers])
        ).replace("words", "numbers")
        return [("user", ask), ("assistant", ", ".join(str(n) for n in sorted(numbers)))]
    if roll < 0.5:
        ask = _asked(rng, section("asks.txt", "sort"), _joined(rng, parts))
        return [("user", ask), ("assistant", ", ".join(sorted(parts, key=str.lower)))]
    if roll < 0.88:
        ask = _asked(rng, section("asks.txt", "reverse"), _joined(rng, parts))
        return [("user", ask), ("assistant", ", ".join(reversed(parts)))]
    frame = rng.choice(section("asks.txt", "pick"))
    if frame.endswith("|count"):
        frame = frame.removesuffix("|count")
        ask = _asked(rng, [frame], _joined(rng, parts))
        return [("user", ask), ("assistant", f"There are {len(parts)}.")]
    where = rng.choice(["first", "second", "last"])
    ask = _asked(rng, [frame.replace("POS", where)], _joined(rng, parts))
    word = parts[{"first": 0, "second": 1, "last": -1}[where]]
    return [("user", ask), ("assistant", f"The {where} word is {word}.")]
