from fnmatch import fnmatch

import pytest

from tests.mutants import AREAS, ROOT, Area, area_of, draw, table

TWO = {"a": Area(("meshllm/a/*",), ()), "b": Area(("meshllm/b.py",), ())}


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


def test_a_mutant_belongs_to_the_area_of_its_file() -> None:
    assert area_of("meshllm.a.c.x_run__mutmut_1", TWO) == "a"
    assert area_of("meshllm.b.xǁClassǁrun__mutmut_2", TWO) == "b"
    assert area_of("meshllm.c.x_run__mutmut_3", TWO) is None


def test_a_sample_is_drawn_from_each_area() -> None:
    mutants = [
        f"meshllm.{name}.x_run__mutmut_{at}" for name in ("a.c", "b", "c") for at in range(9)
    ]

    drawn = draw(mutants, TWO, 4, seed=1)

    assert {name: len(set(each)) for name, each in drawn.items()} == {"a": 4, "b": 4}
    assert drawn == draw(mutants, TWO, 4, seed=1)
    assert draw(mutants, TWO, 20, seed=1)["b"] != draw(mutants, TWO, 20, seed=2)["b"]
    assert sorted(draw(mutants, TWO, None, seed=1)["b"]) == mutants[9:18]


def test_the_table_counts_each_verdict() -> None:
    codes: dict[str, int | None] = {"k": 1, "t": 36, "s": 0, "no test": 33, "odd": 4}

    lines = list(table({"a": ["k", "t", "s", "no test"], "b": ["k", "odd"], "c": []}, codes))

    assert [line.split() for line in lines] == [
        ["area", "mutants", "killed", "timeout", "survived", "percent"],
        ["a", "4", "1", "1", "2", "50.0%"],
        ["b", "2", "1", "0", "1", "50.0%"],
        ["c", "0", "0", "0", "0", "0.0%"],
        ["all", "6", "2", "1", "3", "50.0%"],
    ]
