"""Story lessons: a request names a hero, a thing, a place or a theme, which the story contains."""

import random
from dataclasses import dataclass
from functools import cache

from tests.builtin.training.grammar import (
    SLOT,
    Turn,
    a,
    everyday,
    expand,
    lines,
    made_up,
    names,
    rough,
    section,
    vocabulary,
    words,
)


@dataclass(slots=True)
class Cast:
    """Who and what a story is about."""

    hero: str
    hero_again: str
    friend: str
    friend_again: str
    thing: str
    place: str


@cache
def plots() -> list[list[list[str]]]:
    """Plots of stories.txt: six groups of sentences each."""
    found: list[list[list[str]]] = []
    for line in lines("stories.txt"):
        if line.startswith("["):
            found.append([[] for _ in range(6)])
        elif " [" not in line:
            found[-1][int(line[0]) - 1].append(line[2:])
    return found


def _noun(rng: random.Random, *kinds: str) -> str:
    roll = rng.random()
    if roll < 0.07:
        return made_up(rng)
    if roll < 0.2:
        return rng.choice(everyday() if roll < 0.15 else vocabulary())
    return rng.choice(words(rng.choice(kinds)))


def being(rng: random.Random) -> tuple[str, str]:
    """Make a living being: at first mention, and afterwards."""
    roll = rng.random()
    name = rng.choice(names()[0]) if rng.random() < 0.75 else made_up(rng).capitalize()
    if roll < 0.17:
        return name, name
    noun = _noun(rng, "animal", "animal", "person")
    if roll < 0.25:
        return f"{a(noun)} {rng.choice(['called', 'named'])} {name}", name
    if roll < 0.29:
        return f"{name} the {noun}", name
    if roll < 0.5:
        adjective = rng.choice(words("adjective"))
        return a(f"{adjective} {noun}"), f"the {rng.choice(['', adjective + ' '])}{noun}"
    return a(noun), f"the {noun}"


def cast(rng: random.Random) -> Cast:
    """Choose hero, friend, thing and place."""
    hero, friend = being(rng), being(rng)
    thing = _noun(rng, "object", "object", "fruit")
    return Cast(*hero, *friend, thing, _noun(rng, "place"))


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


def tell(rng: random.Random, who: Cast) -> str:
    """Write the story."""
    told: list[str] = []
    met: set[str] = set()
    for group in rng.choice(plots()):
        sentence = rng.choice(group)
        told.append(_start(_fill(sentence, who, met)))
    return " ".join(told)


def _fill(sentence: str, who: Cast, met: set[str]) -> str:
    first = {"H": who.hero, "F": who.friend, "O": a(who.thing)}
    again = {"H": who.hero_again, "F": who.friend_again, "O": f"the {who.thing}"}
    alias = {"C": "H", "h": "H", "D": "F", "f": "F", "o": "O"}
    parts = sentence.split("<")
    text = parts[0]
    for part in parts[1:]:
        key, _, rest = part.partition(">")
        if key == "P":
            word = f"the {who.place}"
        else:
            role = alias.get(key, key)
            word = again[role] if role in met or key in "CDh" else first[role]
            met.add(role)
        if not text or text.endswith(('. "', '." ', ". ")):
            word = _start(word)
        text += word + rest
    return text


def _wanted(rng: random.Random, who: Cast) -> str:
    hero, friend, thing = who.hero, who.friend, a(who.thing)
    place = f"{rng.choice(['in', 'at', 'near', 'and'])} the {who.place}"
    does = ["finds", "lost", "has", "wants", "loves", "looks for"]
    bare = [h.removeprefix("a ").removeprefix("an ") for h in (hero, friend, thing)]
    return rng.choice(
        [
            hero,
            hero,
            hero,
            hero,
            f"{hero} and {friend}",
            f"{hero} and {friend}",
            f"{hero} and {thing}",
            f"{hero} and {thing}",
            f"{hero} with {thing}",
            f"{hero} who {rng.choice(does)} {thing}",
            f"{hero} {place}",
            f"{hero} {place}",
            f"{hero}, {friend} and {thing}",
            f"{hero}, {thing} and the {who.place}",
            f"{thing} {place}",
            thing,
            f"the {who.place}",
            ", ".join(rng.sample([*bare, who.place], rng.choice([2, 3]))),
            bare[0],
        ]
    )


def _theme(rng: random.Random) -> str:
    theme = rng.choice(words("thing"))
    if rng.random() < 0.3:
        theme = rng.choice([made_up(rng), rng.choice(vocabulary())])
    if rng.random() < 0.4:
        theme = f"{rng.choice(['the', 'my', 'the first', 'a'])} {theme}"
    return theme


def story(rng: random.Random) -> list[Turn]:
    """One request for a story and the story."""
    who = cast(rng)
    roll = rng.random()
    if roll < 0.1:
        ask = expand(rng, rng.choice(section("asks.txt", "any story")))
        return [("user", rough(rng, ask, mark=".")), ("assistant", tell(rng, who))]
    want = _theme(rng) if roll < 0.25 else _wanted(rng, who)
    if rng.random() < 0.15:
        want = want.lower()
    ask = rough(rng, expand(rng, rng.choice(section("asks.txt", "story"))), mark=".", swap=False)
    text = f"A story about {want}. {tell(rng, who)}"
    return [("user", ask.replace(SLOT, want)), ("assistant", text)]
