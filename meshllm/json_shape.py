"""The shape of JSON before it is parsed: depth, number of values, bytes of numbers.

Parsing makes a Python object of each value, a hundred times the bytes of `{}`, and holds the
interpreter until it has finished. This scan makes none and stops at the first limit.
"""

import re

from meshllm.errors import UserError

MAX_DEPTH = 16  # a request has four levels
MAX_VALUES = 65_536  # texts, names, words and containers
MAX_NUMBER_BYTES = 4 << 20  # token ids of a long answer, with what is between values

# A text (with possessive quantifiers, so that no input makes it backtrack), a bracket, a run of
# numbers and what is between values, or a run of anything else.
_TOKEN = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]|[-+.0-9eE,:\s]++|[^"\[\]{}\-+.0-9eE,:\s]++|.',
    re.DOTALL,
)
_OPENING, _CLOSING = b"[{", b"]}"
_BETWEEN = b"-+.0123456789eE,: \t\r\n\v\f"


def check_shape(
    data: bytes, *, values: int = MAX_VALUES, number_bytes: int = MAX_NUMBER_BYTES
) -> None:
    """Refuse JSON with too many values or levels; what is not JSON is left to the parser.

    Raises:
        UserError: a limit is exceeded.
    """
    depth = count = numbers = 0
    for match in _TOKEN.finditer(data):
        first = data[match.start()]
        if first in _BETWEEN:
            numbers += match.end() - match.start()
        elif first in _CLOSING:
            depth -= 1
        else:
            count += 1
            depth += first in _OPENING
        if depth > MAX_DEPTH:
            raise UserError(f"The JSON is nested too deeply: more than {MAX_DEPTH} levels")
        if count > values:
            raise UserError(f"The JSON has more than {values} values")
        if numbers > number_bytes:
            raise UserError(f"The JSON has more than {number_bytes} bytes of numbers")
