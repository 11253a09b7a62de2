"""Nodes of a benchmark."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from meshllm.bench.fleet import Site, open_fleet
from meshllm.errors import MeshError
from tests.builders.waiting import until

PROGRAM = """
import asyncio, sys
from pathlib import Path
from meshllm.bench.fleet import Site, open_fleet
asyncio.run(open_fleet(Path("model"), [Site(prefix=tuple(sys.argv[1:]))], 1).__aenter__())
"""

SETTINGS = """
import os, sys
is_own = os.environ["XDG_CONFIG_HOME"] == os.getcwd()
model = sys.argv[sys.argv.index("--model") + 1]
raise SystemExit(f"{os.environ.get('MESHLLM_JOIN')} {os.listdir()} {is_own} {model}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
async def test_nodes_end_with_their_benchmark(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    node = f"import os, time; print(os.getpid(), file=open({str(note)!r}, 'w')); time.sleep(600)"
    benchmark = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, sys.executable, "-c", node),
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )

    await until(lambda: note.exists() and note.read_text().strip())
    benchmark.kill()
    await benchmark.wait()
    await until(lambda: not _runs(int(note.read_text())))


async def test_a_node_that_ends_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    site = Site(prefix=(sys.executable, "-c", "raise SystemExit('error: no such model')"))

    with pytest.raises(MeshError, match="ended with exit code 1: no such model"):
        await open_fleet(tmp_path, [site], 1).__aenter__()


async def test_nodes_have_none_of_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESHLLM_JOIN", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    site = Site(prefix=(sys.executable, "-c", SETTINGS))

    with pytest.raises(MeshError, match=rf"None \['0.log'\] True {tmp_path}/model$"):
        await open_fleet(Path("model"), [site], 1).__aenter__()


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
