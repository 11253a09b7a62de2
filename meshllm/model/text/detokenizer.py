"""Incremental detokenizer: the tokens of an answer to text, with stop texts."""

from collections.abc import Callable, Sequence

from meshllm.request import MAX_STOPS
from meshllm.strict_json import WrongField

MAX_STOP_CHARS = 1024

_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE = 3  # bytes of an incomplete character: UTF-8 has at most 4
_MAX_PENDING = 32  # tokens without a complete character; more are emitted as they are


class Detokenizer:
    """Tokens of one answer to text: whole characters, no special tokens, nothing after a stop.

    If several stop texts occur, the first to be complete counts, and of those that end together
    the longest; so the cut does not depend on token boundaries.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        silent: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
    ) -> None:
        """Start empty; raise `WrongField` for stop texts that are empty, too long or too many."""
        _check_stop(stop)
        self.stopped = False
        self.stop_text = ""
        """The stop text that was found."""
        self._characters = _Characters(decode)
        self._silent = silent
        self._stop = tuple(stop)
        self._held = ""

    def push_prompt(self, token: int) -> str:
        """Append a token of the prompt, in which no stop text is searched; return its text."""
        return "" if token in self._silent else self._characters.push(token)

    def push(self, token: int) -> str:
        """Append a token; return the text that is now certain, often none."""
        if self.stopped or token in self._silent:
            return ""
        return self._before_stop(self._characters.push(token))

    def finish(self) -> str:
        """Return the text held back as a possible start of a stop text or of a character."""
        if self.stopped:
            return ""
        text = self._before_stop(self._characters.finish())
        held, self._held = self._held, ""
        return text + held

    def _before_stop(self, text: str) -> str:
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            _, at, self.stop_text = min(found)
            return text[:at]
        certain = len(text) - overlap(text, self._stop)
        self._held = text[certain:]
        return text[:certain]


class _Characters:
    """Tokens to whole characters, at a constant cost per token.

    A token can decode differently after another (a leading space, half a character), so it is
    decoded after the tokens emitted last. Emitted text never changes; trailing replacement
    characters wait until they are complete or certainly invalid. Byte fallback (SentencePiece)
    decodes a run of bytes as a whole, each byte as a replacement character until the whole run is
    valid: then the text gets shorter. A byte that invalidates an emitted run is decoded without it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._reset()

    def _reset(self) -> None:
        self._window: list[int] = []
        self._context = 0  # tokens of the window that were emitted before
        self._text = ""  # the decoded window
        self._emitted = 0  # characters of it that were emitted

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if self._is_invalidated(text):
            window = self._window[self._context :]
            self._reset()
            self._window, text = window, self._decode(window)
        if len(self._window) - self._context > _MAX_PENDING:
            return self.finish()
        became_valid = len(text) < len(self._text)
        complete = len(text) if became_valid else len(text) - _incomplete(text)
        piece = text[self._emitted : complete]
        self._text, self._emitted = text, complete
        if piece and complete == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._text = self._decode(self._window)
            self._emitted = len(self._text)
        return piece

    def _is_invalidated(self, text: str) -> bool:
        emitted = self._text[: self._emitted]
        if emitted.endswith(_REPLACEMENT) and len(self._window) == self._context + 1:
            return self._decode(self._window[-1:]) == _REPLACEMENT
        return not text.startswith(emitted)

    def finish(self) -> str:
        rest = self._decode(self._window)[self._emitted :]
        self._reset()
        return rest


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOPS:
        raise WrongField("stop", f"{len(stop)} stop texts, more than {MAX_STOPS}")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            problem = f"A stop text has {len(text)} characters, not 1 to {MAX_STOP_CHARS}"
            raise WrongField("stop", problem)


def _incomplete(text: str) -> int:
    """Count the trailing replacement characters that can be parts of an incomplete character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_INCOMPLETE)


def overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a prefix of a stop text."""
    longest = max(map(len, stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-size:]) for one in stop):
            return size
    return 0
