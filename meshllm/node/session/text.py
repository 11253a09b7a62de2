"""Answers text requests with the entry of a ring: chat template, tokenizer, detokenizer."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, assert_never

from torch import Tensor

from meshllm.errors import ContextTooLong, UserError
from meshllm.model.sampling import logprobs, validate
from meshllm.model.text import grammar_trial
from meshllm.model.text.answer_parser import AnswerParser
from meshllm.model.text.detokenizer import Detokenizer
from meshllm.model.text.grammar import Constraint, Vocabulary
from meshllm.model.text.reasoning import (
    ReasoningFormat,
    ReasoningLimit,
    ReasoningParser,
    max_reasoning_tokens_of,
)
from meshllm.model.text.tokenizer import Text, check_vocabulary, is_long, length_of
from meshllm.model.text.tool_format import MARKERS, Function, call_grammar
from meshllm.model.text.tool_parser import ToolParser
from meshllm.names import NodeId, short, show
from meshllm.node.compute.gauge import GenerationTimes
from meshllm.node.compute.worker import Worker
from meshllm.node.requests.request_json import LINE_TOKENS
from meshllm.node.session.embedding import embed
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.generation import Ended, GenerationRequest, Output, Token
from meshllm.node.timer import loop_time
from meshllm.protocol.planning.plan import Plan
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    HopReport,
    Logprob,
    Piece,
    Prefilled,
    PromptTokens,
    Request,
    Resumable,
    TokenLogprobs,
    Turn,
    Waiting,
    Written,
)
from meshllm.strict_json import WrongField

MAX_LOGPROBS = 20  # OpenAI API reference, as the next one
MAX_BIAS = 100
MAX_TOKEN_CHARS = 64  # upper bound of characters per token; English averages about 4


_Run: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in a thread."""


