"""Reads the tables of a TOML file that a user wrote, with an error that says what to write."""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshllm.errors import UserError

MAX_BYTES = 1 << 20  # of a file
MAX_NAME = 64  # characters of a name


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """Read a file; raise `UserError` if it is not TOML."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        found = tomllib.loads(text.decode())
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or nested too deeply
        raise UserError(f"Invalid TOML in `{path}`: {error}", hint=hint) from None
    if len(text) > MAX_BYTES:
        raise UserError(f"`{path}` is longer than {MAX_BYTES} bytes", hint=hint)
    return found


def tables(found: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return an array of tables; empty if it is missing."""
    value = found.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise UserError(f"`{key}` must be an array of tables", hint=f"write `[[{key}]]` above each")
    return value


def check_keys(table: Mapping[str, Any], kind: str, known: Collection[str]) -> None:
    """Raise `UserError` if a table has a key that is not known."""
    if unknown := sorted(set(table).difference(known)):
        raise UserError(
            f"Unknown key `{unknown[0][:64]}` in a {kind}",
            hint=f"one of {', '.join(f'`{key}`' for key in sorted(known))}",
        )


def text(table: Mapping[str, Any], key: str, most: int = MAX_NAME) -> str:
    """Return a text of at most this many characters."""
    value = table.get(key)
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= most:
        return value
    raise UserError(
        f"`{key}` must be text of 1 to {most} characters", hint=f'write `{key} = "..."`'
    )


def number(table: Mapping[str, Any], key: str, most: float, *, zero: bool) -> float | None:
    """Return a number from 0, or above it, to ``most``; None if it is missing."""
    value = table.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= most and (value or zero):
        return float(value)
    raise UserError(
        f"`{key}` must be a number {'from' if zero else 'above'} 0 up to {most:.10g}",
        hint=f"write `{key} = 2.5`",
    )


def needed(table: Mapping[str, Any], key: str, most: float, kind: str) -> float:
    """Return a number above 0; raise `UserError` if it is missing."""
    found = number(table, key, most, zero=False)
    if found is None:
        raise UserError(f"A {kind} has no `{key}`", hint=f"write `{key} = 2.5`")
    return found
