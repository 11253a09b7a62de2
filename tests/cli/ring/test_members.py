import json

import pytest

from meshllm.cli.ring.members import _confirm, find, guests, lay_out
from meshllm.errors import UserError
from meshllm.node.requests.peer_requests import MAX_PER_CLIENT
from meshllm.status import Named, Removed, to_json
from tests.builders.fake_client import FakeClient
from tests.builders.status import member, node_id
from tests.cli.conftest import Invoke


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    return FakeClient(monkeypatch)


def test_stdout_is_only_the_ticket(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "ticket")

    assert result.stdout == "meshllm1abc\n"
    assert result.stderr == "valid once within 1h; to use it: meshllm node --join TICKET\n"
    assert node.posted == [("node", 3600, 1)]


def test_a_client_ticket_shows_the_chat_command(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "ticket", "--role", "client", "--expires", "7d", "--uses", "5")

    assert result.stderr == "valid 5 times within 7d; to use it: meshllm chat --join TICKET\n"
    assert node.posted == [("client", 604_800, 5)]


def test_a_terminal_gets_the_whole_command(
    meshllm: Invoke, node: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)

    result = meshllm("ring", "ticket")

    assert "to use it: meshllm node --join meshllm1abc" in result.stderr


def test_a_ticket_as_json(meshllm: Invoke, node: FakeClient) -> None:
    told = json.loads(meshllm("ring", "ticket", "--expires", "90s", "--json").stdout)

    assert told == {
        "schema": 1, "ticket": "meshllm1abc", "role": "node", "expires_s": 90, "uses": 1,
        "concurrency": None, "tokens_per_day": None,
    }  # fmt: skip


def test_a_ticket_limits_a_client(meshllm: Invoke, node: FakeClient) -> None:
    words = "--role", "client", "--concurrency", "1", "--tokens-per-day", "5000", "--json"

    told = json.loads(meshllm("ring", "ticket", *words).stdout)

    assert (told["concurrency"], told["tokens_per_day"]) == (1, 5000)
    assert node.posted == [("client", 3600, 1, ("concurrency", 1), ("tokens_per_day", 5000))]


@pytest.mark.parametrize(
    "words", [("--concurrency", "0"), ("--concurrency", "3"), ("--tokens-per-day", "0")]
)
def test_limits_out_of_range_are_refused(
    meshllm: Invoke, node: FakeClient, words: tuple[str, ...]
) -> None:
    result = meshllm("ring", "ticket", "--role", "client", *words)

    assert result.exit_code == 2
    assert node.posted == []


def test_the_most_requests_of_a_client_are_those_of_the_node(
    meshllm: Invoke, node: FakeClient
) -> None:
    for most, code in ((MAX_PER_CLIENT, 0), (MAX_PER_CLIENT + 1, 2)):
        words = "--role", "client", "--concurrency", str(most)
        assert meshllm("ring", "ticket", *words).exit_code == code


@pytest.mark.parametrize("text", ["", "1", "1w", "0h", "-1h", "1.5h", "1h "])
def test_a_time_is_a_number_and_a_unit(meshllm: Invoke, node: FakeClient, text: str) -> None:
    result = meshllm("ring", "ticket", "--expires", text)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: Invalid duration `{text}`\n")
    assert node.posted == []


def test_members_are_listed_with_full_ids(meshllm: Invoke, node: FakeClient) -> None:
    client = member(2, role="client", name="", state="linked", inviters=("3" * 63,))
    node.there.append(client)

    assert meshllm("ring", "members").stdout.splitlines() == [
        "   name   role    state    invited by  id",
        f"*  attic  node    serving  (founder)   {node_id(0)}",
        f"   desk   node    serving  attic       {node_id(1)}",
        f"   -      client  linked   3333333     {node_id(2)}",
    ]


def test_on_a_terminal_a_line_is_truncated() -> None:
    members = [member(0), member(1, name="x" * 17)]

    first, *lines = lay_out(members, 80).split("\n")

    assert first == "   name              role  state    invited by  id"
    assert [len(line) for line in lines] == [80, 80]
    assert f"{'x' * 15}…  node" in lines[1]
    shown = lines[1].rpartition("  ")[2]
    assert shown.endswith("…")
    assert find(members, shown) == members[1]


def test_a_removed_member_is_listed_and_cannot_be_removed_again(
    meshllm: Invoke, node: FakeClient
) -> None:
    node.there[1] = member(1, role="", state="removed", inviters=())

    assert (
        f"   desk   -     removed  -           {node_id(1)}\n" in meshllm("ring", "members").stdout
    )
    assert meshllm("ring", "remove", node_id(1), "--yes").exit_code == 2


def test_members_as_json(meshllm: Invoke, node: FakeClient) -> None:
    told = json.loads(meshllm("ring", "members", "--json").stdout)

    assert told == {"schema": 1, "members": [to_json(member(0)), to_json(member(1))]}


def test_control_characters_in_a_name_are_escaped(meshllm: Invoke, node: FakeClient) -> None:
    node.there[0] = member(0, name="\x1b[2J\n")

    assert "*  \\x1b[2J\\n  node" in meshllm("ring", "members").stdout


