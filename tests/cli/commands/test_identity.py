import json
import stat
from pathlib import Path

from meshllm.names import parse_node, short, show
from meshllm.node.membership.state_store import StateStore
from tests.cli.conftest import Invoke


def test_the_id_is_all_of_stdout_and_stays_the_same(meshllm: Invoke, home: Path) -> None:
    first, second = meshllm("id"), meshllm("id")

    node = StateStore.open(home / "state" / "meshllm").key.node
    assert first.stdout == second.stdout == f"{show(node)}\n"
    assert parse_node(first.stdout) == node
    assert first.stderr.startswith(f"short form {short(node)}, key in ")


def test_the_key_is_private(meshllm: Invoke, home: Path) -> None:
    meshllm("id", "--state", "here")

    assert stat.S_IMODE((home / "here").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "here" / "node.key").stat().st_mode) == 0o600


def test_the_id_as_json_names_the_mesh(meshllm: Invoke, home: Path) -> None:
    alone = json.loads(meshllm("id", "--state", "here", "--json").stdout)
    mesh = StateStore.open(home / "here").create_mesh().mesh
    member = json.loads(meshllm("id", "--state", "here", "--json").stdout)

    assert alone["mesh"] is None
    assert member == {**alone, "mesh": mesh.hex()}
    assert alone["node"].startswith(alone["short"])
