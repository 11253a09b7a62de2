"""Run clients against a ring of the built-in model; print a table, exit 1 on a failure.

Without arguments all clients run, else those of the given names.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshllm.model.locate import find_folder
from tests.processes.fleet import ALONE, Fleet, environment, free_address, open_fleet

FOLDER = Path(__file__).parent
INSTALL_S = 600
NODES = "attic", "bench", "cellar"

Report = tuple[str, list[dict[str, str | None]]]


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and the script that uses it."""

    package: str
    script: str
    more: tuple[str, ...] = ()
    """Further packages."""
    needs_torch: bool = False
    """Whether it uses the packages of this environment that it does not install itself."""
    calls_s: int = 300
    """Maximum seconds that its calls take."""


CLIENTS = (
    Client("openai", "openai_python.py"),
    Client("anthropic", "anthropic_python.py"),
    Client("litellm", "litellm_python.py"),
    Client("llm", "llm_python.py"),
    Client("langchain-openai", "langchain_python.py"),
    Client(
        "lm-eval", "lm_eval_python.py", ("aiohttp", "tenacity", "accelerate", "peft"), True, 900
    ),
    Client("openai", "openai_node.mjs"),
    Client("ai", "vercel_node.mjs", ("@ai-sdk/openai-compatible",)),
)


def run_python(client: Client, home: Path, variables: Mapping[str, str]) -> Report:
    """Install a client in a virtual environment and run its script; return version and calls."""
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    if client.needs_torch:
        paths = {"base": str(home), "platbase": str(home)}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    packages = client.package, *client.more
    _call((python, "-m", "pip", "install", "--quiet", *packages), home, INSTALL_S)
    ask = f"from importlib.metadata import version; print(version({client.package!r}))"
    version = _call((python, "-c", ask), home).strip()
    words = (python, str(FOLDER / client.script))
    return version, _calls(_call(words, home, client.calls_s, variables))


def run_node(client: Client, home: Path, variables: Mapping[str, str]) -> Report:
    """Install a client in a project of node and run its script; return version and calls."""
    home.mkdir()
    (home / "package.json").write_text('{"private": true}')
    install = ("npm", "install", "--no-audit", "--no-fund", "--silent")
    _call((*install, client.package, *client.more), home, INSTALL_S)
    manifest = (home / "node_modules" / client.package / "package.json").read_text()
    for name in ("calls.mjs", client.script):  # packages are found from the script's own folder
        shutil.copy(FOLDER / name, home)
    said = _call(("node", client.script), home, client.calls_s, variables)
    return json.loads(manifest)["version"], _calls(said)


def main(names: list[str]) -> int:
    """Run the clients."""
    failed = 0
    show_head()
    with open_api_server() as (fleet, address):
        variables = _variables(address)
        for client in CLIENTS:
            if names and client.package not in names:
                continue
            run = run_node if client.script.endswith(".mjs") else run_python
            failed += show(client, run(client, fleet.folder / client.script, variables))
    return 1 if failed else 0


@contextmanager
def open_api_server() -> Iterator[tuple[Fleet, str]]:
    """Run a ring of three; yield it with the address of its API."""
    with open_fleet() as fleet:
        address = free_address()
        ticket = fleet.create_mesh(NODES[0])
        options = ("--dtype", "float32", *ALONE)
        for name in NODES[1:]:
            fleet.node(name).start("--join", ticket, *options)
        api_server = ("--members", str(len(NODES)), "--serve", address)
        fleet.node(NODES[0]).start(*api_server, *options)
        fleet.form()
        yield fleet, address


def show_head() -> None:
    """Print the head of the table."""
    print(f"{'client':18} {'script':20} {'version':10} {'calls':>5} {'passed':>6}")


def show(client: Client, report: Report) -> int:
    """Print the row of a client and what was wrong; return how many calls failed."""
    version, calls = report
    wrong = [each for each in calls if each["problem"]]
    passed = len(calls) - len(wrong)
    row = f"{client.package:18} {client.script:20} {version:10} {len(calls):5} {passed:6}"
    print(row, flush=True)
    for each in calls:
        if said := each["problem"] or each.get("found"):
            print(f"  {each['call']}: {said}")
    return len(wrong) + (not calls)


def _variables(address: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"http://{address}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": f"http://{address}",
        "ANTHROPIC_API_KEY": "none",
        "MESHLLM_TEST_MODEL": str(find_folder("builtin", None, is_own=True)),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is downloaded
    }


def _call(
    words: tuple[str, ...],
    folder: Path,
    timeout_s: float = INSTALL_S,
    more: Mapping[str, str] | None = None,
) -> str:
    """Run a command; return its stdout."""
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words,
        cwd=folder,
        env=kept | dict(more or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _calls(said: str) -> list[dict[str, str | None]]:
    """Return the calls that a script reports; libraries write between them."""
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"call"')]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
