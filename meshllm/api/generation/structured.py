"""OpenAI's `response_format` and `text.format`: the JSON schema that an answer has to satisfy."""

import json

from meshllm.strict_json import WrongField

ANY_OBJECT = '{"type":"object"}'
_NAME_CHARS = 64  # OpenAI API reference
_KNOWN = {"name", "schema", "strict", "description"}


def schema_of(given: object) -> str | None:
    """Return the JSON schema of a `response_format`, None for text.

    Schemas are always followed, as if `strict` were set.

    Raises:
        WrongField: it is malformed, or asks for something else.
    """
    match given:
        case None:
            return None
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if not rest:
            return ANY_OBJECT
        case {"type": "json_schema", "json_schema": dict(wanted), **rest} if not rest:
            return _schema(wanted, "response_format.json_schema")
        case _:
            raise _wrong("response_format")


def schema_of_format(given: object) -> str | None:
    """Return the JSON schema of a `text.format` of responses, as `schema_of` does."""
    match given:
        case {"type": "json_schema", **wanted}:
            return _schema({str(name): value for name, value in wanted.items()}, "text.format")
        case None | {"type": "text" | "json_object"}:
            return schema_of(given)
        case _:
            raise _wrong("text.format")


def _wrong(where: str) -> WrongField:
    return WrongField(where, f"`{where}` is not `text`, `json_object` or a `json_schema`")


def _schema(wanted: dict[str, object], where: str) -> str:
    if unknown := wanted.keys() - _KNOWN:
        name = f"{where}.{min(unknown)}"[:100]
        raise WrongField(name, f"`{name}` is not supported")
    given, schema = wanted.get("name"), wanted.get("schema", {})
    if not (isinstance(given, str) and 0 < len(given) <= _NAME_CHARS):
        text = f"`{where}.name` must be a text of 1 to {_NAME_CHARS} characters"
        raise WrongField(f"{where}.name", text)
    if not isinstance(wanted.get("strict"), bool | None):
        raise WrongField(f"{where}.strict", f"`{where}.strict` must be true or false")
    if not isinstance(wanted.get("description"), str | None):
        raise WrongField(f"{where}.description", f"`{where}.description` must be a text")
    if not isinstance(schema, dict):
        raise WrongField(f"{where}.schema", f"`{where}.schema` must be an object")
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
