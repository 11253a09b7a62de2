"""Pacing of a generation: chunk size, window, and timeouts."""

from dataclasses import dataclass

from meshllm.errors import UserError
from meshllm.protocol.session.codec import MAX_ROWS
from meshllm.protocol.session.stage import MAX_PATIENCE_S, MAX_PENDING


@dataclass(frozen=True, slots=True)
class PrefillPacing:
    """Pacing of one generation on a ring."""

    chunk: int = 256
    """Rows of a prefill chunk."""
    window: int = 4
    """Chunks in flight: one per stage keeps a ring of 4 busy."""
    patience_s: float = MAX_PATIENCE_S
    """Wait for a result before the first retry. Links are reliable and detect silence themselves,
    and a busy rank may queue for minutes: this timeout covers what neither explains."""
    retries: int = 3
    """Restarts without progress before the generation fails."""
    close_s: float = 3.0
    """Wait for Close to come back; as long as a link may be silent."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= MAX_ROWS:
            raise UserError(f"A chunk of {self.chunk} rows; allowed are 1 to {MAX_ROWS}")
        if not 1 <= self.window <= MAX_PENDING:
            raise UserError(f"A window of {self.window} chunks; allowed are 1 to {MAX_PENDING}")
