"""The tokens of an answer to text, piece by piece; knows a tokenizer only by its decode."""

from collections.abc import Callable, Sequence

from meshllm.errors import UserError

MAX_STOPS = 64  # each is looked for after each token
MAX_STOP_CHARS = 1024

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 3  # bytes of a character that may still be completed: UTF-8 has at most 4
_MAX_PENDING = 32  # tokens without a character; more are garbage and are shown as such


class TextStream:
    """Tokens of one answer to text: whole characters, no special tokens, nothing from a stop on.

    Where several stop texts occur, the first to be complete counts, and of those that end together
    the longest; so the cut does not depend on where tokens begin.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        silent: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
    ) -> None:
        """Begin empty; raise `UserError` for stop texts that are empty, too long or too many."""
        _check_stop(stop)
        self.stopped = False
        self._characters = _Characters(decode)
        self._silent = silent
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain, often none."""
        if self.stopped or token in self._silent:
            return ""
        return self._before_stop(self._characters.push(token))

    def finish(self) -> str:
        """Return what was held back: the beginning of a stop text, or of a character."""
        if self.stopped:
            return ""
        text = self._before_stop(self._characters.finish())
        held, self._held = self._held, ""
        return text + held

    def _before_stop(self, text: str) -> str:
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - _overlap(text, self._stop)
        self._held = text[certain:]
        return text[:certain]


class _Characters:
    """Tokens to whole characters, at a constant cost per token.

    A token may read differently after another (a leading space, half a character), so it is decoded
    behind the tokens that were shown last. What was shown stays; replacement characters at the end
    wait until they are complete or certain to be none. Byte fallback (SentencePiece) reads a run of
    bytes as a whole, each byte as a replacement character until all of the run is valid: then the
    text gets shorter; and a new byte spoils a run that was shown, so it is read without it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._forget()

    def _forget(self) -> None:
        self._window: list[int] = []
        self._context = 0  # so many tokens of the window were shown before
        self._text = ""  # what the window reads
        self._shown = 0  # so many characters of it were shown

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if self._is_spoiled(text):
            window = self._window[self._context :]
            self._forget()
            self._window, text = window, self._decode(window)
        if len(self._window) - self._context > _MAX_PENDING:
            return self.finish()
        became_valid = len(text) < len(self._text)
        settled = len(text) if became_valid else len(text) - _unsettled(text)
        piece = text[self._shown : settled]
        self._text, self._shown = text, settled
        if piece and settled == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._text = self._decode(self._window)
            self._shown = len(self._text)
        return piece

    def _is_spoiled(self, text: str) -> bool:
        shown = self._text[: self._shown]
        if shown.endswith(_REPLACEMENT) and len(self._window) == self._context + 1:
            return self._decode(self._window[-1:]) == _REPLACEMENT
        return not text.startswith(shown)

    def finish(self) -> str:
        rest = self._decode(self._window)[self._shown :]
        self._forget()
        return rest


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOPS:
        raise UserError(f"{len(stop)} stop texts are more than {MAX_STOPS}")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise UserError(f"a stop text has {len(text)} characters, not 1 to {MAX_STOP_CHARS}")


def _unsettled(text: str) -> int:
    """Count the replacement characters at the end that may be parts of one to come."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNSETTLED)


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of the text that begins a stop text."""
    longest = max(map(len, stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(one.startswith(text[-size:]) for one in stop):
            return size
    return 0