@dataclass(frozen=True, slots=True)
class RingBackend:
    """The entry of a ring as a backend for text requests."""

    entry: EntryNode
    worker: Worker
    text: Text
    plan: Plan
    requester: NodeId | None = None
    """The node that sends the requests; None is the owner of this one."""
    name_of: Callable[[NodeId], str] = short
    """Names a node in errors."""

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request, or embed its prompt, see `Backend`."""
        return self._embed(request) if request.embeds else self._answer(request)

    async def _answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Answer a request with what follows the tokens that were given."""
        begin = loop_time()
        text, request = self.text, self._checked(request)
        prompt, (stream, parser, reasoning) = await self._begin(request)
        _check_room(request, prompt, self.entry.context)
        for reported in _reported(prompt) if request.reports_prompt else ():
            yield reported
        transcript = _Transcript(
            text, stream, parser, request.logprobs, ignores_end=request.ignores_end
        )
        grammar = await self._constraint(request, reasoning)
        order = _order(request, prompt, transcript)
        order = replace(order, requester=self.requester, grammar=grammar, begin=begin)
        finished = (
            FinishReason.LENGTH
            if order.max_tokens == 0  # the prompt is only counted, or is the one token to score
            else _finished(order, transcript, self.entry.context)
        )
        written = Written()
        tokens: list[int] = []
        if request.scores_prompt and not request.given:
            first = transcript.first(prompt[0])
            tokens += first.tokens
            written.add(first)
            yield first
        async with aclosing(
            _ended(finished) if finished else self.entry.generate(order)
        ) as outputs:
            async for output in outputs:
                match output:
                    case Waiting() | Prefilled() | Resumable():
                        yield output
                    case Token(token):
                        tokens.append(token)
                        piece = transcript.next(token)
                        written.add(piece)
                        yield piece
                    case Ended(reason, measured):
                        piece = parser.finish(stream.finish())
                        written.add(piece)
                        if piece.has_text:
                            yield piece
                    case _:
                        assert_never(output)
        answer = Answer(
            text="",
            tokens=tuple(tokens),
            prompt_tokens=len(prompt),
            cached_tokens=_cached(order, measured.reused),
            finish_reason=reason,
            ttft_ms=measured.ttft_s * 1e3,
            ms_per_token=measured.token_s * 1e3,
            tokens_per_second=1 / measured.token_s if measured.token_s else 0.0,
            tokens_per_step=measured.tokens_per_step,
            hops=_hops(measured, self.plan),
            stop_text=stream.stop_text,
            reasoning_tokens=parser.reasoning_tokens,
        )
        yield written.complete(answer)

    def _checked(self, request: Request) -> Request:
        """Return a request with the defaults of the model.

        Raises:
            UserError: it cannot be answered, as far as that shows before it is tokenized.
        """
        self._check_trusted(request)
        request = _with_defaults(request, self.text)
        validate(request.sampling)
        _check_length(request, self.entry.context)
        _check_tokens(request, self.entry.vocabulary)
        if (count := len(request.given)) > (most := self.entry.context):
            text = f"This model's maximum context length is {most} tokens; {count} are given"
            raise ContextTooLong(text)
        return request

    def _check_trusted(self, request: Request) -> None:
        """Raise `WrongField` if a node of the ring may not see what the request computes."""
        nodes = [stage.node for stage in self.plan.stages]
        if request.trusted is None:
            return
        if others := [self.name_of(node) for node in nodes if show(node) not in request.trusted]:
            text = f"The ring has nodes that are not trusted: {', '.join(others)}"
            raise WrongField("meshllm.trust", text)

    async def _begin(self, request: Request) -> "tuple[tuple[int, ...], _Prepared]":
        """Tokenize the prompt, and prepare what reads the answer."""
        functions = _functions(request)
        async with self._thread(request) as run:
            prompt = await self._prompt(request, functions, run)
            return prompt, await run(partial(_prepare, self.text, request, prompt, functions))

    @asynccontextmanager
    async def _thread(self, request: Request) -> AsyncIterator[_Run]:
        """Yield what runs functions in the thread for the text of a request, in turn if long.

        They leave the event loop and the compute thread free: megabytes take seconds.
        """
        thread = self.text.thread_of(request)
        run: _Run = partial(asyncio.get_running_loop().run_in_executor, thread)
        if not is_long(request):
            yield run
            return
        scope, chars = (self.requester, request.scope), length_of(request)
        async with self.entry.text_turns.text(scope, chars):
            yield run

    async def _prompt(
        self, request: Request, functions: Sequence[Function], run: _Run
    ) -> tuple[int, ...]:
        """Tokenize the prompt; a chat is laid out by code of the model, its template."""
        if request.ids:
            return request.ids
        encode = partial(_encode, self.text, request, functions, self.entry.vocabulary)
        ids: tuple[int, ...] = await run(encode)
        return ids

    async def _embed(self, request: Request) -> AsyncGenerator[Event, None]:
        """Embed the prompt of a request."""
        self._check_trusted(request)
        if request.turns:
            raise WrongField("turns", "A chat has no embedding", hint="embed a text")
        _check_length(request, self.entry.context)
        _check_tokens(request, self.entry.vocabulary)
        async with self._thread(request) as run:
            prompt = await self._prompt(request, (), run)
        embedding = embed(
            *(self.entry, self.text.pooling, prompt, request.dimensions),
            (self.requester, request.scope),
            hands_over=request.trusted is None,
        )
        async with aclosing(embedding) as events:
            async for event in events:
                yield event

    async def _constraint(
        self, request: Request, reasoning: "_Reasoning | None"
    ) -> Constraint | None:
        """Return what the answer may continue with."""
        text, grammar = self.text, await self._grammar(request)
        limits = [request.max_reasoning]
        if not text.style.takes_effort:
            limits.append(max_reasoning_tokens_of(request.effort, request.max_tokens))
        most = min((each for each in limits if each is not None), default=None)
        if reasoning and (grammar or most is not None):
            begin, end = map(text.markers.get, (reasoning.form.begin, reasoning.form.end))
            if begin is not None and end is not None:
                grammar = ReasoningLimit(
                    begin,
                    end,
                    is_open=reasoning.is_open,
                    most=most,
                    then=grammar,
                    end_tokens=text.end_tokens,
                    is_blank=lambda token: text.token_bytes(token).isspace(),
                )
            elif request.max_reasoning is not None:
                problem = (
                    "The reasoning of this model cannot be limited: its markers are not tokens"
                )
                hint = "omit it, or use a key that does not limit reasoning"
                raise WrongField("max_reasoning_tokens", problem, hint=hint)
        if grammar and request.given:
            async with self.entry.text_turns.grammar((self.requester, request.scope)):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(text.grammars, grammar.take, request.given)
        return grammar

    async def _grammar(self, request: Request) -> Constraint | None:
        """Compile the grammar of the answer, off the compute thread."""
        text, tools = self.text, request.tools
        calls = call_grammar(tools, text.style.tool_format, text.markers) if tools else None
        if request.schema is None and calls is None:
            return None
        if request.scores_prompt:
            raise WrongField("response_format", "An echoed prompt cannot follow a JSON schema")
        if request.ignores_end:
            raise WrongField(
                "response_format", "JSON and tool calls cannot continue past their end"
            )
        if text.vocabulary is None:
            tokens = await self.worker.run_step(text.serialise)
            text.vocabulary = await asyncio.to_thread(Vocabulary, tokens, text.end_tokens)
        in_thread = partial(asyncio.get_running_loop().run_in_executor, text.grammars)
        has_begun = bool(request.given)
        if tools and calls is not None:
            markers = dict.fromkeys(text.markers, grammar_trial.TOKEN)
            trial = call_grammar(tools, text.style.tool_format, markers) or ""
            compiling = partial(text.vocabulary.tool_calls, calls, trial, has_begun=has_begun)
        else:
            assert request.schema is not None
            schema = request.schema
            compiling = partial(text.vocabulary.json_schema, schema, has_begun=has_begun)
        async with self.entry.text_turns.grammar((self.requester, request.scope)):
            return await in_thread(compiling)


