"""An integer model, exact and cheap, that replaces a real one.

Each layer writes the sum of its inputs so far, in its own way, into each row: another order of
layers, a layer left out or run twice, a row lost, repeated or misplaced change all that follows. A
row between two spans also carries the number of layers it went through, and is refused elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from meshllm.errors import ModelError, OutOfMemory
from meshllm.model.files.source import Source
from meshllm.model.parity.verdict import Verdict
from meshllm.model.sampling import sample_token
from meshllm.model.shape import ModelShape
from meshllm.model.split.kv_cache import Rows
from meshllm.model.steps.execution import Execution, Strategy
from meshllm.model.steps.runner import Runner
from meshllm.model.text.chat_style import ChatStyle
from meshllm.model.text.tokenizer import Text
from meshllm.model.text.tool_format import Function
from meshllm.model.wire.payload import RowFormat
from meshllm.names import Digest, ModelKey, Quant, Span
from meshllm.node.agreement.offer import SMALLER
from meshllm.node.charter_options import amend, create_charter
from meshllm.node.compute.worker import Worker
from meshllm.node.options import NodeOptions
from meshllm.node.preparation import Preparation
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.span_loader import LoadedSpan, RankPart, SpanLoader
from meshllm.protocol.kv_cache.budget import BLOCK
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import DIGEST_PART_BYTES, ENDS, Profile
from meshllm.request import Request, Turn
from tests.simulation.machines import process_here, room_here

P = ParamSpec("P")
T = TypeVar("T")
LAYERS = 4
VOCABULARY = 32
END = 0  # the token that ends an answer
LAYER_BYTES = 1000
END_BYTES = 10
WORKSPACE_BYTES = 20
MORE_BYTES = BLOCK + 2 * END_BYTES + 200  # that a node needs beside its layers
PRIME = 4093  # products of two numbers below it are exact in float32, as is a mark above it

SHAPE = ModelShape(
    name="toy",
    model_type="toy",
    layers=LAYERS,
    layer_bytes=(LAYER_BYTES,) * LAYERS,
    embed_bytes=END_BYTES,
    head_bytes=END_BYTES,
    tied=False,
    kv_bytes_per_token=(1,) * LAYERS,
    hidden_size=1,
    vocab_size=VOCABULARY,
    context=128,
    dtype="float32",
    itemsize=4,
    windows=(0,) * LAYERS,
    state_bytes=(0,) * LAYERS,
)
CONFIG = Digest(bytes(range(32)))
SALTS = {"toy": 0, "toy2": 1}
"""The models, and what tells them apart."""


def config_of(name: str) -> Digest:
    """Return the digest of the configuration of a model."""
    return Digest(bytes([SALTS[name], *CONFIG[1:]]))


def manifest_of(name: str) -> tuple[bytes, ...]:
    """Return the digests of the parts of a model."""
    return (config_of(name)[:DIGEST_PART_BYTES],) * (LAYERS + ENDS)


class ToyCache:
    """Cache of a span: the sum of each layer after each row."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.sums = {layer: [1 + layer] for layer in range(span.start, span.stop)}
        self._empty = 0  # rows of a span without layers

    @property
    def length(self) -> int:
        return min((len(sums) - 1 for sums in self.sums.values()), default=self._empty)

    def add(self, rows: int) -> None:
        self._empty += rows

    def crop(self, rows: int) -> None:
        if rows > self.length:
            raise ModelError(f"layers {list(self.sums)} hold {self.length} rows and not {rows}")
        self._empty = rows
        for sums in self.sums.values():
            del sums[rows + 1 :]

    def branch(self, rows: int) -> "ToyCache":
        other = ToyCache(self.span)
        other.sums = {layer: list(sums) for layer, sums in self.sums.items()}
        other.crop(rows)
        return other

    def copied_rows(self, layer: int, start: int, stop: int) -> tuple[Tensor, int] | None:
        sums = self.sums[layer][start + 1 : stop + 1]
        if len(sums) < stop - start:
            return None
        return torch.tensor([[[[each, layer] for each in sums]]], dtype=torch.float32), 1

    def adopt(self, received: Mapping[int, tuple[Rows, ...]], like: "ToyCache") -> None:
        assert like.length == 1
        if not self.sums.keys() <= received.keys():
            return
        length = min(received[layer][0].used for layer in self.sums)
        for layer in self.sums:
            sums, layers = (rows.held.flatten().tolist()[:length] for rows in received[layer])
            assert set(layers) <= {layer}
            self.sums[layer] = [1 + layer, *map(int, sums)]

    def take_over(self, others: Sequence["ToyCache"]) -> None:
        held = {layer: sums for other in others for layer, sums in other.sums.items()}
        if len({len(held.get(layer, "?")) for layer in self.sums}) == 1:
            self.sums = {layer: held.get(layer, [1 + layer]) for layer in self.sums}


