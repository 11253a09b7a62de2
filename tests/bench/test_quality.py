"""The table of quality: a whole run over two cases."""

import json

import pytest

from tests.bench.quality import main


def test_plain_weights_agree_with_themselves_and_fewer_bits_with_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--kinds", "none,int8,int4", "--cases", "2", "--json"]) == 0

    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)}
    plain = rows["none"]
    assert [*rows] == ["none", "int8", "int4"]
    assert (plain["asked"], plain["same"], plain["agree"]) == (2, 1.0, 1.0)
    assert plain["megabytes"] == 0 < rows["int4"]["megabytes"] < rows["int8"]["megabytes"]
    assert plain["plain_loss"] != rows["int4"]["plain_loss"]
