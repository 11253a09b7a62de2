"""Interactive `meshllm chat`: answers on stdout, everything else on stderr."""

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from meshllm.cli.chat.conversation import REPL_COMMANDS, SETTABLE, Conversation, Question
from meshllm.cli.chat.outlined import outlined
from meshllm.cli.chat.prompt import check_utf8
from meshllm.cli.shared.answer import stream
from meshllm.cli.shared.local import Opener
from meshllm.cli.shared.signals import cancelled_by_signals
from meshllm.cli.terminal import render
from meshllm.config import Settings
from meshllm.errors import MeshError
from meshllm.local_files import make_private, open_own
from meshllm.node import event_loop
from meshllm.request import Answer, Backend, Request, Turn

if TYPE_CHECKING:
    from meshllm.outline.eligibility import OutlineMode

QUOTES = '"""'
_EXITS = {"exit", "quit"}


def converse(
    opener: Opener,
    conversation: Conversation,
    mode: "OutlineMode | None",
    *,
    stats: bool,
    quiet: bool,
) -> None:
    """Run a conversation until the user exits."""
    repl = _Repl(conversation, outlined(opener, mode), stats=stats, quiet=quiet)
    repl.may_outline = mode is not None
    event_loop.run(repl.run())


class _Repl:
    """Reads lines; runs commands and sends messages."""

    def __init__(
        self, conversation: Conversation, opener: Opener, *, stats: bool, quiet: bool
    ) -> None:
        self.conversation = conversation
        self.opener = opener
        self.stats = stats
        self.quiet = quiet
        self.may_outline = False
        self.session = _session(conversation.settings)
        self.leaving = asyncio.Event()

    async def run(self) -> None:
        """Show the prompt while the ring forms; raise what makes the ring fail."""
        self.ring: asyncio.Future[Backend] = asyncio.get_running_loop().create_future()
        chat = self.conversation
        who = chat.where and f", answered by {chat.where}"
        if not self.quiet:
            about = f"{chat.settings.model}{who}; /help lists commands, Ctrl-D exits"
            _note(render.wrapped(about))
        with cancelled_by_signals():
            await self._converse()

    async def _converse(self) -> None:
        async with asyncio.TaskGroup() as group:
            host = group.create_task(self._host())
            while await self._turn():
                pass
            self.leaving.set()
            if not self.ring.done():
                host.cancel()

    async def _host(self) -> None:
        """Keep the ring open in its own task: the task that opens a ring must close it."""
        async with self.opener(self.conversation.settings) as ring:
            self.ring.set_result(ring)
            await self.leaving.wait()

    async def _turn(self) -> bool:
        """Handle one line; return False to exit."""
        try:
            line = check_utf8(await self.session.prompt_async(), "The line")
            if line.strip().lower() in _EXITS:
                return False
            if line.startswith("/"):
                await self._execute(line)
            elif question := _unquoted(line):
                await self._ask(question)
        except KeyboardInterrupt:
            if not self.session.default_buffer.text:
                _note("exit with Ctrl-D or /exit")
        except EOFError:
            return False
        except MeshError as error:
            render.error(error)
        return True

    async def _execute(self, line: str) -> None:
        turns = [*self.conversation.turns]
        match self.conversation.execute(line):
            case Question(text, is_draft=True):
                try:
                    edited = await self.session.prompt_async(default=text)
                    text = _unquoted(check_utf8(edited, "The line"))
                finally:
                    self.conversation.turns = turns
                if text:
                    before = [*turns]
                    self.conversation.take_back()
                    await self._ask_instead(before, text)
            case Question(text):
                await self._ask_instead(turns, text, is_new=True)
            case note:
                _note(note)

    async def _ask_instead(
        self, before: list[Turn], question: str, *, is_new: bool = False
    ) -> None:
        """Ask in place of the last question, which returns if there is no answer."""
        left = len(self.conversation.turns)
        try:
            await self._ask(question, is_new=is_new)
        except MeshError:
            self.conversation.turns = before
            raise
        if len(self.conversation.turns) == left:
            self.conversation.turns = before

    async def _ask(self, question: str, *, is_new: bool = False) -> None:
        """Show an answer; Ctrl-C stops it and keeps the text so far."""
        pieces: list[str] = []
        request = self.conversation.request(question, is_new=is_new)
        asking = asyncio.ensure_future(self._answer(request, pieces))
        with _cancelled_by_sigint(asking):
            await asyncio.wait({asking})
        self.conversation.append(question, "".join(pieces))
        if asking.cancelled():
            _note("stopped")
            return
        self.conversation.answer = asking.result()
        if self.stats:
            _note(f"{render.statistics(asking.result())}\nseed {self.conversation.seed}")

    async def _answer(self, request: Request, pieces: list[str]) -> Answer:
        is_rendered = not self.conversation.settings.plain
        with (
            render.Status(sys.stderr, is_quiet=self.quiet) as status,
            render.answering(markdown=is_rendered) as write,
        ):

            def keep(piece: str) -> None:
                pieces.append(piece)
                write(piece)

            doing = "waiting for" if self.ring.done() else "loading"
            status.show(f"{doing} {self.conversation.settings.model}")
            ring = await asyncio.shield(self.ring)
            return await stream(ring, request, status, keep, may_outline=self.may_outline)