class ToyRunner:
    """Layers of the model, with or without its ends."""

    is_row_invariant = True
    name = "layers"
    prepared = 0
    vocabulary = VOCABULARY
    execution = Execution(Strategy.STOCK)
    row_format = RowFormat(1, torch.float32)

    def warm_up_steps(self) -> Iterator[None]:
        """Record nothing."""
        return iter(())

    def __init__(
        self, span: Span, *, embed: bool = False, head: bool = False, salt: int = 0
    ) -> None:
        self.span = span
        self.salt = salt
        self.embed = embed
        self.head = head
        self.shard = self

    def new_cache(self) -> ToyCache:
        return ToyCache(self.span)

    def one_row(self) -> ToyCache:
        cache = self.new_cache()
        cache.add(1)
        cache.sums = {layer: [*sums, 0] for layer, sums in cache.sums.items()}
        return cache

    def step(self, x: Tensor, cache: ToyCache | None) -> Tensor:
        return self.prefill(x, cache)

    def step_many(self, parts: Sequence[Tensor], caches: Sequence[ToyCache | None]) -> list[Tensor]:
        return [self.step(x, cache) for x, cache in zip(parts, caches, strict=True)]

    def recompute(self, x: Tensor, cache: ToyCache) -> Tensor:
        return self.prefill(x, cache)

    def fill(self, x: Tensor, cache: ToyCache, *, is_step: bool) -> None:
        _ = is_step
        self.prefill(x, cache)

    def prefill(self, x: Tensor, cache: ToyCache | None, rows: int | None = None) -> Tensor:
        """Run tokens or rows ``[1, T]`` or ``[1, T, 1]`` through what this shard holds."""
        marked = [divmod(int(value), PRIME) for value in x.flatten().tolist()]
        for layers, _ in marked:
            assert layers == self.span.start, f"a row behind {layers} layers in {self.span}"
        values = [value for _, value in marked]
        if self.embed:
            values = [(97 * token + 5 + self.salt) % PRIME for token in values]
        if cache is not None:
            cache.add(len(values))
            values = [_through(value, cache) for value in values]
        if self.head:
            assert self.span.stop == LAYERS, f"the head behind {self.span}"
            return torch.tensor([[_logits(value) for value in values[-(rows or 0) :]]])
        out = [self.span.stop * PRIME + value for value in values]
        return torch.tensor(out, dtype=torch.float32).reshape(1, -1, 1)


def _through(value: int, cache: ToyCache) -> int:
    for layer, sums in cache.sums.items():
        sums.append((31 * sums[-1] + value) % PRIME)
        value = (value * (2 * layer + 3) + sums[-1] + len(sums)) % PRIME
    return value


def _logits(value: int) -> list[float]:
    return [float(value * (7 * token + 3) % 101) / 16 for token in range(VOCABULARY)]


