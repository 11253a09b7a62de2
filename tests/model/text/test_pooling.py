import json
from pathlib import Path
from typing import Any

import pytest

from meshllm.model.text.pooling import LAST_ROW, Pooling, PoolingMode, read_pooling

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."


def write(folder: Path, kinds: list[str], config: object, inner: str = "1_Pooling") -> None:
    listed = [
        {"idx": at, "name": str(at), "path": inner if "Pooling" in kind else "", "type": kind}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def test_a_model_that_says_nothing_pools_its_last_row(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == LAST_ROW == Pooling(PoolingMode.LAST, normalises=True)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, PoolingMode.MEAN),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, PoolingMode.FIRST),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, PoolingMode.LAST),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, PoolingMode.MEAN),
        ({"pooling_mode": ["cls"]}, PoolingMode.FIRST),
    ],
)
@pytest.mark.parametrize("names", [OLD, NEW])
@pytest.mark.parametrize("normalises", [True, False])
def test_a_model_says_how_it_pools(
    tmp_path: Path, config: object, mode: PoolingMode, names: str, normalises: bool
) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    write(tmp_path, [names + kind for kind in kinds], config)

    assert read_pooling(tmp_path) == Pooling(mode, normalises)


@pytest.mark.parametrize(
    ("kinds", "config", "inner", "obstacle"),
    [
        (["Pooling", "Dense"], {"pooling_mode": "mean"}, "1_Pooling", "a `Dense` module"),
        (["Pooling"], {"pooling_mode": "max"}, "1_Pooling", "pooling by `max`"),
        (["Pooling"], {"pooling_mode": ["cls", "mean"]}, "1_Pooling", "pooling by `cls+mean`"),
        (["Pooling"], {"pooling_mode_weightedmean_tokens": True}, "1_Pooling", "`weightedmean`"),
        (["Pooling"], {"pooling_mode": "mean"}, "../1_Pooling", "pooling by ``"),
        (["Transformer"], {"pooling_mode": "mean"}, "1_Pooling", "pooling by ``"),
        (["Pooling"], [], "1_Pooling", "is damaged"),
    ],
)
def test_what_is_not_supported_is_told(
    tmp_path: Path, kinds: list[str], config: Any, inner: str, obstacle: str
) -> None:
    write(tmp_path, [OLD + kind for kind in kinds], config, inner)

    assert obstacle in read_pooling(tmp_path).obstacle


@pytest.mark.parametrize("text", ["{", "3", '[{"type": "a"}]', "[" * 100_000])
def test_a_damaged_list_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)

    assert "is damaged" in read_pooling(tmp_path).obstacle
