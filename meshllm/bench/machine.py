"""A description of the machine and the versions, stored and printed with benchmark results."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

import meshllm
from meshllm.model.device import CPU, default_threads, name_of
from meshllm.model.hardware import cpu_lines
from meshllm.model.kernels import jit

FEATURES = "amx-bf16", "avx512bf16", "avx512vnni", "avx512f", "avx2", "bf16", "neon"
"""Instructions that decide which kernels are used, by LLVM's names."""

_PACKAGES = ("meshllm", "torch", "transformers")
_GIT_S = 5.0  # s until git must have answered

About = dict[str, str | int | None]


def machine(threads: int | None = None, device: str = "cpu") -> About:
    """Describe this machine; ``threads`` is the number torch used, None the default."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": threads or default_threads(),
        "device": name_of(torch.device(device)),
        "python": platform.python_version(),
        "commit": commit(),
        **{package: version(package) for package in _PACKAGES},
    }


def lines_of(about: About) -> list[str]:
    """Say on what figures were measured, given `machine`."""
    device = "" if about["device"] == name_of(CPU) else f"{about['device']}; "
    count = f"{about['threads']} thread{'s' * (about['threads'] != 1)}"
    at = f" ({about['commit']})" if about["commit"] else ""
    versions = [f"{name} {about[name]}" for name in _PACKAGES[1:]]
    programs = ", ".join([f"meshllm {about['meshllm']}{at}", *versions])
    return [
        f"measured on {device}{about['processor']}; {count}",
        f"{programs}; figures of other processors differ",
    ]


def processor() -> str:
    """Name this machine's processor and the instructions that kernels use."""
    model, _, features, *_ = jit.machine()
    found = [name for name in FEATURES if f"+{name}" in features.split(",")]
    name = f"{model.partition(':')[2].strip() or model}{_generation()}, {os.cpu_count()} cores"
    return f"{name}: {' '.join(found)}" if found else name


def _generation() -> str:
    """Return family and model of an x86 processor on Linux, as its name may omit both; else ""."""
    parts = [line.partition(":") for line in cpu_lines()]
    numbers = {name.strip(): value.strip() for name, _, value in parts}
    family, model = numbers.get("cpu family"), numbers.get("model")
    return f" (family {family}, model {model})" if family and model else ""


def commit() -> str | None:
    """Return the commit of the checkout that runs, with `-dirty` if files differ from it.

    None if the package is installed, or git cannot tell.
    """
    root = Path(meshllm.__file__).parents[1]
    if not (root / ".git").exists():  # of a folder around it, it would be another project's
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    # In a hook of git these name the repository of the hook.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=_GIT_S, env=outer
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