class AtOnce(Executor):
    """Runs what it is given before it returns: no thread takes virtual time."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # whatever a thread would pass on
            done.set_exception(error)
        return done


class ToyText(Text):
    """A letter for each token."""

    def __init__(self) -> None:
        self.end_tokens = frozenset({END})
        self.defaults = {}
        self.vocabulary = None
        self.style = ChatStyle()
        self._silent = self.end_tokens

    def thread_of(self, _: Request) -> Executor:
        return AtOnce()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def encode_chat(
        self,
        turns: Sequence[Turn],
        functions: Sequence[Function] = (),
        thinks: bool | None = None,
        effort: str | None = None,
    ) -> list[int]:
        return self.encode("".join(turn["content"] for turn in turns))

    def _decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("@") + token) for token in tokens)


class ToyModel(ModelRuntime):
    """Holds spans of the toy model."""

    def __init__(self, worker: Worker, name: str = "toy") -> None:
        verdict = Verdict("toy", equal=True, reason="", chunkable=True, croppable=True)
        source = Source(name, Path(), cast("PreTrainedConfig", None))
        super().__init__(source, worker, replace(SHAPE, name=name), verdict)
        self.divides_head = False
        self._text = ToyText()

    def hidden_bytes(self, positions: int) -> int:
        """Return nothing: the budget has no room for them."""
        return 0

    def kv_row_bytes(self, layer: int) -> int:
        """Return the bytes of a sum and its layer, which count as one in the budget."""
        return 8

    def _new_loader(self) -> SpanLoader:
        return ToyLoader(self.source, self.shape, self.config, self.context, (), None)


class ToyLoader(SpanLoader):
    """Loads spans of the toy model."""

    def load(self, part: RankPart) -> LoadedSpan:
        """Load a part, and note for how many layers there is no memory."""
        try:
            return super().load(part)
        except OutOfMemory:
            if process := process_here():
                process.ran_out = min(process.ran_out or LAYERS, len(part.span))
            raise

    def _headroom(self, part: RankPart) -> int:
        """Return more than the rows sent to the next rank take, as rows take whole blocks."""
        return 1 << 20

    def _build(
        self, span: Span, *, embed: bool = False, head: bool = False, **_more: object
    ) -> Runner:
        salt, room = SALTS[self._source.name], room_here()
        if room is not None and sum(len(each.span) for each in self.runners) + len(span) > room:
            raise MemoryError
        return cast("Runner", ToyRunner(span, embed=embed, head=head, salt=salt))


class ToyPreparation(Preparation):
    """Takes a toy model, at once."""

    async def open_founding_model(self) -> tuple[ModelRuntime, Charter]:
        engine = ToyModel(self.worker)
        charter = charter_of(self.options, engine.shape, CONFIG)
        return engine, amend(charter, self.options, {}, engine.shape.context)

    async def join(
        self, charter: Charter, folder: Path | None = None, *, is_further: bool = False
    ) -> ModelRuntime:
        return ToyModel(self.worker, charter.shape.name)

    async def held(self, charters: Sequence[Charter]) -> tuple[ModelKey, ...]:
        return tuple(each.key for each in charters)

    async def room(self, profile: Profile) -> Profile:
        return replace(profile, memory_bytes=self.options.inference.memory_bytes or 0)

    async def describe(self, name: str, quant: Quant, context: int) -> Charter:
        options = replace(self.options, context=context)
        return charter_of(options, ToyModel(self.worker, name).shape, config_of(name))

    async def offer(
        self, engine: ModelRuntime, profile: Profile, *, is_further: bool = False
    ) -> Profile:
        _ = is_further
        return replace(
            profile,
            memory_bytes=self.options.inference.memory_bytes or 0,
            layer_s=((1, 0.05),),  # s; far more than a round trip, so that rings do not flap
            head_s=0.001,
            model=engine.source.name,
            weights=manifest_of(engine.source.name),
        )


def charter_of(options: NodeOptions, shape: ModelShape, config: Digest) -> Charter:
    """Return the charter of a toy model, a forward of which takes little."""
    charter = create_charter(options, shape, config)
    return replace(charter, shape=replace(charter.shape, workspace_bytes=WORKSPACE_BYTES))


def memory_for(layers: int) -> int:
    """Return the bytes that a node needs to hold so many layers and the ends."""
    return int((layers * (LAYER_BYTES + BLOCK) + MORE_BYTES) / 0.8)


def layers_after(ran_out: int) -> int:
    """Return for how many layers a node has memory at least that ran out of it for so many."""
    offered = ran_out * LAYER_BYTES * SMALLER
    return max(0, int(offered * 0.8 - MORE_BYTES) // (LAYER_BYTES + BLOCK))


@lru_cache(1024)
def reference(request: Request) -> tuple[str, tuple[int, ...]]:
    """Return text and tokens of an answer, by the whole model in one piece."""
    salt = SALTS[request.model or "toy"]
    text, whole = ToyText(), ToyRunner(Span(0, LAYERS), embed=True, head=True, salt=salt)
    prompt = text.encode(request.raw or "")
    cache, history, new = whole.new_cache(), list(prompt), list(prompt)
    most = request.expected_tokens
    while len(history) - len(prompt) < most and len(history) < SHAPE.context:
        logits = whole.prefill(torch.tensor([new]), cache, rows=1)[0, -1]
        token = sample_token(
            logits,
            request.sampling,
            position=len(history),
            history=history,
            prompt_len=len(prompt),
        )
        new = [token]
        history.append(token)
        if token == END:
            break
    tokens = tuple(history[len(prompt) :])
    return text._decode([token for token in tokens if token != END]), tokens
