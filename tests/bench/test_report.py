import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.report import Report, counts, parser_of


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class _Nested:
    row: _Row
    lost: dict[str, int]


def _report(words: list[str]) -> Report:
    parser = parser_of("it", "What it does.")
    parser.add_argument("--threads", type=int)
    report = Report(parser.parse_args(words))
    report.say("a table")
    report.write([_Row("one", 1.5)], model="tiny")
    return report


def test_a_table_alone_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _report([])

    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize("words", [["--json"], ["--json", "-"]])
def test_json_is_the_only_output_on_stdout(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    _report([*words, "--threads", "3"])

    facts = json.loads(capsys.readouterr().out)
    assert (facts["model"], facts["rows"]) == ("tiny", [{"name": "one", "ms": 1.5}])
    assert facts["machine"]["threads"] == 3


def test_json_goes_to_a_file_and_the_table_to_stdout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _report(["--json", str(tmp_path / "rows.json")])

    assert capsys.readouterr().out == "a table\n"
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["ms"] == 1.5


def test_rows_may_hold_counts_and_other_rows(tmp_path: Path) -> None:
    at = tmp_path / "rows.json"
    report = Report(parser_of("it", "").parse_args(["--json", str(at)]))

    report.write([_Nested(_Row("one", 1.5), Counter({"node_lost": 3}))])

    row = json.loads(at.read_text())["rows"][0]
    assert row == {"row": {"name": "one", "ms": 1.5}, "lost": {"node_lost": 3}}


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    report = Report(parser_of("it", "").parse_args(["--json", str(tmp_path / "rows.json")]))

    with pytest.raises(TypeError, match="is not JSON"):
        report.write([tmp_path])


def test_counts_are_parsed() -> None:
    assert counts("1,2,16") == (1, 2, 16)
