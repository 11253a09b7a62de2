"""What each route does with each field that OpenAI or Anthropic document.

A field is honoured if the body of the route has it. The man page shows the table, a test sends each
field, and `python -m tests.clients.schema` compares the names with the published specifications.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from meshllm.api.generation import generating
from meshllm.api.v1 import chat, completions, embeddings, messages, responses

HEADING = "## Every documented field\n"
_HEAD = """
The fields at the top of a request of each route, of OpenAI's specification 2.3.0, Anthropic's of
May 2026, and our own. A refused field gets status 400 and its name as `param`, `only` names the
values that are accepted because they ask for nothing. Fields of other routes (empty cells) are
refused, too. `tests/api/v1/test_documented.py` tests each cell.
"""


@dataclass(frozen=True, slots=True)
class DocumentedRoute:
    """A route, and the fields that its documentation names."""

    name: str
    path: str
    documented: frozenset[str]
    body: type
    apart: tuple[str, ...]
    """Fields that the route reads apart from its body."""
    harmless: frozenset[str]
    neutral: Mapping[str, tuple[object, ...]]

    @property
    def honoured(self) -> frozenset[str]:
        """The fields that change the answer."""
        return frozenset({*(each.name for each in fields(self.body)), *self.apart})

    @property
    def fields(self) -> frozenset[str]:
        """All fields that the route documents or takes."""
        return self.documented | self.honoured

    def only(self, field: str) -> tuple[object, ...]:
        """Return the values that a field may have which is not supported."""
        return () if field in self.honoured else self.neutral.get(field, ())

    def effect(self, field: str) -> str:
        """Return what happens to a field, in the words of the table."""
        if field in self.honoured:
            return "honoured"
        if field in self.harmless:
            return "ignored"
        if values := self.only(field):
            return "only " + ", ".join(f"`{json.dumps(each)}`" for each in values)
        return "refused" if field in self.documented else ""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GENERATING = (
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream"
    " stream_options temperature top_p user"
)
_COUNTED = "cache_control messages model output_config system thinking tool_choice tools"

OPENAI = (
    DocumentedRoute(
        "chat",
        "/v1/chat/completions",
        _names(
            f"{_GENERATING} audio function_call functions max_completion_tokens messages metadata"
            " modalities parallel_tool_calls prediction prompt_cache_key prompt_cache_retention"
            " reasoning_effort response_format safety_identifier service_tier store tool_choice"
            " tools top_logprobs verbosity web_search_options"
        ),
        chat.Chat,
        chat.APART,
        generating.HARMLESS,
        generating.NEUTRAL,
    ),
    DocumentedRoute(
        "completions",
        "/v1/completions",
        _names(f"{_GENERATING} best_of echo prompt suffix"),
        completions.Completion,
        completions.APART,
        generating.HARMLESS,
        generating.NEUTRAL,
    ),
    DocumentedRoute(
        "responses",
        "/v1/responses",
        _names(
            "background context_management conversation include input instructions"
            " max_output_tokens max_tool_calls metadata model parallel_tool_calls"
            " previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning"
            " safety_identifier service_tier store stream stream_options temperature text"
            " tool_choice tools top_logprobs top_p truncation user"
        ),
        responses.Responses,
        responses.APART,
        responses.HARMLESS,
        responses.NEUTRAL,
    ),
    DocumentedRoute(
        "embeddings",
        "/v1/embeddings",
        _names("dimensions encoding_format input model user"),
        embeddings.Embeddings,
        embeddings.APART,
        embeddings.HARMLESS,
        embeddings.NEUTRAL,
    ),
)
ANTHROPIC = (
    DocumentedRoute(
        "messages",
        "/v1/messages",
        _names(
            f"{_COUNTED} container inference_geo max_tokens metadata service_tier stop_sequences"
            " stream temperature top_k top_p"
        ),
        messages.Messages,
        messages.APART,
        messages.HARMLESS,
        messages.NEUTRAL,
    ),
    DocumentedRoute(
        "count_tokens",
        "/v1/messages/count_tokens",
        _names(_COUNTED),
        messages.MessagesPrompt,
        messages.APART,
        messages.HARMLESS,
        messages.NEUTRAL,
    ),
)
ROUTES = (*OPENAI, *ANTHROPIC)


def with_fields(page: str) -> str:
    """Return a page of the manual with the present table under its heading."""
    before, heading, after = page.partition(HEADING)
    if not heading:
        raise ValueError(f"the page lacks the heading `{HEADING.strip()}`")
    _, mark, rest = after.partition("\n## ")
    tables = "\n".join(_table(each) for each in (OPENAI, ANTHROPIC))
    return f"{before}{heading}{_HEAD}\n{tables}{mark}{rest}"


def _table(routes: Sequence[DocumentedRoute]) -> str:
    named = sorted(frozenset[str]().union(*(each.fields for each in routes)))
    head = [["field", *(each.name for each in routes)], ["---"] * (len(routes) + 1)]
    rows = [*head, *([f"`{name}`", *(each.effect(name) for each in routes)] for name in named)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
