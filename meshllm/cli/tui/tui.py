"""`meshllm tui`: watch and control the mesh in a terminal."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from meshllm.cli.chat.prompt import check_utf8
from meshllm.cli.ring.status import clean, ms
from meshllm.cli.shared.client import NodeClient, socket_path
from meshllm.cli.shared.local import absolute_model
from meshllm.cli.shared.options import help_of, settings, shown, takes
from meshllm.cli.terminal import render
from meshllm.cli.terminal.wrap import width_of
from meshllm.cli.tui.screen import (
    Action,
    EndProgram,
    InviteMember,
    RemoveMember,
    ServeModel,
    SettingRow,
    StopModel,
    TimeAnswer,
    TuiScreen,
    WriteSetting,
    summary,
)
from meshllm.config import Scalar, change, current, files, keys, load
from meshllm.errors import MeshError, UserError

if TYPE_CHECKING:
    from prompt_toolkit import Application
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import Layout
    from prompt_toolkit.output import Output

    from meshllm.status import MeshStatus

EXAMPLES = """\b
Examples:
  meshllm tui
  meshllm tui --state ~/second-node
"""

USER_FILE = "user file"
_AROUND = 2  # lines around the body: the views and the keys; the message takes more
_MOST = 3  # lines of a message
_TICKET_S = 3600  # of validity: the default of `meshllm ring ticket`
_TOKENS = 32
_KEYS = (
    "tab", "s-tab", "left", "right", "up", "down", "pageup", "pagedown", "home", "end", "enter",
    *"12345jkqticdsu",
)  # fmt: skip


@takes("state")
def tui(**flags: Scalar) -> None:
    """Watch and control the mesh in the terminal.

    It shows the ring and the events of the running node, invites and removes members, serves and
    stops models, and changes the settings of the user's file, which nodes read when they start. The
    keys of each view are in the last line.
    """
    if not render.can_redraw() or sys.stdin is None or not sys.stdin.isatty():
        raise UserError(
            "`meshllm tui` needs a terminal", hint="use `meshllm ring status`, or `--watch`"
        )
    asyncio.run(Tui(NodeClient(socket_path(settings(flags)))).run())


def read_settings() -> Iterator[SettingRow]:
    """Yield all settings, the ticket of `join` hidden."""
    config, names = load({}), dict(zip(map(str, files()), (USER_FILE, "project file"), strict=True))
    chosen = config.settings
    if chosen.join is not None:
        chosen = change(chosen, {"join": "(hidden)"})
    for name, key in keys().items():
        value = current(config.settings, name)
        given = "" if value is None or name == "join" else str(render.plain(value))
        origin = names.get(config.origins[name], config.origins[name])
        yield SettingRow(name, shown(chosen, name), origin, help_of(key), given)


class Tui:
    """Connects a `TuiScreen` with the terminal and a node."""

    def __init__(
        self, client: NodeClient, given: "Input | None" = None, output: "Output | None" = None
    ) -> None:
        """Prepare; ``given`` and ``output`` replace the terminal in tests."""
        self.screen = TuiScreen(settings=tuple(read_settings()))
        self._client = client
        self._app = self._application(given, output)
        self._tasks: asyncio.TaskGroup | None = None
        self._job: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until a key ends it.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            LinkLost: no node is running at first.
        """
        from meshllm.cli.ring.watch import follow
        from meshllm.cli.shared.signals import cancelled_by_signals

        self._show(await self._client.status())
        with cancelled_by_signals():
            async with asyncio.TaskGroup() as group:  # a bug in a task ends the program
                self._tasks = group
                tasks = [
                    group.create_task(follow(self._client, self._show, self._away)),
                    group.create_task(self._list_members()),
                ]
                screen = group.create_task(self._app.run_async())
                # Not cancelled itself: the screen waits for a ticket, and that for its own end.
                await asyncio.wait({screen})
                for task in (*tasks, *([self._job] if self._job else [])):
                    task.cancel()
        if screen.result():
            raise KeyboardInterrupt

    def _show(self, status: "MeshStatus") -> None:
        from meshllm.cli.shared.events import notices

        before, self.screen.status = self.screen.status, clean(status)
        if self.screen.away:
            self._note("the node answers again")
            self.screen.away = ""
        for each in notices(before, self.screen.status):
            if before or each.event != "joined":  # else it was here before
                self._note(each.text)
        self._app.invalidate()

    def _away(self, message: str) -> None:
        self.screen.away = "no answer from the node, this is old"
        self._note(render.one_line(message))
        self._app.invalidate()

    def _note(self, text: str) -> None:
        self.screen.log.append(f"{time.strftime('%H:%M:%S')} {text}")

    async def _list_members(self) -> None:
        from meshllm.cli.ring.watch import REFRESH_S

        while True:
            with suppress(MeshError):
                self.screen.members = clean((await self._client.members()).members)
                self._app.invalidate()
            await asyncio.sleep(REFRESH_S)

    def _begin(self, action: Action | EndProgram | None) -> None:
        """Do what a key asked for, while others are handled."""
        if action is None or self._tasks is None:
            return
        if isinstance(action, EndProgram):
            self._app.exit(result=False)
            return
        if self._job and not self._job.done():
            self.screen.message = "the last action is not done yet; Esc cancels it"
            return
        self.screen.message = "working …, Esc cancels"
        self._job = self._tasks.create_task(self._do(action))

    async def _do(self, action: Action) -> None:
        try:
            self.screen.message = await self._perform(action)
        except MeshError as error:
            hint = f"; hint: {error.hint}" if error.hint else ""
            self.screen.message = render.one_line(f"error: {error}{hint}")
        except asyncio.CancelledError:
            self.screen.message = "cancelled"
            raise
        finally:
            self._note(self.screen.message)
            self._app.invalidate()

    async def _perform(self, action: Action) -> str:
        """Return what an action did; raise `MeshError` if it failed."""
        client = self._client
        match action:
            case TimeAnswer():
                return await self._trace()
            case InviteMember(role):
                ticket = await client.invite(role, _TICKET_S, 1)
                await self._print_ticket(role, ticket)
                return "the ticket admits one machine within 1 h"
            case RemoveMember(node, name):
                done = await client.remove(node)
                also = f" with {len(done.taken)} that it invited" if done.taken else ""
                return f"{name} was removed{also}"
            case ServeModel(model):
                from meshllm.node.options import ModelOptions

                served = await client.serve(ModelOptions(absolute_model(model)))
                return f"the mesh serves {render.one_line(served.name)}: see its ring"
            case StopModel(model):
                return f"{render.one_line(await client.stop(model))} is no longer served"
            case WriteSetting(name, value):
                return self._write(name, value)

    async def _trace(self) -> str:
        from meshllm.cli.ring.trace import PROMPT
        from meshllm.request import Answer, Request

        request = Request(turns=({"role": "user", "content": PROMPT},), max_tokens=_TOKENS)
        async for event in self._client.generate(request):
            if isinstance(event, Answer):
                first, each = ms(event.ttft_ms), ms(event.ms_per_token)
                return f"first token {first}, then {each} per token"
        return ""

    async def _print_ticket(self, role: str, ticket: str) -> None:
        """Leave the screen for a moment, so that the ticket can be copied as one line."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import in_terminal

        session = PromptSession[str](input=self._app.input, output=self._app.output)
        async with in_terminal():
            render.out(f"meshllm {'node' if role == 'node' else 'chat'} --join {ticket}")
            with suppress(KeyboardInterrupt, EOFError):
                await session.prompt_async("It stays on this terminal. Enter returns. ")

    def _write(self, name: str, value: str | None) -> str:
        from meshllm.config_file import drop, put

        path, _ = files()
        if value is None:
            drop(path, name)
            done = f"removed {name} from {path}"
        else:
            written = render.plain(put(path, name, value))
            done = f"{name} = {'(hidden)' if name == 'join' else written} in {path}"
        self.screen.settings = tuple(read_settings())
        origins = {row.name: row.origin for row in self.screen.settings}
        if value is not None and origins[name] != USER_FILE:
            return f"{done}, but {origins[name]} sets it, too, and takes precedence"
        return f"{done}; nodes read it when they start"

    # The terminal.

    def _application(self, given: "Input | None", output: "Output | None") -> "Application[bool]":
        """Return the program; its result is whether it was interrupted."""
        from prompt_toolkit import Application
        from prompt_toolkit.styles import Style

        return Application(
            self._layout(),
            style=Style.from_dict({"chosen": "reverse", "quiet": "dim"}),
            key_bindings=self._bindings(),
            full_screen=True,
            input=given,
            output=output,
        )

    def _layout(self) -> "Layout":
        from prompt_toolkit.buffer import Buffer
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import DummyHistory
        from prompt_toolkit.layout import (
            BufferControl,
            ConditionalContainer,
            Dimension,
            FormattedTextControl,
            HSplit,
            Layout,
            Window,
        )
        from prompt_toolkit.layout.processors import BeforeInput

        def accept(buffer: Buffer) -> bool:
            self._answer(buffer.text)
            return False

        no_secrets = DummyHistory()
        self._buffer = Buffer(history=no_secrets, multiline=False, accept_handler=accept)
        self._is_asked = Condition(lambda: self.screen.question is not None)
        asked = BeforeInput(lambda: self.screen.question.text if self.screen.question else "")
        body = FormattedTextControl(self._body, focusable=True, show_cursor=False)
        self._body_control = body
        self._input = BufferControl(self._buffer, input_processors=[asked])

        def line(text: object) -> Window:
            return Window(FormattedTextControl(text), height=1)  # type: ignore[arg-type]

        question = ConditionalContainer(Window(self._input, height=1), self._is_asked)
        said = FormattedTextControl(lambda: self.screen.message)
        long = Window(said, height=lambda: Dimension.exact(self._said()), wrap_lines=True)
        message = ConditionalContainer(long, ~self._is_asked)
        keys_of_view = line(lambda: [("class:quiet", self.screen.footer())])
        return Layout(
            HSplit([line(self._header), Window(body), question, message, keys_of_view]), body
        )

    def _bindings(self) -> "KeyBindings":
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        bindings = KeyBindings()

        def bind(key: str) -> None:
            @bindings.add(key, filter=~self._is_asked)
            def press(_event: KeyPressEvent) -> None:
                self._begin(self.screen.press(key, self._room()))
                if self.screen.question is not None:
                    self.screen.message = ""
                    self._ask(self.screen.question.given)

        for key in _KEYS:
            bind(key)
        self._bind_control(bindings)
        return bindings

    def _bind_control(self, bindings: "KeyBindings") -> None:
        """Bind the keys that are not of a view."""
        from prompt_toolkit.key_binding import KeyPressEvent
        from prompt_toolkit.keys import Keys

        @bindings.add("c-z")
        def suspend(event: KeyPressEvent) -> None:
            event.app.suspend_to_background()

        @bindings.add(Keys.BracketedPaste, filter=self._is_asked)
        def paste(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(" ".join(event.data.split()))

        @bindings.add("c-g", filter=~self._is_asked)
        @bindings.add("escape", eager=True, filter=~self._is_asked)
        def cancel_job(_event: KeyPressEvent) -> None:
            if self._job:
                self._job.cancel()

        @bindings.add("<sigint>")
        @bindings.add("c-c")
        def interrupt(event: KeyPressEvent) -> None:
            event.app.exit(result=True)

        @bindings.add("c-g", filter=self._is_asked)
        @bindings.add("escape", eager=True, filter=self._is_asked)
        def cancel(_event: KeyPressEvent) -> None:
            self.screen.question = None
            self._app.layout.focus(self._body_control)

    def _ask(self, given: str) -> None:
        self._buffer.text, self._buffer.cursor_position = given, len(given)
        self._app.layout.focus(self._input)

    def _answer(self, text: str) -> None:
        self._app.layout.focus(self._body_control)
        try:
            self._begin(self.screen.answer(check_utf8(text, "The answer")))
        except UserError as error:
            self.screen.question, self.screen.message = None, f"error: {error}"

    def _header(self) -> "StyleAndTextTuples":
        status = self.screen.status
        views = [
            ("class:chosen" if is_shown else "", name) for name, is_shown in self.screen.header()
        ]
        what = self.screen.away or (summary(status) if status else "")
        room = self._app.output.get_size().columns - sum(len(name) for _, name in views) - 2
        return [*views, ("class:quiet", f"  {render.cut(what, room)}" if room > 1 else "")]

    def _said(self) -> int:
        """Return the lines that the message takes."""
        columns = max(1, self._app.output.get_size().columns)
        return max(1, min(-(-width_of(self.screen.message) // columns), _MOST))

    def _room(self) -> int:
        """Return the lines of the body."""
        said = 1 if self.screen.question else self._said()
        return max(1, self._app.output.get_size().rows - _AROUND - said)

    def _body(self) -> "StyleAndTextTuples":
        lines = self.screen.lines(self._app.output.get_size().columns, self._room())
        return [("class:chosen" if is_chosen else "", f"{text}\n") for text, is_chosen in lines]
