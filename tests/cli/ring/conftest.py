import json
from pathlib import Path

import pytest

from meshllm.traces.trace import TraceLine
from tests.builders.model_configs import LLAMA_8B
from tests.builders.workloads import PAIR


@pytest.fixture
def pair(home: Path) -> Path:
    (home / "big.json").write_text(json.dumps(LLAMA_8B))
    path = home / "pair.toml"
    path.write_text(PAIR)
    return path


@pytest.fixture
def trace(home: Path) -> Path:
    path = home / "trace.jsonl"
    models = ["builtin", "big", "builtin", "other"]
    path.write_bytes(
        b"".join(
            TraceLine(
                at=1000.0 + at,
                model=models[at % 4],
                prompt_tokens=200,
                cached_tokens=50,
                new_tokens=30,
                max_tokens=64,
                ttft_ms=5.0,
                total_ms=100.0,
                finish_reason="stop",
            ).to_json()
            for at in range(400)
        )
    )
    return path
