"""The root command and the one place where errors are reported; imports nothing heavy."""

import errno
import os
import platform
import sys
import traceback
from collections.abc import Collection, Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]  # no __all__ there
from typer.core import TyperGroup

from meshllm import __version__
from meshllm.cli.shared.deferred import DeferredCommand, keep_values
from meshllm.cli.terminal.streams import flush_last, open_closed
from meshllm.errors import MeshError, OutOfMemory, UserError

EXAMPLES = """\b
Examples:
  meshllm chat --nodes 3 "What is a ring?"
  meshllm model show builtin
  meshllm node --model builtin
  meshllm ring status --watch

Each setting can be a flag, a variable MESHLLM_NAME or a line of config.toml;
`meshllm config show --origin` shows where each value comes from.

`meshllm help` also lists the pages of the manual, such as `meshllm help concepts`.
"""


COMMANDS = (
    ("chat", "chat.chat:chat", "Ask one question or hold a conversation."),
    ("node", "node.node:node", "Run a node that holds layers and serves requests."),
    ("serve", "node.serve:serve", "Serve the OpenAI- and Anthropic-compatible API on TCP."),
    (
        "provide",
        "node.provide:provide",
        "Provide the models of an engine with OpenAI's API to a mesh.",
    ),
    ("usage", "commands.usage:usage", "Show requests and tokens of the API on TCP."),
    ("id", "commands.identity:identity", "Print the id of this node."),
    ("doctor", "doctor.doctor:doctor", "Check this machine, its node and the links to its peers."),
    ("relay", "commands.relay:relay", "Run a relay for nodes behind NATs."),
    ("bench", "commands.bench:bench", "Benchmark rings, or one engine, or replay a trace."),
    ("help", "commands.help:show_help", "Show the help of a command or a page of the manual."),
    ("tui", "tui.tui:tui", "Watch and control the mesh in the terminal."),
    ("ring", "ring.ring:app", "Show, plan and manage the ring."),
    ("key", "commands.key:app", "Create, list and revoke keys of the API."),
    ("model", "commands.model:app", "List, inspect, verify, download, merge and serve models."),
    ("transport", "commands.transport:app", "List the transports between nodes."),
    ("config", "commands.config:app", "Show and change settings, and see where they come from."),
)
"""Name, place in `meshllm.cli` and summary of each command, in the order of the help."""


_TAKE_TEXT = (" chat", " ring trace")
_OF_ALL = {"-v", "--verbose", "--debug"}
_WORDING = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
    "Input should be a valid number, unable to parse string as a number": "not a number",
    "Input should be greater than or equal to ": "less than ",
    "Input should be less than or equal to ": "more than ",
}
"""The parser's words for invalid values, and ours."""


SPIN_LIMITS = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
"""How long idle OpenMP threads (GNU's, LLVM's) spin before they sleep: at most one millisecond.

That is longer than the pauses within a token. The defaults, 10 to 200 ms, take cores away from
other processes. GNU's value counts spins, whose duration is known for x86-64 only.
"""


def limit_spinning() -> None:
    """Set these variables unless they are set; torch reads them when it is imported."""
    if "OMP_WAIT_POLICY" in os.environ:
        return
    for name, value in SPIN_LIMITS.items():
        if name != "GOMP_SPINCOUNT" or platform.machine() in ("x86_64", "AMD64"):
            os.environ.setdefault(name, value)


class Boundary(TyperGroup):
    """Reports every error: two lines for an expected one, a short report for a bug.

    It has the commands of `COMMANDS`, and flags and counts only, whose values need no conversion.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, place, summary in COMMANDS:
            self.add_command(DeferredCommand(name, f"meshllm.cli.{place}", summary))
        keep_values(self, all_of_them=True)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run the command and exit with its exit code."""
        words = sys.argv[1:] if args is None else list(args)
        extra["standalone_mode"] = False
        completion_init()  # typer does this only with its own install-completion options
        limit_spinning()
        try:
            status = super().main(words, *rest, **extra)
        except Exception as error:  # the boundary: no traceback without --debug
            status = _report(_first(error), debug=_wants_traceback(words))
        sys.exit(status)