@dataclass(slots=True)
class _Transcript:
    """The text and the log probabilities of an answer."""

    text: Text
    stream: Detokenizer
    parser: AnswerParser
    top: int | None
    """Likeliest tokens to report; None reports no log probabilities."""
    ignores_end: bool = False
    forced: int = 0
    """Tokens of the prompt that are still to come."""
    _pieces: deque[Piece] = field(default_factory=deque)
    _scored: deque[TokenLogprobs] = field(default_factory=deque)

    def first(self, token: int) -> Piece:
        """Return the piece of the first token of the prompt, which has no probability."""
        scores = () if self.top is None else (TokenLogprobs(self._score(token, 0.0)),)
        return Piece(self.stream.push_prompt(token), (token,), scores)

    def next(self, token: int) -> Piece:
        """Return the piece of the next token, after the two methods below have taken it."""
        scores = (self._scored.popleft(),) if self._scored else ()
        return replace(self._pieces.popleft(), tokens=(token,), logprobs=scores)

    # On the compute thread, for each token in order.

    def score(self, logits: Tensor, token: int) -> None:
        """Take the logits [V] from which a token was sampled."""
        own, likeliest = logprobs(logits, token, self.top or 0)
        top = tuple(self._score(*each) for each in likeliest)
        self._scored.append(TokenLogprobs(self._score(token, own), top))

    def take_token(self, token: int) -> bool:
        """Take a token; return whether it ends the answer."""
        if self.forced:
            self.forced -= 1
            self._pieces.append(Piece(self.stream.push_prompt(token)))
            return False
        is_end = token in self.text.end_tokens
        self._pieces.append(Piece("") if is_end else self.parser.push(self.stream.push(token)))
        return self.is_stopped(token)

    def is_stopped(self, token: int) -> bool:
        """Return whether a token, which the stream has taken, ends the answer."""
        is_end = token in self.text.end_tokens and not self.ignores_end
        return is_end or self.stream.stopped

    def _score(self, token: int, logprob: float) -> Logprob:
        spelled = self.text.token_bytes(token)
        return Logprob(token, spelled.decode(errors="replace"), tuple(spelled), logprob)


