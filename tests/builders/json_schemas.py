"""Random JSON schemas."""

from random import Random
from typing import Any

WORDS = ("name", "age", "size", "kind", "tags", "place")


def draw_schema(draw: Random, depth: int = 2) -> dict[str, Any]:
    """Draw a schema of an object, of arrays and objects up to a depth."""
    names = draw.sample(WORDS, draw.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _value(draw: Random, depth: int) -> dict[str, Any]:
    kinds = ("integer", "boolean", "null", "string", "enum", "range", "pattern")
    kind = draw.choice(kinds + (("object", "array", "anyOf") if depth else ()))
    match kind:
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 12)}
        case "enum":
            return {"enum": draw.sample(("red", "green", 7, None, True), draw.randint(1, 3))}
        case "range":
            low = draw.randint(-9, 9)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 99)}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(("^[a-c]{1,4}$", "^(yes|no)$"))}
        case "object":
            return draw_schema(draw, depth - 1)
        case "array":
            return {"type": "array", "items": _value(draw, depth - 1), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [_value(draw, 0), _value(draw, 0)]}
        case _:
            return {"type": kind}
