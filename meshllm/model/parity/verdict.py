"""The verdict on splitting a model type; imports neither torch nor transformers."""

import json
from dataclasses import dataclass
from importlib import resources

from meshllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a ring supports for models of a type."""

    model_type: str
    equal: bool
    """Parts have the logits of the whole model, bit for bit."""
    reason: str
    """Why not; empty if equal."""
    whole: bool = False
    """One part with all layers has the logits of the stock model: it runs on one node."""
    chunkable: bool = False
    """Several rows can be appended to a filled cache: chunked prefill, verified drafts."""
    croppable: bool = False
    """The cache can be cropped: rejected drafts are dropped."""
    transformers: str = ""
    """The version that was measured; empty if none was."""

    def require(self, members: int) -> None:
        """Raise `ModelError` unless a ring of that many members is exact."""
        if self.equal or (members == 1 and self.whole):
            return
        hint = "run it whole with `--nodes 1`" if self.whole else "choose a model of another type"
        raise ModelError(
            f"Model type `{self.model_type}` cannot be split: {self.reason}", hint=hint
        )


def known_verdicts() -> dict[str, Verdict]:
    """Read the verdicts of the last full parity run, by ``type`` or ``type:variant``."""
    text = resources.files(__package__).joinpath("families.json").read_text("utf-8")
    return {name: Verdict(**fields) for name, fields in json.loads(text).items()}
