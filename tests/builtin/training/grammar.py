"""Wordings: reads the data files, expands choices, and adds noise to clean questions."""

import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CHOICE = re.compile(r"\{([^{}]*)\}")
SLOT = "§"  # stands for text that noise must not touch
KEYS = {
    **dict(zip("qwertyuiop", "wertyuiopo", strict=True)),
    **dict(zip("asdfghjkl", "sdfghjklk", strict=True)),
    **dict(zip("zxcvbnm", "xcvbnmn", strict=True)),
}


Turn = tuple[str, str]  # role, text


@dataclass(slots=True)
class Intent:
    """One thing the model can be asked about meshllm."""

    name: str
    answer: str = ""
    items: dict[str, list[str]] = field(default_factory=dict)


def lines(name: str) -> list[str]:
    """Read a data file without comments and empty lines."""
    text = (HERE / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("# ")]


@cache
def intents(file: str = "faq.txt") -> dict[str, Intent]:
    """Read faq.txt, or further wordings of its intents."""
    found: dict[str, Intent] = {}
    latest = Intent("")
    for line in lines(file):
        kind, _, rest = line.partition(" ")
        if line.startswith("["):
            latest = found[line.strip("[]")] = Intent(line.strip("[]"))
        elif kind == "A":
            latest.answer = rest
        else:
            items = [rest] if kind == "Q" else rest.split(" ; ")
            latest.items.setdefault(kind, []).extend(items)
    return found


@cache
def pieces() -> list[tuple[str, list[str]]]:
    """Read faq_keys.txt: the name of an intent and loose words that stand for it."""
    pairs = (line.split(": ", 1) for line in lines("faq_keys.txt"))
    return [(name, rest.split(" ; ")) for name, rest in pairs]


@cache
def frames() -> dict[str, list[str]]:
    """Read frames.txt: question frames by kind, fillers, synonyms."""
    found: dict[str, list[str]] = {}
    for line in lines("frames.txt"):
        kind, _, rest = line.partition(" ")
        parts = rest.split(" ; ") if kind in ("before", "after") else [rest]
        found.setdefault(kind, []).extend(parts)
    return found


@cache
def synonyms() -> dict[str, list[str]]:
    """Words that may stand for one another in a question."""
    pairs = (line.split(": ") for line in frames()["same"])
    return {word: others.split() for word, others in pairs}


@cache
def words(kind: str) -> list[str]:
    """Everyday words of one kind, from words.txt."""
    for line in lines("words.txt"):
        name, _, rest = line.partition(": ")
        if name == kind:
            return [word.replace("-", " ") for word in rest.split()]
    raise KeyError(kind)


@cache
def everyday() -> list[str]:
    """All one-word everyday words that are written small."""
    kinds = [line.partition(": ")[0] for line in lines("words.txt")]
    kinds = [kind for kind in kinds if kind not in ("head", "tail", "one", "ten")]
    every = {word for kind in kinds for word in words(kind)}
    return sorted(word for word in every if word.isalpha() and word.islower())


@cache
def vocabulary() -> list[str]:
    """Common English words."""
    return [word for line in lines("vocabulary.txt") for word in line.split()]


@cache
def names() -> tuple[list[str], list[str]]:
    """First names, and names of pets."""
    people: list[str] = []
    pets: list[str] = []
    for line in lines("names.txt"):
        if line.startswith("pet: "):
            pets.extend(line[5:].split())
        else:
            people.extend(line.split())
    return people, pets


@cache
def section(file: str, name: str) -> list[str]:
    """Lines of one [section] of a data file."""
    every = lines(file)
    start = every.index(f"[{name}]") + 1
    rest = (at for at, line in enumerate(every) if at > start and line.startswith("["))
    return every[start : next(rest, len(every))]


@cache
def unimportant(kind: str) -> frozenset[str]:
    """Words that a question can do without: "filler" may be dropped, "stop" carries no meaning."""
    return frozenset(" ".join(frames()[kind]).split())


def expand(rng: random.Random, pattern: str) -> str:
    """Choose one branch of every {a|b}."""
    while "{" in pattern:
        pattern = CHOICE.sub(lambda match: rng.choice(match[1].split("|")), pattern)
    return " ".join(pattern.split())


