"""What the report of simulated joins and leaves counts, and when the command fails."""

from collections.abc import Mapping

import pytest

from meshllm.names import FIRST_GROUP, GroupId, NodeId
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.groups import UNASSIGNED
from tests.bench import turnover
from tests.bench.turnover import Report, Turnover, main

FEW = ["--changes", "12", "--nodes", "5", "--seed", "1"]


def test_the_report_of_a_seed_is_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FEW) == 0
    _, *first = capsys.readouterr().out.splitlines()  # the first line has the seconds
    assert main(FEW) == 0
    _, *again = capsys.readouterr().out.splitlines()

    assert first == again
    assert first[0].startswith("12 joins and leaves (")


def test_a_mesh_starts_with_its_nodes_and_only_joins_and_leaves_count() -> None:
    mesh = Turnover(1, 20)
    assert len(mesh.memory) == 20

    report = mesh.run(30)

    assert report.changes == 30
    assert report.others > 0
    assert min(report.nodes) > 10
    assert max(report.nodes) < 30


@pytest.mark.parametrize(
    ("changed", "reason"),
    [("MAX_MOVES", "moves by a join or leave"), ("MAX_ROUNDS", "rounds without layers")],
)
def test_the_command_fails_if_a_bound_is_broken(
    changed: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(turnover, changed, -1)

    assert main(FEW) == 1
    assert capsys.readouterr().err.startswith(f"broken: {reason}")


def test_nodes_that_move_in_turn_and_models_without_nodes_break_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Turnover(1, 20)

    def swing(view: MeshView) -> Mapping[NodeId, GroupId]:
        return {
            node: UNASSIGNED if state.group == FIRST_GROUP else FIRST_GROUP
            for node, state in view.states.items()
        }

    monkeypatch.setattr(turnover, "assign", swing)
    report = mesh.run(3)

    assert report.oscillations >= 3
    assert report.rounds > 1
    assert len(report.broken()) == 3


def test_nodes_that_stay_although_a_model_lacks_them_leave_it_without_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Turnover(1, 20)
    monkeypatch.setattr(
        turnover, "assign", lambda view: {node: at.group for node, at in view.states.items()}
    )
    mesh.places = dict.fromkeys(mesh.places, UNASSIGNED)

    report = mesh.run(5)

    assert report.unserved >= 5
    assert report.rounds >= 5


def test_reports_of_meshes_add_up() -> None:
    first, other = Turnover(1, 6).run(10), Turnover(2, 6).run(20)
    both = Report()
    both.add(first)
    both.add(other)

    assert both.joins == [*first.joins, *other.joins]
    assert both.changes == 30
    assert both.layers == first.layers + other.layers
    assert both.rounds == max(first.rounds, other.rounds)
