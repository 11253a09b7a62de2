from typing import Any

from meshllm.cli.news import news
from tests.cli.statuses import status_of, waiting


def texts(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [each.text for each in news(before, after)]


def test_at_first_everything_is_new() -> None:
    assert texts({}, status_of(2)) == [
        "desk joined (desk1bc, 8.0 GiB)",
        "the ring of 2 serves, epoch 3: attic 0:10, desk 10:20",
    ]


def test_nothing_new_is_no_news() -> None:
    later = status_of(2)
    later["nodes"][1]["link"]["heard_s"] = 2.0

    assert texts(status_of(2), later) == []


def test_a_reason_to_wait_is_told_once() -> None:
    assert texts({}, waiting("alone")) == ["waiting: alone"]
    assert texts(waiting("alone"), waiting("alone")) == []
    assert texts(waiting("alone"), waiting("still alone")) == ["waiting: still alone"]


def test_a_ring_that_forms_is_told_with_who_holds_what() -> None:
    forming = status_of(2)
    forming["ring"] |= {"state": "forming", "reason": "desk loads 10:20"}

    assert texts(waiting("alone"), forming)[-1:] == [
        "a ring of 2 forms, epoch 3: attic 0:10, desk 10:20: desk loads 10:20"
    ]


def test_a_ring_that_broke_is_told_until_the_next_one_forms() -> None:
    broken, gone, forming = status_of(2), status_of(2), status_of(2)
    broken["ring"] |= {"state": "forming", "reason": "its nodes link up"}
    gone["ring"] |= {"state": "forming", "reason": "desk is gone"}
    gone["nodes"][1] |= {"state": "down", "reason": "no link"}
    forming["ring"] |= {"state": "forming", "reason": "", "digest": "another", "epoch": 4}

    assert texts(status_of(2), broken) == ["the ring of 2 broke, epoch 3"]
    assert texts(broken, gone) == ["desk is gone: no link"]
    assert texts(status_of(2), gone) == ["desk is gone: no link", "the ring of 2 broke, epoch 3"]
    assert texts(gone, forming)[-1] == "a ring of 2 forms, epoch 4: attic 0:10, desk 10:20"
    assert texts(status_of(2), forming) == texts(broken, forming)


def test_what_keeps_a_ring_from_forming_is_told() -> None:
    before, after = status_of(2), status_of(2)
    before["ring"] |= {"state": "forming", "reason": "its nodes load"}
    after["ring"] |= {"state": "forming", "reason": "no memory is left"}

    (told,) = texts(before, after)

    assert told.endswith(": no memory is left")


def test_who_left_and_who_is_gone_are_told_apart() -> None:
    later = status_of(3)
    later["nodes"][1] |= {"state": "left"}
    later["nodes"][2] |= {"state": "down", "reason": "silent for 3 s"}

    assert texts(status_of(3), later) == ["desk left", "laptop is gone: silent for 3 s"]


def test_a_standby_is_told_once_though_its_figures_change() -> None:
    before, after = status_of(2), status_of(2)
    before["nodes"][1] |= {"state": "standby", "reason": "its link adds 40 ms"}
    after["nodes"][1] |= {"state": "standby", "reason": "its link adds 41 ms"}

    assert texts(before, after) == []


def test_who_was_removed_is_told() -> None:
    after = status_of(2)
    after["ring"] = status_of(3)["ring"]

    assert texts(status_of(3), after) == ["laptop is no member any more"]


def test_who_comes_back_joined() -> None:
    before = status_of(2)
    before["nodes"][1]["state"] = "down"

    assert texts(before, status_of(2)) == ["desk joined (desk1bc, 8.0 GiB)"]


def test_who_went_before_we_came_is_no_news() -> None:
    after = status_of(2)
    after["nodes"][1]["state"] = "left"

    assert "left" not in " ".join(texts({}, after))


def test_a_node_that_is_refused_or_stands_by_is_told_with_the_reason() -> None:
    refused, standby = status_of(2), status_of(2)
    refused["nodes"][1] |= {"state": "refused", "reason": "layer 3 differs"}
    standby["nodes"][1] |= {"state": "standby", "reason": "its link adds 40 ms"}

    assert texts(status_of(2), refused) == ["desk is refused: layer 3 differs"]
    assert texts(refused, standby) == ["desk stands by: its link adds 40 ms"]


def test_a_node_that_no_plan_has_judged_yet_is_no_news() -> None:
    after = status_of(2)
    after["nodes"][1]["state"] = "standby"

    assert texts(status_of(2), after) == []


def test_a_node_without_a_name_has_its_id() -> None:
    after = status_of(2)
    after["nodes"][1] |= {"name": "", "memory_bytes": 0}

    assert texts({}, after)[0] == "desk1bc joined (desk1bc)"


def test_news_for_tools_are_fields() -> None:
    joined, serving = news({}, status_of(2))

    assert (joined.event, joined.fields["name"]) == ("joined", "desk")
    assert serving.event == "serving"
    assert serving.fields["stages"] == "attic 0:10, desk 10:20"
