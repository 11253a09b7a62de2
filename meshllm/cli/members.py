"""`meshllm ring ticket|members|remove`: who may enter; decides nothing itself."""

import re
import sys
from typing import Annotated, Any, Literal

import typer

from meshllm.cli import render
from meshllm.cli.options import Json, settings, takes
from meshllm.config import Scalar, Settings
from meshllm.errors import UserError

RoleName = Literal["node", "client"]
Fields = dict[str, Any]

SHORTEST = 7  # letters of an id that may stand for the whole of it: the short form
_DURATION = re.compile(r"(\d{1,9})(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

TICKET_EXAMPLES = """\b
Examples:
  meshllm ring ticket
  meshllm ring ticket --role client --expires 7d --uses 5
  meshllm ring ticket --json
"""
REMOVE_EXAMPLES = """\b
Examples:
  meshllm ring remove 3kq7f2ab
  meshllm ring remove 3kq7f2ab --yes
"""


@takes("state")
def ticket(
    role: Annotated[
        RoleName,
        typer.Option(metavar="node|client", help="A node holds layers, a client only asks."),
    ] = "node",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Good for so long: `90s`, `30m`, `1h`, `7d`.")
    ] = "1h",
    uses: Annotated[int, typer.Option(min=1, metavar="N", help="Good for so many joiners.")] = 1,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Print a ticket that lets another machine in.

    Whoever has the ticket can use it: send it as you would a password. stdout is the ticket.
    """
    wanted = {"role": role, "expires_s": _seconds(expires), "uses": uses}
    made = _post(settings(flags), "/mesh/ticket", wanted)["ticket"]
    if as_json:
        render.dump({"ticket": made, **wanted})
        return
    render.out(made)
    command = "node" if role == "node" else "chat"
    times = "once" if uses == 1 else f"{uses} times"
    render.talk(f"good {times} within {expires}; there: meshllm {command} --join {made}")


@takes("state")
def members(as_json: Json = False, **flags: Scalar) -> None:
    """List who may take part in the mesh."""
    found = _members(settings(flags))
    if as_json:
        render.dump({"members": found})
        return
    rows = [(each["node"], each["role"] or each["state"], each["name"]) for each in found]
    render.out(render.table(("member", "role", "name"), rows))


@takes("state")
def remove(
    member: Annotated[
        str, typer.Argument(metavar="ID", help="An id of `ring members`, or how it begins.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Shut a member out for ever.

    Its links are cut at once and every node is told. The same key can never come back.
    """
    chosen = settings(flags)
    found = find(_members(chosen), member)
    who = " ".join(each for each in (found["name"], found["node"]) if each)
    if not yes:
        if not _is_person():
            raise UserError(f"Nobody is here to confirm that {who} goes", hint="add `--yes`")
        if not typer.confirm(f"Shut out {who} for ever?", err=True):
            raise typer.Exit(1)
    done = _post(chosen, "/mesh/remove", {"node": found["node"]})
    if as_json:
        render.dump(done)
    else:
        render.talk(f"{who} is shut out")


def find(members: list[Fields], text: str) -> Fields:
    """Return the member whose id begins with a text; raise `UserError` for none or several."""
    wanted = _letters(text)
    if len(wanted) < SHORTEST:
        raise UserError(
            f"`{text}` is too short for an id", hint=f"give {SHORTEST} letters of it or more"
        )
    there = [each for each in members if each["state"] != "removed"]
    found = [each for each in there if _letters(each["node"]).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"`{text}` begins {len(found)} ids", hint="give more letters of it")
    raise UserError(f"No member has the id `{text}`", hint="see `meshllm ring members`")


def _is_person() -> bool:
    return sys.stdin.isatty()


def _letters(text: str) -> str:
    return text.replace("-", "").lower()


def _seconds(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        raise UserError(f"`{text}` is no time", hint="write it as `90s`, `30m`, `1h` or `7d`")
    return int(match[1]) * _SECONDS[match[2]]


def _members(chosen: Settings) -> list[Fields]:
    import asyncio

    from meshllm.cli.door import Client, door_path
    from meshllm.cli.status import clean

    reply = asyncio.run(Client(door_path(chosen)).get("/mesh/members"))
    members: list[Fields] = clean(reply["members"])
    return members


def _post(chosen: Settings, path: str, fields: Fields) -> Fields:
    import asyncio

    from meshllm.cli.door import Client, door_path

    return asyncio.run(Client(door_path(chosen)).post(path, fields))
