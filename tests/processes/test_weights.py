"""Nodes without the model of their mesh: they fetch what they hold, and outlive who had it all."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshllm.model.locate import BUILTIN, INDEX, find_folder
from tests.builders.own_cache import own_cache
from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, Node, ask, meshllm, until

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

NAMES = "attic", "barn", "cellar"


def start(node: Node, *options: str) -> None:
    """Start a node with a cache of its own, without weights: it shares no disk with the others."""
    node.start(*ALONE, *options, variables={"XDG_CACHE_HOME": own_cache(node.folder)})


def parts(node: Node) -> dict[int, float]:
    """Return the parts that a node has fetched, and when."""
    files = node.folder.glob("cache/meshllm/weights/*/part-*.safetensors")
    return {int(file.stem.removeprefix("part-")): file.stat().st_mtime for file in files}


def needed(node: Node) -> set[int]:
    """Return the parts that a node holds in the ring."""
    ring = node.status()["ring"]
    (stage,) = [each for each in ring["stages"] if each["name"] == node.name]
    start, stop = map(int, stage["layers"].split(":"))
    return {*range(start, stop), *((8, 9) if stage["rank"] == 0 else ())}


def test_nodes_fetch_their_layers_and_outlive_the_only_one_with_the_model(
    fleet: Fleet, answers: Answers, tmp_path: Path
) -> None:
    model = shutil.copytree(find_folder(BUILTIN), tmp_path / "model")
    ticket = fleet.create_mesh("attic")
    attic, *others = [fleet.node(name) for name in NAMES]
    start(attic, "--model", str(model), "--members", "3")
    for each in others:
        start(each, "--join", ticket)
    fleet.form()
    assert all(needed(each) <= parts(each).keys() for each in others)
    assert not parts(attic)

    # Whatever only the founder has, one of the others fetches.
    until(lambda: {*parts(others[0]), *parts(others[1])} == set(range(10)), fleet.told)
    attic.kill()
    fleet.form()

    assert ask(others[0], QUESTION) == answers[QUESTION]
    assert all(needed(each) <= parts(each).keys() for each in others)

    before = parts(others[1])
    others[1].kill()
    start(others[1])
    fleet.form()
    assert before.items() <= parts(others[1]).items()


def test_a_node_that_died_while_it_fetched_fetches_what_is_damaged_again(
    fleet: Fleet, answers: Answers, tmp_path: Path
) -> None:
    model = shutil.copytree(find_folder(BUILTIN), tmp_path / "model")
    ticket = fleet.create_mesh("attic")
    attic, barn = fleet.node("attic"), fleet.node("barn")
    start(attic, "--model", str(model), "--members", "2")
    start(barn, "--join", ticket)
    fleet.form()
    barn.kill()
    whole, *others = sorted(barn.folder.glob("cache/meshllm/weights/*/part-*.safetensors"))
    right = {each.name: each.read_bytes() for each in (whole, *others)}
    for each in others:  # as a power cut leaves files whose data was not yet on disk
        each.write_bytes(b"")
    others[1].write_bytes((2).to_bytes(8, "little") + b"{}")  # a header without its tensors
    index = whole.parent / INDEX
    index.write_bytes(index.read_bytes()[:100])
    left = whole.with_name(f"{others[0].name}.partial")
    left.write_bytes(right[others[0].name][:100])

    start(barn)
    fleet.form()

    assert ask(barn, QUESTION) == answers[QUESTION]
    places = {name: whole.parent / name for name in right}
    until(lambda: all(each.exists() for each in places.values()), fleet.told)  # spare ones, too
    assert {name: each.read_bytes() for name, each in places.items()} == right
    assert not left.exists()


def test_weights_that_the_founder_has_changed_are_fetched_again_and_the_old_ones_kept(
    fleet: Fleet, tmp_path: Path
) -> None:
    model = shutil.copytree(find_folder(BUILTIN), tmp_path / "model")
    ticket = fleet.create_mesh("attic")
    attic, barn = fleet.node("attic"), fleet.node("barn")
    own = "--model", str(model), "--layers", "4:8"
    start(attic, *own, "--members", "2")
    start(barn, "--join", ticket, "--layers", "0:4")
    fleet.form()
    until(lambda: parts(barn).keys() == set(range(10)), fleet.told)
    before = ask(barn, QUESTION)
    folder = barn.folder / "cache" / "meshllm" / "weights"
    old = {f"{each.name}.kept": each.read_bytes() for each in folder.glob("*/part-*.safetensors")}
    attic.kill()
    (path,) = model.glob("*.safetensors")
    changed = {
        name: -each if "down_proj" in name else each for name, each in load_file(path).items()
    }
    save_file(changed, path, {"format": "pt"})

    start(attic, *own)
    until(lambda: bool([*folder.glob("*/*.kept")]), fleet.told)
    fleet.form()

    assert needed(barn) <= parts(barn).keys()
    for fetched in barn.folder.glob("cache/meshllm/weights/*/part-*.safetensors"):
        assert all(torch.equal(each, changed[name]) for name, each in load_file(fetched).items())
    alone = meshllm("chat", "--model", str(model), "--nodes", "1", state=None, stdin=QUESTION)
    assert ask(barn, QUESTION) == alone.stdout != before
    kept = {each.name: each.read_bytes() for each in folder.glob("*/*.kept")}
    assert kept
    assert kept.items() <= old.items()
