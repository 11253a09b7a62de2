"""What `meshllm tui` shows, and what its keys ask for; draws nothing, and asks no node.

A key changes the screen, or returns an `Action` for the node or the settings. Some keys ask a
question first: the line at the bottom is its answer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING, TypeAlias

from meshllm.cli.ring.members import guests
from meshllm.cli.ring.members import lay_out as lay_out_members
from meshllm.cli.ring.status import lay_out
from meshllm.cli.terminal.render import bytes_of, cut, table

if TYPE_CHECKING:
    from meshllm.status import MemberStatus, MeshStatus, ModelStatus


class TuiView(IntEnum):
    """What the body shows."""

    RING = 0
    MEMBERS = 1
    MODELS = 2
    SETTINGS = 3
    LOG = 4


KEYS = {
    TuiView.RING: "t time an answer",
    TuiView.MEMBERS: "i invite a node  c a client  d remove",
    TuiView.MODELS: "s serve  d stop serving",
    TuiView.SETTINGS: "Enter change  u unset",
    TuiView.LOG: "",
}
"""The keys of each view, beside those of all."""
ALL_KEYS = "1-5 view  ↑↓ move  q quit"
QUESTION_KEYS = "Enter: answer  Esc: cancel"
MAX_LOG = 500  # lines
_HEADER = 1  # lines above the rows of a table


@dataclass(frozen=True, slots=True)
class TimeAnswer:
    """Time an answer of the ring."""


@dataclass(frozen=True, slots=True)
class InviteMember:
    """Make a ticket."""

    role: str


@dataclass(frozen=True, slots=True)
class RemoveMember:
    """Permanently remove a member from the mesh."""

    node: str
    name: str


@dataclass(frozen=True, slots=True)
class ServeModel:
    """Let the mesh serve a model."""

    model: str


@dataclass(frozen=True, slots=True)
class StopModel:
    """Let the mesh no longer serve a model."""

    model: str


@dataclass(frozen=True, slots=True)
class WriteSetting:
    """Write a setting to the user's file; None removes it."""

    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class EndProgram:
    """End the program; the node goes on."""


Action: TypeAlias = TimeAnswer | InviteMember | RemoveMember | ServeModel | StopModel | WriteSetting
"""What takes time, and says what it did."""


