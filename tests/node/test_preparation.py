"""Loading and profiling of the model before the first offer."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.config import cache_path
from meshllm.errors import ModelError, ModelMissing, OutOfMemory, UserError
from meshllm.model.capacity import shape_of
from meshllm.model.files import manifest
from meshllm.model.files.source import Source, resolve
from meshllm.model.shape import process_memory
from meshllm.model.timing import Speed, measure_speed
from meshllm.names import Digest, Quant, Span, WireMode
from meshllm.node.compute.worker import Worker
from meshllm.node.preparation import Preparation
from meshllm.node.ring import model_runtime
from meshllm.node.ring.shape import waiting_room
from meshllm.protocol.membership.records import ENDS, Profile
from meshllm.protocol.session.messages import DType
from meshllm.protocol.weights.holders import name_of
from meshllm.testing.clock import InlineExecutor
from meshllm.testing.models import tiny_model
from tests.builders.node_options import node_options

EMPTY = Profile("desk", "1", (), 0)


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the speed with a model once for all offers, which have caches of their own."""

    def measure(source: Source, dtype: torch.dtype, _: Path, *where: Any) -> Speed:
        return measure_speed(source, dtype, cache_path(), *where)

    monkeypatch.setattr("meshllm.node.preparation.measure_speed", measure)


def prepare(folder: Path, **wishes: Any) -> Preparation:
    options = node_options(folder / "state", **({"threads": 1} | wishes))
    return Preparation(options, Worker(InlineExecutor()), folder / "cache")


async def test_a_founder_creates_the_charter_of_its_model(llama: Path, tmp_path: Path) -> None:
    engine, charter = await prepare(tmp_path, model=str(llama), members=2).open_founding_model()

    assert charter.dtype is DType.FLOAT32
    assert charter.members == 2
    assert charter.shape.layers == engine.shape.layers == 6
    assert engine.source.folder == llama


async def test_a_founder_cannot_hold_layers_that_its_model_lacks(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="layers `2:7` end above the 6 layers of") as refused:
        await prepare(tmp_path, model=str(llama), layers=Span(2, 7)).open_founding_model()

    assert refused.value.hint == "choose a span within `0:6`"
    await prepare(tmp_path, model=str(llama), layers=Span(2, 6)).open_founding_model()


async def test_a_joiner_cannot_hold_layers_that_all_its_models_lack(
    llama: Path, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"model": str(llama), "layers": Span(2, 7)}

    with pytest.raises(UserError, match="layers `2:7` end above the 6 layers of"):
        await prepare(tmp_path, **own).check_layers()
    await prepare(tmp_path, **own, more_models=("builtin",)).check_layers()
    await prepare(tmp_path, **own, more_models=("no/model",)).check_layers()  # may be fetched
    await prepare(tmp_path, layers=Span(2, 7)).check_layers()


@pytest.mark.parametrize(
    ("own", "held"), [(None, [True, True, True]), (Quant.INT4, [False, True, False])]
)
async def test_a_node_with_a_quantisation_holds_what_its_owner_served_too(
    llama: Path, tmp_path: Path, own: Quant | None, held: list[bool]
) -> None:
    preparation = prepare(tmp_path, model="builtin", quant=own)

    charter = await preparation.describe(str(llama), Quant.INT8, 1 << 20)
    all_quants = [replace(charter, quant=quant) for quant in (Quant.NONE, Quant.INT8, Quant.INT4)]

    keys = await preparation.held(all_quants)
    assert [each.key in keys for each in all_quants] == held
    longest = [await preparation.longest(each) for each in all_quants]
    assert longest == [charter.shape.context] * 3


async def test_a_mesh_starts_with_the_builtin_model(tmp_path: Path) -> None:
    _, charter = await prepare(tmp_path).open_founding_model()

    assert charter.shape.name == shape_of(resolve("builtin"), None).name


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", DType.BFLOAT16), (None, DType.FLOAT32)])
async def test_the_founder_chooses_the_dtype(
    llama: Path, tmp_path: Path, dtype: str | None, told: DType
) -> None:
    _, charter = await prepare(tmp_path, model=str(llama), dtype=dtype).open_founding_model()

    assert charter.dtype is told


