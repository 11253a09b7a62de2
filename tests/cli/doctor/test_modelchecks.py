import re
import shutil
from pathlib import Path

import pytest
import torch

from meshllm.cli.doctor import modelchecks
from meshllm.cli.doctor.finding import Finding
from meshllm.config import Settings
from meshllm.model import device
from meshllm.model.locate import find_folder
from meshllm.model.parity.verdict import known_verdicts
from meshllm.model.steps.execution import Execution, Strategy


def test_a_gpu_is_reported_with_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "choose", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(device, "name_of", lambda found: f"{found} Fake 100")
    monkeypatch.setattr(device, "free_bytes", lambda _: 3 << 30)
    monkeypatch.setattr(device, "missing_for_cuda_graphs", lambda: None)

    assert modelchecks.check_gpu("auto") == Finding("ok", "device", "cuda:1 Fake 100, 3.0 GiB free")
    monkeypatch.setattr(device, "missing_for_cuda_graphs", lambda: "Triton")
    assert modelchecks.check_gpu("auto") == Finding(
        "warn", "device", "cuda:1 Fake 100, 3.0 GiB free, slow without Triton", "install it"
    )


def test_the_model_is_found_and_can_be_split(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert modelchecks.check_model("builtin").found == "builtin: `qwen3` is bit-equal when split"
    assert modelchecks.check_model("missing").verdict == "fail"
    monkeypatch.setattr(modelchecks, "known_verdicts", dict)
    assert modelchecks.check_model("builtin").verdict == "warn"


def test_a_model_without_a_tokenizer_cannot_be_the_entry(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_folder("builtin"), folder)
    (folder / "tokenizer.json").unlink()

    finding = modelchecks.check_model(str(folder))

    assert finding.verdict == "warn"
    assert finding.found.startswith(f"The tokenizer in `{folder}` is missing")
    assert finding.found.endswith("it cannot be the entry")


def test_the_weights_are_hashed_and_missing_parts_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = modelchecks.check_weights("builtin", home / "cache")
    monkeypatch.setattr(modelchecks, "manifest", lambda *_: (bytes(16), b"1" * 16))
    part = modelchecks.check_weights("builtin", home / "cache")
    missing = modelchecks.check_weights("no/model", home / "cache")

    assert (whole.verdict, whole.found[12:]) == ("ok", ", 11 parts hashed")
    assert (part.verdict, part.found[12:]) == ("warn", ", 1 of 2 parts are missing on this machine")
    assert missing.verdict == "fail"


def test_the_execution_strategy_is_reported() -> None:
    told = modelchecks.check_execution(Settings(model="builtin"))
    wide = modelchecks.check_execution(Settings(model="builtin", dtype="float32"))
    exact = modelchecks.check_execution(Settings(model="builtin", exact=True))
    missing = modelchecks.check_execution(Settings(model="no/model"))

    assert (told.verdict, wide.verdict, exact.verdict) == ("ok", "warn", "ok")
    assert "row-invariant" in told.found or "replayed" in told.found
    assert re.search(r"; \d+ threads?$", told.found)  # the fastest number, measured now
    asked = modelchecks.check_execution(Settings(model="builtin", threads=3))
    assert asked.found.endswith("; 3 threads")
    assert wide.advice == "use `--dtype bfloat16`"
    assert exact.found.startswith("stock")
    assert missing.verdict == "fail"


@pytest.mark.parametrize("error", [None, "can't allocate memory: you tried 64 MiB\nat 0x7f"])
def test_measuring_threads_leaves_their_number_and_may_fail(
    monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    before = torch.get_num_threads()

    def calibrate(cores: int, *_: object) -> int:
        assert cores == 3
        torch.set_num_threads(cores + 1)
        if error:
            raise RuntimeError(error)
        return cores + 1

    monkeypatch.setattr("meshllm.node.compute.worker.calibrate", calibrate)
    monkeypatch.setattr(device, "default_threads", lambda: 3)

    told = modelchecks.check_execution(Settings(model="builtin"))

    assert torch.get_num_threads() == before
    if error:
        assert (told.verdict, told.found) == ("fail", error.partition("\n")[0])
    else:
        assert told.found.endswith("; 4 threads")


@pytest.mark.parametrize("is_fallback", [False, True])
def test_a_fallback_is_a_warning(monkeypatch: pytest.MonkeyPatch, *, is_fallback: bool) -> None:
    found = Execution(Strategy.STOCK, reason="why", is_fallback=is_fallback)
    monkeypatch.setattr("meshllm.model.steps.execution.forecast", lambda *_: found)

    told = modelchecks.check_execution(Settings(model="builtin", threads=1))
    monkeypatch.setattr(device, "refused_gpu", lambda *_: "too old")
    refused = modelchecks.check_execution(Settings(model="builtin", threads=1))

    assert told.verdict == ("warn" if is_fallback else "ok")
    assert told.found.startswith("stock (why); ")
    assert refused.verdict == "warn"
    assert refused.found.startswith("stock (too old; why); ")


def test_missing_compiled_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "meshllm.model.kernels.jit.limits", lambda: ("no compiled kernels: forbidden",)
    )

    told = modelchecks.check_execution(Settings(model="builtin"))

    assert told.verdict == "warn"
    assert told.found.endswith("; no compiled kernels: forbidden")


def test_a_model_that_cannot_be_split_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = known_verdicts()["qwen3"]
    bad = type(verdict)("qwen3", equal=False, reason="it looks ahead")
    monkeypatch.setattr(modelchecks, "known_verdicts", lambda: {"qwen3": bad})

    assert modelchecks.check_model("builtin") == Finding(
        "fail", "model", "builtin: `qwen3` cannot be split: it looks ahead"
    )


def test_no_more_is_checked_of_a_model_that_is_missing() -> None:
    missing = list(modelchecks.examine_model(Settings(model="no/model")))
    builtin = list(modelchecks.examine_model(Settings()))

    assert [(each.verdict, each.what) for each in missing] == [("fail", "model")]
    assert [each.what for each in builtin] == ["model", "weights", "execution"]
