"""One generation on the entry: its caches, its tokens, its results; knows token ids, not text."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from meshllm.errors import MeshError, ModelError
from meshllm.model.sample import pick
from meshllm.model.shard import Shard
from meshllm.node.gauge import Gauge, Measured
from meshllm.node.stopwatch import Stopwatch
from meshllm.node.wire import error_of, opened, sealed
from meshllm.protocol.blob import SessionKey
from meshllm.protocol.entry import Done, Embed, Emit, Entry, Failed, Pick, Progress
from meshllm.protocol.messages import Blob
from meshllm.request import FinishReason, Prefilled, Sampling


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of the answer."""

    id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The generation is over on every rank."""

    reason: FinishReason
    measured: Measured


Output = Prefilled | Token | Ended


@dataclass(frozen=True, slots=True)
class Order:
    """A generation in token ids."""

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    is_last: Callable[[int], bool]
    """Called once with each token, in order: whether it ends the answer."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What rank 0 holds."""

    front: Shard
    """The embedding and the first layers; alone in the ring, the whole model."""
    head: Shard | None
    """The head apart from the layers; None when the front has it."""
    context: int
    """Most tokens that the model takes, prompt included."""


class Generation:
    """The state of one order; ``embed`` and ``pick`` run on the compute thread."""

    def __init__(
        self, order: Order, machine: Entry, ends: Ends, key: SessionKey, begin: float
    ) -> None:
        self.machine = machine
        self.gauge = Gauge(begin)
        self.outputs: asyncio.Queue[Output | MeshError] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.outcome: FinishReason | MeshError = FinishReason.CANCELLED
        self.cause: MeshError | None = None  # of a failure on this rank
        self._order = order
        self._ends = ends
        self._key = key
        self._cache = ends.front.new_cache()
        self._history = list(order.prompt)
        self._rows = None if ends.head else 1  # of logits to compute, where the front does
        self._row: Tensor | None = None  # the last local output, for a Pick without a blob

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._order.prompt)

    def embed(self, job: Embed, watch: Stopwatch) -> Blob | None:
        """Run tokens through the embedding and the local layers."""
        watch.queued()
        self._cache.crop(job.pos)
        tokens = torch.tensor([job.tokens])  # [1, T]
        output = self._ends.front.forward(tokens, self._cache, rows=self._rows)  # [1, T, D]
        watch.computed()
        if job.keep:
            blob = sealed(self._key, output[:, -job.keep :])
            watch.serialised()
            return blob
        self._row = output[:, -1:]
        return None

    def pick(self, job: Pick, watch: Stopwatch) -> int:
        """Run the head on one row and sample the token at ``job.pos``."""
        watch.queued()
        row = self._row if job.blob is None else opened(self._key, job.blob)  # [1, 1, D]
        if row is None:
            raise ModelError(f"no row to sample the token at position {job.pos} from")
        watch.serialised()
        head = self._ends.head
        logits = head.forward(row, None, rows=1) if head else row  # [1, 1, V]
        token = pick(
            logits[0, -1],
            self._order.sampling,
            position=job.pos,
            history=self._history,
            prompt_len=self.prompt_tokens,
        )
        watch.computed()
        return token

    def note(self, action: Emit | Progress | Done | Failed) -> None:
        """Pass on what the machine says to whoever waits for the outputs."""
        match action:
            case Emit(token):
                self.outputs.put_nowait(Token(token))
            case Progress(done, total):
                self.outputs.put_nowait(Prefilled(done, total))
            case Done(reason):
                self.outcome = reason
            case Failed(code, text, rank):
                self.outcome = self.cause or error_of(code, text, rank)
            case _:
                assert_never(action)

    def commit(self, token: int) -> bool:
        """Add a token to the history; say whether it ends the answer."""
        self._history.append(token)
        return self._order.is_last(token)
