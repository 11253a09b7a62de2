"""`meshllm key`: the keys of the API."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from meshllm.cli.shared.client import NodeClient, socket_path
from meshllm.cli.shared.options import Json, settings, takes, with_state
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, state_path
from meshllm.errors import MeshError, UserError
from meshllm.units import listed, parse_duration

if TYPE_CHECKING:
    from meshllm.api.access.accounts import Accounts, ApiKey

app = typer.Typer(help="Create, list and revoke keys of the API.", rich_markup_mode=None)


@app.command(
    epilog="""\b
Examples:
  meshllm key create laptop
  meshllm key create guest --expires 7d --concurrency 1 --tokens-per-day 100000
  meshllm key create me --owner
  meshllm key create ci --models Qwen/Qwen3-0.6B --json
  meshllm key create clinic --trust attic,cellar
  meshllm key create class --deadline 60s --max-reasoning 2000
"""
)
@takes("state")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name the key, for lists and usage.")],
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Expire after this time: `12h`, `30d`; never when not set."
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Allow only these models, comma-separated.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Allow N requests at a time.")
    ] = None,
    tokens_per_day: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Allow N tokens a day (UTC), read and written."),
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Let only these nodes see its requests: names or ids, comma-separated.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="End answers that take longer: `90s`, `5m`."),
    ] = None,
    max_reasoning: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Allow N tokens of reasoning in an answer."),
    ] = None,
    owner: Annotated[
        bool,
        typer.Option(
            "--owner", help="Open the owner's views of the page, too: keys, usage, plans."
        ),
    ] = False,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Create a key and print it.

    Only the key goes to stdout. It is stored as a keyed hash, so it cannot be shown again. It is
    valid at once at every API server of this node; a running node needs no restart.
    """
    from meshllm.api.access.accounts import KeyLimits

    now, allowed, trusted = time.time(), listed(models), listed(trust)
    if allowed == ():
        raise UserError("`--models` names no model", hint="leave it out to allow all")
    if trusted == ():
        raise UserError("`--trust` names no node", hint="leave it out to trust all")
    expires_s = None if expires is None else int(now) + parse_duration(expires)
    limits = KeyLimits(
        expires_s=expires_s,
        models=allowed or (),
        concurrency=concurrency,
        tokens_per_day=tokens_per_day,
        trust=trusted or (),
        deadline_s=None if deadline is None else parse_duration(deadline),
        max_reasoning=max_reasoning,
    )
    chosen = settings(flags)
    with opened_accounts(chosen) as accounts:
        key = accounts.create(name, limits, now, is_owner=owner)
    try:
        if as_json:
            render.dump({"name": name, "key": key, "expires_s": expires_s, "owner": owner})
        else:
            render.out(key)
    except (MeshError, SystemExit):  # it is stored, so that no other process can use the name
        text = f"nobody has seen this key: revoke it with `meshllm key revoke {name}`"
        render.print_message(text)
        raise
    if not as_json:
        render.print_message("stored as a hash: it cannot be shown again")
    if limits.models and _is_running(chosen):
        _note_unserved(chosen, limits.models)


def _note_unserved(chosen: Settings, names: Sequence[str]) -> None:
    """Say which models of a new key the mesh does not serve: a name may be mistyped."""
    import asyncio

    from meshllm.status import find_model

    try:
        served = asyncio.run(NodeClient(socket_path(chosen)).models())
    except MeshError:  # the key is made: what the note would say is not worth a failure
        return
    if unserved := [name for name in names if find_model(served, name) is None]:
        which = ", ".join(f"`{render.safe(name)}`" for name in unserved)
        render.print_message(f"note: the mesh does not serve {which} now")


