"""State of a conversation, and its slash commands."""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshllm.cli.shared.options import shown
from meshllm.cli.terminal import render
from meshllm.config import DEFAULT, Scalar, Settings, change, check, current, expanded, keys, parse
from meshllm.errors import UserError
from meshllm.local_files import hint_of, read_regular, reason_of, replace_text
from meshllm.request import MODEL_SAMPLING, Answer, Request, Sampling, Turn
from meshllm.strict_json import parse as parse_json

MAX_SAVED_BYTES = 64 << 20  # of a conversation
_SEEDS = 2**31
SETTABLE = ("max_tokens", *(each.name for each in fields(Sampling)))
_SAVED = ("system", *SETTABLE)


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the settings of the next answer."""

    settings: Settings
    stop: tuple[str, ...] = ()
    schema: str | None = None
    """A JSON schema that the answers satisfy."""
    thinks: bool | None = None
    """Whether the model reasons before it answers."""
    turns: list[Turn] = field(default_factory=list)
    answer: Answer | None = None
    """The latest complete answer."""

    seed: int = 0
    """Of the latest answer."""
    where: str = ""
    """What answers, for people."""

    def request(self, text: str, *, is_new: bool = False) -> Request:
        """Return the request that continues the conversation with a question.

        With ``is_new`` a seed is drawn, even if one is set, for another answer.
        """
        turns = with_system(self.settings, *self.turns, Turn(role="user", content=text))
        request = request_of(self.settings, turns=turns, stop=self.stop)
        request = replace(request, schema=self.schema, thinks=self.thinks)
        if is_new:
            sampling = replace(request.sampling, seed=draw_seed())
            request = replace(request, sampling=sampling)
        self.seed = request.sampling.seed
        return request

    def take_back(self) -> str:
        """Remove the last question and its answer; return the question.

        Raises:
            UserError: there is none.
        """
        if not self.turns:
            raise UserError("There is no question yet", hint="ask something first")
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def append(self, question: str, reply: str) -> None:
        """Append a question and its reply; drop a question without a reply."""
        if reply:
            self.turns += [
                Turn(role="user", content=question),
                Turn(role="assistant", content=reply),
            ]

    def execute(self, line: str) -> "str | Question":
        """Run a line ``/name argument``; return its output, or what to ask."""
        name, _, argument = line.partition(" ")
        command = REPL_COMMANDS.get(name)
        if command is None:
            close = get_close_matches(name, REPL_COMMANDS, n=1)
            meant = f"did you mean `{close[0]}`? " if close else ""
            hint = f"{meant}see `/help`; start with a space to send the line as a message"
            raise UserError(f"Unknown command `{name}`", hint=hint)
        return command.run(self, argument.strip())


@dataclass(frozen=True, slots=True)
class Question:
    """A question to ask as the result of a command."""

    text: str
    is_draft: bool = False
    """The user edits it first."""


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command."""

    usage: str
    meaning: str
    """In the help; empty for another name of a command."""
    run: Callable[[Conversation, str], str | Question]


def request_of(
    settings: Settings,
    *,
    turns: tuple[Turn, ...] = (),
    raw: str | None = None,
    stop: tuple[str, ...],
) -> Request:
    """Return a request with these settings; draw a seed unless one is set."""
    seed = draw_seed() if "seed" in settings.unset else settings.sampling.seed
    return Request(
        turns=turns,
        raw=raw,
        sampling=replace(settings.sampling, seed=seed),
        unset=tuple(name for name in MODEL_SAMPLING if name in settings.unset),
        max_tokens=settings.max_tokens,
        stop=stop,
    )


def draw_seed() -> int:
    """Draw a seed that is short enough to type."""
    return secrets.randbelow(_SEEDS)


def with_system(settings: Settings, *turns: Turn) -> tuple[Turn, ...]:
    """Put the system prompt before the turns."""
    system = [Turn(role="system", content=settings.system)] if settings.system else []
    return (*system, *turns)


def _help(_: Conversation, __: str) -> str:
    rows = [
        (f"{name} {command.usage}", command.meaning)
        for name, command in REPL_COMMANDS.items()
        if command.meaning
    ]
    keys = [
        ('"""', "start and end a message of several lines"),
        ("Alt-Enter", "insert a line break"),
        ("Ctrl-C", "stop the answer"),
        ("Ctrl-D", "exit"),
    ]
    return render.explained([*rows, *keys])


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    name = name.replace("-", "_")
    if name and name not in SETTABLE:
        close = get_close_matches(name, SETTABLE, n=1)
        hint = f"did you mean `{close[0]}`?" if close else ", ".join(SETTABLE)
        raise UserError(f"`{name}` cannot be set", hint=hint)
    if not text.strip():
        usage = f"`/set {name} VALUE`" if name else "`/set temperature 0.8`"
        raise UserError("`/set` needs a name and a value", hint=usage)
    is_reset = text.strip() == DEFAULT
    default = None if name in Settings().unset else keys()[name].default
    value = default if is_reset else parse(name, text.strip(), "/set")
    conversation.settings = change(conversation.settings, {name: value})
    return f"{name} = {shown(conversation.settings, name)}"


