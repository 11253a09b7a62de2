"""Run clients against a ring of the built-in model; print a table, exit 1 on a failure.

Without arguments all clients run, else those of the given names.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshllm.model.locate import find_folder
from tests.processes.fleet import ALONE, environment, free_address, open_fleet

FOLDER = Path(__file__).parent
INSTALL_S = 600
CALLS_S = 300
NODES = "attic", "bench", "cellar"

Report = tuple[str, list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and the script that uses it."""

    package: str
    script: str
    more: tuple[str, ...] = ()
    """Further packages."""
    needs_torch: bool = False
    """Whether it uses the packages of this environment that it does not install itself."""


CLIENTS = (
    Client("openai", "openai_python.py"),
    Client("anthropic", "anthropic_python.py"),
    Client("litellm", "litellm_python.py"),
    Client("llm", "llm_python.py"),
    Client("langchain-openai", "langchain_python.py"),
    Client("lm-eval", "lm_eval_python.py", ("aiohttp", "tenacity", "accelerate", "peft"), True),
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
    return version, _calls(_call((python, str(FOLDER / client.script)), home, CALLS_S, variables))


def run_node(client: Client, home: Path, variables: Mapping[str, str]) -> Report:
    """Install a client in a project of node and run its script; return version and calls."""
    home.mkdir()
    (home / "package.json").write_text('{"private": true}')
    install = ("npm", "install", "--no-audit", "--no-fund", "--silent")
    _call((*install, client.package, *client.more), home, INSTALL_S)
    manifest = (home / "node_modules" / client.package / "package.json").read_text()
    for name in ("calls.mjs", client.script):  # packages are found from the script's own folder
        shutil.copy(FOLDER / name, home)
    said = _call(("node", client.script), home, CALLS_S, variables)
    return json.loads(manifest)["version"], _calls(said)


def main(names: list[str]) -> int:
    """Run the clients."""
    failed = 0
    print(f"{'client':18} {'script':20} {'version':10} {'calls':>5} {'passed':>6}")
    with open_fleet() as fleet:
        address = free_address()
        ticket = fleet.found(NODES[0])
        options = ("--dtype", "float32", *ALONE)
        for name in NODES[1:]:
            fleet.node(name).start("--join", ticket, *options)
        door = ("--members", str(len(NODES)), "--serve", address)
        fleet.node(NODES[0]).start(*door, *options)
        fleet.form()
        variables = _variables(address)
        for client in CLIENTS:
            if names and client.package not in names:
                continue
            run = run_node if client.script.endswith(".mjs") else run_python
            version, calls = run(client, fleet.folder / client.script, variables)
            wrong = [each for each in calls if each["problem"]]
            passed = len(calls) - len(wrong)
            row = f"{client.package:18} {client.script:20} {version:10} {len(calls):5} {passed:6}"
            print(row, flush=True)
            for each in wrong:
                print(f"  {each['call']}: {each['problem']}")
            failed += len(wrong) + (not calls)
    return 1 if failed else 0


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


def _calls(said: str) -> list[dict[str, str]]:
    """Return the calls that a script reports; libraries write between them."""
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"call"')]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
