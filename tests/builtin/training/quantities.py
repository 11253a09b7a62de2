"""Lessons on quantities in words: comparisons of things, counts, extremes, sequences."""

import random
from collections.abc import Callable

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
from tests.builtin.training.sums import spelled

Lesson = Callable[[random.Random], list[Turn]]
CASES = "quantities.txt"


def _ask(rng: random.Random, frame: str, **values: str) -> str:
    """Expand a frame, add noise around its capital letters, then fill these in."""
    text = expand(rng, frame)
    for key in values:
        text = text.replace(f"<{key}>", f"{SLOT}{key}{SLOT}")
    text = rough(rng, text, mark=rng.choice(["?", "?", ""]), swap=False)
    for key, value in values.items():
        text = text.replace(f"{SLOT}{key}{SLOT}", value).replace(
            f"{SLOT}{key.upper()}{SLOT}", value
        )
        text = text.replace(f"{SLOT}{key.lower()}{SLOT}", value)
    return text


def _turns(ask: str, answer: str) -> list[Turn]:
    return [("user", ask), ("assistant", answer)]


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    top = rng.choice([10, 20, 100, 100, 100, 1000])
    a, b = rng.sample(range(1, top + 1), 2)
    return (a, b) if rng.random() < 0.85 else (a, int(str(a)[::-1]) + (str(a) == str(a)[::-1]))


def _thing(rng: random.Random, kind: str) -> str:
    if kind == "person":
        roll = rng.random()
        if roll < 0.2:
            return "my " + rng.choice(
                ["sister", "brother", "mother", "father", "friend", "uncle", "aunt", "cousin"]
            )
        return rng.choice(names()[0]) if roll < 0.8 else name_like(rng)
    name = rng.choice(words(rng.choice(kind.split("+"))))
    return rng.choice(["the ", "a ", "", "the "]) + name


def compare_things(rng: random.Random) -> list[Turn]:
    """Compare two things by their numbers: who is older, what is cheaper."""
    line = rng.choice(section(CASES, "compare things"))
    kind, wordings, more, less = line.split(" | ")
    a, b = _two_numbers(rng)
    first, second = _thing(rng, kind), _thing(rng, kind)
    while second.split()[-1] == first.split()[-1]:
        second = _thing(rng, kind)
    fact = rng.choice(wordings.split(" / "))
    big = rng.random() < 0.5
    adjective = rng.choice((more if big else less).split(","))
    winner = first if (a > b) == big else second
    high, low = max(a, b), min(a, b)
    ask = _ask(
        rng,
        rng.choice(section(CASES, "compare frames")),
        F=fact.replace("N", str(a)).replace("S", first),
        G=fact.replace("N", str(b)).replace("S", second),
        Q=("who" if kind == "person" else rng.choice(["which", "what", "which one"])),
        A=adjective,
    )
    said = winner.replace("my ", "your ").removeprefix("the ").removeprefix("a ")
    said = said if kind == "person" else f"the {said}"
    said = said[0].upper() + said[1:]
    order = f"{high} is more than {low}" if big else f"{low} is less than {high}"
    return _turns(ask, f"{said} is {adjective}: {order}.")


def extreme(rng: random.Random) -> list[Turn]:
    """Give the largest or smallest of some numbers."""
    numbers = rng.sample(
        range(rng.choice([10, 30, 100, 100, 1000])), rng.choice([2, 3, 3, 3, 4, 5])
    )
    frame, _, kind = rng.choice(section(CASES, "extreme")).rpartition("|")
    joined = rng.choice([", ", ", ", " ", " or ", " and "]).join(map(str, numbers))
    if len(numbers) > 2 and rng.random() < 0.5:
        joined = ", ".join(map(str, numbers[:-1])) + f" {rng.choice(['and', 'or'])} {numbers[-1]}"
    best = max(numbers) if kind == "max" else min(numbers)
    return _turns(
        _ask(rng, frame, L=joined), f"{best} is the {'largest' if kind == 'max' else 'smallest'}."
    )


def relation(rng: random.Random) -> list[Turn]:
    """Say whether a relation of two numbers holds."""
    a, b = _two_numbers(rng)
    frame, _, kind = rng.choice(section(CASES, "relation")).rpartition("|")
    if kind == "eq" and rng.random() < 0.4:
        b = a
    ask = _ask(rng, frame, A=str(a), B=str(b))
    true = {"gt": a > b, "lt": a < b, "eq": a == b}[kind]
    how = "equal to" if a == b else "bigger than" if a > b else "smaller than"
    return _turns(ask, f"{'Yes' if true else 'No'}, {a} is {how} {b}.")


def parity(rng: random.Random) -> list[Turn]:
    """Say whether a number is even."""
    number = rng.randint(0, rng.choice([10, 20, 100]))
    frame, _, kind = rng.choice(section(CASES, "parity")).rpartition("|")
    is_even = number % 2 == 0
    found = "even" if is_even else "odd"
    answer = f"{number} is {found}."
    if kind in ("even", "odd"):
        answer = f"{'Yes' if kind == found else 'No'}, {answer}"
    return _turns(_ask(rng, frame, A=str(number)), answer)


