"""The models that a node holds again after a restart."""

from pathlib import Path

import pytest

from meshllm.errors import UserError
from meshllm.names import Quant
from meshllm.node.membership.saved_models import LocalModel, load_models, save_models
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.charter import MAX_SERVED


def test_models_are_those_that_were_saved_last(tmp_path: Path) -> None:
    store = StateStore.open(tmp_path / "state")
    assert load_models(store) == []
    wanted: list[LocalModel] = [("/models/a", None), ("org/b", Quant.INT8)]
    save_models(store, wanted)

    assert load_models(StateStore.open(store.folder)) == wanted


def test_no_more_models_are_saved_than_a_mesh_serves(tmp_path: Path) -> None:
    store = StateStore.open(tmp_path / "state")
    models: list[LocalModel] = [(f"m{number}", None) for number in range(MAX_SERVED + 3)]
    save_models(store, models)

    assert load_models(store) == models[3:]


@pytest.mark.parametrize("data", [b"{", b"[1]", b'[["a"]]', b'[["a", "int3"]]', b"\xff"])
def test_damaged_models_are_an_error(tmp_path: Path, data: bytes) -> None:
    store = StateStore.open(tmp_path / "state")
    store.save("models", data)

    with pytest.raises(UserError, match="Invalid models") as raised:
        load_models(store)

    assert raised.value.hint
