"""Grammars that an answer has to follow, compiled by llguidance: JSON schemas, tool calls.

Theory of operation
-------------------
The state of a grammar is a function of the tokens taken so far. Before a token is sampled, the
grammar masks the tokens that cannot follow; drafts that it does not allow are rejected like any
wrong draft, and after the loss of a ring the next entry takes the given tokens first. So the same
seed gives the same text on every ring, with and without speculation.

The compiler is bounded by the size of a schema and by the limits of llguidance, and never fetches
a schema from elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.strict_json import WrongField

T = TypeVar("T")

MAX_SCHEMA_BYTES = 64 << 10
MESSAGE_CHARS = 300
# Endless white space would be valid JSON.
_WHITE_SPACE = r" ?|\n {0,16}"


class Constraint(Protocol):
    """What may follow in one answer: a function of its tokens so far."""

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [V] with minus infinity for each token that may not follow."""

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer; raise `ModelError` if they do not follow."""


class Vocabulary:
    """The tokens of a model, prepared for masks; building it takes a second for 150,000 tokens."""

    def __init__(self, tokenizer: str, end_tokens: Iterable[int]) -> None:
        """Read a fast tokenizer in the JSON of the tokenizers library.

        Raises:
            ModelError: llguidance does not support it.
        """
        from llguidance import LLTokenizer  # takes a tenth of a second

        ends = sorted(end_tokens)
        if not ends:
            raise ModelError("The model has no end token, so no answer of it can follow a schema")
        self._tokens = _guarded(lambda: LLTokenizer(tokenizer, eos_token=ends), ModelError)

    def json_schema(self, schema: str) -> "Grammar":
        """Compile the grammar of JSON that satisfies a JSON schema, at its beginning.

        Raises:
            WrongField: the schema is too long, invalid, too complex, or uses what is not supported.
        """
        from llguidance import LLMatcher

        size = len(schema.encode())
        if size > MAX_SCHEMA_BYTES:
            text = f"The JSON schema is {size} bytes long; the limit is {MAX_SCHEMA_BYTES}"
            raise WrongField("response_format", text)

        def grammar() -> str:
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _WHITE_SPACE}
            )

        return self._compile(grammar, "response_format")

    def tool_calls(self, grammar: str) -> "Grammar":
        """Compile a grammar of `call_grammar`; raise `WrongField` if it is not supported."""
        return self._compile(lambda: grammar, "tools")

    def _compile(self, grammar: Callable[[], str], field: str) -> "Grammar":
        from llguidance import LLMatcher

        def build() -> Any:
            matcher = LLMatcher(self._tokens, grammar(), log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            return matcher

        def refused(message: str) -> WrongField:
            return WrongField(field, f"A JSON schema is not supported: {message}")

        return Grammar(_guarded(build, refused), self._tokens.vocab_size)


class Grammar:
    """What may follow in one answer; not thread-safe."""

    def __init__(self, matcher: Any, size: int) -> None:
        """Begin with a matcher of llguidance for a vocabulary of ``size`` tokens."""
        self._matcher = matcher
        self._size = size
        self._mask = np.zeros((size + 31) // 32, np.int32)

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [V] with minus infinity for each token that may not follow."""
        mask, matcher = self._mask, self._matcher
        _guarded(lambda: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), ModelError)
        if self._matcher.is_error():
            why = _short(self._matcher.get_error())
            raise ModelError(f"The grammar of the answer cannot be followed: {why}")
        bits = np.unpackbits(mask.view(np.uint8), count=self._size, bitorder="little")
        excluded = torch.ones(len(logits), dtype=torch.bool)
        known = min(len(logits), self._size)
        excluded[:known] = torch.from_numpy(bits[:known] == 0)
        return logits.masked_fill(excluded.to(logits.device), -inf)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer.

        Raises:
            ModelError: they do not follow the grammar.
        """
        for token in tokens:
            if not _guarded(partial(self._matcher.consume_token, token), ModelError):
                raise ModelError("The answer so far does not follow its grammar")


def _guarded(call: Callable[[], T], fault: Callable[[str], Exception]) -> T:
    """Call llguidance; whatever it raises, panics of Rust included, becomes ``fault``."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise fault(_short(str(error) or type(error).__name__)) from None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]}..."
