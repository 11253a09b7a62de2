"""The divergence of quantised logits: structure, temperature, and a whole run."""

import json
from pathlib import Path

import pytest
import torch

from tests.bench.divergence import (
    ENTROPY,
    OUTLIER,
    OUTLIERS,
    channels,
    entropy_of,
    main,
    structured,
    temperature_of,
)


def test_channels_differ_and_the_size_of_inputs_is_kept() -> None:
    torch.manual_seed(0)
    weights, sizes = structured((512, 1024)), channels(400_000, OUTLIERS)

    assert (sizes > OUTLIER / 2).float().mean() == pytest.approx(OUTLIERS, rel=0.3)
    assert weights.std(0).max() > 2 * weights.std(0).min()
    assert (weights @ torch.randn(1024)).std() == pytest.approx(1.0, rel=0.3)
    singular = torch.linalg.svdvals(weights)
    assert singular[0] > 4 * singular[100]


def test_the_temperature_gives_the_entropy_of_trained_models() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 5000)

    assert entropy_of(logits / temperature_of(logits)) == pytest.approx(ENTROPY, rel=1e-3)


def test_fewer_bits_diverge_more(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"

    assert main(["--models", "tiny", "--tokens", "64", "--json", str(file)]) == 0

    rows = {row["kind"]: row for row in json.loads(file.read_text("utf-8"))["rows"]}
    assert rows["none"]["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert rows["none"]["same"] == 1.0
    assert 0 < rows["int8"]["divergence"] < rows["int4"]["divergence"]
    assert rows["wire"]["divergence"] > 0
