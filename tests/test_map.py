"""The map of CONTRIBUTING names every room, and no other; its ways lead to files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / ".github" / "CONTRIBUTING.md").read_text("utf-8")
MAP = TEXT.partition("## The map")[2].partition("```\n")[2].partition("```")[0]
FLOORS = {f"meshllm/{name}" for name in ("cli", "api", "node", "protocol", "model")}  # with rooms


def rooms() -> dict[str, list[str]]:
    """Read the map: the rooms of each floor, in order."""
    found: dict[str, list[str]] = {}
    for line in MAP.splitlines():
        names = re.split(r"  +", line.strip())[0].split(", ")
        if line.startswith("meshllm/"):
            found[names[0]] = []
        else:
            found[[*found][-1]].extend(names)
    return found


def packages(folder: Path) -> set[str]:
    return {each.parent.name for each in folder.glob("*/__init__.py")}


def test_the_map_is_short() -> None:
    assert len(MAP.splitlines()) <= 40


def test_every_floor_is_on_the_map() -> None:
    assert {Path(name).name for name in rooms()} == packages(ROOT / "meshllm")


@pytest.mark.parametrize("floor", sorted(FLOORS))
def test_every_room_is_on_the_map(floor: str) -> None:
    assert set(rooms()[floor]) == packages(ROOT / floor)


def test_rooms_are_in_import_order() -> None:
    contracts = (ROOT / "pyproject.toml").read_text("utf-8")
    for floor in FLOORS:
        container = floor.replace("/", ".")
        layers = contracts.partition(f'containers = ["{container}"]')[0].rpartition("layers = [")[2]
        rank = {
            name: place
            for place, line in enumerate(layers.splitlines())
            for name in re.findall(r"\w+", line)
        }
        ranks = [rank[room] for room in rooms()[floor]]
        assert ranks == sorted(ranks), floor


@pytest.mark.parametrize("place", ["meshllm", "plugins/meshllm_*"])
def test_packages_are_neither_halls_nor_closets(place: str) -> None:
    found = [each.parent for top in ROOT.glob(place) for each in top.rglob("__init__.py")]
    assert found
    for package in found:
        files = [each for each in package.glob("*.py") if each.stem != "__init__"]
        least = 0 if packages(package) else 2  # one that has rooms may hold nothing else
        assert least <= len(files) <= 15, package


def test_what_is_named_exists() -> None:
    named = {name for name in re.findall(r"`([\w/]+(?:/[\w.]+)?)`", TEXT) if "/" in name}
    roots = (ROOT, ROOT / "meshllm")
    lost = [name for name in named if not any((root / name).exists() for root in roots)]

    assert lost == []


def test_names_are_in_the_files_that_are_named_with_them() -> None:
    named = re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w/]+\.py)`", TEXT)
    lost = [(name, path) for name, path in named if not defines(path, name)]

    assert len(named) > 15
    assert lost == []


def defines(path: str, name: str) -> bool:
    file = next(root / path for root in (ROOT, ROOT / "meshllm") if (root / path).exists())
    return bool(
        re.search(rf"(?m)^ *((async )?def |class )?{name}\b[(:\[ ]", file.read_text("utf-8"))
    )
