"""State of a conversation, and its slash commands."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshllm.cli.terminal import render
from meshllm.config import Scalar, Settings, change, check, current, parse
from meshllm.errors import UserError
from meshllm.request import Answer, Request, Sampling, Turn

SETTABLE = ("max_tokens", *(each.name for each in fields(Sampling)))
_SAVED = ("system", *SETTABLE)


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the settings of the next answer."""

    settings: Settings
    stop: tuple[str, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    answer: Answer | None = None
    """The latest complete answer."""

    def request(self, text: str) -> Request:
        """Return the request that continues the conversation with a question."""
        return Request(
            turns=with_system(self.settings, *self.turns, Turn(role="user", content=text)),
            sampling=self.settings.sampling,
            max_tokens=self.settings.max_tokens,
            stop=self.stop,
        )

    def append(self, question: str, reply: str) -> None:
        """Append a question and its reply; drop a question without a reply."""
        if reply:
            self.turns += [
                Turn(role="user", content=question),
                Turn(role="assistant", content=reply),
            ]

    def execute(self, line: str) -> str:
        """Run a line ``/name argument`` and return its output."""
        name, _, argument = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            close = get_close_matches(name, COMMANDS, n=1)
            meant = f"did you mean `{close[0]}`? " if close else ""
            hint = f"{meant}see `/help`; start with a space to send the line as a message"
            raise UserError(f"Unknown command `{name}`", hint=hint)
        return command.run(self, argument.strip())


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command."""

    usage: str
    meaning: str
    run: Callable[[Conversation, str], str]


def with_system(settings: Settings, *turns: Turn) -> tuple[Turn, ...]:
    """Put the system prompt before the turns."""
    system = [Turn(role="system", content=settings.system)] if settings.system else []
    return (*system, *turns)


def _help(_: Conversation, __: str) -> str:
    rows = [(f"{name} {command.usage}", command.meaning) for name, command in COMMANDS.items()]
    keys = [
        ('"""', "start and end a message of several lines"),
        ("Alt-Enter", "insert a line break"),
        ("Ctrl-C", "stop the answer"),
        ("Ctrl-D", "exit"),
    ]
    return render.table(("", ""), [*rows, *keys]).lstrip("\n")


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
    value = parse(name, text.strip(), "/set")
    conversation.settings = change(conversation.settings, {name: value})
    return f"{name} = {render.plain(value)}"


def _show(conversation: Conversation, _: str) -> str:
    names = ("model", "nodes", "transport", *_SAVED)
    rows = [(name, render.plain(current(conversation.settings, name))) for name in names]
    return render.table(("", ""), [*rows, ("turns", len(conversation.turns))]).lstrip("\n")


def _system(conversation: Conversation, argument: str) -> str:
    conversation.settings = change(conversation.settings, {"system": argument or None})
    return "system prompt set" if argument else "system prompt removed"


def _clear(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "conversation cleared"


def _stats(conversation: Conversation, _: str) -> str:
    if conversation.answer is None:
        raise UserError("No complete answer yet")
    return render.statistics(conversation.answer)


def _save(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/save")
    if path.exists():
        _read(path)  # overwrite saved conversations only
    settings = {name: current(conversation.settings, name) for name in _SAVED}
    content = {"schema": render.SCHEMA, "settings": settings, "turns": conversation.turns}
    try:
        path.touch(mode=0o600)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"`{path}` cannot be written: {error.strerror}") from None
    return f"saved {len(conversation.turns)} turns in `{path}`"


def _load(conversation: Conversation, argument: str) -> str:
    path = _path(argument, "/load")
    content = _read(path)
    values: dict[str, Scalar] = {
        name: check(name, value, str(path))
        for name, value in content["settings"].items()
        if name in _SAVED and value is not None
    }
    conversation.settings = change(conversation.settings, {"system": None} | values)
    conversation.turns = [
        Turn(role=turn["role"], content=turn["content"]) for turn in content["turns"]
    ]
    return f"loaded {len(conversation.turns)} turns from `{path}`"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UserError(f"`{command}` needs a file", hint=f"`{command} talk.json`")
    return Path(argument).expanduser()


def _read(path: Path) -> dict[str, Any]:
    """Read a saved conversation; raise `UserError` for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}") from None
    except ValueError:
        content = None
    if not _is_conversation(content):
        raise UserError(f"`{path}` is not a saved conversation")
    return dict(content)


def _is_conversation(content: Any) -> bool:
    match content:
        case {"schema": render.SCHEMA, "settings": dict(), "turns": [*turns]}:
            return all(map(_is_turn, turns))
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


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/set": Command("NAME VALUE", "change a generation setting", _set),
    "/show": Command("", "show the settings", _show),
    "/system": Command("TEXT", "set the system prompt; without TEXT remove it", _system),
    "/save": Command("FILE", "save the conversation to a file", _save),
    "/load": Command("FILE", "load a saved conversation", _load),
    "/clear": Command("", "clear the conversation", _clear),
    "/stats": Command("", "show the timings of the last answer", _stats),
    "/bye": Command("", "exit", _bye),
}
