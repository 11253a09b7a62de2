"""Generates man pages and shell completions: `python -m tests.manual check|write`.

Pages carry no date, so they change only when a command does.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshllm.cli.app import command_tree
from meshllm.cli.commands.help import topics
from meshllm.cli.shared.options import help_of
from meshllm.cli.terminal.render import out, print_message
from meshllm.config import PROJECT_FILE, keys
from tests.manual.documented import with_fields
from tests.manual.roff import escape, page

ROOT = Path(__file__).parents[2]

API_TOPIC = "meshllm/cli/topics/api.md"
"""A page with a table that is generated: of the fields of the API."""
EXIT_STATUS = (
    ("0", "Success."),
    ("1", "The command failed, or meshllm has a bug."),
    ("2", "The command line, a setting or the prompt is invalid."),
    ("3", "A node or peer cannot be reached."),
    ("4", "The model is missing, unsupported, damaged or too large."),
    ("5", "Access to the mesh was denied."),
    ("6", "A deadline has passed, or no ring served the model in time."),
    ("7", "A hash does not match, or a peer violated the protocol."),
    ("8", "No capacity for the request now; retry later."),
    ("129", "Its terminal was closed."),
    ("130", "Interrupted."),
    ("141", "The reader of standard output closed the pipe."),
    ("143", "Terminated."),
)

_FILES = (
    ("~/.config/meshllm/config.toml", "Settings of the user, one `name = value` per line."),
    (
        PROJECT_FILE,
        "Sampling and limits of a project, in the working directory; override the user's.",
    ),
    (
        "~/.local/state/meshllm/api.sock",
        "Socket of the running node; `--state` names another folder. For its owner only.",
    ),
    (
        "~/.local/state/meshllm/node.key, mesh.json",
        "Key of the node, and its mesh; readable by its owner only.",
    ),
    ("~/.local/state/meshllm/history", "Lines typed in conversations; readable by its owner only."),
    (
        "~/.local/state/meshllm/api.sqlite",
        "Keys of the API, as keyed hashes, and what was used; readable by its owner only.",
    ),
    ("~/.cache/huggingface/hub", "Downloaded models."),
    (
        "~/.cache/meshllm",
        "Measurements and verification results of this machine, packed weights and compiled"
        " kernels, shared by all nodes of the user; may be deleted at any time, but for `weights`,"
        " which came from other nodes and may be the last copy.",
    ),
    (
        "~/Library/Application Support/meshllm, ~/Library/Caches/meshllm",
        "Settings and state, and the cache, on macOS.",
    ),
)
_VARIABLES = (
    ("HF_HOME", "Folder of downloaded models."),
    ("HF_HUB_OFFLINE", "Forbid every download when set to 1."),
    ("NO_COLOR", "Turn colour off when set."),
    ("VISUAL, EDITOR", "Editor of `meshllm config edit`; `vi` when not set."),
    (
        "XDG_CONFIG_HOME, XDG_STATE_HOME, XDG_CACHE_HOME",
        "Folders used instead of `~/.config`, `~/.local/state` and `~/.cache`.",
    ),
)

COMPLETIONS = {
    "meshllm.bash": """\
_meshllm_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
                 _MESHLLM_COMPLETE=complete_bash $1))
}

complete -o default -F _meshllm_completion meshllm
""",
    "_meshllm": """\
#compdef meshllm

eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _MESHLLM_COMPLETE=complete_zsh meshllm)
""",
    "meshllm.fish": """\
function __meshllm_complete
    env _MESHLLM_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \\
        _TYPER_COMPLETE_ARGS=(commandline -cp) meshllm
end

complete --command meshllm --no-files --arguments "(__meshllm_complete get-args)" \\
    --condition "__meshllm_complete is-args"