def test_a_member_is_removed_by_a_prefix_of_its_id(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "remove", "DESK1BCD", "--yes")

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"desk {node_id(1)} was removed\n"
    assert node.posted == [(node_id(1),)]


def test_a_removal_as_json(meshllm: Invoke, node: FakeClient) -> None:
    told = json.loads(meshllm("ring", "remove", node_id(1), "-y", "--json").stdout)

    assert told == {
        "schema": 1, "node": node_id(1), "name": "desk", "spared": [], "taken": [],
    }  # fmt: skip


def test_guests_go_or_stay_and_are_listed(meshllm: Invoke, node: FakeClient) -> None:
    node.there = [member(each) for each in range(5)]
    one, *others = (Named(node_id(each), "") for each in (2, 3, 4))
    node.removed = Removed(node_id(1), "desk", tuple(others), (one,))

    result = meshllm("ring", "remove", node_id(1), "--yes", "--spare", node_id(3))

    assert result.stderr.splitlines() == [
        f"desk {node_id(1)} was removed",
        f"laptop {node_id(2)} was removed",
        "cellar, kitchen, invited by desk, stay",
    ]
    assert node.posted == [(node_id(1), node_id(3))]


def test_a_guest_that_joined_meanwhile_is_named_too(meshllm: Invoke, node: FakeClient) -> None:
    node.removed = Removed(node_id(1), "desk", (), (Named(node_id(7), "late\x1b"),))

    result = meshllm("ring", "remove", node_id(1), "--yes")

    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"desk {node_id(1)} was removed",
        f"late\\x1b {node_id(7)} was removed",
    ]


def test_an_unknown_node_cannot_be_spared(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "remove", node_id(1), "--yes", "--spare", node_id(7))

    assert (result.exit_code, node.posted) == (2, [])


def test_a_removal_needs_a_confirmation(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "remove", node_id(1))

    assert result.exit_code == 2
    assert result.stderr.endswith("hint: add `--yes`\n")
    assert node.posted == []


def test_a_closed_stdin_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)

    with pytest.raises(UserError, match="stdin is not a terminal"):
        _confirm(member(1), [])


@pytest.mark.parametrize(("answer", "code", "count"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
def test_the_confirmation_shows_the_full_id(
    meshllm: Invoke,
    node: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    count: int,
) -> None:
    monkeypatch.setattr("meshllm.cli.ring.members._is_interactive", lambda: True)

    result = meshllm("ring", "remove", node_id(1), stdin=answer)

    assert f"Permanently remove desk {node_id(1)}? [y/N]:" in result.stderr
    assert (result.exit_code, len(node.posted)) == (code, count)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), f"laptop {node_id(2)} will be removed, too: it was invited by desk\n"),
        (("--spare", node_id(2)), ""),
    ],
)
def test_the_confirmation_lists_the_guests(
    meshllm: Invoke,
    node: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.setattr("meshllm.cli.ring.members._is_interactive", lambda: True)
    node.there = [member(0), member(1), member(2), member(3, inviters=(node_id(0),))]

    result = meshllm("ring", "remove", node_id(1), *options, stdin="n\n")

    assert result.stderr.startswith(f"{line}Permanently remove desk {node_id(1)}? [y/N]:")
    assert node.posted == []


def test_the_confirmation_leaves_out_the_branches_that_stay() -> None:
    me = member(4, inviters=(node_id(0), node_id(1), node_id(2)), is_self=True)
    one, two = (member(each, inviters=(node_id(0), node_id(1))) for each in (2, 5))
    three = member(6, inviters=(node_id(0), node_id(1), node_id(5)))
    there = [member(0, is_self=False), member(1), one, me, two, three, member(7, inviters=())]

    assert guests(there, member(1), []) == [two, three]
    assert guests(there, member(1), [three]) == []
    assert guests(there, two, []) == [three]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("desk1b", "`desk1b` is too short for an id"),
        ("d-e-s-k-", "`d-e-s-k-` is too short for an id"),
        ("kitc4bc-d", "No member has the id `kitc4bc-d`"),
        ("desk", "`desk` is a name, which any node may choose"),
    ],
)
def test_an_id_must_match_a_member(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find([member(0), member(1)], text)


def test_the_id_of_a_name_is_told() -> None:
    with pytest.raises(UserError) as one:
        find([member(0), member(1)], "desk")
    with pytest.raises(UserError) as two:
        find([member(1), member(2, name="desk")], "desk")

    assert one.value.hint == f"use its id, which is `{member(1).short}`"
    assert two.value.hint == f"{one.value.hint} or `{member(2).short}`"


def test_an_id_must_match_one_member() -> None:
    twin = member(1, node=f"{node_id(1)[:-1]}k", name="twin")

    with pytest.raises(UserError, match="`desk1bcd` matches 2 ids"):
        find([member(1), twin], "desk1bcd")
    assert find([member(1), twin], node_id(1)) == member(1)
