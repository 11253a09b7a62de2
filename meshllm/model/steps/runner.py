"""A shard with the strategy that runs its steps, see `meshllm.model.steps.strategies`."""

from collections.abc import Sequence

from torch import Tensor

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.steps.execution import Strategy
from meshllm.model.steps.strategies import ReplayedSteps, Trial, choose_steps
from meshllm.model.steps.trial import try_steps


class Runner:
    """Runs one shard."""

    def __init__(
        self, shard: Shard, counts: Sequence[int] = (), trial: Trial | None = None
    ) -> None:
        """Prepare steps of one row and of each number of rows in ``counts``; if empty, stock steps.

        ``trial`` returns why they cannot be used, or ""; None runs `try_steps`.

        A shard has one runner, because a runner exchanges modules.
        """
        self.shard = shard
        self.steps, self.execution = choose_steps(shard, counts, trial or try_steps)
        self.step, self.step_many = self.steps.step, self.steps.step_many
        self.runs_in_one_pass, self.warm_up_steps = self.steps.runs_in_one_pass, self.steps.warm_up
        self.new_cache = shard.new_cache

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a chunk of a prompt, see `Shard.forward`."""
        return self.steps.prefill(x, cache, rows)

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.shard.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def is_row_invariant(self) -> bool:
        """Whether several rows run in one pass, in about the time of one row."""
        return self.execution.strategy is not Strategy.STOCK

    @property
    def recorded_bytes(self) -> int:
        """The memory of compiled steps."""
        return self.steps.replay.bytes if isinstance(self.steps, ReplayedSteps) else 0

    @property
    def prepared(self) -> int:
        """Steps so far that were slower than later ones of as many rows."""
        return self.steps.replay.prepared if isinstance(self.steps, ReplayedSteps) else 0
