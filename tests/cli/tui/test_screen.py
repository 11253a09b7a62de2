"""What `meshllm tui` shows, and what its keys ask for."""

from dataclasses import replace

import pytest

from meshllm.cli.tui.screen import (
    MAX_LOG,
    Action,
    EndProgram,
    InviteMember,
    RemoveMember,
    ServeModel,
    SettingRow,
    StopModel,
    TimeAnswer,
    TuiScreen,
    TuiView,
    WriteSetting,
    summary,
)
from tests.builders.status import member, node_id, status_of

SETTING = SettingRow("memory", "-", "default", "Memory limit of the process.", "4GiB")


@pytest.fixture
def screen() -> TuiScreen:
    status = status_of(3)
    assert status.model
    return TuiScreen(
        status=replace(status, models=(status.model, replace(status.model, name="other"))),
        members=[member(number) for number in range(3)],
        settings=[replace(SETTING, name=f"setting{number}") for number in range(40)],
    )


def shown(screen: TuiScreen, columns: int = 100, rows: int = 20) -> list[str]:
    return [line for line, _ in screen.lines(columns, rows)]


def chosen(screen: TuiScreen, rows: int = 20) -> list[str]:
    return [line for line, is_chosen in screen.lines(100, rows) if is_chosen]


def press(screen: TuiScreen, *keys: str) -> Action | EndProgram | None:
    """Press keys; return what the last one asks for."""
    asked: Action | EndProgram | None = None
    for key in keys:
        asked = screen.press(key, 10)
    return asked


def question(screen: TuiScreen) -> str:
    """Return the text of the question; empty without one."""
    return screen.question.text if screen.question else ""


@pytest.mark.parametrize(
    ("keys", "view"),
    [
        ((), TuiView.RING),
        (("2",), TuiView.MEMBERS),
        (("5",), TuiView.LOG),
        (("tab", "right"), TuiView.MODELS),
        (("left",), TuiView.LOG),
        (("5", "tab"), TuiView.RING),
        (("s-tab", "s-tab"), TuiView.SETTINGS),
    ],
)
def test_keys_choose_the_view(screen: TuiScreen, keys: tuple[str, ...], view: TuiView) -> None:
    assert press(screen, *keys) is None

    assert screen.view is view
    assert [name.split()[1] for name, is_shown in screen.header() if is_shown] == [
        view.name.capitalize()
    ]
    assert screen.footer().endswith("q quit")


@pytest.mark.parametrize("view", TuiView)
@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (40, 5), (20, 2)])
def test_every_view_fits(screen: TuiScreen, view: TuiView, columns: int, rows: int) -> None:
    screen.view = view
    for keys in ((), ("end",), ("up",), ("pageup",)):
        press(screen, *keys)
        lines = shown(screen, columns, rows)
        assert 0 < len(lines) <= rows
        assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("view", TuiView)
def test_nothing_is_known_at_first(view: TuiView) -> None:
    screen = TuiScreen(view=view)

    assert shown(screen)
    assert chosen(screen) == []
    for key in ("d", "enter", "u", "down", "end"):
        assert press(screen, key) is None
    assert screen.question is None


def test_a_text_is_scrolled_to_its_ends(screen: TuiScreen) -> None:
    whole = shown(screen, rows=100)

    assert shown(screen, rows=10) == whole[:10]
    press(screen, "down", "j")
    assert shown(screen, rows=10) == whole[2:12]
    press(screen, "end")
    assert shown(screen, rows=10) == whole[-10:]
    press(screen, "down")
    assert shown(screen, rows=10) == whole[-10:]
    press(screen, "up")
    assert shown(screen, rows=10) == whole[-11:-1]
    press(screen, "home", "k")
    assert shown(screen, rows=10) == whole[:10]


def test_the_header_of_a_table_stays_while_rows_are_scrolled(screen: TuiScreen) -> None:
    press(screen, "4")
    header, first, *_ = shown(screen, rows=5)
    assert header.startswith("setting ")
    assert chosen(screen, rows=5) == [first]

    press(screen, "pagedown")
    assert shown(screen, rows=5)[0] == header
    assert chosen(screen, rows=5)[0].startswith("setting10 ")
    press(screen, "end")
    assert chosen(screen, rows=5) == shown(screen, rows=5)[-1:]
    assert chosen(screen)[0].startswith("setting39 ")
    press(screen, "up")
    assert chosen(screen, rows=5)[0].startswith("setting38 ")