@pytest.mark.parametrize("wire", WireMode)
async def test_the_wire_mode_is_an_option_of_each_node(
    llama: Path, tmp_path: Path, wire: WireMode
) -> None:
    engine, _ = await prepare(tmp_path, model=str(llama), wire=wire).open_founding_model()

    assert engine.wire is wire


async def test_a_mixture_is_sent_exact_unless_forced(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "qwen3_moe").folder

    engine, _ = await prepare(tmp_path, model=str(folder), wire=WireMode.AUTO).open_founding_model()

    assert engine.wire is WireMode.EXACT


async def test_the_memory_of_a_draft_model_is_not_offered(llama: Path, tmp_path: Path) -> None:
    def offering(**wishes: Any) -> Preparation:
        return prepare(tmp_path, model=str(llama), draft=str(llama), **wishes)

    engine, _ = await offering().open_founding_model()
    assert engine.draft is not None
    size = engine.draft.bytes

    some = await offering(memory_bytes=size + 1000).offer(engine, EMPTY)
    none = await offering(memory_bytes=size - 1000).offer(engine, EMPTY)

    assert (some.memory_bytes, none.memory_bytes) == (1000, 0)


async def test_the_memory_of_the_process_is_not_offered(llama: Path, tmp_path: Path) -> None:
    limit = process_memory() + (1 << 30)
    preparation = prepare(tmp_path, model=str(llama), memory_bytes=limit)
    engine, _ = await preparation.open_founding_model()

    profile = await preparation.offer(engine, EMPTY)

    assert profile.memory_bytes == limit
    assert profile.reserve_bytes > process_memory() // 2 + waiting_room(engine.shape).total
    assert profile.reserve_bytes - process_memory() < (1 << 30)


