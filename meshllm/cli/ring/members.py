"""`meshllm ring ticket|members|remove`: membership of the mesh."""

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings
from meshllm.errors import UserError
from meshllm.units import parse_duration

if TYPE_CHECKING:
    from meshllm.cli.shared.client import NodeClient
    from meshllm.status import Members, MemberStatus, Named

RoleName = Literal["node", "client"]

MIN_PREFIX = 7  # characters that identify a member: the short form of an id

TICKET_EXAMPLES = """\b
Examples:
  meshllm ring ticket
  meshllm ring ticket --role client --expires 7d --uses 5
  meshllm ring ticket --role client --concurrency 1 --tokens-per-day 100000
  meshllm ring ticket --json
"""
REMOVE_EXAMPLES = """\b
Examples:
  meshllm ring remove 3kq7f2ab
  meshllm ring remove 3kq7f2ab --spare m5xd7qpe --yes
"""


@takes("state")
def ticket(
    role: Annotated[
        RoleName,
        typer.Option(metavar="node|client", help="Admit a node, or a client without layers."),
    ] = "node",
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Expire after this time: `90s`, `30m`, `1h`, `7d`.")
    ] = "1h",
    uses: Annotated[int, typer.Option(min=1, metavar="N", help="Admit up to N machines.")] = 1,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=2, metavar="N", help="Maximum concurrent requests of a client, per node."
        ),
    ] = None,
    tokens_per_day: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Maximum tokens of a client per day (UTC), per node."
        ),
    ] = None,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Print a ticket that admits another machine.

    Anyone with the ticket can use it: treat it like a password. Only the ticket goes to stdout.
    """
    import asyncio

    expires_s = parse_duration(expires)
    wished = {"concurrency": concurrency, "tokens_per_day": tokens_per_day}
    limits = {name: most for name, most in wished.items() if most is not None}
    made = asyncio.run(_node(settings(flags)).invite(role, expires_s, uses, **limits))
    if as_json:
        terms = {"role": role, "expires_s": expires_s, "uses": uses, **wished}
        render.dump({"ticket": made, **terms})
        return
    render.out(made)
    command = "node" if role == "node" else "chat"
    times = "once" if uses == 1 else f"{uses} times"
    is_seen = sys.stdout.isatty() and sys.stderr.isatty()  # else stderr may be a log
    shown = made if is_seen else "TICKET"
    render.print_message(
        f"valid {times} within {expires}; to use it: meshllm {command} --join {shown}"
    )


@takes("state")
def members(as_json: Json = False, **flags: Scalar) -> None:
    """List the members of the mesh."""
    found = _members(settings(flags))
    if as_json:
        from meshllm.status import to_json

        render.dump(to_json(found))
        return
    is_wide = not sys.stdout.isatty()
    render.out(lay_out(found.members, None if is_wide else shutil.get_terminal_size().columns))


@takes("state")
def remove(
    member: Annotated[
        str, typer.Argument(metavar="ID", help="Remove the member whose id starts with this.")
    ],
    spare: Annotated[
        list[str] | None,
        typer.Option("--spare", metavar="ID", help="Keep this node that it invited; repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Permanently remove a member from the mesh.

    Its links are closed at once, every node is notified, its key can never rejoin, and the ticket
    that admitted it admits nobody any more. Members that it invited go with it, unless `--spare`
    names them; this node itself always stays. Ids are listed by `ring members`.
    """
    import asyncio

    from meshllm.cli.ring.status import clean

    chosen = settings(flags)
    there = _members(chosen).members
    found = find(there, member)
    kept = [find(there, each) for each in spare or ()]
    if not yes:
        _confirm(found, guests(there, found, kept))
    done = asyncio.run(_node(chosen).remove(found.node, [each.node for each in kept]))
    if as_json:
        from meshllm.status import to_json

        render.dump(to_json(done))
        return
    known = {each.node: each for each in there}
    for gone in clean((done, *done.taken)):  # one may have joined since
        render.print_message(f"{_title(known.get(gone.node, gone))} was removed")
    spared = {each.node for each in done.spared}
    if staying := [each for each in there if each.node in spared and not each.is_self]:
        names = ", ".join(map(_name, staying))
        verb = "stays" if len(staying) == 1 else "stay"
        render.print_message(f"{names}, invited by {_name(found)}, {verb}")