def _with_defaults(request: Request, text: Text) -> Request:
    """Set the sampling parameters that the request leaves to the model."""
    values: dict[str, Any] = {
        name: value for name, value in text.defaults.items() if name in request.unset
    }
    return replace(request, sampling=replace(request.sampling, **values)) if values else request


def _order(request: Request, prompt: tuple[int, ...], transcript: _Transcript) -> GenerationRequest:
    """Return a request in token ids; a prompt to be scored is decoded after its first token."""
    forced: tuple[int, ...] = ()
    given = request.given
    if request.scores_prompt:
        prompt, forced, given = prompt[:1], prompt[1:], given[1:]
    transcript.forced = max(0, len(forced) - len(given))
    return GenerationRequest(
        prompt,
        request.sampling,
        None if request.max_tokens is None else len(forced) + request.max_tokens,
        transcript.take_token,
        bound=request.bound,
        given=given,
        forced=forced,
        resume=request.resume,
        logit_bias=request.logit_bias,
        shares_prefix=request.shares_prefix,
        hands_over=request.trusted is None,
        scope=request.scope,
        on_logits=None if request.logprobs is None else transcript.score,
    )


def _check_length(request: Request, context: int) -> None:
    """Raise `UserError` for a prompt that is too long, before it is tokenized."""
    chars = len(request.raw or "") + sum(map(_chars, request.turns))
    chars += len(request.tools.functions) if request.tools else 0
    if chars > context * MAX_TOKEN_CHARS:
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens; the prompt has {chars}"
            " characters, more than that many tokens can have",
            hint="shorten the prompt or the chat",
        )


def _chars(turn: Turn) -> int:
    calls = turn.get("tool_calls", ())
    return len(turn["content"]) + sum(len(call.name) + len(call.arguments) for call in calls)


def _check_room(request: Request, prompt: Sequence[int], context: int) -> None:
    """Raise `UserError` for a prompt to be scored that is empty or exceeds the context."""
    if not request.scores_prompt:
        return  # the entry checks it
    most = context - (request.max_tokens != 0)
    if not 0 < len(prompt) <= most:
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens; the prompt to score has"
            f" {len(prompt)}, not 1 to {most}"
        )


def _check_tokens(request: Request, vocabulary: int) -> None:
    """Raise `UserError` for tokens that the model does not have, and for invalid amounts."""
    biased = [token for token, _ in request.logit_bias]
    for name, tokens in (("given", request.given), ("ids", request.ids), ("logit_bias", biased)):
        if unknown := [token for token in tokens if not 0 <= token < vocabulary]:
            prompt = "input" if request.embeds else "prompt"  # in the public API
            field = prompt if name == "ids" else name
            text = f"Token {unknown[0]} of `{field}` is not in the vocabulary of {vocabulary}"
            raise WrongField(field, text)
    if any(abs(value) > MAX_BIAS for _, value in request.logit_bias):
        raise WrongField("logit_bias", f"A value of `logit_bias` is not within {MAX_BIAS}")
    if not 0 <= (request.logprobs or 0) <= MAX_LOGPROBS:
        text = f"`top_logprobs` is {request.logprobs}, not between 0 and {MAX_LOGPROBS}"
        raise WrongField("top_logprobs", text)


def _functions(request: Request) -> tuple[Function, ...]:
    """Return the functions that an answer may call; raise `WrongField` if they are malformed."""
    if request.tools is None:
        return ()
    if not request.turns:
        raise WrongField("tools", "`tools` requires a chat")
    if request.schema is not None:
        raise WrongField("tools", "`tools` and a JSON schema of the answer cannot be combined")
    return Function.all_of(request.tools)