def _session(settings: Settings) -> PromptSession[str]:
    """Return the line editor: history, Tab completion, multi-line messages in triple quotes."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline()

    session: PromptSession[str] = PromptSession(
        ">>> ",
        output=create_output(sys.stderr if sys.stderr.isatty() else sys.stdout),
        history=_history() if settings.history else InMemoryHistory(),
        completer=_Commands(),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        multiline=Condition(lambda: _is_open(session.default_buffer.text)),
        prompt_continuation=_continuation,
        key_bindings=bindings,
        enable_suspend=True,  # Ctrl-Z
    )
    return session


def _continuation(width: int, _: int, wraps: int) -> str:
    """Return what precedes a further line of a message, or the rest of one that is wrapped."""
    return " " * width if wraps else "... "


def _history() -> History:
    """Keep history in a private file of the state folder, or in memory if that fails."""
    path = user_state_path("meshllm", appauthor=False) / "history"
    try:
        make_private(path.parent)
        os.close(open_own(path, os.O_APPEND))
    except OSError:
        return InMemoryHistory()
    return _FileHistory(path)


class _FileHistory(FileHistory):
    """Keeps lines in memory once the file cannot be written, as on a full disk."""

    def store_string(self, string: str) -> None:
        """Write a line, which is in memory already: an error would break the prompt."""
        with suppress(OSError):
            super().store_string(string)


class _Commands(Completer):
    """Completes command names, and setting names after ``/set``."""

    def get_completions(self, document: Document, _: CompleteEvent) -> Iterable[Completion]:
        """Yield completions of the text before the cursor."""
        text = document.text_before_cursor
        words, typed = (SETTABLE, text[5:]) if text.startswith("/set ") else (REPL_COMMANDS, text)
        for word in words:
            if (typed and word.startswith(typed)) or (words is SETTABLE and not typed):
                yield Completion(word, start_position=-len(typed))


def _is_open(text: str) -> bool:
    """Return whether a multi-line message is not closed yet."""
    return text.startswith(QUOTES) and not text.rstrip().endswith(QUOTES, len(QUOTES))


def _unquoted(line: str) -> str:
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES)
    return text.strip()


@contextmanager
def _cancelled_by_sigint(asking: asyncio.Task[Answer]) -> Iterator[None]:
    """Cancel the answer on Ctrl-C, and turn off echo while it is printed."""
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    loop.add_signal_handler(signal.SIGINT, asking.cancel)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        loop.remove_signal_handler(signal.SIGINT)
        asking.cancel()


def _note(text: str) -> None:
    render.print_message(render.dim(text))
