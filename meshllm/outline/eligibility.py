"""Which requests are answered by outline."""

import re
from enum import StrEnum

from meshllm.request import Request
from meshllm.strict_json import WrongField

MIN_TOKENS = 128  # two points of a sentence or two, and their outline
MIN_LONG_TOKENS = 256  # below, an answer is not long

_NEVER = re.compile(
    r"```|\b(?:code|coding|function|script|program|regex|sql|python|javascript|rust|implement"
    r"|debug|compile|calculate|compute|solve|prove|proof|theorem|equation|integral|derivative"
    r"|translate|rewrite|rephrase|proofread|poem|story|song|joke|letter|email|dialogue"
    r"|briefly|short(?:ly)?|one (?:word|line|sentence)|in a (?:word|line|sentence)|yes or no)\b"
    r"|\d\s*[-+*/^=]\s*\d|\\(?:frac|sum|int)|\$[^$\n]+\$",
    re.IGNORECASE,
)
"""Code, mathematics, texts of one piece, and short answers."""


class OutlineMode(StrEnum):
    """When an answer is outlined."""

    ON = "on"
    AUTO = "auto"
    """If it is long and the model finds independent points."""


def objection(request: Request) -> WrongField | None:
    """Return why a request cannot be answered by outline; None if it can."""
    unfit = {
        "raw": request.raw is not None,
        "ids": bool(request.ids),
        "given": bool(request.given),
        "stop": bool(request.stop),
        "schema": request.schema is not None,
        "tools": request.tools is not None,
        "reasoning": bool(request.thinks or request.effort),
        "logprobs": request.logprobs is not None,
    }
    for name, is_set in unfit.items():
        if is_set:
            text = f"`outline` cannot be combined with `{name}`"
            return WrongField("meshllm.outline", text, hint="omit one of them")
    if request.max_tokens < MIN_TOKENS:
        text = f"`outline` needs `max_tokens` of at least {MIN_TOKENS}, not {request.max_tokens}"
        return WrongField("meshllm.outline", text)
    if not request.turns or request.turns[-1]["role"] != "user":
        text = "`outline` needs a chat that ends with a message of the user"
        return WrongField("meshllm.outline", text)
    return None


def may_be_long(request: Request) -> bool:
    """Return whether nothing in the request says that its answer is short or of one piece."""
    question = request.turns[-1]["content"]
    return request.max_tokens >= MIN_LONG_TOKENS and not _NEVER.search(question)