def _show(conversation: Conversation, _: str) -> str:
    names = ("model", *_SAVED)
    rows = [(name, shown(conversation.settings, name)) for name in names]
    more = [("messages", str(len(conversation.turns))), ("answered by", conversation.where)]
    return render.explained([*rows, *more])


def _system(conversation: Conversation, argument: str) -> str:
    conversation.settings = change(conversation.settings, {"system": argument or None})
    return "system prompt set" if argument else "system prompt removed"


def _clear(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "conversation cleared"


def _stats(conversation: Conversation, _: str) -> str:
    if conversation.answer is None:
        raise UserError("No complete answer yet", hint="ask something first")
    return f"{render.statistics(conversation.answer)}\nseed {conversation.seed}"


def _regenerate(conversation: Conversation, _: str) -> Question:
    return Question(conversation.take_back())


def _edit(conversation: Conversation, argument: str) -> Question:
    question = conversation.take_back()
    return Question(argument) if argument else Question(question, is_draft=True)


def _copy(conversation: Conversation, _: str) -> str:
    if not conversation.turns:
        raise UserError("There is no answer yet", hint="ask something first")
    text = conversation.turns[-1]["content"]
    if not render.copy(text):
        raise UserError("Only a terminal can copy", hint="`/save FILE` writes a file")
    return f"sent {len(text)} characters to the clipboard of the terminal"


def _save(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/save")
    if os.path.exists(path):  # noqa: PTH110  # never raises
        _read(path)  # overwrite saved conversations only
    settings = {name: current(conversation.settings, name) for name in _SAVED}
    content = {"schema": render.SCHEMA, "settings": settings, "turns": conversation.turns}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        replace_text(path, text)  # a full disk keeps the earlier conversation
    except OSError as error:
        raise UserError(
            f"`{path}` cannot be written: {error.strerror}", hint=hint_of(error)
        ) from None
    return f"saved {len(conversation.turns)} messages in `{path}`"


def _load(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/load")
    content = _read(path)
    values: dict[str, Scalar] = {
        name: check(name, value, str(path))
        for name, value in content["settings"].items()
        if name in _SAVED and value is not None
    }
    unset: dict[str, Scalar] = dict.fromkeys(("system", "max_tokens", *Settings().unset))
    conversation.settings = change(conversation.settings, unset | values)
    conversation.turns = [
        Turn(role=turn["role"], content=turn["content"]) for turn in content["turns"]
    ]
    return f"loaded {len(conversation.turns)} messages from `{path}`"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UserError(f"`{command}` needs a file", hint=f"`{command} talk.json`")
    if "\0" in argument:
        raise UserError("A file name has no NUL character", hint=f"`{command} talk.json`")
    return expanded(argument)


def _read(path: Path) -> dict[str, Any]:
    """Read a saved conversation; raise `UserError` for any other file."""
    content: Any = None
    try:
        content = parse_json(read_regular(path, MAX_SAVED_BYTES))
    except OSError as error:
        text = f"`{path}` cannot be read: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None
    except UserError:  # other JSON, or none
        pass
    if not _is_conversation(content):
        raise UserError(
            f"`{path}` is not a saved conversation", hint="give a file that `/save` wrote"
        )
    return dict(content)


def _is_conversation(content: Any) -> bool:
    match content:
        case {"schema": render.SCHEMA, "settings": dict(), "turns": [*turns]}:
            roles = ["user", "assistant"] * (len(turns) // 2)
            return all(map(_is_turn, turns)) and [each["role"] for each in turns] == roles
        case _:
            return False


def _is_turn(turn: Any) -> bool:
    match turn:
        case {"role": "user" | "assistant", "content": str()}:
            return True
        case _:
            return False


def _bye(_: Conversation, __: str) -> str:
    raise EOFError


REPL_COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/set": Command(
        "NAME VALUE", "change a generation setting; the value `default` resets it", _set
    ),
    "/show": Command("", "show the settings", _show),
    "/system": Command("TEXT", "set the system prompt; without TEXT remove it", _system),
    "/save": Command("FILE", "save the conversation to a file", _save),
    "/load": Command("FILE", "load a saved conversation", _load),
    "/clear": Command("", "clear the conversation", _clear),
    "/regenerate": Command("", "ask the last question again, with another seed", _regenerate),
    "/edit": Command("[TEXT]", "change the last question and ask it", _edit),
    "/copy": Command("", "copy the last answer to the clipboard", _copy),
    "/stats": Command("", "show the timings of the last answer", _stats),
    "/exit": Command("", "exit; also /quit, /bye, exit and quit", _bye),
    "/quit": Command("", "", _bye),
    "/bye": Command("", "", _bye),
}
