"""A command ends when its parent does."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.builders.engine_children import is_running, written_pid
from tests.builders.waiting import until

pytestmark = pytest.mark.socket


async def test_an_engine_ends_with_its_provider(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    program = (
        "import asyncio, sys; from meshllm.node.provider import EngineProcess;"
        " asyncio.run(EngineProcess(sys.argv[1:]).run())"
    )
    note = tmp_path / "pid"
    engine = f"import os, time; print(os.getpid(), file=open({str(note)!r}, 'w')); time.sleep(600)"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, sys.executable, "-c", engine
    )
    await until(lambda: written_pid(note))
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(written_pid(note)))
