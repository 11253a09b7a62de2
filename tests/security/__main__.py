"""Run attacks and print what each achieved; exit with 1 if one exceeded its bound.

Arguments select attacks by a part of their name; without any, all run.
"""

import subprocess
import sys

from meshllm.cli.terminal.render import out, print_message, table
from tests.security import (
    addresses,
    api,
    api_servers,
    beacons,
    charter,
    clients,
    configs,
    files,
    floods,
    lies,
    project_file,
    quic,
    records,
    relays,
    removal,
    tickets,
)
from tests.security.attack import Attack, Outcome

ATTACKS: tuple[Attack, ...] = (
    *project_file.ATTACKS,
    *files.ATTACKS,
    *configs.ATTACKS,
    *addresses.ATTACKS,
    *tickets.ATTACKS,
    *charter.ATTACKS,
    *removal.ATTACKS,
    *records.ATTACKS,
    *lies.ATTACKS,
    *clients.ATTACKS,
    *api.ATTACKS,
    *floods.ATTACKS,
    *api_servers.ATTACKS,
    *beacons.ATTACKS,
    *quic.ATTACKS,
    *relays.ATTACKS,
)


def main(words: list[str]) -> int:
    """Run the selected attacks; return the exit code."""
    rows, held = [], True
    for attack in ATTACKS:
        if words and not any(word in attack.name for word in words):
            continue
        outcome = _run(attack)
        held = held and outcome.held
        verdict = "held" if outcome.held else "BROKEN"
        print_message(f"{attack.name}: {outcome.effect}: {verdict}")  # a long run may be ended
        rows.append((attack.name, attack.before, outcome.effect, outcome.bound, verdict))
    out(table(("attack", "effect before", "effect now", "bound", ""), rows))
    return 0 if held else 1


def _run(attack: Attack) -> Outcome:
    """Run an attack; a condition of its that never comes true breaks its row only."""
    try:
        return attack.run()
    except (AssertionError, subprocess.SubprocessError) as late:  # `Waited` is one of the first
        return Outcome(str(late).partition("\n")[0][:100], "ends", held=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
