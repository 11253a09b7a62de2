"""Mutation testing: ``python -m tests.mutants --sample 10 'meshllm.protocol.*'``.

Changes one expression at a time and prints the changes that no test notices, area by area, then a
table of the areas. mutmut makes the mutants, and runs for each of them the tests that call its
function; first it finds out which these are, which takes minutes. It knows one source folder, so
packages and plugins are copied into one; the checkout does not change.

Constants of modules and decorated functions, thus properties, are not mutated. ``strict=True`` of
``zip`` is an assertion: mutants without it are not counted if they survive.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from shutil import copytree, ignore_patterns

ROOT = Path(__file__).parents[1]
QUIC = "tests/plugins/quic"
SPARE = ignore_patterns("__pycache__")


@dataclass(frozen=True, slots=True)
class Area:
    """Files of one row of the table."""

    sources: tuple[str, ...]
    """Patterns of the files whose functions are changed."""
    tests: tuple[str, ...]
    """What runs for them, if it calls the changed function."""


AREAS = {
    "protocol": Area(("meshllm/protocol/*",), ("tests/protocol",)),
    "scheduler": Area(("meshllm/scheduler/*",), ("tests/scheduler",)),
    "split": Area(("meshllm/model/split/*",), ("tests/model/split",)),
    "kernels": Area(  # with torch: the reference of the kernels
        ("meshllm/model/steps/attention.py",), ("tests/model/steps/test_attention.py",)
    ),
    "quic": Area(
        (
            "meshllm_quic/base/congestion.py",
            "meshllm_quic/path/*",
            "meshllm_quic/wire/*",
            *(f"meshllm_quic/relay/{name}.py" for name in ("registration", "relay")),
            "meshllm_quic/relay/relay_limiter.py",
            *(f"meshllm_quic/link/{name}.py" for name in ("admission", "machine", "table")),
        ),
        (
            *(f"{QUIC}/{name}" for name in ("base", "path", "wire", "link", "test_hostile.py")),
            *(f"{QUIC}/relay/test_{name}.py" for name in ("registration", "relay")),
            f"{QUIC}/relay/test_relay_limiter.py",
        ),
    ),
}
SETTINGS = {
    "source_paths": ["src"],
    "do_not_mutate_patterns": [r"(Error|Fault)\(", r"Reader\(.*\""],  # wording of errors
    "pytest_add_cli_args": ["-p", "no:cacheprovider"],
    "process_isolation": "forkserver",  # threads of torch do not survive a fork
    "timeout_constant": 15.0,  # s; pytest takes some to start
    "timeout_multiplier": 3.0,
    "use_git_change_detection": False,
}
KILLED = {1, 3}
"""Exit codes of mutmut: a test failed, or pytest did. Negative ones are crashes, too."""
TIMEOUT = {24, 36, 152, 255, -24, -9}
"""Exit codes of mutmut: the tests took too long. All others are survivors."""


def copy_to(tree: Path, area: Area) -> None:
    """Copy code and tests, with all packages in one folder, and configure mutmut."""
    tree.mkdir(parents=True, exist_ok=True)
    for package in (ROOT / "meshllm", *(ROOT / "plugins").glob("meshllm_*")):
        copytree(package, tree / "src" / package.name, ignore=SPARE, dirs_exist_ok=True)
    copytree(ROOT / "tests", tree / "tests", ignore=SPARE, dirs_exist_ok=True)
    settings = SETTINGS | {
        "only_mutate": [f"src/{pattern}" for pattern in area.sources],
        "pytest_add_cli_args_test_selection": list(area.tests),
    }
    lines = (f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    project = (ROOT / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{''.join(lines)}")


def mutmut(tree: Path, *arguments: str) -> str:
    """Run mutmut; return what it prints."""
    command = ["mutmut", *arguments]
    output, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.run(
        command, cwd=tree, text=True, stdout=output, stderr=both, check=False
    ).stdout


def results(tree: Path) -> dict[str, int | None]:
    """Map the name of each mutant to the exit code of its tests, None before they ran."""
    paths = sorted(tree.glob("mutants/src/**/*.meta"))
    each = (json.loads(path.read_text())["exit_code_by_key"] for path in paths)
    return {name: code for codes in each for name, code in codes.items()}


def draw(mutants: Iterable[str], patterns: Sequence[str], most: int | None, seed: int) -> list[str]:
    """Draw at ``most`` that many of the mutants whose names match one of the patterns."""
    found = [name for name in mutants if any(fnmatch(name, each) for each in patterns)]
    return random.Random(seed).sample(found, len(found) if most is None else min(most, len(found)))


def verdict(code: int | None) -> str:
    """Name an exit code of mutmut."""
    if code in TIMEOUT:
        return "timeout"
    return "killed" if code in KILLED or (code or 0) < 0 else "survived"


def lacks_only_strict(diff: str) -> bool:
    """Return whether a mutant differs from the code only in what ``zip`` asserts."""
    lines = diff.splitlines()
    kept = [[each[1:] for each in lines if re.match(rf"[{sign}] ", each)] for sign in "-+"]
    before, after = ([re.sub(r", *(strict=\w+)?\)", ")", each) for each in side] for side in kept)
    return before == after


def table(found: Mapping[str, Collection[int | None]]) -> Iterator[str]:
    """Yield a line for the exit codes of each area, and one for all."""
    yield f"{'area':<10}{'mutants':>8}{'killed':>8}{'timeout':>9}{'survived':>10}{'percent':>9}"
    whole = [code for codes in found.values() for code in codes]
    for name, codes in [*found.items(), ("all", whole)]:
        count = Counter(map(verdict, codes))
        figures = f"{count['killed']:>8}{count['timeout']:>9}{count['survived']:>10}"
        share = count["survived"] / max(1, len(codes))
        yield f"{name:<10}{len(codes):>8}{figures}{share:>9.1%}"


def survey(tree: Path, area: str, options: Namespace) -> dict[str, int | None]:
    """Test a sample of the mutants of an area and print the survivors; return all exit codes."""
    jobs = [] if options.jobs is None else ["--max-children", str(options.jobs)]
    copy_to(tree, AREAS[area])
    print(f"{area}: making mutants and finding their tests", flush=True)
    output = mutmut(tree, "run", *jobs, "none")
    drawn = draw(results(tree), options.names, options.sample, options.seed)
    print(f"{area}: testing {len(drawn)} of {len(results(tree))} mutants", flush=True)
    if drawn:
        output = mutmut(tree, "run", *jobs, *drawn)
    codes = {name: results(tree)[name] for name in drawn}
    if None in codes.values() or not results(tree):
        raise SystemExit(output)
    for name in drawn:
        if verdict(codes[name]) == "survived":
            shown = mutmut(tree, "show", name)
            if lacks_only_strict(shown):
                del codes[name]
            else:
                print(shown, flush=True)
    return codes


def parse(arguments: Sequence[str]) -> Namespace:
    """Read the options."""
    parser = ArgumentParser(
        "mutants", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of modules or functions")
    parser.add_argument("--area", action="append", choices=AREAS, help="all areas if omitted")
    parser.add_argument("--sample", type=int, help="mutants drawn from each area; all if omitted")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, help="mutants tested at a time; one per CPU if omitted")
    parser.add_argument("--keep", type=Path, help="folder of the copy: a second run starts sooner")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Copy the code, and test a sample of its mutants."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        parent = options.keep or Path(folder)
        found = {area: survey(parent / area, area, options) for area in options.area or AREAS}
    print("\n".join(table({area: codes.values() for area, codes in found.items()})))
    return 0 if any(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
