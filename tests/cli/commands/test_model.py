import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshllm.model import shape
from meshllm.model.files import source
from meshllm.model.parity import check, verdict
from meshllm.model.parity.check import ParityReport, Split
from meshllm.model.parity.verdict import Verdict
from meshllm.model.split import onemkl
from meshllm.model.split.meta_model import Part
from meshllm.names import Span
from tests.cli.conftest import Invoke

HALVES = (Part(Span(0, 4), True, False), Part(Span(4, 8), False, True))
EQUAL = ParityReport("builtin", "float32", (1, 2), (3,), (Split(HALVES, True, True, 0.0, 0.0),))


def test_show_prints_sizes_and_what_fits(meshllm: Invoke) -> None:
    text = meshllm("model", "show", "builtin").stdout

    assert "\nlayers        8, " in text
    assert " per token\n" in text
    assert "\nfits here     all layers in " in text
    assert "\nCPU engine    " in text


def test_show_json(meshllm: Invoke) -> None:
    shape = json.loads(meshllm("model", "show", "builtin", "--json", "--dtype", "float32").stdout)

    assert (shape["schema"], shape["name"], shape["layers"]) == (1, "builtin", 8)
    assert (shape["dtype"], shape["itemsize"]) == ("float32", 4)
    assert shape["here"]["layers_with_ends"] == 8
    assert shape["here"]["execution"]["strategy"] == "stock"
    assert "--dtype bfloat16" in shape["here"]["execution"]["reason"]


