"""Loading a shard: what is cut, and what stays whole."""

from pathlib import Path

from meshllm.testing.models import tiny_model
from tests.builders.lm_heads import PARTS, VOCABULARY, head_of


def test_a_tied_embedding_stays_whole(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3")
    shard = head_of(source, PARTS[1])

    assert shard.model.get_output_embeddings().weight.shape == (64, 64)
    assert shard.model.get_input_embeddings().weight.shape[0] in {0, VOCABULARY}
