"""Mutation testing: ``python -m tests.mutants --sample 60 'meshllm.protocol.*'``.

Changes one expression at a time and prints the changes that no test notices. mutmut makes the
mutants, and runs for each of them the tests that call its function; first it finds out which these
are, which takes minutes. It knows one source folder, so packages and plugins are copied into one;
the checkout does not change.

Constants of modules and decorated functions, thus properties, are not mutated.
"""

import json
import random
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).parents[1]
QUIC = "tests/plugins/quic"
SOURCES = (
    "meshllm/protocol/*",
    "meshllm/model/split/*",
    "meshllm/model/steps/attention.py",  # with torch: the reference of the kernels
    "meshllm_quic/base/congestion.py",
    "meshllm_quic/path/*",
    "meshllm_quic/wire/*",
    *(f"meshllm_quic/relay/{name}.py" for name in ("registration", "relay", "relay_limiter")),
    *(f"meshllm_quic/link/{name}.py" for name in ("admission", "machine", "table")),
)
TESTS = (
    *("tests/protocol", "tests/model/split", "tests/model/steps/test_attention.py"),
    *(f"{QUIC}/{name}" for name in ("base", "path", "wire", "link", "test_hostile.py")),
    *(f"{QUIC}/relay/test_{name}.py" for name in ("registration", "relay", "relay_limiter")),
)
SETTINGS = {
    "source_paths": ["src"],
    "only_mutate": [f"src/{pattern}" for pattern in SOURCES],
    "do_not_mutate_patterns": [r"(Error|Fault)\(", r"Reader\(.*\""],  # wording of errors
    "pytest_add_cli_args_test_selection": TESTS,
    "pytest_add_cli_args": ["-p", "no:cacheprovider"],
    "process_isolation": "forkserver",  # threads of torch do not survive a fork
    "timeout_constant": 15.0,  # s; pytest takes some to start
    "timeout_multiplier": 3.0,
    "use_git_change_detection": False,
}
SURVIVED = {0, 5, 33}
"""Exit codes of mutmut: the tests passed, none was found, none calls the function."""


def copy_to(tree: Path) -> None:
    """Copy code and tests, with all packages in one folder, and configure mutmut."""
    spare = ignore_patterns("__pycache__")
    for package in (ROOT / "meshllm", *(ROOT / "plugins").glob("meshllm_*")):
        copytree(package, tree / "src" / package.name, ignore=spare)
    copytree(ROOT / "tests", tree / "tests", ignore=spare)
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
    project = (ROOT / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{''.join(lines)}")


def mutmut(tree: Path, *arguments: str) -> str:
    """Run mutmut; return what it prints."""
    command = ["mutmut", *arguments]
    output, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.run(
        command, cwd=tree, text=True, stdout=output, stderr=both, check=False
    ).stdout


def results(tree: Path) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each mutant and the exit code of its tests, None before they ran."""
    for path in sorted(tree.glob("mutants/src/**/*.meta")):
        yield from json.loads(path.read_text())["exit_code_by_key"].items()


def survey(tree: Path, names: Sequence[str], most: int | None, seed: int) -> int:
    """Test mutants whose names match, at ``most`` a sample of them; print the survivors."""
    said = mutmut(tree, "run", "none")  # makes all mutants, and finds the tests of each
    found = [name for name, _ in results(tree) if any(fnmatch(name, each) for each in names)]
    count = len(found) if most is None else min(most, len(found))
    chosen = random.Random(seed).sample(found, count)
    if chosen:
        said = mutmut(tree, "run", *chosen)
    codes = dict(results(tree))
    if not chosen or any(codes[name] is None for name in chosen):
        print(said)
        return 1
    survivors = sorted(name for name in chosen if codes[name] in SURVIVED)
    for name in survivors:
        print(mutmut(tree, "show", name))
    print(f"{len(survivors)} of {count} mutants survived: {len(survivors) / count:.1%}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Parse the options and copy the code."""
    parser = ArgumentParser(
        "mutants", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of modules or functions")
    parser.add_argument("--sample", type=int, help="mutants drawn at random; all if omitted")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        return survey(Path(folder), options.names, options.sample, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
