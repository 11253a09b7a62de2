"""`meshllm usage`: what was used at the API."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from meshllm.cli.commands.key import opened_accounts
from meshllm.cli.shared.options import Json, settings, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar

Grouping = Literal["key", "model", "day"]

EXAMPLES = """\b
Examples:
  meshllm usage
  meshllm usage --by key
  meshllm usage --by model --json
"""

_NO_KEY = "(no key)"


@takes("state")
def usage(
    by: Annotated[
        Grouping, typer.Option(metavar="key|model|day", help="Group by this; days are of UTC.")
    ] = "day",
    as_json: Json = False,
    **flags: Scalar,
) -> None:
    """Show requests and tokens of the API on TCP.

    Tokens read are those of prompts; cached ones of them came from the prefix cache. Requests on
    the owner's socket, such as those of `meshllm chat`, are not counted. A request that failed, or
    that its daily limit refused, is an error.
    """
    with opened_accounts(settings(flags)) as accounts:
        found = accounts.usage(by)
    if as_json:
        render.dump({"by": by, "usage": [{by: name, **asdict(used)} for name, used in found]})
        return
    if not found:
        render.print_message("no requests yet")
        return
    header = (by, "requests", "errors", "read", "cached", "written")
    render.out(render.table(header, [(n or _NO_KEY, *asdict(used).values()) for n, used in found]))
