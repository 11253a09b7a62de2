"""The faults of the chaos benchmark."""

from pathlib import Path
from typing import cast

import pytest

from tests.bench.chaos import agreed
from tests.bench.far import Change
from tests.bench.nemesis import CALM, LOSSY, OF_NETWORKS, OF_PROCESSES, SLOW, Ground
from tests.processes.fleet import Fleet
from tests.processes.namespaces import Space
from tests.simulation.wires import Line

A, B, C = (Space(f"space-{name}", host) for name, host in zip("abc", "123", strict=True))
CUTS = {
    "one way": {(B, A), (B, C)},
    "cut": {(B, A), (B, C), (A, B), (C, B)},
    "partition": {(A, C), (B, C), (C, A), (C, B)},
    "delay": set(),
    "drop": set(),
}


@pytest.mark.parametrize("fault", CUTS)
def test_a_fault_of_the_network_ends(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[Line, set[tuple[Space, Space]]]]()
    monkeypatch.setattr("time.sleep", lambda _: None)

    def change(line: Line, cuts: list[tuple[Space, Space]] | None = None) -> None:
        told.append((line, set(cuts or ())))

    ground = Ground(Fleet(tmp_path), {"a": A, "b": B, "c": C}, cast("Change", change))

    ground.strike(fault, "b", lambda _: None)

    line = {"delay": SLOW, "drop": LOSSY}.get(fault, CALM)
    assert told == [(line, CUTS[fault]), (CALM, set())]


def test_on_loopback_only_processes_fail(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)

    assert Ground(fleet, {}).faults == OF_PROCESSES
    assert Ground(fleet, {"a": A}).faults == (*OF_PROCESSES, *OF_NETWORKS)
    assert Ground(fleet, {"a": A}).node("a").address == "1:7700"


@pytest.mark.parametrize(
    ("got", "right", "same"),
    [([1, 2], [1, 2], 2), ([1, 9], [1, 2], 1), ([1], [1, 2], 1), ([], [], 0)],
)
def test_the_first_tokens_that_are_right_are_counted(
    got: list[int], right: list[int], same: int
) -> None:
    assert agreed(got, right) == same
