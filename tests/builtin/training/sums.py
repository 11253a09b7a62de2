"""Lessons on numbers: small sums, differences and products, and comparisons."""

import random

from tests.builtin.training.grammar import SLOT, Turn, expand, rough, section, words


def spelled(number: int) -> str:
    """Return a number below 100 in words."""
    if number <= 20:
        return words("one")[number]
    ten, one = divmod(number, 10)
    return words("ten")[ten - 2] + (f"-{words('one')[one]}" if one else "")


def _numbers(rng: random.Random, sign: str) -> tuple[int, int]:
    roll = rng.random()
    if sign == "*":
        top = 10 if roll < 0.75 else 12
        return rng.randint(0, top), rng.randint(0, top)
    top = 10 if roll < 0.35 else 20 if roll < 0.65 else 100
    a, b = rng.randint(0, top), rng.randint(0, top)
    if roll > 0.9:
        b = rng.randint(0, 10)
    if sign == "-" and a < b and rng.random() < 0.93:
        a, b = b, a
    return a, b


def _written(rng: random.Random, a: int, b: int, sign: str) -> str:
    if rng.random() < 0.5:
        gap = rng.choice([" ", " ", ""])
        shown = rng.choice(["*", "x", "\u00d7", "*"]) if sign == "*" else sign
        return f"{a}{gap}{shown}{gap}{b}"
    said = {"+": ["plus", "plus", "and"], "-": ["minus", "minus", "take away"], "*": ["times"]}
    return f"{_digit(rng, a)} {rng.choice(said[sign])} {_digit(rng, b)}"


def _digit(rng: random.Random, number: int) -> str:
    return spelled(number) if number < 100 and rng.random() < 0.25 else str(number)


def arithmetic(rng: random.Random) -> list[Turn]:
    """A sum, a difference or a product, asked in one of many ways."""
    sign, kind = rng.choices([("+", "plus"), ("-", "minus"), ("*", "times")], [4, 4, 3])[0]
    a, b = _numbers(rng, sign)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    said = _special(rng, a) if rng.random() < 0.06 else None
    if said:
        ask, answer = said
        return [("user", rough(rng, ask, swap=False)), ("assistant", answer)]
    if rng.random() < 0.5:
        ask = rough(
            rng, expand(rng, rng.choice(section("asks.txt", "sum"))).replace("X", SLOT), swap=False
        )
        ask = ask.replace(SLOT, _written(rng, a, b, sign))
    else:
        ask = _with_numbers(rng, rng.choice(section("asks.txt", kind)), a, b)
    return [("user", ask), ("assistant", f"{a} {sign} {b} = {result}.")]


def _with_numbers(rng: random.Random, frame: str, a: int, b: int) -> str:
    text = expand(rng, frame).replace(" A ", " §1 ").replace(" B ", " §2 ")
    text = " ".join(
        {"A": "§1", "B": "§2", "A,": "§1,", "B,": "§2,"}.get(word, word) for word in text.split()
    )
    text = rough(rng, text, swap=False)
    return text.replace("§1", _digit(rng, a)).replace("§2", _digit(rng, b))


def _special(rng: random.Random, a: int) -> tuple[str, str]:
    n = min(a, 50)
    m = rng.randint(1, 10)
    match rng.randrange(4):
        case 0:
            ask = expand(rng, "{double|twice|two times|what is double|what is twice|the double of}")
            return f"{ask} {n}", f"{n} * 2 = {2 * n}."
        case 1:
            ask = expand(rng, "{half of|what is half of|whats half of|the half of|halve}")
            return f"{ask} {2 * n}", f"{2 * n} / 2 = {n}."
        case 2:
            q = rng.randint(1, 10)
            ask = expand(rng, "{what is|} §1 {/|divided by|over} §2")
            ask = ask.replace("§1", str(q * m)).replace("§2", str(m))
            return ask, f"{q * m} / {m} = {q}."
        case _:
            ask = expand(rng, "{what|which number} comes {after|before} §1")
            step, side = (-1, "before") if "before" in ask else (1, "after")
            return ask.replace("§1", str(n + 1)), f"{n + 1 + step} comes {side} {n + 1}."


def compare(rng: random.Random) -> list[Turn]:
    """Which of two numbers is bigger or smaller."""
    top = rng.choice([10, 20, 100, 100, 1000])
    a, b = rng.sample(range(top + 1), 2)
    frame, _, kind = rng.choice(section("asks.txt", "compare")).rpartition("|")
    ask = _with_numbers(rng, frame, a, b)
    big, small = max(a, b), min(a, b)
    match kind:
        case "gt":
            answer = f"Yes, {a} is bigger than {b}." if a > b else f"No, {a} is smaller than {b}."
        case "lt":
            answer = f"Yes, {a} is smaller than {b}." if a < b else f"No, {a} is bigger than {b}."
        case "min":
            answer = f"{small} is smaller than {big}."
        case _:
            answer = f"{big} is bigger than {small}."
    return [("user", ask), ("assistant", answer)]