class _Reasoning(NamedTuple):
    """How the model reasons, and whether the prompt ends within its reasoning."""

    form: ReasoningFormat
    is_open: bool


class _Prepared(NamedTuple):
    """What reads the answer to a request."""

    stream: Detokenizer
    parser: AnswerParser
    reasoning: _Reasoning | None


def _prepare(
    text: Text, request: Request, prompt: tuple[int, ...], functions: Sequence[Function]
) -> _Prepared:
    """Make a stream and a parser that have read the given tokens."""
    form = text.style.reasoning if request.turns else None
    reasoning = _Reasoning(form, form.is_open(text.tail(prompt))) if form else None
    shown = [*((form.begin, form.end) if form else ()), *(MARKERS if functions else ())]
    stream = text.stream(request.stop, shown)
    offered = {each.name: each.parameters for each in functions}
    parser = AnswerParser(
        ReasoningParser(reasoning.form, is_open=reasoning.is_open) if reasoning else None,
        ToolParser(text.style.tool_format, offered) if functions else None,
    )
    known = len(prompt) if request.scores_prompt else 0
    for place, token in enumerate(request.given):
        if place < known:
            stream.push_prompt(token)
        elif token not in text.end_tokens:
            parser.push(stream.push(token))
    return _Prepared(stream, parser, reasoning)


def _reported(prompt: tuple[int, ...]) -> Iterator[PromptTokens]:
    for at in range(0, len(prompt), LINE_TOKENS):
        yield PromptTokens(at, prompt[at : at + LINE_TOKENS])


def _finished(
    order: GenerationRequest, transcript: _Transcript, context: int
) -> FinishReason | None:
    """Return why the given tokens are the whole answer; None if they are not."""
    prompt, given = len(order.prompt), len(order.given)
    if transcript.stream.stopped or (
        given > len(order.forced) and transcript.is_stopped(order.given[-1])
    ):
        return FinishReason.STOP
    limit = order.bound if order.max_tokens is None else order.max_tokens
    most = math.inf if limit is None else limit
    is_full = given >= most or prompt + given >= context > prompt
    return FinishReason.LENGTH if given and is_full else None


async def _ended(reason: FinishReason) -> AsyncGenerator[Output, None]:
    yield Ended(reason, GenerationTimes(0.0, 0.0, 0.0, 0, ()))


def _encode(
    text: Text, request: Request, functions: Sequence[Function], vocabulary: int
) -> tuple[int, ...]:
    if request.raw is None and not request.turns:
        raise UserError("The prompt is empty", hint="give a prompt, or pipe one in")
    ids = (
        text.encode_chat(request.turns, functions, request.thinks, request.effort)
        if request.raw is None
        else text.encode(request.raw)
    )
    return tuple(check_vocabulary(ids, vocabulary))


def _cached(order: GenerationRequest, reused: int) -> int:
    """Return how many tokens of the prompt were cached when the first ring of an answer began."""
    found = order.resume.cached if order.resume else reused
    return max(0, min(found, len(order.prompt)))


def _hops(measured: GenerationTimes, plan: Plan) -> tuple[HopReport, ...]:
    per_step = measured.tokens_per_step or 1
    return tuple(
        HopReport(
            rank=rank,
            node=short(stage.node),
            span=stage.span,
            compute_ms=hop.compute_s * 1e3 / per_step,
            serialise_ms=hop.serialise_s * 1e3 / per_step,
            queue_ms=hop.queue_s * 1e3 / per_step,
            wire_ms=hop.wire_s * 1e3 / per_step,
            bytes_per_token=hop.bytes_sent / per_step,
        )
        for rank, (stage, hop) in enumerate(zip(plan.stages, measured.hops, strict=False))
    )
