import json
import os
import resource
from pathlib import Path

import pytest

from meshllm.cli.chat.conversation import REPL_COMMANDS, SETTABLE, Conversation
from meshllm.config import Settings
from meshllm.errors import UserError
from meshllm.request import MODEL_SAMPLING
from tests.builders.fake_ring import answer_of


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(Settings())


def test_a_request_contains_the_previous_turns(conversation: Conversation) -> None:
    conversation.append("I am Ada", "Hello Ada")
    conversation.execute("/system be brief")

    request = conversation.request("Who am I?")

    assert [(turn["role"], turn["content"]) for turn in request.turns] == [
        ("system", "be brief"),
        ("user", "I am Ada"),
        ("assistant", "Hello Ada"),
        ("user", "Who am I?"),
    ]


def test_a_question_without_a_reply_is_dropped(conversation: Conversation) -> None:
    conversation.append("stopped at once", "")

    assert conversation.turns == []


def test_help_lists_every_command(conversation: Conversation) -> None:
    text = output_of(conversation, "/help")

    assert all(name in text for name in REPL_COMMANDS)
    assert "Ctrl-C" in text


@pytest.mark.parametrize("name", SETTABLE)
def test_everything_settable_can_be_set_and_shown(conversation: Conversation, name: str) -> None:
    told = conversation.execute(f"/set {name} 1")

    assert told == f"{name} = 1"
    assert f"{name} " in output_of(conversation, "/show")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("temperature", "the model's"),
        ("seed", "random"),
        ("max_tokens", "no limit"),
        ("frequency_penalty", "0"),
    ],
)
def test_a_set_value_can_be_reset(conversation: Conversation, name: str, shown: str) -> None:
    conversation.execute(f"/set {name} 1")

    assert conversation.execute(f"/set {name} default") == f"{name} = {shown}"
    assert conversation.settings == Settings()


def test_help_lists_no_command_twice(conversation: Conversation) -> None:
    assert [line for line in output_of(conversation, "/help").splitlines() if "/quit" in line] == [
        "/exit            exit; also /quit, /bye, exit and quit"
    ]