@dataclass(frozen=True, slots=True)
class ScreenQuestion:
    """A question at the bottom, the text that its answer begins with, and what the answer does."""

    text: str
    given: str
    answered: Callable[[str], Action | None]


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting and its value, as text, with where it is set."""

    name: str
    value: str
    origin: str
    meaning: str
    given: str = ""
    """The text to change; empty for a secret."""


@dataclass(slots=True)
class TuiScreen:
    """The state of the program."""

    view: TuiView = TuiView.RING
    status: "MeshStatus | None" = None
    """Cleaned."""
    members: "Sequence[MemberStatus]" = ()
    """Cleaned."""
    settings: Sequence[SettingRow] = ()
    away: str = ""
    """Why the status is an old one; empty while the node answers."""
    message: str = ""
    """What the last action did."""
    question: ScreenQuestion | None = None
    log: deque[str] = field(default_factory=lambda: deque[str](maxlen=MAX_LOG))
    _places: dict[TuiView, int] = field(default_factory=dict)
    """The selected row of each view, or the first line that is shown."""
    _tops: dict[TuiView, int] = field(default_factory=dict)
    """The first row of each table that is shown."""
    _chosen: dict[TuiView, str] = field(default_factory=dict)
    """What the selected row of each table is of: rows come and go."""

    @property
    def models(self) -> "Sequence[ModelStatus]":
        """The models of the mesh."""
        return self.status.models if self.status else ()

    def press(self, key: str, lines: int) -> Action | EndProgram | None:
        """Handle a key; ``lines`` are those of the body, for pages."""
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -lines, "pagedown": lines}
        if key == "q":
            return EndProgram()
        if key in {"tab", "right"}:
            self._show(self.view + 1)
        elif key in {"s-tab", "left"}:
            self._show(self.view - 1)
        elif key in {str(view + 1) for view in TuiView}:
            self._show(int(key) - 1)
        elif key in steps or key in {"home", "end"}:
            ends = {"home": 0, "end": len(self._body(80))}
            self._choose(ends[key] if key in ends else self._row() + steps[key])
        else:
            return self._act(key)
        return None

    def answer(self, text: str) -> Action | None:
        """Answer the question."""
        question, self.question = self.question, None
        action = question.answered(text.strip()) if question else None
        if question and action is None:
            self.message = "nothing was changed"
        return action

    def lines(self, columns: int, rows: int) -> Iterator[tuple[str, bool]]:
        """Yield the lines of the body that fit in ``rows``, and which is selected.

        The header of a table stays while its rows are scrolled.
        """
        body, at = [cut(line, columns) for line in self._body(columns)], self._selected()
        if at is None:
            self._places[self.view] = max(0, min(self._place(), len(body) - rows))
            yield from ((line, False) for line in body[self._place() :][:rows])
            return
        room = max(1, rows - _HEADER)
        first = min(max(self._tops.get(self.view, _HEADER), at - room + 1), at)
        first = self._tops[self.view] = max(_HEADER, min(first, len(body) - room))
        yield from ((line, False) for line in body[:_HEADER])
        for number, line in [*enumerate(body)][first:][:room]:
            yield line, number == at

    def header(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of the views, and which is shown."""
        for view in TuiView:
            yield f" {view + 1} {view.name.capitalize()} ", view is self.view

    def footer(self) -> str:
        """Return the keys of the view."""
        if self.question:
            return QUESTION_KEYS
        return "  ".join(filter(None, (KEYS[self.view], ALL_KEYS)))

    def _show(self, view: int) -> None:
        self.view, self.message = TuiView(view % len(TuiView)), ""

    def _rows(self) -> Sequence[str]:
        """Return what each row of a table is of; nothing if the view shows a text."""
        match self.view:
            case TuiView.MEMBERS:
                return [each.node for each in self.members]
            case TuiView.MODELS:
                return [each.name for each in self.models]
            case TuiView.SETTINGS:
                return [each.name for each in self.settings]
            case _:
                return ()

    def _place(self) -> int:
        return self._places.get(self.view, 0)

    def _choose(self, place: int) -> None:
        """Select a row, or scroll a text."""
        rows = self._rows()
        self._places[self.view] = max(0, min(place, len(rows) - 1)) if rows else place
        if rows:
            self._chosen[self.view] = rows[self._place()]

    def _row(self) -> int:
        """Return the place of the selected row, wherever it is now, or of the first line."""
        rows, chosen = self._rows(), self._chosen.get(self.view)
        if chosen in rows:
            self._places[self.view] = rows.index(chosen)
        elif rows:
            self._choose(self._place())
        return self._place()

    def _selected(self) -> int | None:
        """Return the line of the selected row; None if nothing can be selected."""
        return _HEADER + self._row() if self._rows() else None

    def _body(self, columns: int) -> list[str]:
        match self.view:
            case TuiView.RING:
                text = lay_out(self.status, columns) if self.status else "no status yet"
            case TuiView.MEMBERS:
                text = lay_out_members(self.members, columns)
            case TuiView.MODELS:
                text = _models(self.models)
            case TuiView.SETTINGS:
                text = _settings(self.settings)
            case TuiView.LOG:
                lines = (wrap(line, columns, subsequent_indent="  ") for line in reversed(self.log))
                return [*chain.from_iterable(lines)] or ["nothing has happened yet"]
        return text.split("\n")

    def _act(self, key: str) -> Action | None:
        match self.view, key:
            case TuiView.RING, "t":
                return TimeAnswer()
            case TuiView.MEMBERS, "i" | "c":
                return InviteMember("node" if key == "i" else "client")
            case TuiView.MEMBERS, "d" if self.members:
                self._ask_to_remove(self.members[self._row()])
            case TuiView.MODELS, "s":
                asked = "Serve (builtin, a folder, or a Hugging Face name): "
                self.question = ScreenQuestion(
                    asked, "", lambda text: ServeModel(text) if text else None
                )
            case TuiView.MODELS, "d" if self.models:
                name = self.models[self._row()].name
                self._confirm(f"Stop serving {name}", StopModel(name))
            case TuiView.SETTINGS, "enter" if self.settings:
                row = self.settings[self._row()]
                asked = f"{row.name} ({row.meaning.rstrip('.')}): "
                self.question = ScreenQuestion(
                    asked,
                    row.given,
                    lambda text: (
                        WriteSetting(row.name, text) if text not in {"", row.given} else None
                    ),
                )
            case TuiView.SETTINGS, "u" if self.settings:
                return WriteSetting(self.settings[self._row()].name, None)
            case _:
                pass
        return None

    def _ask_to_remove(self, member: "MemberStatus") -> None:
        if member.state == "removed" or member.is_self:
            why = "it is removed already", "this node leaves the mesh when it is stopped"
            self.message = why[member.is_self]
            return
        there = [each for each in self.members if each.state != "removed"]
        name, going = f"{member.name} ({member.short})".lstrip(), len(guests(there, member, ()))
        also = f" and {going} that it invited" if going else ""
        self._confirm(f"Permanently remove {name}{also}", RemoveMember(member.node, name))

    def _confirm(self, text: str, action: Action) -> None:
        self.question = ScreenQuestion(
            f"{text}? [y/N] ", "", lambda said: action if said.lower() in {"y", "yes"} else None
        )


def _models(models: "Sequence[ModelStatus]") -> str:
    rows = [
        (
            each.name,
            each.precision or each.dtype,
            each.context or None,
            f"{each.rings} of {each.replicas}" if each.replicas else None,
            ", ".join(each.providers) or None,
            ", ".join(each.aliases) or None,
        )
        for each in models
    ]
    return table(("model", "precision", "context", "rings", "provided by", "aliases"), rows)


def _settings(settings: Sequence[SettingRow]) -> str:
    rows = [(each.name, each.value, each.origin, each.meaning) for each in settings]
    return table(("setting", "value", "origin", "meaning"), rows)


def summary(status: "MeshStatus") -> str:
    """Return one line about the mesh, for the end of the header."""
    ring, memory = status.ring, bytes_of(status.memory.process)
    rate = f", {1000 / ring.measured.ms_per_token:.0f} tokens/s" if ring.measured else ""
    return f"{status.name}: {ring.state}, {len(ring.stages)} in the ring{rate}, {memory}"
