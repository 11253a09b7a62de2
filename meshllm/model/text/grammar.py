"""Grammars that an answer has to follow, compiled by llguidance: JSON schemas, tool calls.

Theory of operation
-------------------
The state of a grammar is a function of the tokens taken so far. Before a token is sampled, the
grammar masks the tokens that cannot follow; drafts that it does not allow are rejected like any
wrong draft, and after the loss of a ring the next entry takes the given tokens first. So the same
seed gives the same text on every ring, with and without speculation.

The compiler never fetches a schema from elsewhere. Its work is not bounded by the size of a schema:
two factors of `multipleOf` can take it minutes, and nothing interrupts it. So each grammar is first
compiled by a process of its own, `grammar_trial`, that the system ends; what that refuses, or lets
pass, is remembered.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from meshllm.errors import Busy, ModelError
from meshllm.model.text import grammar_trial
from meshllm.strict_json import WrongField

T = TypeVar("T")

MAX_SCHEMA_BYTES = 64 << 10
MESSAGE_CHARS = 300
TRIAL_S = 60.0  # s, on a machine that is busy: a trial has CPU_S of its processor
_UNSATISFIABLE = "Unsatisfiable schema"
KNOWN_TRIALS = 64  # grammars, of up to 128 KiB


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

    def json_schema(self, schema: str, *, has_begun: bool = False) -> "Grammar":
        """Compile the grammar of JSON that satisfies a JSON schema, at its beginning.

        ``has_begun``: another machine has compiled it for an answer that continues here.

        Raises:
            WrongField: the schema is too long, invalid, too complex, or uses what is not supported.
            Busy: this machine is too busy to try it.
        """
        from llguidance import LLMatcher

        size = len(schema.encode())
        if size > MAX_SCHEMA_BYTES:
            text = f"The JSON schema is {size} bytes long; the limit is {MAX_SCHEMA_BYTES}"
            raise WrongField("response_format", text)

        def grammar() -> str:
            return LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": grammar_trial.WHITE_SPACE}
            )

        _try(schema, "json", "response_format", has_begun=has_begun)
        return self._compile(grammar, "response_format")

    def tool_calls(self, grammar: str, trial: str, *, has_begun: bool = False) -> "Grammar":
        """Compile a grammar of `call_grammar`; ``trial`` is the same with `grammar_trial.TOKEN`.

        ``has_begun``: see `json_schema`.

        Raises:
            WrongField: it is too complex, or uses what is not supported.
            Busy: this machine is too busy to try it.
        """
        _try(trial, "lark", "tools", has_begun=has_begun)
        return self._compile(lambda: grammar, "tools")

    def _compile(self, grammar: Callable[[], str], field: str) -> "Grammar":
        from llguidance import LLMatcher

        def build() -> Any:
            matcher = LLMatcher(self._tokens, grammar(), log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # fails if nothing can begin an answer
            if matcher.is_error():
                raise ValueError(matcher.get_error().replace("NoExtensionBias", _UNSATISFIABLE))
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
                why = _short(self._matcher.get_error())
                raise ModelError(f"The answer so far does not follow its grammar: {why}")


def _try(grammar: str, kind: str, field: str, *, has_begun: bool) -> None:
    """Raise `WrongField` unless a process compiles a grammar within its limits."""
    cpu_s = grammar_trial.BEGUN_CPU_S if has_begun else grammar_trial.CPU_S
    if exceeded := _exceeded(grammar, kind, cpu_s):
        raise WrongField(field, f"A JSON schema is too complex: it takes more than {exceeded}")


@lru_cache(KNOWN_TRIALS)
def _exceeded(grammar: str, kind: str, cpu_s: int) -> str:
    """Return which limit of its process a grammar exceeds; empty if none.

    Raises:
        Busy: this machine did not let the process come to its end.
    """
    script = grammar_trial.__file__, kind, str(cpu_s)
    try:
        done = subprocess.run(
            (sys.executable, "-P", *script),
            input=grammar.encode(),
            capture_output=True,
            timeout=TRIAL_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the node
        )
    except subprocess.TimeoutExpired:
        raise Busy(f"A JSON schema was not compiled within {TRIAL_S:.0f} s") from None
    except OSError as error:  # no memory or no process left
        raise Busy(f"A JSON schema cannot be compiled: {error.strerror}") from None
    ended_by = -done.returncode
    if ended_by == signal.SIGXCPU:
        return f"{cpu_s} s to compile"
    if ended_by == signal.SIGABRT:  # by Rust, whose allocation failed
        return f"{grammar_trial.MEMORY_BYTES >> 30} GiB to compile"
    if ended_by > 0:
        raise Busy("A JSON schema was not compiled: the system ended the process")
    if ended_by < 0:
        raise RuntimeError(done.stderr.decode(errors="replace"))
    return ""


def _guarded(call: Callable[[], T], fault: Callable[[str], Exception]) -> T:
    """Call llguidance; all that it raises, panics of Rust included, becomes ``fault``."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise fault(_short(str(error) or type(error).__name__)) from None


def _short(text: str) -> str:
    line = " ".join(text.partition("\n<state>")[0].split())  # llguidance appends its state
    return line if len(line) <= MESSAGE_CHARS else f"{line[:MESSAGE_CHARS]}..."
