"""Run every client against a node of the built-in model; print a table, exit 1 on a failure."""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
INSTALL_S = 600
CALLS_S = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A client: what to install, and the script that uses it."""

    package: str
    script: str


CLIENTS = Client("openai", "openai_python.py"), Client("anthropic", "anthropic_python.py")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the built-in model; yield the base URL."""
    program = (sys.executable, "-m", "meshllm", "serve", "--port", "0", "--no-discovery")
    where = ("--state", str(folder / "state"), "--model", "builtin")
    with (folder / "log").open("w") as log:
        node = subprocess.Popen((*program, *where), stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert node.stdout
            yield node.stdout.readline().strip()
        finally:
            node.terminate()
            node.communicate()


def run(client: Client, folder: Path, url: str) -> tuple[str, list[dict[str, str]]]:
    """Install a client and run its script; return its version and its calls."""
    home = folder / client.package
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", client.package)
    subprocess.run(install, check=True, timeout=INSTALL_S)
    ask = f"from importlib.metadata import version; print(version({client.package!r}))"
    version = subprocess.run((python, "-c", ask), check=True, capture_output=True, text=True)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        (python, FOLDER / client.script),
        env=kept
        | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none",
        },
        capture_output=True,
        text=True,
        timeout=CALLS_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{client.script} ended with {done.returncode}:\n{done.stderr}")
    return version.stdout.strip(), [json.loads(line) for line in done.stdout.splitlines()]


def main() -> int:
    """Run all clients."""
    failed = 0
    print(f"{'client':16} {'version':10} {'calls':>5} {'passed':>6}")
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as url:
        for client in CLIENTS:
            version, calls = run(client, Path(name), url)
            wrong = [each for each in calls if each["problem"]]
            passed = len(calls) - len(wrong)
            print(f"{client.package:16} {version:10} {len(calls):5} {passed:6}")
            for each in wrong:
                print(f"  {each['call']}: {each['problem']}")
            failed += len(wrong) + (not calls)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