def test_each_view_keeps_its_place(screen: TuiScreen) -> None:
    press(screen, "2", "down", "4", "down", "down", "2")

    assert "desk" in chosen(screen)[0]
    press(screen, "4")
    assert chosen(screen)[0].startswith("setting2 ")


@pytest.mark.parametrize(
    ("keys", "action"),
    [
        (("q",), EndProgram()),
        (("1", "t"), TimeAnswer()),
        (("2", "i"), InviteMember("node")),
        (("2", "c"), InviteMember("client")),
        (("2", "t"), None),
        (("4", "down", "u"), WriteSetting("setting1", None)),
    ],
)
def test_some_keys_act_at_once(
    screen: TuiScreen, keys: tuple[str, ...], action: Action | EndProgram | None
) -> None:
    assert press(screen, *keys) == action
    assert screen.question is None


@pytest.mark.parametrize(
    ("keys", "said", "action"),
    [
        (("2", "down", "d"), "y", RemoveMember(node_id(1), "desk (desk1bc)")),
        (("2", "down", "d"), " YES ", RemoveMember(node_id(1), "desk (desk1bc)")),
        (("2", "down", "d"), "", None),
        (("2", "down", "d"), "no", None),
        (("3", "down", "d"), "y", StopModel("other")),
        (("3", "s"), " builtin ", ServeModel("builtin")),
        (("3", "s"), " ", None),
        (("4", "enter"), "8GiB", WriteSetting("setting0", "8GiB")),
        (("4", "enter"), "", None),
        (("4", "enter"), "4GiB", None),
    ],
)
def test_some_keys_ask_first(
    screen: TuiScreen, keys: tuple[str, ...], said: str, action: Action | None
) -> None:
    assert press(screen, *keys) is None
    assert question(screen)

    assert screen.answer(said) == action
    assert not question(screen)
    assert screen.answer(said) is None


def test_a_setting_is_changed_from_its_value(screen: TuiScreen) -> None:
    press(screen, "4", "enter")

    assert screen.question
    assert screen.question.given == "4GiB"
    assert screen.question.text == "setting0 (Memory limit of the process): "


def test_who_goes_with_a_member_is_said_before(screen: TuiScreen) -> None:
    guest = replace(member(2), inviters=(node_id(0), node_id(1)))
    screen.members = [member(0), member(1), guest, replace(member(3), state="removed")]

    press(screen, "2", "down", "d")
    assert question(screen) == "Permanently remove desk (desk1bc) and 1 that it invited? [y/N] "
    screen.answer("n")
    press(screen, "down", "down", "d")
    assert not question(screen)
    assert screen.message == "it is removed already"
    press(screen, "home", "d")
    assert not question(screen)
    assert "this node leaves the mesh when it is stopped" in screen.message


def test_a_row_stays_selected_when_others_come_and_go(screen: TuiScreen) -> None:
    press(screen, "2", "down", "down")
    (before,) = chosen(screen)

    screen.members = screen.members[1:]
    assert [" ".join(line.split()[:2]) for line in chosen(screen)] == [" ".join(before.split()[:2])]
    screen.members = screen.members[:1]
    assert "desk" in chosen(screen)[0]


def test_a_table_scrolls_only_where_it_must(screen: TuiScreen) -> None:
    press(screen, "4", "end")
    lines = shown(screen, rows=10)

    press(screen, "up", "up")
    assert shown(screen, rows=10) == lines
    assert chosen(screen, rows=10) == [lines[-3]]


def test_long_events_are_wrapped() -> None:
    screen = TuiScreen(view=TuiView.LOG)
    screen.log.append("12:00:00 the first ring has lost a node")

    assert shown(screen, columns=20) == ["12:00:00 the first", "  ring has lost a", "  node"]


def test_the_last_line_says_how_to_answer(screen: TuiScreen) -> None:
    press(screen, "3", "s")

    assert screen.footer() == "Enter: answer  Esc: cancel"


def test_the_latest_events_come_first_and_are_limited() -> None:
    screen = TuiScreen(view=TuiView.LOG)
    screen.log += map(str, range(MAX_LOG + 2))

    assert shown(screen, rows=2) == [str(MAX_LOG + 1), str(MAX_LOG)]
    assert len(screen.log) == MAX_LOG


def test_a_summary_has_the_speed_once_it_is_measured() -> None:
    status = status_of(3)
    assert status.ring.measured

    rate = f"{1000 / status.ring.measured.ms_per_token:.0f} tokens/s"
    assert summary(status).startswith(f"attic: serving, 3 in the ring, {rate}, ")
    assert "tokens/s" not in summary(status_of(3, measured=False))
