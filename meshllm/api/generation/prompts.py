"""The forms of the text that a client wants completed or embedded."""

from dataclasses import replace

from meshllm.request import Request
from meshllm.strict_json import WrongField


def read_prompts(value: object, name: str, most: int) -> list[str | tuple[int, ...]]:
    """Read a text, a list of texts, a list of token ids, or a list of such lists.

    Raises:
        WrongField: the field is anything else, has more than ``most``, or one is empty.
    """
    if value is None:
        raise WrongField(name, f"`{name}` is missing", code="missing_required_parameter")
    if isinstance(value, list) and _are_ids(value):
        return [tuple(value)]
    several = value if isinstance(value, list) else [value]
    prompts = [_read_prompt(each, name) for each in several]
    if not all(prompts) or not 0 < len(prompts) <= most:
        text = f"`{name}` must be 1 to {most} prompts, none of them empty"
        raise WrongField(name, text)
    return prompts


def with_prompt(asked: Request, prompt: str | tuple[int, ...]) -> Request:
    """Return a request for a prompt."""
    return replace(asked, raw=prompt) if isinstance(prompt, str) else replace(asked, ids=prompt)


def _read_prompt(value: object, name: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and (_are_ids(value) or not value):
        return tuple(value)
    text = f"`{name}` must be text, token ids, or a list of one of them"
    raise WrongField(name, text, code="invalid_type")


def _are_ids(value: list[object]) -> bool:
    return set(map(type, value)) == {int}  # there may be two million
