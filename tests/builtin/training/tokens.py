"""Tokenizer training (byte-level BPE), tokenizer files, and packing of conversations into batches.

A space is prepended to messages, so that the first word has the same token as inside a message;
each digit is a separate token.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from tests.builtin.training.corpus import conversation
from tests.builtin.training.grammar import Turn, everyday, names, vocabulary

PAD, SYSTEM, USER, ASSISTANT, END = range(5)
SPECIAL = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
SIZE = 6144
ROWS, LONG_ROWS = (128, 256), (40, 800)  # rows and their length
PIECES = r" ?[A-Za-zÀ-ɏ]+|[0-9]| ?[^\sA-Za-zÀ-ɏ0-9]+|\s+"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim"
    " + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Train the vocabulary on the corpus and the word lists."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    rng = random.Random(f"tokenizer {seed}")
    texts = [text for _ in range(40_000) for _, text in conversation(rng)]
    people, pets = names()
    texts += [" ".join(everyday())] * 60 + [" ".join(people + pets)] * 30
    texts += [" ".join(vocabulary())] * 20
    texts += [" ".join(word.capitalize() for word in everyday())] * 8
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that AutoTokenizer reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": TEMPLATE,
    }
    text = json.dumps(settings, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def encode(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[bool]]:
    """Encode a conversation like the chat template; also return which tokens are targets."""
    ids: list[int] = []
    wanted: list[bool] = []
    for role, text in turns:
        body = tokenizer.encode(text.strip()).ids
        ids += [ROLE[role], *body, END]
        answers = role == "assistant"
        wanted += [False, *[answers] * len(body), answers]
    return ids, wanted


class Batch:
    """Rows of packed conversations, each of which attends only to itself.

    tokens [B, T], owner [B, T] the number of the conversation; where [N] flat positions with a
    wanted next token, target [N] those tokens.
    """

    def __init__(self, rows: int, length: int) -> None:
        """Start with empty rows."""
        self.length = length
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.wanted: list[list[bool]] = [[] for _ in range(rows)]
        self.owner: list[list[int]] = [[] for _ in range(rows)]
        self.count = 0

    def add(self, ids: list[int], wanted: list[bool]) -> bool:
        """Put a conversation into the first row with room; False when there is none."""
        for row, taken in enumerate(self.ids):
            if len(taken) + len(ids) <= self.length:
                self.count += 1
                self.ids[row] += ids
                self.wanted[row] += wanted
                self.owner[row] += [self.count] * len(ids)
                return True
        return False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pad the rows and build tokens, owner, where and target."""
        size = self.length
        tokens = torch.tensor([row + [PAD] * (size - len(row)) for row in self.ids])
        wanted = torch.tensor([row + [False] * (size - len(row)) for row in self.wanted])
        owner = torch.tensor([row + [0] * (size - len(row)) for row in self.owner])
        before = torch.zeros_like(wanted)
        before[:, :-1] = wanted[:, 1:]
        where = before.flatten().nonzero()[:, 0]
        return tokens, owner, where, tokens.flatten()[where + 1]


def visible(owner: Tensor) -> Tensor:
    """Return [B, 1, T, T]: which earlier positions of its own conversation a token sees."""
    return (owner[:, :, None] == owner[:, None, :]).tril()[:, None]


def batch(tokenizer: Tokenizer, seed: str, *, phase: int, long: bool) -> Batch:
    """Fill one batch of about 32,000 tokens, deterministic for its seed."""
    rng = random.Random(seed)
    made = Batch(*LONG_ROWS) if long else Batch(*ROWS)
    misses = 0
    while misses < 12:
        turns = conversation(rng, phase=phase, long=long and rng.random() < 0.6)
        ids, wanted = encode(tokenizer, turns)
        if (len(ids) > ROWS[1]) == long and len(ids) <= made.length:
            misses += not made.add(ids, wanted)
    return made