async def test_weights_are_hashed_while_the_model_loads(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = prepare(tmp_path, model=str(llama))
    engine, _ = await preparation.open_founding_model()
    monkeypatch.setattr("meshllm.model.files.manifest.hash_tensors", None)

    assert any((await preparation.offer(engine, EMPTY)).weights)


async def test_damaged_weights_are_reported_with_the_offer(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
    preparation = prepare(tmp_path, model=str(tmp_path / "model"))

    engine, _ = await preparation.open_founding_model()

    with pytest.raises(ModelError, match="is damaged"):
        await preparation.offer(engine, EMPTY)


@pytest.mark.parametrize(
    "lack", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
async def test_a_lack_of_memory_while_a_model_is_measured_is_reported(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: Exception
) -> None:
    def refusing(*_: object) -> None:
        raise lack

    preparation = prepare(tmp_path, model=str(llama))
    engine, _ = await preparation.open_founding_model()
    monkeypatch.setattr("meshllm.node.preparation.measure_speed", refusing)

    with pytest.raises(OutOfMemory, match="Not enough memory to prepare"):
        await preparation.offer(engine, EMPTY)


@pytest.mark.parametrize(
    "place",
    [
        "meshllm.model.files.source.read_regular",  # of the config
        "meshllm.model.files.source.AutoConfig.from_pretrained",
        "meshllm.model.files.source.Path.iterdir",
        "meshllm.node.ring.model_runtime.shape_of",
        "meshllm.node.preparation.config_digest",
        "meshllm.node.preparation.hash_files",
        "transformers.configuration_utils.cached_file",  # whose errors transformers wraps
    ],
)
@pytest.mark.parametrize("lack", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
async def test_a_lack_of_memory_while_a_model_is_opened_is_reported(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, lack: Exception
) -> None:
    def refusing(*_: object, **_more: object) -> None:
        raise lack

    monkeypatch.setattr(place, refusing)

    with pytest.raises(OutOfMemory, match="Not enough memory to prepare"):
        await prepare(tmp_path, model=str(llama)).open_founding_model()


@pytest.mark.parametrize(
    "cause", [None, RuntimeError("this type cannot allocate a ring buffer")], ids=repr
)
async def test_a_model_that_is_not_supported_is_not_taken_for_a_lack_of_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Exception | None
) -> None:
    def refusing(*_: object, **_more: object) -> None:
        try:
            raise MemoryError  # noqa: TRY301 -- of a first attempt
        except MemoryError:
            raise ModelError("it is not supported: it cannot allocate its cache") from cause

    monkeypatch.setattr("meshllm.node.ring.model_runtime.shape_of", refusing)

    with pytest.raises(ModelError, match="it is not supported") as refused:
        await prepare(tmp_path, model=str(llama)).open_founding_model()

    assert not isinstance(refused.value, OutOfMemory)


async def test_a_model_that_cannot_be_read_for_lack_of_memory_counts_as_held(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, charter = await prepare(tmp_path, model=str(llama)).open_founding_model()
    preparation = prepare(tmp_path, model="no/model", more_models=(str(llama), "builtin"))
    digest = manifest.config_digest

    def refusing(source: Source) -> bytes:
        if source.name == str(llama):
            raise MemoryError
        return digest(source)

    monkeypatch.setattr("meshllm.node.preparation.config_digest", refusing)

    assert await preparation.held([charter]) == (charter.key,)
    with pytest.raises(OutOfMemory, match=f"Not enough memory to prepare `{llama}`"):
        await preparation.join(charter)


async def test_a_bug_while_a_model_is_measured_keeps_its_type(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("shapes do not match")

    preparation = prepare(tmp_path, model=str(llama))
    engine, _ = await preparation.open_founding_model()
    monkeypatch.setattr("meshllm.node.preparation.measure_speed", failing)

    with pytest.raises(RuntimeError, match="shapes do not match"):
        await preparation.offer(engine, EMPTY)


async def test_a_missing_draft_model_is_reported(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no/such"):
        await prepare(tmp_path, model=str(llama), draft="no/such").open_founding_model()


async def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        await prepare(tmp_path, model=str(tmp_path / "nothing")).open_founding_model()


async def test_a_joining_node_uses_the_model_and_dtype_of_the_mesh(
    llama: Path, tmp_path: Path
) -> None:
    _, charter = await prepare(tmp_path, model=str(llama), dtype="bfloat16").open_founding_model()

    engine = await prepare(tmp_path, model=str(llama)).join(charter)

    assert engine.shape.dtype == "bfloat16"


async def test_a_folder_that_the_charter_names_is_not_opened(llama: Path, tmp_path: Path) -> None:
    _, charter = await prepare(tmp_path, model=str(llama)).open_founding_model()
    assert charter.shape.name == str(llama)

    with pytest.raises(ModelError, match="is not a name of the Hugging Face hub"):
        await prepare(tmp_path).join(charter)


async def test_the_context_of_a_served_model_is_known_where_it_is_or_was_fetched(
    llama: Path, tmp_path: Path
) -> None:
    _, charter = await prepare(tmp_path, model=str(llama), context=8).open_founding_model()
    longest = shape_of(resolve(str(llama)), None).context

    assert await prepare(tmp_path, model=str(llama), quant=Quant.INT8).longest(charter) == longest
    with pytest.raises(ModelMissing, match="does not know how long a context"):
        await prepare(tmp_path).longest(charter)
    shutil.copytree(llama, tmp_path / "cache" / "weights" / name_of(charter))
    assert await prepare(tmp_path).longest(charter) == longest > charter.shape.context == 8


async def test_a_joining_node_with_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    _, charter = await prepare(tmp_path, model=str(llama)).open_founding_model()
    other = replace(charter, config_digest=Digest(bytes(32)))

    with pytest.raises(ModelError, match="a different configuration"):
        await prepare(tmp_path, model=str(llama)).join(other)


@pytest.mark.parametrize("threads", [1, None])
async def test_an_offer_is_measured(
    llama: Path, tmp_path: Path, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated: list[object] = []
    monkeypatch.setattr(model_runtime, "calibrate", lambda *asked: calibrated.append(asked))
    wishes = {"threads": threads, "memory_bytes": 1 << 20, "layers": Span(1, 3)}
    preparation = prepare(tmp_path, model=str(llama), **wishes)
    engine, charter = await preparation.open_founding_model()

    profile = await preparation.offer(engine, EMPTY)

    assert (profile.name, profile.memory_bytes, profile.span) == ("desk", 1 << 20, Span(1, 3))
    assert len(profile.weights) == charter.shape.layers + ENDS
    assert profile.weights[-1] == charter.config_digest[:16]
    assert profile.layer_s
    assert Profile.decode(profile.encode()) == profile
    assert len(calibrated) == (threads is None)
