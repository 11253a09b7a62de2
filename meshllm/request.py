"""Requests for a generation, the events it yields, and the interface of a backend.

The string under each field is its help text: the command line and the man page show it.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NotRequired, Protocol, TypedDict

from meshllm.names import LossCause, Span


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks the client to make."""

    name: str
    arguments: str
    """JSON of an object, as the model wrote it: it may be incomplete or invalid."""
    id: str = ""
    """The client's name of the call, in a chat that continues."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of a call: its name comes first, its arguments as they are written."""

    index: int
    """Of the call in the answer."""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer may call."""

    functions: str
    """A JSON list of OpenAI's function objects: `name`, `description`, `parameters`, `strict`."""
    is_required: bool = False
    """The answer is one call or several, enforced by a grammar."""
    parallel: bool = True
    """There may be several calls, in models that know them."""


class Turn(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[tuple[ToolCall, ...]]
    """Of the assistant."""
    tool_call_id: NotRequired[str]
    """The call of which the content is the result."""


def openai_message(turn: Turn) -> dict[str, Any]:
    """Lay a turn out as a message of OpenAI's API."""
    message: dict[str, Any] = {"role": turn["role"], "content": turn["content"]}
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if (name := turn.get("tool_call_id")) is not None:
        message["tool_call_id"] = name
    return message


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; the next token depends on (logits, seed, position, history) only."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Keep the K most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to a total probability of X."""
    min_p: float = 0.0
    """Drop tokens below X times the highest probability."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens already seen; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtract this per earlier occurrence in the answer."""
    presence_penalty: float = 0.0
    """Subtract this once for a token that is in the answer."""
    seed: int = 0
    """Random seed: the same seed gives the same text."""


MAX_STOPS = 64  # stop texts of a request: each is searched after each token
NEVER = -9999.0  # log probability of what cannot be, as in OpenAI's API: JSON has no infinity
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),  # a divisor, so never 0
    "frequency_penalty": (-2, 2),  # OpenAI API reference
    "presence_penalty": (-2, 2),
    "seed": (0, 2**63 - 1),
}
"""Least and largest value of each sampling parameter."""
MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a model may recommend values, in `generation_config.json`."""
TYPICAL_TOKENS = 512
"""Tokens of an answer whose length nobody limits, where plans and queues need a number."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token, and the logarithm of its probability before sampling parameters apply."""

    token: int
    text: str
    """Its text; bytes that are not a whole character are replaced."""
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token of the answer, and those of the likeliest ones."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()
    """The likeliest first."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation: prompt, sampling parameters, stop conditions."""

    turns: tuple[Turn, ...] = ()
    """The chat so far, oldest first; empty when `raw` is given."""
    raw: str | None = None
    """A prompt that is used verbatim, without the chat template."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    """Maximum tokens of an answer; 0 only counts those of a prompt. None leaves its end to the
    model, within the context and a part of the memory for KV caches."""
    stop: tuple[str, ...] = ()
    """Stop strings: they end the answer and are not part of it."""
    given: tuple[int, ...] = ()
    """Tokens of the answer sampled by an earlier ring. The answer continues after them: they count
    for `max_tokens`, penalties and stop strings, and are not yielded again."""
    resume: "Resumable | None" = None
    """The latest one that this ring sent: which caches they continue from, if these still exist."""
    ids: tuple[int, ...] = ()
    """A prompt of token ids, instead of a text."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits after the penalties."""
    logprobs: int | None = None
    """Report the log probability of each token, and of this many of the likeliest tokens."""
    scores_prompt: bool = False
    """Yield the prompt before the answer, token by token as if it were part of it, so that its log
    probabilities can be reported; `max_tokens`, which may then be 0, does not count it."""
    schema: str | None = None
    """A JSON schema, as JSON: the answer is JSON that satisfies it, or ends at its length."""
    tools: Tools | None = None
    """Functions that the answer may call, for a chat."""
    thinks: bool | None = None
    """Whether a model that can do both reasons before it answers; None leaves it to the model."""
    effort: str | None = None
    """How long to reason, for models whose chat template takes it: `low`, `medium`, `high`."""
    max_reasoning: int | None = None
    """Maximum tokens of reasoning: the reasoning is closed then, and the answer begins."""
    model: str = ""
    """Whose answer it is; empty for the model of the ring."""
    trusted: tuple[str, ...] | None = None
    """Names or ids of the nodes that may see the prompt or hidden states, in place of which the
    ingress puts whole ids; None trusts all members."""
    affinity: str = ""
    """Requests of a scope with the same text go to the same replica or provider, if that is not
    much busier: its prefix cache has what they share. If empty, those that begin alike do."""
    needs_exact: bool = False
    """Only rings whose nodes all compute bit-identically to transformers may answer."""
    min_bits: int = 0
    """Fewest bits per weight of the model that answers; 0 sets no limit."""
    min_context: int = 0
    """Fewest tokens of context of a provider; all rings of one model have the same."""
    deadline_ms: int = 0
    """Milliseconds for the whole answer; 0 is none. The ingress prefers rings that are as fast."""
    shares_prefix: bool = False
    """Other requests continue the same text: its cached prefix is copied, not taken over."""
    scope: str = ""
    """Whose cached prefixes and drafts it shares: those of its asker in the same scope. The ingress
    names it."""
    embeds: bool = False
    """Compute the embedding of the prompt, which is `raw` or `ids`, instead of an answer."""
    dimensions: int | None = None
    """Number of leading values of the embedding to return; None returns all."""
    unset: tuple[str, ...] = ()
    """Those of `MODEL_SAMPLING` that are not set: what the model recommends replaces them."""
    ignores_end: bool = False
    """Continue the answer after end tokens, for benchmarks."""
    reports_prompt: bool = False
    """Yield the token ids of the prompt before anything else."""
    group: str | None = None
    """The ring that answers, as the hex digits of its id, none for the first of a mesh. An ingress
    names it to the entry, and ignores what others say; None leaves the choice to the entry."""
    bound: int | None = None
    """Maximum tokens of an answer without `max_tokens`: what is left of a client's daily quota."""

    @property
    def computes(self) -> bool:
        """Whether a forward is needed: else the tokens of the prompt are only counted."""
        return self.max_tokens != 0 or self.embeds or self.scores_prompt

    @property
    def expected_tokens(self) -> int:
        """How many tokens its answer may have; without a limit `TYPICAL_TOKENS` more than given."""
        typical = len(self.given) + TYPICAL_TOKENS
        return typical if self.max_tokens is None else self.max_tokens

    @property
    def beyond_engines(self) -> tuple[str, str] | None:
        """The field that asks for what no engine does, and a phrase about it; None without one."""
        if self.scores_prompt:
            return "echo", "A provider cannot score a prompt"
        if self.embeds:
            return "model", "A provider does not compute embeddings for the mesh"
        if not self.computes:
            return "model", "A provider does not count tokens"
        if self.max_reasoning is not None:
            text = "A provider does not support a reasoning limit: omit it, or use another key"
            return "max_reasoning_tokens", text
        if self.logprobs is not None and not self.turns:
            return "logprobs", "A provider reports log probabilities of chats only"
        return None


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class HopReport:
    """Times of one rank in a session: means per token after the first."""

    rank: int
    node: str
    span: Span
    compute_ms: float
    """Time of the forward pass."""
    serialise_ms: float
    """Time to convert between bytes and tensors, the keyed hash included."""
    queue_ms: float
    """Time that received work waited for the compute thread."""
    wire_ms: float
    """Time from this rank to the next."""
    bytes_per_token: float
    """Sent by this rank to the next."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation."""

    text: str
    tokens: tuple[int, ...]
    """The generated token ids, end token included."""
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_ms: float
    """Time from the request to the first token."""
    ms_per_token: float
    """Mean time of every later token; 0 with fewer than two."""
    tokens_per_second: float
    tokens_per_step: float
    """Mean over the decode steps; more than 1 if drafted tokens were accepted, 0 if unknown."""
    hops: tuple[HopReport, ...]
    cached_tokens: int = 0
    """Tokens of the prompt taken from the prefix cache."""
    stop_text: str = ""
    """The stop text that ended it, if one did."""
    reasoning: str = ""
    """What the model wrote before its answer, which is not part of it."""
    calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0
    counted: int | None = None
    """Generated tokens, from an engine that does not tell their ids."""

    @property
    def completion_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) if self.counted is None else self.counted

    def written_for(self, request: Request) -> int:
        """Return the number of generated tokens, without those of an echoed prompt."""
        return self.completion_tokens - (self.prompt_tokens if request.scores_prompt else 0)

    embedding: str = ""
    """Base64 of its values as little-endian float32; empty unless the request embeds."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request waits: no ring serves the model yet, or an answer has no room to go on."""

    reason: str
    """What is waited for, for people; empty if that is there now, and the ring computes."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Token ids of the prompt, if requested; a long prompt has several, in order.

    After the loss of a ring they come again from the start.
    """

    start: int
    """Position of the first one."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill progress, in prompt tokens."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Resumable:
    """Which caches an answer continues from if its ring is lost, and how they were computed.

    The next one replaces it. All tokens after the last of `stops` are computed in decode steps.
    The ring sends it again while it reads a prompt, and with the first token.
    """

    key: str
    """In hexadecimal; only the entry and those that hold the tokens of the answer know it."""
    stops: tuple[int, ...]
    """First position after each chunk."""
    steps: tuple[int, ...] = ()
    """Those of them after decode steps; the others are after chunks of a prompt."""
    held: int | None = None
    """Positions that every rank holds; None are those of all tokens but the last."""
    cached: int = 0
    """Tokens of the prompt that the first ring of the answer took from its prefix cache."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """The ring of the answer was lost; the answer continues with the next event."""

    cause: LossCause
    text: str
    """What happened, for people: who is gone, and which layers the others took over."""
    pause_s: float
    """Seconds without new text: from the last before the loss to this event."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of the answer, complete characters only, and its new tokens."""

    text: str
    """Empty while it depends on the next tokens."""
    tokens: tuple[int, ...] = ()
    """Empty for text that was held back until the end."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens, if requested."""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()

    @property
    def has_text(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.text or self.reasoning or self.calls)


class Written:
    """The pieces of an answer, put together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, piece: Piece) -> None:
        """Append a piece; a delta after the next call is ignored.

        What is empty is not stored: a peer may send any number of it.
        """
        if piece.text:
            self._text.append(piece.text)
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
        for each in piece.calls:
            if each.index == len(self._calls):
                self._calls.append((each.name, []))
            if each.index < len(self._calls) and each.arguments:
                self._calls[each.index][1].append(each.arguments)

    def complete(self, answer: Answer) -> Answer:
        """Return an answer with all that was written."""
        calls = tuple(ToolCall(name, "".join(parts)) for name, parts in self._calls)
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        return replace(answer, text=text, reasoning=reasoning, calls=calls)


Event = Waiting | PromptTokens | Prefilled | Resumable | Interruption | Piece | Answer
"""An item of a generation: waits, prompt, progress, resumption, losses, pieces, the answer last."""


class Backend(Protocol):
    """Serves requests: a local ring, the entry of a ring, another node, a mesh, a provider."""

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield progress, how to resume, losses, pieces of text, and the `Answer` last.

        Raises:
            UserError: the request is invalid.
            MeshError: the generation failed; no node holds state of it any more.

        Closing the generator cancels the generation on every node.
        """
