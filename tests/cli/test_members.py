import json
from typing import Any

import pytest

from meshllm.cli.members import find
from meshllm.errors import UserError
from tests.cli.conftest import Invoke
from tests.cli.statuses import NAMES, FakeDoor, node_id


def member(index: int) -> dict[str, Any]:
    return {"node": node_id(index), "name": NAMES[index], "role": "node", "state": "serving"}


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> FakeDoor:
    door = FakeDoor(monkeypatch)
    door.replies = {
        "/mesh/ticket": {"ticket": "meshllm1abc"},
        "/mesh/members": {"members": [member(0), member(1)]},
        "/mesh/remove": {"removed": node_id(1)},
    }
    return door


def test_a_ticket_is_all_of_stdout(meshllm: Invoke, door: FakeDoor) -> None:
    result = meshllm("ring", "ticket")

    assert result.stdout == "meshllm1abc\n"
    assert result.stderr == "good once within 1h; there: meshllm node --join meshllm1abc\n"
    assert door.posted == [("/mesh/ticket", {"role": "node", "expires_s": 3600, "uses": 1})]


def test_a_client_is_told_another_command(meshllm: Invoke, door: FakeDoor) -> None:
    result = meshllm("ring", "ticket", "--role", "client", "--expires", "7d", "--uses", "5")

    assert result.stderr == "good 5 times within 7d; there: meshllm chat --join meshllm1abc\n"
    assert door.posted[0][1] == {"role": "client", "expires_s": 604_800, "uses": 5}


def test_a_ticket_as_json(meshllm: Invoke, door: FakeDoor) -> None:
    told = json.loads(meshllm("ring", "ticket", "--expires", "90s", "--json").stdout)

    assert told == {
        "schema": 1, "ticket": "meshllm1abc", "role": "node", "expires_s": 90, "uses": 1,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "1", "1w", "0h", "-1h", "1.5h", "1h "])
def test_a_time_is_a_number_and_a_unit(meshllm: Invoke, door: FakeDoor, text: str) -> None:
    result = meshllm("ring", "ticket", "--expires", text)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: `{text}` is no time\n")
    assert door.posted == []


def test_members_are_listed_with_their_whole_id(meshllm: Invoke, door: FakeDoor) -> None:
    assert meshllm("ring", "members").stdout.splitlines() == [
        f"{'member':<63}  role  name",
        f"{node_id(0):<63}  node  attic",
        f"{node_id(1):<63}  node  desk",
    ]


def test_who_was_removed_is_listed_and_cannot_be_removed_again(
    meshllm: Invoke, door: FakeDoor
) -> None:
    gone = member(1) | {"role": "", "state": "removed"}
    door.replies["/mesh/members"]["members"] = [member(0), gone]

    assert f"{node_id(1)}  removed  desk\n" in meshllm("ring", "members").stdout
    assert meshllm("ring", "remove", node_id(1), "--yes").exit_code == 2


def test_members_as_json(meshllm: Invoke, door: FakeDoor) -> None:
    told = json.loads(meshllm("ring", "members", "--json").stdout)

    assert told == {"schema": 1, "members": [member(0), member(1)]}


def test_the_name_of_a_member_commands_no_terminal(meshllm: Invoke, door: FakeDoor) -> None:
    door.replies["/mesh/members"]["members"][0]["name"] = "\x1b[2J\n"

    assert "\\x1b[2J\\n\n" in meshllm("ring", "members").stdout


def test_a_member_is_removed_by_the_beginning_of_its_id(meshllm: Invoke, door: FakeDoor) -> None:
    result = meshllm("ring", "remove", "DESK1BCD", "--yes")

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"desk {node_id(1)} is shut out\n"
    assert door.posted == [("/mesh/remove", {"node": node_id(1)})]


def test_a_removal_as_json(meshllm: Invoke, door: FakeDoor) -> None:
    told = json.loads(meshllm("ring", "remove", node_id(1), "-y", "--json").stdout)

    assert told == {"schema": 1, "removed": node_id(1)}


def test_nobody_is_removed_unasked(meshllm: Invoke, door: FakeDoor) -> None:
    result = meshllm("ring", "remove", node_id(1))

    assert result.exit_code == 2
    assert result.stderr.endswith("hint: add `--yes`\n")
    assert door.posted == []


@pytest.mark.parametrize(("answer", "code", "count"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
def test_a_person_is_shown_the_whole_id_and_asked(
    meshllm: Invoke,
    door: FakeDoor,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    count: int,
) -> None:
    monkeypatch.setattr("meshllm.cli.members._is_person", lambda: True)

    result = meshllm("ring", "remove", node_id(1), stdin=answer)

    assert f"Shut out desk {node_id(1)} for ever? [y/N]:" in result.stderr
    assert (result.exit_code, len(door.posted)) == (code, count)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("desk1b", "`desk1b` is too short for an id"),
        ("d-e-s-k-", "`d-e-s-k-` is too short for an id"),
        ("kitc4bc-d", "No member has the id `kitc4bc-d`"),
    ],
)
def test_an_id_must_name_a_member(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find([member(0), member(1)], text)


def test_an_id_must_name_one_member() -> None:
    twin = {"node": f"{node_id(1)[:-1]}k", "name": "twin", "role": "node", "state": "serving"}

    with pytest.raises(UserError, match="`desk1bcd` begins 2 ids"):
        find([member(1), twin], "desk1bcd")
    assert find([member(1), twin], node_id(1)) == member(1)