def test_a_set_value_is_used_for_the_next_answer(conversation: Conversation) -> None:
    conversation.execute("/set top-p 0.5")
    conversation.execute("/set max_tokens 7")

    request = conversation.request("hi")

    assert (request.sampling.top_p, request.max_tokens) == (0.5, 7)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("/set temprature 1", "`temprature` cannot be set", "did you mean `temperature`?"),
        ("/set nodes 3", "`nodes` cannot be set", "max_tokens, temperature"),
        ("/set seed", "`/set` needs a name and a value", "`/set seed VALUE`"),
        ("/set", "`/set` needs a name and a value", "`/set temperature 0.8`"),
        ("/set top_p 2", "`top_p` is 2.0, not between 0 and 1 (/set)", ""),
        ("/set top_k many", "`top_k` is 'many', not a whole number (/set)", ""),
        ("/zzzz", "Unknown command `/zzzz`", "see `/help`"),
        ("/regenerate", "There is no question yet", "ask something"),
        ("/edit", "There is no question yet", "ask something"),
        ("/copy", "There is no answer yet", "ask something"),
        ("/shwo", "Unknown command `/shwo`", "did you mean `/show`? see `/help`"),
        ("/save", "`/save` needs a file", "`/save talk.json`"),
        ("/load", "`/load` needs a file", "`/load talk.json`"),
        ("/load gone.json", "`gone.json` cannot be read: no such file or directory", "check"),
        (
            "/save no/dir/a.json",
            "`no/dir/a.json` cannot be written: No such file",
            "check the path",
        ),
        ("/stats", "No complete answer yet", "ask something"),
    ],
)
def test_an_invalid_command_is_explained(
    conversation: Conversation, line: str, message: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        conversation.execute(line)

    assert str(caught.value).startswith(message)
    assert (caught.value.hint or "").startswith(hint)


def test_a_conversation_continues_from_a_file(conversation: Conversation, home: Path) -> None:
    conversation.execute("/system be brief")
    conversation.execute("/set seed 7")
    conversation.append("Grüße", "🦊")
    other = Conversation(Settings(system="something else"))

    told = [conversation.execute("/save talk.json"), other.execute("/load talk.json")]

    assert told == [
        "saved 2 messages in `talk.json`",
        "loaded 2 messages from `talk.json`",
    ]
    assert other.turns == conversation.turns
    assert (other.settings.system, other.settings.sampling.seed) == ("be brief", 7)
    assert (home / "talk.json").stat().st_mode & 0o777 == 0o600


def test_what_a_saved_conversation_leaves_unset_is_unset_again(home: Path) -> None:
    Conversation(Settings()).execute("/save talk.json")
    other = Conversation(Settings())
    for line in ("/set seed 7", "/set temperature 0.9", "/load talk.json"):
        other.execute(line)

    assert other.settings == Settings()


def test_a_saved_conversation_may_be_saved_again(conversation: Conversation) -> None:
    conversation.execute("/save talk.json")
    conversation.append("a", "b")

    assert conversation.execute("/save talk.json") == "saved 2 messages in `talk.json`"


def test_a_full_disk_keeps_the_earlier_conversation(conversation: Conversation, home: Path) -> None:
    conversation.execute("/save talk.json")
    before = (home / "talk.json").read_bytes()
    conversation.append("a", "b" * 10_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"`talk.json` cannot be written: File too large"):
            conversation.execute("/save talk.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [each.name for each in home.iterdir()] == ["talk.json"]
    assert (home / "talk.json").read_bytes() == before


def test_no_other_file_is_overwritten(conversation: Conversation, home: Path) -> None:
    (home / "precious.txt").write_text("precious")

    with pytest.raises(UserError, match="is not a saved conversation"):
        conversation.execute("/save precious.txt")

    assert (home / "precious.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"schema": 2, "settings": {}, "turns": []}',
        '{"schema": 1, "settings": {}, "turns": [{"role": "user"}]}',
        '{"schema": 1, "settings": {}, "turns": [{"role": "root", "content": "x"}]}',
        '{"schema": 1, "settings": {}, "turns": [{"role": "user", "content": "x"}]}',
        '{"schema": 1, "settings": {}, "turns": [{"role": "user", "content": "\\ud800"}]}',
        "[" * 100_000,
    ],
)
def test_a_file_without_a_conversation_is_refused(
    conversation: Conversation, home: Path, content: str
) -> None:
    (home / "talk.json").write_text(content)
    conversation.append("a", "b")

    with pytest.raises(UserError, match="is not a saved conversation"):
        conversation.execute("/load talk.json")

    assert len(conversation.turns) == 2


@pytest.mark.parametrize(
    "name", ["/dev/zero", "pipe", "x" * 300, "a\0b", "~no-such-user/talk.json"]
)
def test_what_is_not_a_regular_file_is_neither_loaded_nor_overwritten(
    conversation: Conversation, home: Path, name: str
) -> None:
    os.mkfifo(home / "pipe")

    for command in ("/load", "/save"):
        with pytest.raises(
            UserError, match=r"cannot be read|cannot be written|is not known|no NUL"
        ):
            conversation.execute(f"{command} {name}")


def test_a_saved_setting_out_of_range_is_refused(conversation: Conversation, home: Path) -> None:
    content = {"schema": 1, "settings": {"top_p": 9}, "turns": []}
    (home / "talk.json").write_text(json.dumps(content))

    with pytest.raises(UserError, match="not between 0 and 1"):
        conversation.execute("/load talk.json")


def test_clear_drops_turns_and_keeps_settings(conversation: Conversation) -> None:
    conversation.append("a", "b")
    conversation.execute("/set seed 7")

    conversation.execute("/clear")

    assert (conversation.turns, conversation.settings.sampling.seed) == ([], 7)


def test_system_without_a_text_removes_the_system_prompt(conversation: Conversation) -> None:
    conversation.execute("/system be brief")

    conversation.execute("/system")

    assert conversation.settings.system is None


def test_stats_show_the_last_answer(conversation: Conversation) -> None:
    conversation.answer = answer_of("hi", 1)
    seed = conversation.request("hi").sampling.seed

    assert "250.0 tokens/s" in output_of(conversation, "/stats")
    assert f"\nseed {seed}" in output_of(conversation, "/stats")


def test_each_answer_has_a_new_seed_unless_one_is_set(conversation: Conversation) -> None:
    drawn = {conversation.request("hi").sampling.seed for _ in range(8)}
    conversation.execute("/set seed 7")

    assert len(drawn) == 8
    assert conversation.request("hi").sampling.seed == 7
    assert conversation.request("hi", is_new=True).sampling.seed != 7


def test_what_is_not_set_is_left_to_the_model(conversation: Conversation) -> None:
    assert conversation.request("hi").unset == MODEL_SAMPLING
    assert "the model's" in output_of(conversation, "/show")

    conversation.execute("/set temperature 0")

    assert "temperature" not in conversation.request("hi").unset
    assert conversation.request("hi").sampling.temperature == 0


def output_of(conversation: Conversation, line: str) -> str:
    told = conversation.execute(line)
    assert isinstance(told, str)
    return told


def test_bye_exits(conversation: Conversation) -> None:
    with pytest.raises(EOFError):
        conversation.execute("/bye")