@app.command("list")
@takes("state")
def list_keys(as_json: Json = False, **flags: Scalar) -> None:
    """List the keys, without their secrets."""
    chosen = settings(flags)
    with opened_accounts(chosen) as accounts:
        found = accounts.list_keys()
    now = time.time()
    if as_json:
        render.dump({"keys": [each.fields(now) for each in found]})
    elif found:
        header = (
            "name", "id", "state", "role", "created", "expires", "models", "at a time",
            "tokens a day", "trusted", "deadline s", "reasoning",
        )  # fmt: skip
        render.out(render.table(header, [_row(each, now) for each in found]))
    else:
        create = with_state("meshllm key create NAME", state_path(chosen))
        render.print_message(f"no keys; create one with `{create}`")


@app.command()
@takes("state")
def revoke(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Revoke the key of this name; `-` reads a key from stdin."
        ),
    ],
    **flags: Scalar,
) -> None:
    """Revoke a key permanently; the next request with it is refused.

    The running node tells its mesh: every member refuses the key at its API servers, also one from
    a `--key-file`. With `-` it can be a key that was created on another node.
    """
    chosen = settings(flags)
    with opened_accounts(chosen) as accounts:
        if name == "-":
            accounts.revoke_key(_read_key(), time.time())
        else:
            accounts.revoke(name, time.time())
        tags = accounts.revoked()
    what = "the key" if name == "-" else f"`{name}`"
    if not _is_running(chosen):
        render.print_message(f"{what} is revoked here; other nodes are notified when the node runs")
        return
    import asyncio

    asyncio.run(NodeClient(socket_path(chosen)).revoke(tags))
    render.print_message(f"{what} is revoked at all API servers of the mesh")


def _is_running(chosen: Settings) -> bool:
    """Return whether a node answers; the keys have changed, so that a folder is not refused."""
    from meshllm.api.unix import is_answered

    return is_answered(socket_path(chosen))


def _read_key() -> str:
    """Read the only key on stdin, which may be in the form of a `--key-file`, with comments."""
    from meshllm.api.access.accounts import MAX_KEY_CHARS, MAX_KEY_FILE_BYTES, keys_in

    stdin, data = sys.stdin, b""
    with suppress(OSError):  # such as the stdin that `nohup` leaves, which is for writing only
        if stdin is not None:
            read = stdin.buffer.readline if stdin.isatty() else stdin.buffer.read
            data = read(MAX_KEY_FILE_BYTES)
    # In Latin-1, as HTTP headers are decoded: any byte is a character.
    keys = keys_in(data.decode("latin-1"))
    if len(keys) > 1:
        raise UserError(f"stdin has {len(keys)} keys", hint="revoke them one by one")
    if not keys or len(keys[0]) > MAX_KEY_CHARS:
        raise UserError(f"stdin has no key of 1 to {MAX_KEY_CHARS} characters")
    return keys[0]


@contextmanager
def opened_accounts(chosen: Settings) -> "Iterator[Accounts]":
    """Open the keys and their usage; an error of their file is one for people."""
    import sqlite3

    from meshllm.api.access.accounts import Accounts

    with Accounts.open(state_path(chosen)) as accounts:
        try:
            yield accounts
        except sqlite3.Error as error:  # such as a full disk
            text = f"Keys and usage in `{state_path(chosen)}` cannot be read or changed: {error}"
            hint = "free space on its disk" if "full" in str(error) else None
            raise MeshError(text, hint=hint) from None


def _row(key: "ApiKey", now: float) -> tuple[object, ...]:
    limits = key.limits
    expires = "never" if limits.expires_s is None else _date(limits.expires_s)
    return (
        key.name, key.id, key.state(now), "owner" if key.is_owner else "user",
        _date(key.created_s), expires, ", ".join(limits.models) or "all",
        limits.concurrency, limits.tokens_per_day, ", ".join(limits.trust) or "all",
        limits.deadline_s, limits.max_reasoning,
    )  # fmt: skip


def _date(seconds: int) -> str:
    """Return the day of a Unix time; earlier versions stored later ones than have a date."""
    from meshllm.api.access.accounts import LAST_S

    return f"{datetime.fromtimestamp(min(seconds, LAST_S), UTC):%Y-%m-%d}"