def lay_out(members: "Sequence[MemberStatus]", columns: int | None = None) -> str:
    """Lay out a row per member with its inviter and id, truncated to the columns."""
    names = {each.node: _name(each) for each in members}
    rows = [
        (
            "*" if each.is_self else "",
            render.cut(each.name) or None,
            each.role or None,
            each.state,
            _inviter(each, names),
            each.node,
        )
        for each in members
    ]
    text = render.table(("", "name", "role", "state", "invited by", "id"), rows)
    if columns is None:
        return text
    return "\n".join(render.cut(line, columns) for line in text.split("\n"))


def guests(
    members: "Sequence[MemberStatus]", inviter: "MemberStatus", kept: "Sequence[MemberStatus]"
) -> "list[MemberStatus]":
    """Return the members that go with a member: those invited by it or its guests.

    A direct guest that led to this node, or to one to keep, stays with all that it led to.
    """
    paths = [(*each.inviters, each.node) for each in members if inviter.node in each.inviters]
    branches = {path[-1]: path[path.index(inviter.node) + 1] for path in paths}
    stay = {branches.get(each.node) for each in members if each.is_self or each in kept}
    return [each for each in members if branches.get(each.node) not in {None, *stay}]


def find(members: "Sequence[MemberStatus]", text: str) -> "MemberStatus":
    """Return the member whose id starts with a text; raise `UserError` for none or several."""
    wanted = _normalise(text)
    there = [each for each in members if each.state != "removed"]
    found = [each for each in there if _normalise(each.node).startswith(wanted)]
    is_id = len(wanted) >= MIN_PREFIX and found
    if named := [f"`{each.short}`" for each in there if each.name == text and not is_id]:
        hint = f"use its id, which is {' or '.join(named)}"
        raise UserError(f"`{text}` is a name, which any node may choose", hint=hint)
    if len(wanted) < MIN_PREFIX:
        raise UserError(
            f"`{text}` is too short for an id",
            hint=f"use {MIN_PREFIX} or more characters of it; see `meshllm ring members`",
        )
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"`{text}` matches {len(found)} ids", hint="use more characters of the id")
    raise UserError(f"No member has the id `{text}`", hint="see `meshllm ring members`")


def _confirm(found: "MemberStatus", going: "list[MemberStatus]") -> None:
    if not _is_interactive():
        raise UserError("Cannot ask for confirmation: stdin is not a terminal", hint="add `--yes`")
    for each in going:
        render.print_message(
            f"{_title(each)} will be removed, too: it was invited by {_name(found)}"
        )
    if not typer.confirm(f"Permanently remove {_title(found)}?", err=True):
        raise typer.Exit(1)


def _inviter(member: "MemberStatus", names: dict[str, str]) -> str | None:
    if member.inviters:
        return render.cut(names.get(member.inviters[-1], member.inviters[-1][:MIN_PREFIX]))
    return "(founder)" if member.role == "node" else None


def _title(member: "MemberStatus | Named") -> str:
    return " ".join(each for each in (member.name, member.node) if each)


def _name(member: "MemberStatus") -> str:
    return member.name or member.node[:MIN_PREFIX]


def _is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None if it is closed


def _normalise(text: str) -> str:
    return text.replace("-", "").rstrip("…").lower()


def _members(chosen: Settings) -> "Members":
    import asyncio

    from meshllm.cli.ring.status import clean

    return clean(asyncio.run(_node(chosen).members()))


def _node(chosen: Settings) -> "NodeClient":
    from meshllm.cli.shared.client import NodeClient, socket_path

    return NodeClient(socket_path(chosen))
