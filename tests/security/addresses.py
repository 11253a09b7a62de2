"""A member whose addresses are servers that only the victim can reach."""

import asyncio
from pathlib import Path

from meshllm.protocol.membership.records import Profile
from tests.processes.fleet import ALONE, Node, open_fleet
from tests.security.attack import Attack, Outcome
from tests.security.member import join
from tests.security.owner import alone_s, compared, owner_s

WATCH_S = 10.0  # s; a node dials a new member at once, then with a backoff of 1, 2, 4 s


def reach_an_inner_server() -> Outcome:
    """Publish a loopback address with a path, and count what arrives there."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("victim")
        victim = fleet.node("victim").start("--model", "builtin", *ALONE)
        fleet.form()
        alone = alone_s(victim)
        lines, crowded = asyncio.run(_publish(ticket, fleet.folder / "attacker", victim))
    shown = f"{len(lines)} connections" + (f", `{lines[0]}`" if lines else "")
    done = Outcome(shown, "none to hosts of this machine", held=not lines)
    return compared(done, alone, crowded)


async def _publish(ticket: str, state: Path, victim: Node) -> tuple[list[str], float]:
    lines: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readline()).decode().strip())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with join(ticket, state) as member:
            inner = (f"ws://127.0.0.1:{port}/admin?off=1", f"ws://localhost:{port}")
            now = asyncio.get_running_loop().time()
            profile = Profile("attacker", "1", inner, 0)
            member.links.act(member.machine.publish(profile=profile, now=now))
            await asyncio.sleep(1)
            crowded = await asyncio.to_thread(owner_s, victim)
        await asyncio.sleep(WATCH_S)
    return lines, crowded


ATTACKS = (
    Attack(
        "a peer's address is an inner server",
        "10 GETs in 20 s, path of its choice",
        reach_an_inner_server,
    ),
)