def neighbour(rng: random.Random) -> list[Turn]:
    """Give the number after or before another."""
    number = rng.randint(1, rng.choice([10, 20, 100, 100]))
    frame, _, kind = rng.choice(section(CASES, "neighbour")).rpartition("|")
    found = number + (1 if kind == "after" else -1)
    return _turns(_ask(rng, frame, A=str(number)), f"{found} comes {kind} {number}.")


def sequence(rng: random.Random) -> list[Turn]:
    """Count up, down or on."""
    frame, _, kind = rng.choice(section(CASES, "sequence")).rpartition("|")
    step = rng.choice([1, 1, 2, 2, 3, 5, 10]) if kind == "on" else 1
    start, count = rng.randint(1, 10) * (step if rng.random() < 0.5 else 1), rng.randint(3, 8)
    run = [start + step * at for at in range(count)]
    if kind == "up":
        start = rng.choice([1, 1, 1, 2, 3, 5])
        run = list(range(start, start + rng.randint(2, 10)))
    elif kind == "down":
        run = list(range(rng.randint(3, 12), rng.choice([0, 1, 1]) - 1, -1))
    if kind != "on":
        ask = _ask(rng, frame, A=str(run[0]), B=str(run[-1]))
        return _turns(ask, ", ".join(map(str, run)) + ".")
    shown = ", ".join(map(str, run[:3])) + rng.choice(["", ",", ", ...", " ..."])
    rest = [run[2] + step * at for at in (1, 2, 3)]
    return _turns(_ask(rng, frame, L=shown), ", ".join(map(str, rest)) + ".")


def count_items(rng: random.Random) -> list[Turn]:
    """Count the members of a list, or the words of a sentence."""
    count = rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6, 7])
    frame, _, kind = rng.choice(section(CASES, "count")).rpartition("|")
    parts = items(rng, count, late=True)
    joined = " ".join(parts) if kind == "words" else ", ".join(parts)
    if kind != "words" and count > 1 and rng.random() < 0.2:
        joined = ", ".join(parts[:-1]) + f" and {parts[-1]}"
    if rng.random() < 0.3:
        joined = f'"{joined}"'
    answer = f"There are {count}." if count > 1 else "There is 1."
    return _turns(_ask(rng, frame, L=joined), answer)


def count_letters(rng: random.Random) -> list[Turn]:
    """Count the letters of an everyday word by spelling it."""
    word = rng.choice(everyday())
    shown = f'"{word}"' if rng.random() < 0.2 else word
    ask = _ask(rng, rng.choice(section(CASES, "letters")), W=shown)
    return _turns(ask, f"{word} has {len(word)} letters.")


def longer_word(rng: random.Random) -> list[Turn]:
    """Say which of two everyday words has more letters."""
    a, b = rng.sample(everyday(), 2)
    while len(a) == len(b):
        a, b = rng.sample(everyday(), 2)
    frame, _, kind = rng.choice(section(CASES, "longer")).rpartition("|")
    best = max(a, b, key=len) if kind == "longer" else min(a, b, key=len)
    ask = _ask(rng, frame, A=a, B=b)
    return _turns(ask, f"{best} is {kind}: it has {len(best)} letters.")


def more_sums(rng: random.Random) -> list[Turn]:
    """Sums of three numbers, halves, doubles, shares, and further wordings of sums."""
    frame, _, kind = rng.choice(section(CASES, "sums")).rpartition("|")
    a, b, c = (rng.randint(1, rng.choice([9, 12, 20])) for _ in range(3))
    match kind:
        case "three":
            answer = f"{a} + {b} + {c} = {a + b + c}."
        case "plus":
            answer = f"{a} + {b} = {a + b}."
        case "minus":
            a, b = max(a, b), min(a, b)
            answer = f"{a} - {b} = {a - b}."
        case "times":
            a, b = min(a, 12), min(b, 12)
            answer = f"{a} * {b} = {a * b}."
        case "share":
            a, b = min(a, 10) * min(b, 10), min(b, 10)
            answer = f"{a} / {b} = {a // b}."
        case "double":
            a *= rng.choice([1, 1, 2])
            answer = f"{a} * 2 = {2 * a}."
        case _:
            a *= 2
            answer = f"{a} / 2 = {a // 2}."
    said = [spelled(n) if n < 100 and rng.random() < 0.25 else str(n) for n in (a, b, c)]
    people = rng.sample(names()[0], 2)
    thing = rng.choice(words("fruit") + words("object"))
    ask = _ask(rng, frame, A=said[0], B=said[1], C=said[2], P=people[0], R=people[1], T=f"{thing}s")
    return _turns(ask, answer)


LESSONS: dict[Lesson, float] = {
    compare_things: 5,
    extreme: 3,
    relation: 3,
    parity: 1.5,
    neighbour: 1.5,
    sequence: 2,
    count_items: 4,
    count_letters: 3,
    longer_word: 3,
    more_sums: 4,
}


def quantity(rng: random.Random) -> list[Turn]:
    """Draw one of these lessons."""
    return rng.choices(list(LESSONS), list(LESSONS.values()))[0](rng)
