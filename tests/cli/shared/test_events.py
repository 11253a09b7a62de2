from dataclasses import replace

import pytest

from meshllm.cli.shared.events import notices
from meshllm.status import NO_LINK, MeshStatus, NodeState, RingState
from tests.builders.status import status_of, waiting, with_link, with_node, with_ring


def texts(before: MeshStatus | None, after: MeshStatus) -> list[str]:
    return [each.text for each in notices(before, after)]


def test_without_a_previous_report_everything_is_new() -> None:
    assert texts(None, status_of(2)) == [
        "desk joined (desk1bc, 8.0 GiB)",
        "ring of 2 serving, epoch 3: attic 0:10, desk 10:20",
    ]


def test_another_node_that_reads_prompts_is_named() -> None:
    found = status_of(2)
    reverse = with_ring(found, stages=found.ring.stages[::-1])

    assert texts(None, reverse)[-1] == (
        "ring of 2 serving, epoch 3: desk 10:20, attic 0:10; desk reads prompts"
    )


def test_nodes_of_one_name_are_told_apart_where_their_layers_are_listed() -> None:
    found = status_of(3)
    stages = tuple(
        replace(each, name="vm") if each.rank else each for each in found.ring.stages[::-1]
    )
    same = with_ring(found, stages=stages)

    told = texts(None, same)[-1]

    ids = [each.node[:7] for each in stages]
    assert f"vm ({ids[0]}) {stages[0].layers}, vm ({ids[1]}) {stages[1].layers}, attic" in told
    assert told.endswith(f"; vm ({ids[0]}) reads prompts")


def test_an_unchanged_report_yields_nothing() -> None:
    assert texts(status_of(2), with_link(status_of(2), 1, heard_s=2.0)) == []


def test_a_reason_to_wait_is_reported_once() -> None:
    assert texts(None, waiting("alone")) == ["waiting: alone"]
    assert texts(waiting("alone"), waiting("alone")) == []
    assert texts(waiting("alone"), waiting("still alone")) == ["waiting: still alone"]


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [
        ("the nodes are loading the model: a", "the nodes are loading the model: a, b", False),
        ("1 of 3 members are here, loading the model: a", "2 of 3 members are here: a, b", False),
        ("2 members are requested, 3 nodes are here, loading the model: a, b, c",
         "2 members are requested, 4 nodes are here, loading the model: a, b, c, d", False),
        ("1 of 3 members are ready: a", "1 of 3 members are ready: a; loading: b", False),
        ("1 of 3 members are ready: a", "2 of 3 members are ready: a, b", True),
        ("0 of 2 nodes have loaded their layers; loading: a, b",
         "2 of 2 nodes have loaded their layers and connect", False),
        ("2 of 2 nodes have loaded their layers and connect", "a is gone", True),
        ("2 of 2 nodes have loaded their layers and connect",
         "2 of 2 nodes have loaded their layers and connect; no link to a", True),
        ("2 of 2 nodes have loaded their layers and connect; no link to a",
         "2 of 2 nodes have loaded their layers and connect; no link to b", True),
    ],
)  # fmt: skip
def test_the_progress_of_the_same_wait_is_not_news(
    before: str, after: str, *, is_news: bool
) -> None:
    assert texts(waiting(before), waiting(after)) == [f"waiting: {after}"] * is_news


def test_a_forming_ring_is_reported_with_its_layers() -> None:
    forming = with_ring(status_of(2), state=RingState.FORMING, reason="desk loads 10:20")

    assert texts(waiting("alone"), forming)[-1:] == [
        "ring of 2 forming, epoch 3: attic 0:10, desk 10:20: desk loads 10:20"
    ]


def test_a_lost_ring_is_reported_once() -> None:
    broken = with_ring(status_of(2), state=RingState.FORMING, reason="its nodes link up")
    gone = with_ring(status_of(2), state=RingState.FORMING, reason="desk is gone")
    gone = with_node(gone, 1, state=NodeState.DOWN, reason=NO_LINK)
    forming = with_ring(status_of(2), state=RingState.FORMING, digest="another", epoch=4)

    assert texts(status_of(2), broken) == ["ring of 2 lost, epoch 3"]
    assert texts(broken, gone) == ["desk is down: no link to it"]
    assert texts(status_of(2), gone) == ["desk is down: no link to it", "ring of 2 lost, epoch 3"]
    assert texts(gone, forming)[-1] == "ring of 2 forming, epoch 4: attic 0:10, desk 10:20"
    assert texts(status_of(2), forming) == texts(broken, forming)


def test_the_reason_a_ring_does_not_form_is_reported() -> None:
    before = with_ring(status_of(2), state=RingState.FORMING, reason="its nodes load")
    after = with_ring(before, reason="no memory is left")

    (told,) = texts(before, after)

    assert told.endswith(": no memory is left")


