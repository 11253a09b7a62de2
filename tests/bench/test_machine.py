"""What a benchmark tells about the machine, the commit and the versions."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import meshllm
from meshllm.bench import machine as module
from meshllm.bench.machine import commit, lines_of, machine, processor
from meshllm.model.kernels import jit

INTEL = "model name\t: Core 9"
ZEN = "model name\t: EPYC"


def of_zen(family: int, model: int) -> tuple[str, ...]:
    """Return what Linux says of an AMD processor."""
    return f"cpu family\t: {family}", f"model\t\t: {model}", ZEN, "flags\t\t: avx2"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that the package is in a folder of its own; return its file."""
    file = tmp_path / "meshllm" / "__init__.py"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(meshllm, "__file__", str(file))
    return file


@pytest.mark.parametrize(
    ("model", "lines", "features", "name"),
    [
        (INTEL, (), "+avx2,+amx-bf16,-avx512f", "Core 9, 8 cores: amx-bf16 avx2"),
        (ZEN, of_zen(25, 17), "+avx2", "EPYC (family 25, model 17), 8 cores: avx2"),
        (ZEN, of_zen(26, 2), "+avx2", "EPYC (family 26, model 2), 8 cores: avx2"),
        ("aarch64", ("CPU part\t: 0xd40", "Features\t: bf16"), "+bf16", "aarch64, 8 cores: bf16"),
        ("apple-m1", (), "", "apple-m1, 8 cores"),
    ],
)
def test_the_processor_is_told_with_its_instructions(
    monkeypatch: pytest.MonkeyPatch, model: str, lines: tuple[str, ...], features: str, name: str
) -> None:
    monkeypatch.setattr(module, "cpu_lines", lambda: lines)
    monkeypatch.setattr(jit, "machine", lambda: (model, "cpu", features, "DEFAULT"))
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    assert processor() == name


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_a_checkout_is_told_and_whether_files_differ(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A hook of git that runs the tests sets these: they would name the developer's repository.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*words: str) -> str:
        who = "-c", "user.name=a", "-c", "user.email=a@b"
        command = ["git", "-C", str(package.parents[1]), *who, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=outer)
        return done.stdout.strip()

    monkeypatch.setenv("GIT_DIR", str(package.parents[1] / "hook"))
    monkeypatch.setenv("GIT_INDEX_FILE", "absent")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one", "--no-gpg-sign")
    git("tag", "v9")
    clean = commit()
    package.write_text("x = 1\n")

    assert clean
    assert git("rev-parse", "HEAD").startswith(clean)
    assert commit() == f"{clean}-dirty"


def test_an_installed_package_has_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit() is None
    (package.parents[1] / ".git").mkdir()
    assert commit() is None  # damaged
    monkeypatch.setenv("PATH", "")
    assert commit() is None  # git is not installed


def test_figures_name_what_they_were_measured_on() -> None:
    about = machine(3) | {"commit": "abc1234", "meshllm": "1.2"}

    here, versions = lines_of(about)
    bare = lines_of(about | {"commit": None, "device": "cuda:0 Fake 100", "threads": 1})

    assert here == f"measured on {processor()}; 3 threads"
    assert versions.startswith("meshllm 1.2 (abc1234), torch ")
    assert versions.endswith("; figures of other processors differ")
    assert bare[0] == f"measured on cuda:0 Fake 100; {processor()}; 1 thread"
    assert bare[1].startswith("meshllm 1.2, torch ")
