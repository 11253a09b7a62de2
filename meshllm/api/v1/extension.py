"""`meshllm`, the object in a request of what OpenAI's fields do not have."""

from dataclasses import dataclass

from meshllm.outline.eligibility import OutlineMode
from meshllm.strict_json import WrongField

_MODES = {None: None, False: None, True: OutlineMode.ON, "auto": OutlineMode.AUTO}


@dataclass(frozen=True, slots=True)
class Extension:
    """The object; null is the same as absent."""

    outline: bool | str | None = None

    def outline_mode(self, choices: int) -> OutlineMode | None:
        """Return how to outline so many answers; raise `WrongField` if it cannot be done."""
        if self.outline not in _MODES:
            text = f"Invalid value `{str(self.outline)[:40]}` for `meshllm.outline`"
            raise WrongField("meshllm.outline", text, hint="true, false or `auto`")
        mode = _MODES[self.outline]
        if choices == 1:
            return mode
        if mode is OutlineMode.ON:
            raise WrongField("meshllm.outline", f"`meshllm.outline` cannot make {choices} answers")
        return None
