"""A small tokenizer of each kind; each decodes spaces and rare characters in its own way."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = ["the ring passes a blob to the next node", "héllo wörld 你好 🙂👩‍👩‍👧"] * 3


@cache
def byte_level() -> Any:
    """Return a tokenizer like GPT-2, Llama 3 and Qwen; token 0 ends and 1 begins a turn."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@cache
def byte_fallback() -> Any:
    """Return a tokenizer like Llama 2: a space is part of its word, rare characters are bytes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh"]
    vocabulary = {word: index for index, word in enumerate([*words, "▁a", "▁▁", "ab"])}
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@cache
def metaspace() -> Any:
    """Return a unigram tokenizer over metaspaces, like converted SentencePiece models."""
    pieces = [
        ("<unk>", 0.0),
        *((c, -2.0) for c in "▁abé🙂.,'"),
        *((w, -1.0) for w in ("▁a", "▁.", "ab")),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@cache
def word_piece() -> Any:
    """Return a tokenizer like BERT; its decoder joins parts and removes spaces before marks."""
    words = ["[UNK]", "a", "b", "##a", "##b", "##ab", "é", "##é", "🙂", ".", ",", "'", "do", "n't"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
