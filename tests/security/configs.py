"""Every field of a model's config.json with values that no model has.

``python -m tests.security.configs FOLDER`` reads that model with each of them.
"""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshllm.errors import MeshError
from tests.processes.fleet import environment, open_fleet
from tests.security.attack import Attack, Outcome

VALUES: tuple[object, ...] = (
    None, True, 0, -1, 1, 7, 2**31, 2**63, 2**200, -0.5, 1e-308, 1e308, float("nan"), float("inf"),
    "", "x", "../../etc/passwd", "a" * 100_000, [], [0], ["x"] * 10_000, {}, {"x": {"y": []}},
)  # fmt: skip
ODD = (
    *("auto_map", "quantization_config", "attn_implementation", "torch_dtype", "rope_scaling"),
    *("configuration_files", "num_labels", "num_blocks", "attention_types"),
)
VALUE_S = 20  # s for one value; reading a model takes a millisecond
MEMORY_BYTES = 8 << 30
ALL_S = 900.0


def hostile_fields() -> Outcome:
    """Read the built-in model with each value in each field."""
    from meshllm.model.files.source import resolve

    with open_fleet() as fleet:
        folder = Path(shutil.copytree(resolve("builtin").folder, fleet.folder / "model"))
        done = subprocess.run(
            [sys.executable, "-m", "tests.security.configs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=ALL_S,
            env=environment(),
        )
    *wrong, last = done.stdout.splitlines() or ["nothing was read"]
    effect = f"{last}, {len(wrong)} are not one line" + "".join(f"; {each}" for each in wrong[:1])
    return Outcome(effect, "an answer or one line", held=done.returncode == 0 and not wrong)


def _configs(whole: dict[str, Any]) -> Iterator[tuple[str, object, dict[str, Any]]]:
    for field in (*whole, *ODD):
        for value in VALUES:
            yield field, value, {**whole, field: value}
    for field in whole["rope_parameters"]:
        for value in VALUES:
            rope = {**whole["rope_parameters"], field: value}
            yield f"rope_parameters.{field}", value, {**whole, "rope_parameters": rope}


def _late(*_: object) -> None:
    raise TimeoutError


def main(folder: Path) -> None:
    """Print a line for each value that ends in anything but an answer or a `MeshError`."""
    import torch

    from meshllm.model.capacity import shape_of
    from meshllm.model.device import CPU
    from meshllm.model.files.source import resolve
    from meshllm.model.steps.execution import forecast

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _late)
    path, number, refused = folder / "config.json", 0, 0
    for field, value, config in _configs(json.loads(path.read_text("utf-8"))):
        path.write_text(json.dumps(config), "utf-8")
        number += 1
        signal.alarm(VALUE_S)
        try:
            source = resolve(str(folder))
            shape = shape_of(source, None)
            forecast(source.config, getattr(torch, shape.dtype), CPU)
        except MeshError:
            refused += 1
        except BaseException as error:  # whatever it is, it is not one line
            print(f"{field} = {str(value)[:40]}: {type(error).__name__}: {str(error)[:80]!r}")
        signal.alarm(0)
    print(f"{number} values, {refused} refused")


ATTACKS = (
    Attack("hostile values in config.json", "11 of 759: traceback, or GiB", hostile_fields),
)  # fmt: skip

if __name__ == "__main__":
    main(Path(sys.argv[1]))