def made_up(rng: random.Random) -> str:
    """Make a random word, so that copying cannot be memorised."""
    heads, tails = words("head"), words("tail")
    return "".join(
        rng.choice(heads) + rng.choice("aeiou") + rng.choice(["", "", *tails])
        for _ in range(rng.choice([1, 2, 2, 2, 3]))
    )


def a(noun: str) -> str:
    """Put the article before a noun."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def _typo(rng: random.Random, word: str) -> str:
    at = rng.randrange(1, len(word))
    match rng.randrange(5):
        case 0:
            return word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]
        case 1 | 2:
            return word[:at] + word[at + 1 :]
        case 3:
            return word[:at] + word[at - 1] + word[at:]
        case _:
            return word[:at] + KEYS.get(word[at].lower(), "e") + word[at + 1 :]


def _misspell(rng: random.Random, text: str) -> str:
    parts = text.split(" ")
    able = [i for i, word in enumerate(parts) if len(word) > 3 and word.isalpha()]
    for at in rng.sample(able, min(len(able), rng.choice([1, 1, 1, 2, 2, 3]))):
        parts[at] = _typo(rng, parts[at])
    return " ".join(parts)


def _reword(rng: random.Random, text: str) -> str:
    table = synonyms()
    swapped = (
        rng.choice(table[word]) if word in table and rng.random() < 0.4 else word
        for word in text.split(" ")
    )
    return " ".join(swapped)


def _thin(rng: random.Random, text: str) -> str:
    parts = text.split(" ")
    if len(parts) < 4:
        return text
    fillers = unimportant("filler")
    kept = [w for w in parts if not (w.lower() in fillers and rng.random() < 0.6)]
    if rng.random() < 0.25 and len(kept) > 4:
        at = rng.randrange(len(kept))
        if SLOT not in kept[at]:
            del kept[at]
    return " ".join(kept)


def _keywords(rng: random.Random, text: str) -> str:
    """Keep the words that carry the meaning, sometimes in another order."""
    stops = unimportant("stop")
    kept = [word for word in text.split(" ") if word.lower().strip(",:") not in stops]
    if len(kept) < 2:
        return text
    if rng.random() < 0.3:
        rng.shuffle(kept)
    return " ".join(kept)


def _intrude(rng: random.Random, text: str) -> str:
    """Insert an irrelevant word."""
    parts = text.split(" ")
    word = rng.choice(everyday() if rng.random() < 0.5 else vocabulary())
    parts.insert(rng.randrange(len(parts) + 1), word)
    return " ".join(parts)


def _finish(rng: random.Random, text: str, mark: str) -> str:
    roll = rng.random()
    if roll < 0.5:
        text += mark
    elif roll < 0.58:
        text += rng.choice(["??", "!", "...", " ?", "?!", ".", "!!", " ??"])
    roll = rng.random()
    if roll < 0.45:
        return text[0].upper() + text[1:]
    if roll < 0.75:
        return text.lower()
    return text.upper() if roll < 0.77 else text


def _disturb(rng: random.Random, text: str, swap: bool) -> str:
    if swap and rng.random() < 0.5:
        text = _reword(rng, text)
    if rng.random() < 0.18:
        text = _thin(rng, text)
    if swap and rng.random() < 0.08:
        text = _keywords(rng, text)
    if swap and rng.random() < 0.12:
        text = _intrude(rng, text)
    return text


def rough(rng: random.Random, text: str, *, mark: str = "?", swap: bool = True) -> str:
    """Return a clean wording as people type it: fillers, synonyms, gaps, typos, case."""
    text = _disturb(rng, text, swap)
    if rng.random() < 0.22:
        text = f"{rng.choice(frames()['before'])} {text}"
    if rng.random() < 0.12 and not text.endswith(SLOT):  # else it would look like payload
        after = rng.choice(frames()["after"])
        text += after if after.startswith(",") else f" {after}"
    if rng.random() < 0.2:
        text = _misspell(rng, text)
    if rng.random() < 0.3:
        text = text.replace("'", "")
    return _finish(rng, " ".join(text.split()), mark)
