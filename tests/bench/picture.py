"""Draw a live ring of three nodes for the README: `python -m tests.bench.picture`.

The nodes are processes on this machine; what they answer and report is real.
"""

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[2] / ".github" / "ring.svg"
COLUMNS = 84
START_S = 120.0  # s until the ring serves
_PROMPT = "What is a ring?"
_FORMAT = """\
<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; \
line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
"""
"""The format of rich without its web fonts: the picture loads nothing."""


def main() -> None:
    """Run the ring, ask it once, and write the picture."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshllm-")))
        ticket = home / "ticket"
        _node(stack, home, "attic", "--members", "3", "--ticket-file", str(ticket))
        _wait(lambda: ticket.exists() and ticket.read_text())
        for name in ("kitchen", "laptop"):
            _node(stack, home, name, "--join", ticket.read_text().strip())
        _wait(lambda: '"state": "serving"' in _meshllm(home, "ring", "status", "--json"))
        answer = _meshllm(home, "chat", _PROMPT)
        blocks = _meshllm(home, "ring", "status").rstrip().split("\n\n")
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f'$ meshllm chat "{_PROMPT}"', style="bold cyan"))
    console.print(Text(answer.rstrip()))
    console.print(Text("$ meshllm ring status", style="bold cyan"))
    console.print(Text("\n\n".join([*blocks[:3], "...", blocks[-1]])))
    svg = console.export_svg(title="meshllm", code_format=_FORMAT, unique_id="ring")
    PICTURE.write_text(svg, encoding="utf-8")
    print(PICTURE)


def _node(stack: ExitStack, home: Path, name: str, *options: str) -> None:
    common = ["--name", name, "--state", str(home / name), "--no-discovery"]
    address = ["--listen", "127.0.0.1:0", "--transport", "websocket"]
    command = [sys.executable, "-m", "meshllm", "node", *common, *address, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _meshllm(home: Path, *words: str) -> str:
    """Ask the first node; return what the command prints."""
    variables = os.environ | {"MESHLLM_STATE": str(home / "attic"), "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "meshllm", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return done.stdout


def _wait(is_done: Callable[[], object]) -> None:
    end = time.monotonic() + START_S
    while not is_done():
        if time.monotonic() > end:
            sys.exit(f"The ring does not serve after {START_S:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
