"""The import contracts hold, and each of them fails on a violation."""

import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]

PLANTS = {
    "Floors": ("meshllm/model/wire/payload.py", "import meshllm.node.compute.worker"),
    "Rooms of the model": ("meshllm/model/split/stubs.py", "import meshllm.model.steps.runner"),
    "Rooms of the protocol": (
        "meshllm/protocol/session/blob.py",
        "import meshllm.protocol.planning",
    ),
    "Rooms of the node": ("meshllm/node/net/dialer.py", "import meshllm.node.membership"),
    "Following what": (
        "meshllm/node/agreement/plan_hold.py",
        "import meshllm.node.agreement.own_state",
    ),
    "Rooms of the API": ("meshllm/api/access/gate.py", "import meshllm.api.v1.chat"),
    "Rooms of QUIC": ("plugins/meshllm_quic/net/udp.py", "import meshllm_quic.path.paths"),
    "Rooms of the command line": ("meshllm/cli/terminal/wrap.py", "import meshllm.cli.ring.spec"),
    "Deciding is pure": ("meshllm/protocol/session/stage.py", "import time"),
    "The model computes": ("meshllm/model/wire/payload.py", "import asyncio"),
    "The terminal": ("meshllm/node/compute/gauge.py", "import rich"),
    "Typer carries": ("meshllm/cli/app.py", "import click"),
    "Plugins do not know": ("plugins/meshllm_loopback/pipe.py", "import meshllm_websocket.frames"),
    "A plugin sees": ("plugins/meshllm_loopback/pipe.py", "import meshllm.protocol.session.blob"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.txt")
    for name in ("meshllm", "plugins"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{folder / 'plugins'}", "PATH": "", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold(copy: Path) -> None:
    done = lint(copy)

    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def reports(copy: Path) -> dict[str, str]:
    """What is said about each broken contract after all violations are planted; by its heading."""
    whole = {place: (copy / place).read_text(encoding="utf-8") for place, _ in PLANTS.values()}
    for place, line in PLANTS.values():
        with (copy / place).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")

    done = lint(copy)

    for place, text in whole.items():
        (copy / place).write_text(text, encoding="utf-8")
    assert done.returncode == 1, done.stdout
    parts = re.split(
        r"^(.+)\n-+\n", done.stdout.partition("Broken contracts")[2], flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("contract", PLANTS)
def test_a_planted_violation_is_caught(reports: dict[str, str], contract: str) -> None:
    place, line = PLANTS[contract]
    importer = place.removeprefix("plugins/").removesuffix(".py").replace("/", ".")
    (report,) = [text for heading, text in reports.items() if heading.startswith(contract)]

    assert f"{importer} -> {line.removeprefix('import ')} (l." in report


def test_no_imports_go_in_a_circle() -> None:
    """Not even with an import for annotations only."""
    plugins = (each.name for each in (ROOT / "plugins").glob("meshllm_*"))
    graph = grimp.build_graph("meshllm", *plugins, cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}

    TopologicalSorter(imports).prepare()  # raises `CycleError`, which names the modules of one


def test_a_module_without_a_floor_is_caught(copy: Path) -> None:
    stray = copy / "meshllm" / "stray.py"
    stray.write_text('"""No floor."""\n', encoding="utf-8")

    done = lint(copy)

    stray.unlink()
    assert done.returncode == 1
    assert "stray" in done.stdout
