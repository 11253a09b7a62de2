"""What is known about splitting a model type; loads no model and neither torch nor transformers."""

import json
from dataclasses import dataclass
from importlib import resources

from meshllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What models of a type can do in a ring."""

    model_type: str
    equal: bool
    """Parts give the logits of the whole model, bit for bit."""
    reason: str
    """Why not; empty when equal."""
    whole: bool = False
    """One part with all layers gives the logits of the stock model: it runs on one node."""
    chunkable: bool = False
    """Several rows may be written onto a filled cache: chunked prefill, checked drafts."""
    croppable: bool = False
    """Rows may be taken back from the cache."""
    transformers: str = ""
    """The version that was measured; empty when nothing was."""

    def require(self, members: int) -> None:
        """Raise `ModelError` unless a ring of that many members gives the right numbers."""
        if self.equal or (members == 1 and self.whole):
            return
        hint = "it runs whole: `--nodes 1`" if self.whole else "choose a model of another type"
        raise ModelError(
            f"model type `{self.model_type}` cannot be split: {self.reason}", hint=hint
        )


def known_verdicts() -> dict[str, Verdict]:
    """Read what the last run of the whole parity table found, by ``type`` or ``type:variant``."""
    text = resources.files(__package__).joinpath("families.json").read_text("utf-8")
    return {name: Verdict(**fields) for name, fields in json.loads(text).items()}
