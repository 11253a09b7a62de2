"""The comparison of two revisions."""

from pathlib import Path

import pytest

from tests.bench.revisions import ROOT, RevisionRow, _extract, paired, sizes, speeds


def test_ratios_are_of_pairs() -> None:
    assert paired("x", [1.0, 10.0, 4.0], [2.0, 10.0, 4.0]) == RevisionRow("x", 4.0, 4.0, 1.0)


def test_figures_are_found_by_name() -> None:
    assert speeds({"rows": [{"name": "ring of 2", "ms_per_token": 3.5}]}) == {
        "ms per token, ring of 2": 3.5
    }
    rows = [
        {"nodes": 1, "ends": "entry", "bytes_per_hop": 0},
        {"nodes": 2, "ends": "entry", "bytes_per_hop": 700},
    ]
    assert sizes({"rows": rows}) == {"bytes per hop, 2 nodes, ends at entry": 700}


def test_rounds_of_different_number_are_a_bug() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired("x", [1.0], [])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_revision_is_extracted_whole(tmp_path: Path) -> None:
    _extract("HEAD", str(tmp_path))

    assert (tmp_path / "meshllm" / "__init__.py").is_file()