""",
}
"""Completion scripts; each runs the command on Tab, so installed plugins complete too."""


def generate() -> dict[str, str]:
    """Return every page and completion script by its path in the repository."""
    tree = command_tree()
    pages = {"man/man1/meshllm.1": _root_page(tree)}
    pages |= {
        f"man/man1/meshllm-{name}.1": _page(name, child) for name, child in tree.commands.items()
    }
    topic = topics()
    topic["api"] = with_fields(topic["api"])
    pages |= {f"man/man7/meshllm-{name}.7": page(text, "7") for name, text in topic.items()}
    pages[API_TOPIC] = topic["api"]
    return pages | {f"completions/{name}": text for name, text in COMPLETIONS.items()}


def stale(root: Path) -> list[str]:
    """List the files of a repository that are missing, outdated or superfluous."""
    wanted = generate()
    present = {str(path.relative_to(root)) for path in _present(root)}
    return sorted(
        path
        for path in wanted.keys() | present
        if path not in present or wanted.get(path) != (root / path).read_text(encoding="utf-8")
    )


def write(root: Path) -> None:
    """Write the generated files of a repository and delete superfluous ones."""
    wanted = generate()
    for path in _present(root):
        if str(path.relative_to(root)) not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def main(words: list[str]) -> int:
    """Check or write the generated files of this repository."""
    match words:
        case ["write"]:
            write(ROOT)
            return 0
        case ["check"]:
            behind = stale(ROOT)
            for path in behind:
                out(path)
            if behind:
                print_message("hint: update them with `just fix`")
            return 1 if behind else 0
        case _:
            print_message("usage: python -m tests.manual check|write")
            return 2


def _present(root: Path) -> list[Path]:
    return [*root.glob("man/man*/*"), *root.glob("completions/*"), *root.glob(API_TOPIC)]


def _root_page(tree: Any) -> str:
    variables = [*((key.variable, help_of(key)) for key in keys().values()), *_VARIABLES]
    return _lay_out(
        "meshllm",
        tree,
        {
            "SYNOPSIS": _synopsis("meshllm", tree),
            "DESCRIPTION": _description(tree),
            "COMMANDS": _list(
                (f"meshllm-{name}(1)", _summary(child)) for name, child in tree.commands.items()
            ),
            "OPTIONS": _options(tree),
            "ENVIRONMENT": _list(variables),
            "FILES": _list(_FILES),
            "EXIT STATUS": _list(EXIT_STATUS),
            "EXAMPLES": _examples(tree),
            "SEE ALSO": _references(
                [*((f"meshllm-{name}", 1) for name in tree.commands), *_topic_references()]
            ),
        },
    )


def _page(name: str, command: Any) -> str:
    """Return the page of a command, or of a group with all its commands."""
    line = f"meshllm {name}"
    children = {f"{line} {child}": it for child, it in getattr(command, "commands", {}).items()}
    sections = {
        "SYNOPSIS": "\n.br\n".join(
            _synopsis(*each) for each in (children or {line: command}).items()
        ),
        "DESCRIPTION": _description(command),
        "COMMANDS": "".join(
            f'.SS "{escape(child)}"\n{_description(it)}\n{_options(it)}'
            for child, it in children.items()
        ),
        "OPTIONS": "" if children else _options(command),
        "EXAMPLES": "".join(_examples(it) for it in (command, *children.values())),
        "SEE ALSO": _references([("meshllm", 1)])
        + "\nfor environment variables, files and exit status",
    }
    return _lay_out(f"meshllm-{name}", command, sections)


def _lay_out(name: str, command: Any, sections: dict[str, str]) -> str:
    summary = _summary(command).removesuffix(".")
    parts = {"NAME": f"{escape(name)} \\- {escape(summary)}"} | sections
    body = "".join(f".SH {title}\n{text.rstrip()}\n" for title, text in parts.items() if text)
    return f'.TH "{name.upper()}" "1" "" "meshllm" "meshllm manual"\n{body}'


def _summary(command: Any) -> str:
    return str(command.help or "").strip().partition("\n")[0]


def _synopsis(line: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [_argument(each.metavar, is_required=each.required) for each in arguments]
    tail = ["COMMAND ..."] if getattr(command, "commands", None) else words
    return f".B {escape(line)}\n{escape(' '.join(['[OPTIONS]', *tail]))}"


def _argument(name: str, *, is_required: bool) -> str:
    return name if is_required or name.startswith("[") else f"[{name}]"


def _description(command: Any) -> str:
    return escape(re.sub(r"\n[ \t]*\n", "\n.PP\n", str(command.help or "").strip()))


def _options(command: Any) -> str:
    entries = [(_heading(each), _meaning(each)) for each in command.params]
    return _list([*entries, ("-h, --help", "Show a help message and exit.")])


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    if parameter.is_flag or parameter.count:
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    space = "" if str(parameter.metavar).startswith("[") else " "
    return f"{', '.join(parameter.opts)}{space}{parameter.metavar}"


def _meaning(parameter: Any) -> str:
    default = f"  [default: {parameter.default}]" if parameter.show_default else ""
    return (parameter.help or "") + (default if parameter.default else "")


def _examples(command: Any) -> str:
    lines = [line.strip() for line in str(command.epilog or "").splitlines()]
    text = escape("\n".join(line for line in lines if line.startswith(("meshllm ", "echo "))))
    return f".nf\n{text}\n.fi\n" if text else ""


def _references(names: Iterable[tuple[str, int]]) -> str:
    return ",\n".join(f".BR {escape(name)} ({section})" for name, section in names)


def _topic_references() -> list[tuple[str, int]]:
    return [(f"meshllm-{name}", 7) for name in sorted(topics())]


def _list(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f".TP\n.B {escape(name)}\n{escape(text)}\n" for name, text in entries)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