@pytest.mark.parametrize("lacking", [None, "Triton"])
def test_show_tells_how_a_gpu_would_run_it(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, lacking: str | None
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("meshllm.model.hardware.may_have_gpu", lambda: True)
    monkeypatch.setattr("meshllm.model.device.choose", lambda wanted, *_: {"auto": gpu}[wanted])
    monkeypatch.setattr("meshllm.model.steps.execution.missing_for_cuda_graphs", lambda: lacking)

    text = meshllm("model", "show", "builtin").stdout
    here = json.loads(meshllm("model", "show", "builtin", "--json").stdout)["here"]

    engine = "stock (a CUDA graph needs Triton); attention: torch"
    assert f"\nGPU engine    {engine if lacking else 'CUDA graph; attention: own'}\n" in text
    assert here["device"] == "cuda:0"
    assert here["execution"]["is_fallback"] is (lacking is not None)


def test_show_tells_the_sizes_although_a_device_is_missing(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_DEVICE", "cuda:99")
    monkeypatch.setenv("MESHLLM_QUANT", "int8")

    result = meshllm("model", "show", "builtin")

    assert result.exit_code == 0
    assert "quantised" in result.stdout.partition("CPU engine")[2]
    assert "cuda:99" in result.stdout.partition("CPU engine")[2]


def test_show_measures_a_model_once(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("meshllm.model.hardware.may_have_gpu", lambda: False)
    monkeypatch.setattr(shape, "free_memory", lambda: 10 << 20)
    first = [meshllm("model", "show", "builtin", *form).stdout for form in ((), ("--json",))]

    monkeypatch.setattr("meshllm.model.files.source.resolve", None)

    again = [meshllm("model", "show", "builtin", *form).stdout for form in ((), ("--json",))]
    assert first == again
    assert "CPU engine" in first[0]


def test_show_counts_the_layers_that_fit(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "free_memory", lambda: 10 << 20)

    text = meshllm("model", "show", "builtin").stdout

    assert " of 8 layers in 10.0 MiB of free memory" in text


def test_an_unknown_model_exits_4(meshllm: Invoke) -> None:
    result = meshllm("model", "show", "org/missing")

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("error: There is no model `org/missing`")
    assert "meshllm model pull org/missing" in result.stderr


def test_verify_prints_a_verdict(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "verify", lambda *_, **__: EQUAL)

    result = meshllm("model", "verify", "builtin")

    assert result.exit_code == 0
    assert "    2  0:4 4:8  equal   equal\n" in result.stdout
    assert "builtin in float32: bit-equal to transformers" in result.stdout


def test_a_model_that_differs_exits_4(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(EQUAL, splits=(Split(HALVES, False, True, 0.25, 3e-4),))
    monkeypatch.setattr(check, "verify", lambda *_, **__: report)

    result = meshllm("model", "verify", "builtin")
    as_json = meshllm("model", "verify", "builtin", "--json")

    assert (result.exit_code, as_json.exit_code) == (4, 4)
    assert "differ by 0.25" in result.stdout
    assert "NOT equal to transformers: largest relative difference 3.0e-04" in result.stdout
    assert result.stderr.startswith("error: `builtin` computes other logits when split\n")
    assert result.stderr.endswith("hint: run it with `--nodes 1`\n")
    assert json.loads(as_json.stdout)["outcome"] == "different"


@pytest.mark.parametrize("blamed", [False, True])
def test_rounding_is_distinguished_from_error(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, blamed: bool
) -> None:
    report = replace(EQUAL, splits=(Split(HALVES, False, True, 2e-6, 2e-7),))
    monkeypatch.setattr(check, "verify", lambda *_, **__: report)
    monkeypatch.setattr(onemkl, "rounds_by_alignment", lambda: blamed)

    result = meshllm("model", "verify", "builtin")
    as_json = json.loads(meshllm("model", "verify", "builtin", "--json").stdout)

    assert result.exit_code == 0
    assert "up to rounding, largest relative difference 2.0e-07" in result.stdout
    assert ("BLAS depends on memory alignment" in result.stdout) is blamed
    assert (as_json["outcome"], as_json["equal"], as_json["relative"]) == ("rounding", False, 2e-7)


def test_rounding_of_16_bits_hides_errors(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(HALVES, False, True, 2e-6, 2e-7)
    report = replace(EQUAL, dtype="bfloat16", splits=(split,))
    monkeypatch.setattr(check, "verify", lambda *_, **__: report)

    result = meshllm("model", "verify", "builtin")

    assert result.exit_code == 4
    assert "rule out rounding with `--dtype float32`" in result.stderr


def test_pull_fetches_the_files_of_a_span(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def resolve(name: str, **wishes: object) -> SimpleNamespace:
        asked.extend([name, wishes])
        return SimpleNamespace(folder=tmp_path)

    monkeypatch.setattr(source, "resolve", resolve)

    result = meshllm("model", "pull", "org/name", "--layers", "0:14")

    assert result.stdout == f"{tmp_path}\n"
    assert asked == ["org/name", {"revision": None, "span": Span(0, 14), "download": True}]


def test_pull_refuses_an_invalid_span(meshllm: Invoke) -> None:
    result = meshllm("model", "pull", "org/name", "--layers", "14")

    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        2, "error: Invalid layer span `14`",
    )  # fmt: skip


def test_families_show_refused_types_with_reasons(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "llama": Verdict("llama", equal=True, reason=""),
        "odd": Verdict("odd", equal=False, reason="it shares layers"),
    }
    monkeypatch.setattr(verdict, "measured_verdicts", lambda: known)
    monkeypatch.setattr(verdict, "known_verdicts", lambda: known)

    result = meshllm("model", "families")
    as_json = json.loads(meshllm("model", "families", "--json").stdout)

    assert result.stdout.splitlines()[1:] == ["llama  checked", "odd    refused  it shares layers"]
    assert result.stderr == "1 of 2 text model types are bit-equal when split\n"
    assert as_json["families"]["odd"]["reason"] == "it shares layers"


def test_families_show_one_type_with_its_variants(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        name: Verdict(name.partition(":")[0], equal=True, reason="")
        for name in ("llama", "odd", "odd:tied")
    }
    monkeypatch.setattr(verdict, "known_verdicts", lambda: known)

    odd, typo = meshllm("model", "families", "odd"), meshllm("model", "families", "lama")
    other = meshllm("model", "families", "zzzz")

    assert [line.split()[0] for line in odd.stdout.splitlines()] == ["type", "odd", "odd:tied"]
    assert (odd.stderr, typo.exit_code, other.exit_code) == ("", 2, 2)
    assert typo.stderr == "error: Unknown model type `lama`\nhint: did you mean `llama`?\n"
    assert "`meshllm model families` lists them" in other.stderr


def test_list_names_the_builtin_and_the_cached(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", tmp_path / "hub")

    text = meshllm("model", "list").stdout
    models = json.loads(meshllm("model", "list", "--json").stdout)["models"]

    assert [model["name"] for model in models] == ["builtin", "org/name"]
    assert "\norg/name " in text


def test_list_names_what_was_fetched_from_peers(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, index in (("good", '{"metadata": {"name": "org/name"}}'), ("odd", "[]")):
        folder = tmp_path / "cache" / "meshllm" / "weights" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors.index.json").write_text(index)
        (folder / "gone").symlink_to("nothing")  # as if it were removed while the folder is read

    models = json.loads(meshllm("model", "list", "--json").stdout)["models"]

    names = [model["name"] for model in models if model["name"].endswith("(from peers)")]
    assert names == ["org/name (from peers)", "odd (from peers)"]


def test_list_works_without_a_cache(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", tmp_path / "none")

    models = json.loads(meshllm("model", "list", "--json").stdout)["models"]

    assert [model["name"] for model in models] == ["builtin"]
