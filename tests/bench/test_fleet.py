"""Nodes of a benchmark."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from pathlib import Path
from meshllm.bench.fleet import Site, open_fleet
asyncio.run(open_fleet(Path("model"), [Site(prefix=tuple(sys.argv[1:]))], 1).__aenter__())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
async def test_nodes_end_with_their_benchmark(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    node = f"import os, time; print(os.getpid(), file=open({str(note)!r}, 'w')); time.sleep(600)"
    benchmark = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, sys.executable, "-c", node),
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )

    async with asyncio.timeout(60):
        while not note.exists() or not note.read_text().strip():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        benchmark.kill()
        await benchmark.wait()
        while _runs(int(note.read_text())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
