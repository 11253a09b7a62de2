"""The verdict on splitting a model type; imports neither torch nor transformers."""

import json
import tomllib
from dataclasses import dataclass, replace
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
    """Return the verdict on each type, also on wrappers of text models and on what has no text."""
    measured, table = measured_verdicts(), tomllib.loads(_read("families.toml"))
    wrappers = {
        name: replace(measured[text], model_type=name) for name, text in table["wrappers"].items()
    }
    excluded = {
        name: Verdict(name, equal=False, reason=why)
        for why, group in table["excluded"].items()
        for name in group["types"]
    }
    return dict(sorted((measured | wrappers | excluded).items()))


def measured_verdicts() -> dict[str, Verdict]:
    """Read the verdicts of the last full parity run, by ``type`` or ``type:variant``."""
    return {name: Verdict(**fields) for name, fields in json.loads(_read("families.json")).items()}


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
