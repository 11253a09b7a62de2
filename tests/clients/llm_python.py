"""The command `llm`, with an entry in its `extra-openai-models.yaml`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from calls import run

ASKED = "What is a ring?"
HOME = Path("llm-user")
"""In the folder of the client, the working folder."""
ENTRY = """\
- model_id: ring
  model_name: builtin
  api_base: {base}
  supports_tools: true
  supports_schema: true
- model_id: ring-completion
  model_name: builtin
  api_base: {base}
  completion: true
"""


def models() -> None:
    assert "ring" in llm("models")


def prompt() -> None:
    assert llm("-m", "ring", "-o", "temperature", "0", ASKED).startswith("A ring is")


def piped() -> None:
    told = llm("-m", "ring", "-o", "temperature", "0", stdin=f"{ASKED}\n")
    assert told.startswith("A ring is")


def whole() -> None:
    told = llm("-m", "ring", "--no-stream", "-o", "temperature", "0", ASKED)
    assert told == llm("-m", "ring", "-o", "temperature", "0", ASKED)


def conversation() -> None:
    llm("-m", "ring", "-o", "seed", "3", ASKED)
    assert llm("-c", "Why?").strip()


def schema() -> None:
    told = llm("-m", "ring", "--schema", "legs int", "-o", "seed", "1", "How many legs has a cow?")
    assert '"legs"' in told, told


def completion() -> None:
    assert llm("-m", "ring-completion", "-o", "max_tokens", "8", "Once upon a time").strip()


def usage() -> None:
    told = llm("-m", "ring", "-u", ASKED, both=True)
    assert "input" in told, told


def refused() -> None:
    told = llm("-m", "ring", "ring " * 20_000, fails=True)
    assert "maximum context length" in told, told


def llm(*words: str, stdin: str = "", both: bool = False, fails: bool = False) -> str:
    done = subprocess.run(
        [Path(sys.executable).with_name("llm"), *words],
        input=stdin,
        env=os.environ | {"LLM_USER_PATH": str(HOME.absolute())},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr if both or fails else done.stdout


def write(base: Any) -> None:
    HOME.mkdir(exist_ok=True)
    (HOME / "extra-openai-models.yaml").write_text(ENTRY.format(base=base))


if __name__ == "__main__":
    write(os.environ["OPENAI_BASE_URL"])
    run(models, prompt, piped, whole, conversation, schema, completion, usage, refused)
