"""Word wrap for streamed text."""

from unicodedata import category, east_asian_width

LONGEST = 32  # characters held back while a word grows; a longer one is shown in pieces
_NO_WIDTH = {"Mn", "Me", "Cf"}  # marks on the character before, and joiners


class Wrap:
    """Wraps text that arrives in pieces at ``columns``, as far as word lengths allow."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.column = 0
        self.word = ""

    def feed(self, piece: str) -> str:
        """Take a piece and return what can be shown; a word is held back until it ends."""
        return "".join(map(self._take, piece))

    def flush(self) -> str:
        """Return what was held back."""
        word, self.word = self.word, ""
        width = width_of(word)
        lacks_room = self.column > 0 and self.columns < self.column + width <= 2 * self.columns
        self.column = (0 if lacks_room else self.column) + width
        return f"\n{word}" if lacks_room else word

    def _take(self, char: str) -> str:
        if char == "\n":
            shown = self.flush() + char
            self.column = 0
            return shown
        if char.isspace():
            shown = self.flush() + char
            self.column += 1
            return shown
        self.word += char
        # Scripts without spaces use wide characters, and a line may break before each of them.
        return self.flush() if len(self.word) > LONGEST or _width(char) > 1 else ""


def width_of(text: str) -> int:
    """Return the columns that a text takes."""
    return sum(map(_width, text))


def _width(char: str) -> int:
    if char.isascii():
        return 1
    if category(char) in _NO_WIDTH:
        return 0
    return 2 if east_asian_width(char) in "WF" else 1
