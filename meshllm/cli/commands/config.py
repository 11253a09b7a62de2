"""`meshllm config`: the settings, their origins, and the files that set them."""

import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from meshllm.cli.shared.complete import setting_names
from meshllm.cli.shared.options import Json, help_of, shown
from meshllm.cli.terminal import render
from meshllm.config import Settings, change, current, files, find_key, keys, load, state_path
from meshllm.errors import UserError
from meshllm.local_files import hint_of, keep_temporary_files, reason_of

app = typer.Typer(
    help="Show and change settings, and see where they come from.",
    rich_markup_mode=None,
    epilog="""\b
Examples:
  meshllm config show --origin
  meshllm config set model Qwen/Qwen3-0.6B
  meshllm config set max_tokens 1024 --project
  meshllm config unset model
  meshllm config edit
""",
)

_ANY_BYTES = "surrogateescape"
"""How bytes that are not UTF-8 are read and written."""

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A setting, as `show` lists them.", autocompletion=setting_names
    ),
]
Project = Annotated[
    bool,
    typer.Option(
        "--project/--user",
        help="The file `meshllm.toml` of this folder, or that of this user.",
    ),
]


@app.command()
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show this setting only.",
            show_default=False,
            autocompletion=setting_names,
        ),
    ] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show every setting, or one.

    The ticket of `join`, a secret, is shown only if it is asked for by name.
    """
    config = load({})
    chosen = config.settings
    if name is None and chosen.join is not None:
        chosen = change(chosen, {"join": "(hidden)"})
    names = keys() if name is None else [find_key(_key(name), "NAME").name]
    values = {each: current(chosen, each) for each in names}
    if as_json:
        settings = [
            {"name": each, "value": value, "origin": config.origins[each]}
            for each, value in values.items()
        ]
        render.dump({"settings": settings, "files": [str(path) for path in files()]})
        return
    rows = [
        (
            each,
            shown(chosen, each),
            config.origins[each] if origin else help_of(keys()[each]),
        )
        for each in values
    ]
    render.out(render.table(("setting", "value", "origin" if origin else "meaning"), rows))


@app.command("set")
def set_(
    name: Name,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Its new value.")],
    project: Project = False,
) -> None:
    """Write one setting to a file.

    The value is checked first, and the file is replaced in one step. Comments in the file are not
    kept: `meshllm config edit` keeps them.
    """
    from meshllm.config_file import put

    path = _file(is_project=project)
    written = put(path, _key(name), value)
    render.print_message(f"{_key(name)} = {render.plain(written)} in {path}")
    _warn_if_hidden(_key(name), path)


@app.command()
def unset(name: Name, project: Project = False) -> None:
    """Remove one setting from a file, so that its default applies again."""
    from meshllm.config_file import drop

    path = _file(is_project=project)
    drop(path, _key(name))
    render.print_message(f"removed {_key(name)} from {path}")


@app.command("path")
def path_(project: Project = False) -> None:
    """Print the path of a file of settings, whether it exists or not."""
    render.out(str(_file(is_project=project)))


@app.command()
def edit(project: Project = False) -> None:
    """Open a file of settings in `$VISUAL` or `$EDITOR`.

    A new file lists all settings in comments. It is saved only if every setting in it is valid.
    """
    from meshllm.config_file import template, write

    path = _file(is_project=project)
    text = _read(path)
    draft = text if text is not None else template({n: help_of(key) for n, key in keys().items()})
    while True:
        edited = _edited(draft)
        if edited is None:
            render.print_message("nothing changed")
            return
        if _read(path) != text:
            raise UserError(
                f"`{path}` was changed meanwhile; the edited text is in `{_kept(path, edited)}`",
                hint="copy what you changed, and edit it again",
            )
        try:
            write(path, edited)
        except UserError as error:
            render.error(error)
            if not typer.confirm("Edit it again?", default=True, err=True):
                raise typer.Exit(error.exit_code) from None
            draft = edited
        else:
            render.print_message(f"saved {path}")
            return


def _kept(path: Path, text: str) -> Path:
    """Write an edited text beside the file that it does not replace; return where."""
    from meshllm.local_files import replace_text

    place = path.with_name(f"{path.name}.edited")
    replace_text(place, text.encode(errors=_ANY_BYTES).decode(errors="replace"))
    return place


def _read(path: Path) -> str | None:
    """Read a file to edit, which may have to be repaired: any bytes are kept; None if missing."""
    try:
        return path.read_text(encoding="utf-8", errors=_ANY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"Cannot read `{path}`: {reason_of(error)}"
        raise UserError(text, hint=hint_of(error)) from None


def _edited(text: str) -> str | None:
    """Let the user edit a text; return None if it was not changed, or its file was deleted.

    Raises:
        UserError: the editor cannot be started, or fails.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        keep_temporary_files(state_path(Settings()))
    except OSError as error:
        text = f"There is no place for a copy to edit: {reason_of(error)}"
        raise UserError(text, hint="set `TMPDIR`") from None
    with tempfile.TemporaryDirectory(prefix="meshllm-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, encoding="utf-8", errors=_ANY_BYTES)
        try:
            with _signals_of_another():
                code = subprocess.run([*shlex.split(editor), str(path)], check=False).returncode
        except (OSError, ValueError) as error:
            raise UserError(
                f"Cannot start `{editor}`: {reason_of(error)}", hint="set `EDITOR`"
            ) from None
        if code:
            raise UserError(f"`{editor}` ended with exit status {code}")
        edited = _read(path)
    return None if edited == text else edited


@contextmanager
def _signals_of_another() -> Iterator[None]:
    """Leave the keys that interrupt to a program that has the terminal.

    It takes them itself: a function is not inherited, as `SIG_IGN` would be.
    """
    keys_of_terminal = (signal.SIGINT, signal.SIGQUIT)
    before = {each: signal.signal(each, lambda *_: None) for each in keys_of_terminal}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _file(*, is_project: bool) -> Path:
    user, project = files()
    return project if is_project else user


def _key(name: str) -> str:
    """Return the key of a setting, which a flag spells with hyphens."""
    return name.removeprefix("--").replace("-", "_")


def _warn_if_hidden(name: str, path: Path) -> None:
    try:
        origin = load({}).origins[name]
    except UserError:  # of another setting: what was written stands
        return
    if origin != str(path):
        render.print_message(f"note: `{origin}` sets it, too, and takes precedence")
