"""`meshllm doctor`: reports problems and how to fix them."""

import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING

from meshllm.cli.node.node import Transports, transports_of
from meshllm.cli.shared.options import Json, takes
from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, load
from meshllm.errors import MeshError

if TYPE_CHECKING:
    from meshllm.cli.doctor.finding import Finding
    from meshllm.status import MeshStatus

EXAMPLES = """\b
Examples:
  meshllm doctor
  meshllm doctor --json
"""


@takes("model", "device", "listen", "state")
def doctor(transport: Transports = None, as_json: Json = False, **flags: Scalar) -> None:
    """Check this machine, its node and the links to its peers.

    It changes no settings or state, contacts no other machine, works with and without a running
    node, and exits with 1 if a check fails. A model that passed is not loaded again for a day,
    unless its files, the settings, the installed libraries or this machine change. The kernels
    that were chosen by measurement are listed, and in JSON all of their times.
    """
    config = load({**flags, "transport": transport})
    chosen = config.settings
    with render.Status(sys.stderr) as status:
        status.show("querying the node")
        from meshllm.cli.doctor import checks
        from meshllm.model.kernels.measured import remembered

        transports, mesh = transports_of(config), _mesh_status(chosen)
        status.show("checking this machine")
        findings = list(checks.examine(chosen, mesh, transports))
    failed = sum(each.verdict == "fail" for each in findings)
    if as_json:
        kernels = [{**asdict(each), "gain": each.gain} for each in remembered()]
        found = [asdict(each) for each in findings]
        render.dump({"failed": failed, "findings": found, "kernels": kernels})
    else:
        render.out(lay_out(findings, shutil.get_terminal_size().columns))
    if failed:
        raise MeshError(f"{failed} of {len(findings)} checks failed")


def lay_out(findings: "Iterable[Finding]", columns: int) -> str:
    """Lay out each finding and its hint, wrapped between words at ``columns``."""
    lines: list[str] = []
    for each in findings:
        lines += _wrap(f"{each.verdict:<5} {each.what:<10} ", each.found, columns)
        if each.advice:
            lines += _wrap(f"{'':16} hint: ", each.advice, columns)
    return "\n".join(lines)


def _wrap(head: str, text: str, columns: int) -> list[str]:
    return wrap(
        render.safe(text),
        columns,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _mesh_status(chosen: Settings) -> "MeshStatus | MeshError":
    import asyncio

    from meshllm.cli.shared.client import NodeClient, socket_path

    try:
        return asyncio.run(NodeClient(socket_path(chosen)).status())
    except MeshError as error:
        return error
