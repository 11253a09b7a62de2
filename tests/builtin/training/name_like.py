"""Words that look like names, of many languages, so that copying cannot be memorised."""

import random
from collections import defaultdict
from functools import cache

from tests.builtin.training.grammar import everyday, made_up, names, vocabulary

# Ranges of letters from other scripts and with accents; a drawn name is a run of them.
SCRIPTS = (
    "àáâãäåæçèéêëìíîïñòóôõöøùúûüýąćčďęěğıłńňőřśşšťůżž",
    "абвгдежзийклмнопрстуфхцчшщыьэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "あいうえおかきくけこさしすせそたちつてとなにのまみもやゆよらりるれろん",
    "安美李王明花子田山川小大林金文海",
    "אבגדהוזחטיכלמנסעפצקרשת",
    "ابتجحدرزسشصطعفقكلمنهوي",
    "가나다라마바사아자하민지수영",
)
ORDER = 2  # letters of context


@cache
def _following() -> dict[str, str]:
    """Map two letters to the letters that follow them in names and words."""
    after: dict[str, list[str]] = defaultdict(list)
    for word in names()[0] * 3 + everyday() + vocabulary():
        text = f"{'^' * ORDER}{word.lower()}$"
        for at in range(ORDER, len(text)):
            after[text[at - ORDER : at]].append(text[at])
    return {key: "".join(value) for key, value in after.items()}


def _spelled(rng: random.Random) -> str:
    """Draw letters by what follows what."""
    while True:
        text = "^" * ORDER
        while not text.endswith("$") and len(text) < 16:
            text += rng.choice(_following()[text[-ORDER:]])
        word = text.strip("^$")
        if len(word) > 2 and word.isalpha():
            return word


def _foreign(rng: random.Random) -> str:
    accents, *scripts = SCRIPTS
    if rng.random() < 0.5:
        word = list(_spelled(rng))
        for _ in range(rng.choice([1, 1, 2])):
            word[rng.randrange(len(word))] = rng.choice(accents)
        return "".join(word)
    letters = rng.choice(scripts)
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 7)))


def name_like(rng: random.Random) -> str:
    """Draw something that could be a name, capitalised."""
    roll = rng.random()
    if roll < 0.5:
        word = _spelled(rng)
    elif roll < 0.7:
        word = made_up(rng)
    elif roll < 0.78:
        word = _spelled(rng) + rng.choice(vocabulary()).lower()
    elif roll < 0.9:
        word = rng.choice(vocabulary())
    else:
        word = _foreign(rng)
    return word[0].upper() + word[1:]
