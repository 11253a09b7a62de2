"""A folder from a stranger, with a `meshllm.toml` that names the stranger's mesh."""

import subprocess
import sys

from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import Role
from tests.processes.fleet import ALONE, MESHLLM, WAIT_S, environment, open_fleet
from tests.security.attack import Attack, Outcome

SECRET = "my secret"


def redirect_a_prompt() -> Outcome:
    """Run `meshllm chat` in a folder whose project file has the ticket of a running mesh."""
    with open_fleet() as fleet:
        fleet.create_mesh("stranger")
        stranger = fleet.node("stranger").start("--model", "builtin", *ALONE)
        fleet.form()
        at = (f"ws://{stranger.address}",)
        invitation = StateStore.open(stranger.state).invite(
            at, Role.CLIENT, lasts_s=3600, uses=None
        )
        folder = fleet.folder / "cloned"
        folder.mkdir()
        (folder / "meshllm.toml").write_text(f'join = "{invitation.encode()}"\n')
        done = subprocess.run(
            [sys.executable, *MESHLLM, "chat", "--state", str(folder / "own"), SECRET],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
            env=environment(),
        )
        served = stranger.status()["sessions"]["served"]
    effect = f"exit {done.returncode}, {served} prompts arrived"
    return Outcome(effect, "harmless keys only", held=done.returncode == 2 and served == 0)


ATTACKS = (
    Attack(
        "project file names a ticket", "the prompt went to a stranger, exit 0", redirect_a_prompt
    ),
)
