"""Splits the reasoning of a model from its answer, and limits it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

import torch
from torch import Tensor

from meshllm.model.text.detokenizer import overlap
from meshllm.model.text.grammar import Constraint
from meshllm.request import Piece

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning: those of Qwen 3, DeepSeek R1 and others; those of Mistral."""

    begin: str
    end: str

    @classmethod
    def of(cls, template: str) -> "ReasoningFormat | None":
        """Recognise the format by the chat template of a model; None if it does not reason."""
        return next((cls(*pair) for pair in PAIRS if pair[1] in template), None)

    def is_open(self, prompt: str) -> bool:
        """Return whether a prompt ends within reasoning, which some templates begin."""
        return prompt.rstrip(_SPACE).endswith(self.begin)


class _Phase(Enum):
    BEFORE = auto()
    """The answer has not begun."""
    OPENED = auto()
    """Behind the first marker, before its reasoning."""
    INSIDE = auto()
    CLOSED = auto()
    """Behind the second marker, before the answer."""
    BEHIND = auto()


class ReasoningParser:
    """Splits the text of one answer into the reasoning at its beginning, and the rest.

    White space around the markers belongs to neither.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """Begin an answer; with ``is_open``, its prompt ends within the reasoning."""
        self._form = form
        self._held = ""
        self._part = _Phase.OPENED if is_open else _Phase.BEFORE

    @property
    def is_inside(self) -> bool:
        """Whether the next token is one of reasoning, or of its end."""
        return self._part in {_Phase.OPENED, _Phase.INSIDE}

    def push(self, text: str) -> Piece:
        """Append text; return what is now certain."""
        self._held += text
        reasoning = []
        if self._part is _Phase.BEFORE:
            self._open()
        if self._part is _Phase.OPENED:
            self._trim(_Phase.INSIDE)
        if self._part is _Phase.INSIDE:
            reasoning.append(self._close())
        if self._part is _Phase.CLOSED:
            self._trim(_Phase.BEHIND)
        if self._part is not _Phase.BEHIND:
            return Piece("", reasoning="".join(reasoning))
        text, self._held = self._held, ""
        return Piece(text, reasoning="".join(reasoning))

    def finish(self) -> Piece:
        """Return what was held back."""
        text, self._held = self._held, ""
        return Piece("", reasoning=text) if self.is_inside else Piece(text)

    def _open(self) -> None:
        text = self._held.lstrip(_SPACE)
        if text.startswith(self._form.begin):
            self._held = text.removeprefix(self._form.begin)
            self._part = _Phase.OPENED
        elif not self._form.begin.startswith(text):
            self._part = _Phase.BEHIND

    def _trim(self, following: _Phase) -> None:
        self._held = self._held.lstrip(_SPACE)
        if self._held:
            self._part = following

    def _close(self) -> str:
        """Return the reasoning that is certain."""
        text, found, rest = self._held.partition(self._form.end)
        if found:
            self._held, self._part = rest, _Phase.CLOSED
            return text.rstrip(_SPACE)
        text = text[: len(text) - overlap(text, (self._form.end,))].rstrip(_SPACE)
        self._held = self._held[len(text) :]
        return text


EFFORTS = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""Share of the tokens of an answer that may be reasoning: the rest is for what follows."""
EFFORT_TOKENS = 4096
"""Those of an answer without a limit, of which the reasoning is such a share."""


def max_reasoning_tokens_of(effort: str | None, max_tokens: int | None) -> int | None:
    """Return the most tokens of reasoning of an effort; None if it sets no limit."""
    share = EFFORTS.get(effort or "")
    most = EFFORT_TOKENS if max_tokens is None else max_tokens
    return None if share is None else int(share * most)


class ReasoningLimit:
    """A constraint on an answer with reasoning: ends it in time, then applies another one."""

    def __init__(  # noqa: PLR0913 -- the state of an answer, and its limits
        self,
        begin: int,
        end: int,
        *,
        is_open: bool,
        most: int | None = None,
        then: Constraint | None = None,
        end_tokens: Iterable[int] = (),
        is_blank: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Begin an answer, with the tokens that begin and end its reasoning.

        ``most`` limits the tokens of reasoning; ``end_tokens``, which end an answer, do not follow
        within it if there is another constraint. Reasoning may begin after tokens that
        ``is_blank`` names.
        """
        self._begin = begin
        self._end = end
        self._most = most
        self._then = then
        self._is_blank = is_blank
        self._end_tokens = torch.tensor(sorted(end_tokens), dtype=torch.long)
        self._part = _Phase.INSIDE if is_open else _Phase.BEFORE
        self._count = 0

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [V] with minus infinity for each token that may not follow."""
        if self._part is _Phase.INSIDE:
            if self._most is not None and self._count >= self._most:
                closed = torch.full_like(logits, -inf)
                closed[self._end] = 0.0
                return closed
            if self._then:
                return logits.index_fill(0, self._end_tokens.to(logits.device), -inf)
            return logits
        if not self._then:
            return logits
        masked = self._then.masked(logits)
        if self._part is _Phase.BEFORE:
            masked[self._begin] = logits[self._begin]
        return masked

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the answer; raise `ModelError` if they do not follow."""
        for token in tokens:
            self._take(token)

    def _take(self, token: int) -> None:
        if self._part is _Phase.INSIDE:
            self._count += 1
            if token == self._end:
                self._part = _Phase.BEHIND
        elif self._part is _Phase.BEFORE and token == self._begin:
            self._part = _Phase.INSIDE
        else:
            if not (self._part is _Phase.BEFORE and self._is_blank(token)):
                self._part = _Phase.BEHIND
            if self._then:
                self._then.take([token])