app = typer.Typer(
    cls=Boundary,
    name="meshllm",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version; with -v, also of dependencies.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, show_default=False, help="Log more: -v info, -vv debug."
        ),
    ] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one language model split over several machines."""
    if version:
        _print_version(verbose > 0)
    elif context.invoked_subcommand is None:
        from meshllm.cli.terminal import render

        render.out(context.get_help())
    elif verbose:
        from meshllm.log import setup

        setup(verbose)


def command_tree() -> TyperGroup:
    """Import all commands, for what reads them, such as the generator of man pages."""
    tree: Any = typer.main.get_command(app)
    tree.commands = {name: each.load() for name, each in tree.commands.items()}
    return cast("TyperGroup", tree)


def main() -> None:
    """Run the command line."""
    open_closed()
    if sys.stdout is None:
        sys.exit(_report(MeshError("Standard output is closed"), debug=False))
    if isinstance(sys.stdout, TextIOWrapper):  # escape what the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except KeyboardInterrupt:  # before typer handles it
        sys.exit(130)
    except MemoryError:  # not even the report of an error had enough
        os.write(2, b"error: Not enough memory\nhint: free memory, or raise its limit\n")
        sys.exit(OutOfMemory.exit_code)
    finally:
        flush_last()


def _print_version(everything: bool) -> None:
    from meshllm.cli.terminal import render

    render.out(f"meshllm {__version__}")
    if everything:
        import platform
        from importlib.metadata import version

        from meshllm.transport.registry import Registry

        render.out(f"python {platform.python_version()}")
        for package in ("torch", "transformers"):
            render.out(f"{package} {version(package)}")
        for offer in Registry.discover().describe():
            render.out(f"transport {offer.name} ({offer.distribution} {offer.version})")


def _first(error: BaseException) -> BaseException:
    """Return the error to report from a group, expected errors first."""
    while isinstance(error, BaseExceptionGroup):
        expected, _ = error.split(MeshError)
        error = (expected or error).exceptions[0]
    return error


def _report(error: BaseException, *, debug: bool) -> int:
    from meshllm.cli.terminal import render

    if debug and not isinstance(error, typer.TyperException):
        traceback.print_exception(error)
    match error:
        case MeshError():
            render.error(error)
            return error.exit_code
        case typer.Abort():
            return 130
        case typer.TyperException():
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "meshllm"
            words = error.format_message().removesuffix(".")
            for theirs, ours in _WORDING.items():
                words = words.replace(theirs, ours)
            render.error(UserError(words, hint=_advice(error, command)))
            return error.exit_code
        case _:
            lack = _lack(error) or _bug(error)
            render.error(lack)
            return lack.exit_code


def _lack(error: BaseException) -> MeshError | None:
    """Return the error to show for one that says what the machine lacks."""
    match error:
        case MemoryError():
            return OutOfMemory("Not enough memory", hint="free memory, or raise its limit")
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            hint = "raise the limit of open files: `ulimit -n`"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            hint = "free space on that disk"
        case _:
            return None
    place = f": `{error.filename}`" if error.filename else ""
    return MeshError(f"{error.strerror}{place}", hint=hint)


def _advice(error: typer.TyperException, command: str) -> str:
    option = getattr(error, "option_name", None)
    if option in _OF_ALL and error.format_message().startswith("No such option"):
        return f"write it before the command, as in `meshllm {option} ...`"
    if option and option.removeprefix("-").replace(".", "", 1).isdigit():
        return "write `--` before a negative number"
    if command == "meshllm" and error.format_message().startswith("No such command"):
        name = error.format_message().split("'")[1]
        groups = [at for at, each in command_tree().commands.items() if name in _commands(each)]
        if groups:
            return "there is " + " and ".join(f"`meshllm {group} {name}`" for group in groups)
    if "unexpected extra argument" in error.format_message() and command.endswith(_TAKE_TEXT):
        return f"put a text of several words in quotes; see `{command} --help`"
    return f"see `{command} --help`"


def _commands(command: object) -> Collection[str]:
    return getattr(command, "commands", ())


def _bug(error: BaseException) -> MeshError:
    return MeshError(
        f"This is a bug in meshllm {__version__}: {type(error).__name__}: {error}",
        hint="run it again as `meshllm --debug ...` and report the output",
    )


def _wants_traceback(words: Sequence[str]) -> bool:
    from meshllm.config import load

    try:
        return "--debug" in words or load({}).settings.debug
    except Exception:  # in the settings: the error of the command is reported all the same
        return False
