"""A ticket that an attacker hands over: it names servers that only the victim can reach."""

import asyncio
from pathlib import Path

from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.ticket import Ticket
from tests.processes.fleet import meshllm, open_fleet
from tests.security.attack import Attack, Outcome

EXPIRES_S = 20  # s; the victim tries until then


def ticket_names_inner_servers() -> Outcome:
    """Let the victim chat with a ticket of addresses with path, query, user and CRLF."""
    with open_fleet() as fleet:
        lines, code = asyncio.run(_chat(fleet.folder))
    asked = sorted({line for line in lines if line != "GET / HTTP/1.1"})
    effect = f"exit {code}, {len(lines)} connections" + (f", `{asked[0]}`" if asked else "")
    return Outcome(effect, "host and port only", held=not asked and code != 0)


async def _chat(folder: Path) -> tuple[list[str], int]:
    lines: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readline()).decode(errors="replace").strip())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        store = StateStore.open(folder / "attacker")
        store.create_mesh()
        inner = tuple(
            f"ws://{text}"
            for text in (f"{at}/admin?off=1", f"{at}/#x", f"u:p@{at}/", f"{at}/%0d%0aX:y", at)
        )
        made = store.invite(inner, Role.CLIENT, lasts_s=EXPIRES_S, uses=None)
        ticket = Ticket(made.inviter, inner, made.role, made.expires_s, made.secret).encode()
        words = "chat", "--join", ticket, "my secret"
        done = await asyncio.to_thread(lambda: meshllm(*words, state=folder / "victim"))
    return lines, done.returncode


ATTACKS = (
    Attack("a ticket names inner servers", "not known", ticket_names_inner_servers),
)  # fmt: skip
