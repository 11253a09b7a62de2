"""A systemd user unit that keeps a node running."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from meshllm.cli.terminal.render import plain
from meshllm.config import DEFAULT, PATHS, Config, Scalar, current, expanded, files, keys
from meshllm.model.locate import is_folder
from meshllm.units import listed

HF_FOLDERS = ("HF_HOME", "HF_HUB_CACHE")
SHELL = (
    "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", *HF_FOLDERS, "HF_HUB_OFFLINE",
)  # fmt: skip
"""Variables, apart from settings, that move folders."""
STOP_S = 75  # until SIGKILL; a node drains requests for up to 60 s, then leaves the mesh


def unit(command: Sequence[str]) -> str:
    """Return the unit for a command line, whose first word must be an absolute path."""
    return f"""\
# mkdir -p ~/.config/systemd/user
# meshllm node --print-service > ~/.config/systemd/user/meshllm.service
# systemctl --user enable --now meshllm.service
# loginctl enable-linger      (keeps it running while you are logged out)
[Unit]
Description=meshllm node
Documentation=man:meshllm-node(1)

[Service]
ExecStart={" ".join(map(_quoted, command))}
Restart=on-failure
RestartSec=5
# backoff of systemd 254 and later; older ones ignore these two with a warning
RestartSteps=6
RestartMaxDelaySec=5min
RestartPreventExitStatus=2 5 130
# stdout has tickets, which the journal would keep; `meshllm ring ticket` prints one
StandardOutput=null
StandardError=journal
TimeoutStopSec={STOP_S}
KillMode=mixed
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def command(config: Config, names: Iterable[str]) -> list[str]:
    """Return the command line of a node, with every setting that a service would not find itself.

    The ticket is omitted: it is a secret, and a node needs it only once.
    """
    program = Path(sys.argv[0])
    is_installed = program.name == "meshllm"
    words = [str(program.absolute())] if is_installed else [sys.executable, "-m", "meshllm"]
    found = {DEFAULT, str(files()[0])}
    given = {
        name: current(config.settings, name)
        for name in names
        if config.origins[name] not in found and name != "join"
    }
    variables = list(_variables(given))
    flags = (flag for name, value in given.items() for flag in _flag(name, value))
    return [*(("/usr/bin/env", *variables) if variables else ()), *words, "node", *flags]


def _variables(given: Mapping[str, Scalar]) -> Iterator[str]:
    for name in SHELL:
        if text := os.environ.get(name):
            yield f"{name}={expanded(text).absolute() if name in HF_FOLDERS else text}"
    for name, value in given.items():
        if isinstance(value, bool) and not _has_flag(name, is_set=value):
            yield f"{keys()[name].variable}={plain(value)}"


def _has_flag(name: str, *, is_set: bool) -> bool:
    """Return whether a flag says this: switches are off unless given, but for discovery."""
    return is_set is (name != "discovery")


def _flag(name: str, value: Scalar) -> Iterator[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        if _has_flag(name, is_set=value):
            yield f"--{option}" if value else f"--no-{option}"
        return
    text = plain(value)
    if name == "model":
        text = ",".join(map(_placed, listed(text) or ()))
    elif name == "draft":
        text = _placed(text)
    elif name in PATHS:
        text = str(expanded(text).resolve())
    yield f"--{option}"
    yield text


def _placed(model: str) -> str:
    """Return the name of a model for a service, which runs in another folder."""
    return str(expanded(model).resolve()) if is_folder(model) else model


def _quoted(word: str) -> str:
    """Quote a word for systemd.service(5), where `%` and `$` are escaped by doubling."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"' if not word or set(word) & set(" \t\r\n'\"\\;") else escaped
