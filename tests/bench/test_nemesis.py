"""The faults of the chaos benchmark."""

from pathlib import Path
from typing import cast

import pytest

from meshllm.protocol.session.link import SILENCE
from tests.bench.chaos import agreed, growth, phases, rows_again, unnamed
from tests.bench.far import Change
from tests.bench.nemesis import CALM, LOSSY, OF_NETWORKS, OF_PROCESSES, SLOW, Ground, Relay
from tests.processes.fleet import Fleet
from tests.processes.namespaces import Space
from tests.simulation.wires import Line

A, B, C = (Space(f"space-{name}", host) for name, host in zip("abc", "123", strict=True))
CUTS = {
    "one way": {(B, A), (B, C)},
    "cut": {(B, A), (B, C), (A, B), (C, B)},
    "gap": {(B, A), (B, C), (A, B), (C, B)},
    "partition": {(A, C), (B, C), (C, A), (C, B)},
    "delay": set(),
    "drop": set(),
}


@pytest.mark.parametrize("fault", CUTS)
def test_a_fault_of_the_network_ends(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[Line, set[tuple[Space, Space]]]]()
    waited = list[float]()
    monkeypatch.setattr("time.sleep", waited.append)

    def change(line: Line, cuts: list[tuple[Space, Space]] | None = None) -> None:
        told.append((line, set(cuts or ())))

    ground = Ground(Fleet(tmp_path), {"a": A, "b": B, "c": C}, cast("Change", change))

    ground.strike(fault, "b", lambda _: None)

    line = {"delay": SLOW, "drop": LOSSY}.get(fault, CALM)
    assert told == [(line, CUTS[fault]), (CALM, set())]
    assert [each > SILENCE for each in waited] == [fault != "gap"]


class FakeRelay(Relay):
    """A relay without a process."""

    def __init__(self) -> None:
        super().__init__(Space("space-relay", "4"), Path())
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def kill(self) -> None:
        self.calls.append("kill")


def test_a_relay_is_killed_and_started_while_a_node_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = list[set[tuple[Space, Space]]]()
    relay = FakeRelay()
    monkeypatch.setattr("time.sleep", lambda _: relay.calls.append("wait"))
    monkeypatch.setattr(Ground, "_is_relayed", lambda *_: True)

    def change(_: Line, pairs: list[tuple[Space, Space]] | None = None) -> None:
        cuts.append(set(pairs or ()))

    ground = Ground(Fleet(tmp_path), {"a": A, "b": B, "c": C}, cast("Change", change), relay=relay)
    with ground.hiding("b"):
        ground.strike("relay", "b", lambda _: None)

    assert ground.faults == ("relay",)
    assert ground.options == ("--transport", "quic", "--relay", "4:8790")
    assert cuts == [CUTS["cut"], set()]  # the relay stays within reach of all
    assert relay.calls == ["kill", "wait", "start"]


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


def test_growth_names_what_grew() -> None:
    before = {"total": 100 << 20, "weights": 40 << 20, "kv_cache": 5 << 20, "other": 55 << 20}
    after = {"total": 110 << 20, "weights": 52 << 20, "kv_cache": 5 << 20, "other": 53 << 20}
    told = "100 MiB, then 110 (+10%, -2% without names): weights +12, other -2"
    assert growth(before, after) == told
    assert growth(before, before) == "100 MiB, then 100 (+0%, +0% without names)"
    assert unnamed(before, {**after, "other": 61 << 20}) == pytest.approx(0.06)


def test_phases_are_those_between_a_fault_and_the_next_token() -> None:
    one = [("open", 1.0), ("backoff", 11.0), ("loading", 12.0), ("waiting", 14.0), ("open", 17.0)]
    other = [("open", 1.0), ("loading", 12.5), ("waiting", 13.0), ("open", 16.0), ("loading", 30.0)]
    assert phases([one, other], 10.0, 20.0) == (1.0, 1.5, 1.5, 3.0, 3.0)
    assert phases([[("backoff", 11.0), ("open", 12.0)]], 10.0, 12.5) == (1.0, 0.0, 0.0, 1.0, 0.5)
    assert phases([[]], 10.0, 10.5) == (0.0, 0.0, 0.0, 0.0, 0.5)


def test_rows_again_are_those_of_the_worst_run_by_cause() -> None:
    runs = [{"node_lost": 4}, {"node_lost": 7, "link_lost": 2, "replanned": 0}, {}]
    assert rows_again(runs) == "7 node_lost, 2 link_lost"
    assert rows_again([{}, {"node_lost": 0}]) == "0"