def test_leaving_and_failing_nodes_are_distinguished() -> None:
    later = with_node(status_of(3), 1, state=NodeState.LEFT)
    later = with_node(later, 2, state=NodeState.DOWN, reason="silent for 3 s")

    assert texts(status_of(3), later) == ["desk left", "laptop is down: silent for 3 s"]


def test_a_node_reports_that_it_is_on_standby_itself_once() -> None:
    before = with_node(status_of(2), 0, state=NodeState.STANDBY)
    after = with_node(before, 0, reason="its link adds 40 ms")

    assert texts(status_of(2), before) == []
    assert texts(before, after) == ["this node is on standby: its link adds 40 ms"]
    assert texts(after, with_node(after, 0, reason="its link adds 41 ms")) == []


def test_a_node_reports_that_it_is_refused_itself_once() -> None:
    after = with_node(status_of(2), 0, state=NodeState.REFUSED, reason="layer 3 differs")

    assert texts(status_of(2), after) == ["this node is refused: layer 3 differs"]
    assert texts(after, after) == []


def test_a_standby_is_reported_once_although_its_figures_change() -> None:
    before = with_node(status_of(2), 1, state=NodeState.STANDBY, reason="its link adds 40 ms")
    after = with_node(before, 1, reason="its link adds 41 ms")

    assert texts(before, after) == []


def test_a_removed_node_is_reported() -> None:
    after = replace(status_of(2), ring=status_of(3).ring)

    assert texts(status_of(3), after) == ["laptop was removed from the mesh"]


def test_a_returning_node_has_joined() -> None:
    before = with_node(status_of(2), 1, state=NodeState.DOWN, reason=NO_LINK)

    assert texts(before, status_of(2)) == ["desk joined (desk1bc, 8.0 GiB)"]


def test_a_provider_whose_engine_is_down_is_still_here() -> None:
    down = with_node(status_of(2), 1, state=NodeState.DOWN, reason="its engine ended with code 1")

    told = "desk is down: its engine ended with code 1"
    assert texts(None, down)[:2] == ["desk joined (desk1bc, 8.0 GiB)", told]
    assert texts(status_of(2), down) == [told]
    assert texts(down, down) == texts(down, status_of(2)) == []


def test_a_node_that_left_before_the_first_report_is_not_reported() -> None:
    after = with_node(status_of(2), 1, state=NodeState.LEFT)

    assert "left" not in " ".join(texts(None, after))


def test_refused_and_standby_nodes_are_reported_with_the_reason() -> None:
    refused = with_node(status_of(2), 1, state=NodeState.REFUSED, reason="layer 3 differs")
    standby = with_node(status_of(2), 1, state=NodeState.STANDBY, reason="its link adds 40 ms")

    assert texts(status_of(2), refused) == ["desk is refused: layer 3 differs"]
    assert texts(refused, standby) == ["desk is on standby: its link adds 40 ms"]


def test_a_node_is_on_standby_only_once_there_is_a_plan() -> None:
    standby = with_node(status_of(2), 1, state=NodeState.STANDBY, reason="it has no model yet")
    before = with_ring(standby, state=RingState.WAITING, digest="", stages=())
    after = with_node(standby, 1, reason="its link adds 40 ms")

    assert [text for text in texts(status_of(2), before) if "standby" in text] == []
    assert "desk is on standby: its link adds 40 ms" in texts(before, after)


def test_a_ring_names_how_many_requested_members_it_lacks() -> None:
    found = with_ring(status_of(2), members=3)

    (*_, told) = texts(None, found)

    assert told.startswith("ring of 2 serving, epoch 3 without 1 of the 3 requested members: attic")
    assert "without" not in texts(None, with_ring(found, members=2))[-1]


def test_a_standby_without_a_reason_is_not_reported() -> None:
    after = with_node(status_of(2), 1, state=NodeState.STANDBY)

    assert texts(status_of(2), after) == []


def test_a_node_without_a_name_is_reported_by_id() -> None:
    after = with_node(status_of(2), 1, name="", memory_bytes=0)

    assert texts(None, after)[0] == "desk1bc joined (desk1bc)"


def test_a_node_says_once_that_it_serves_alone_although_others_are_expected() -> None:
    alone = replace(status_of(1), unanswered=2)

    told = texts(None, alone)

    assert told[-1].startswith("2 members of this mesh do not answer: they are off or unreachable")
    assert texts(alone, replace(alone, unanswered=1)) == []


def test_a_node_that_serves_alone_as_it_should_says_nothing_of_others() -> None:
    expected = [
        status_of(1),  # a mesh of one, or others that left
        replace(waiting("alone"), unanswered=2),  # its wait is reported
        replace(status_of(2), unanswered=1),  # reported by name: it was here
    ]

    assert not any("not answer" in text for each in expected for text in texts(None, each))


def test_notices_have_fields() -> None:
    joined, serving = notices(None, status_of(2))

    assert (joined.event, joined.fields["name"]) == ("joined", "desk")
    assert serving.event == "serving"
    assert serving.fields["stages"] == "attic 0:10, desk 10:20"
