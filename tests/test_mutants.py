from fnmatch import fnmatch

import pytest

from tests.mutants import AREAS, ROOT, draw, lacks_only_strict, table


@pytest.mark.parametrize("name", AREAS)
def test_every_pattern_of_an_area_finds_files(name: str) -> None:
    paths = [*ROOT.glob("meshllm/**/*.py"), *ROOT.glob("plugins/meshllm_*/**/*.py")]
    files = [path.relative_to(ROOT).as_posix().removeprefix("plugins/") for path in paths]

    empty = [
        *(
            pattern
            for pattern in AREAS[name].sources
            if not any(fnmatch(f, pattern) for f in files)
        ),
        *(test for test in AREAS[name].tests if not (ROOT / test).exists()),
    ]

    assert files
    assert not empty


def test_a_sample_is_drawn_of_what_matches() -> None:
    mutants = [f"meshllm.{name}.x_run__mutmut_{at}" for name in ("a", "b") for at in range(9)]

    drawn = draw(mutants, ["meshllm.a.*"], 4, seed=1)

    assert len(set(drawn)) == 4
    assert set(drawn) < set(mutants[:9])
    assert drawn == draw(mutants, ["meshllm.a.*"], 4, seed=1)
    assert draw(mutants, ["*"], 17, seed=1) != draw(mutants, ["*"], 17, seed=2)
    assert sorted(draw(mutants, ["*.b.*", "*_8"], None, seed=1)) == mutants[8:]


@pytest.mark.parametrize(
    ("line", "is_equivalent"),
    [
        ("for a, b in zip(x, y, strict=False):", True),
        ("for a, b in zip(x, y, ):", True),
        ("for a, b in zip(x, strict=True):", False),
    ],
)
def test_what_zip_asserts_is_not_counted(line: str, *, is_equivalent: bool) -> None:
    diff = f"--- a.py\n+++ a.py\n def f():\n-    for a, b in zip(x, y, strict=True):\n+    {line}\n"

    assert lacks_only_strict(diff) is is_equivalent


def test_the_table_counts_each_verdict() -> None:
    lines = list(table({"a": [-4, 36, 0, 33], "b": [1, 4], "c": []}))

    assert [line.split() for line in lines] == [
        ["area", "mutants", "killed", "timeout", "survived", "percent"],
        ["a", "4", "1", "1", "2", "50.0%"],
        ["b", "2", "1", "0", "1", "50.0%"],
        ["c", "0", "0", "0", "0", "0.0%"],
        ["all", "6", "2", "1", "3", "50.0%"],
    ]
