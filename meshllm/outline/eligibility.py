"""Which requests are answered by outline."""

import re
from enum import StrEnum

from meshllm.request import Request
from meshllm.strict_json import WrongField

MAX_OUTLINE_TOKENS = 256
MAX_POINT_TOKENS = 1024
MAX_POINTS = 8
"""Of an answer; each reads the prompt again."""
MIN_TOKENS = 128  # two points of a sentence or two, and their outline
MIN_LONG_TOKENS = 256  # below, an answer is not long
SEARCHED_CHARS = 8192  # at each end of a text: what is asked is before or after long material

_NEVER = re.compile(
    r"\b(?:code|coding|function|script|program|regex|sql|python|java|javascript|typescript"
    r"|rust|golang|kotlin|php|haskell|bash|html|css|json|yaml|algorithm|implement|refactor|debug"
    r"|compile|unit tests?|calculate|compute|solve|prove|proof|theorem|equation|integral|derivative"
    r"|factorial|(?:square|cube) roots?|(?:sum|average|product) of \d+|translate|rewrite|rephrase"
    r"|proofread|summar(?:y|i[sz]e)|poem|story|song|joke|letter|email|dialogue)\b|\bc(?:\+\+|#)"
    r"|\d\s*(?:[-+*/^=x\u00d7\u00f7]|times|plus|minus|divided by|(?:%|percent) of)\s*\d"
    r"|\\(?:frac|sum|int)|\$[^$\n]+\$",
    re.IGNORECASE,
)
"""Code, mathematics, and texts of one piece."""

_SHORT = re.compile(
    r"\b(?:brief(?:ly)?|short(?:ly)?|concise(?:ly)?|terse(?:ly)?|yes or no"
    r"|(?:in|with|than|most) (?:an?|one|two|three|\d{1,2}|a (?:single|few)) "
    r"(?:words?|lines?|sentences?)|(?:one|single)[ -](?:word|line|sentence))\b",
    re.IGNORECASE,
)
"""What asks for short answers."""

_FACT = re.compile(
    r"^\W*(?:who|when|where (?:is|are|was|were)|how (?:many|much|old|tall|far|big|high|heavy)"
    r"|what (?:time|day|date|year)|what(?:'s| is| was) the (?:capital|name|date|time|year|height"
    r"|population|price|weather))\b",
    re.IGNORECASE,
)
"""Questions for one fact."""


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
    if request.max_tokens is not None and request.max_tokens < MIN_TOKENS:
        text = f"`outline` needs `max_tokens` of at least {MIN_TOKENS}, not {request.max_tokens}"
        return WrongField("meshllm.outline", text)
    if not request.turns or request.turns[-1]["role"] != "user":
        text = "`outline` needs a chat that ends with a message of the user"
        return WrongField("meshllm.outline", text)
    return None


def may_be_long(request: Request) -> bool:
    """Return whether nothing in the request says that its answer is short or of one piece."""
    *before, last = request.turns
    question = ends_of(last["content"])
    rules = ends_of("\n".join(each["content"] for each in before if each["role"] == "system"))
    return (
        (request.max_tokens is None or request.max_tokens >= MIN_LONG_TOKENS)
        and not _NEVER.search(question)
        and not _FACT.search(question)
        and not any(_SHORT.search(each) for each in (rules, question))
        and not any("```" in each["content"] for each in request.turns)
    )


def most_tokens(request: Request) -> int:
    """Return the most tokens of an answer by outline; without a limit those of all its parts."""
    parts = MAX_OUTLINE_TOKENS + MAX_POINTS * MAX_POINT_TOKENS
    return parts if request.max_tokens is None else request.max_tokens


def most_reads(request: Request, mode: OutlineMode | None) -> int:
    """Return how often the prompt of a request may be read: for an outline and each point."""
    if mode is None or objection(request):
        return 1
    return 1 + MAX_POINTS if mode is OutlineMode.ON or may_be_long(request) else 1


def ends_of(text: str) -> str:
    """Return the ends of a long text: searching all of it would keep others waiting."""
    is_long = len(text) > 2 * SEARCHED_CHARS
    return f"{text[:SEARCHED_CHARS]}\n{text[-SEARCHED_CHARS:]}" if is_long else text
