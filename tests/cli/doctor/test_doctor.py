import json
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from meshllm.cli.doctor import checks
from meshllm.cli.doctor.doctor import lay_out
from meshllm.cli.doctor.finding import Finding
from meshllm.cli.shared import model_record
from meshllm.errors import LinkLost, MeshError
from meshllm.model.kernels import measured
from tests.builders.fake_client import FakeClient
from tests.builders.status import status_of
from tests.cli.conftest import Invoke

OF_MODEL = {"model", "weights", "execution"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    node = FakeClient(monkeypatch)
    node.statuses = [replace(status_of(2), listening=("loopback:1",))]
    return node


def test_a_finding_is_a_line_and_one_for_its_hint() -> None:
    findings = [Finding("ok", "model", "builtin"), Finding("warn", "node", "\x1b[2J", "start one")]

    assert lay_out(findings, 80).splitlines() == [
        "ok    model      builtin",
        "warn  node       \\x1b[2J",
        "                 hint: start one",
    ]


def test_long_lines_are_wrapped_between_words() -> None:
    (finding,) = [Finding("warn", "node", f"/{'x' * 30} is open", "chmod 600 it, and be quick")]

    assert lay_out([finding], 36).splitlines() == [
        "warn  node       /" + "x" * 30,
        "                 is open",
        "                 hint: chmod 600 it,",
        "                       and be quick",
    ]


def test_a_machine_without_a_node_is_checked(meshllm: Invoke, node: FakeClient) -> None:
    node.statuses = [LinkLost("No node is running")]

    result = meshllm("doctor")

    found = {line.split()[1] for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert found == {
        "state", "clock", "node", "port", "memory", "threads", "device", "model", "weights",
        "execution", "kernels", "transport", "versions",
    }  # fmt: skip
    assert "ok    model      builtin: `qwen3` is bit-equal when split" in result.stdout
    assert "websocket is selected and loads" in result.stdout


@pytest.mark.parametrize("stored", ["measured", "nothing", "damaged"])
def test_kernels_that_were_measured_are_listed(
    meshllm: Invoke,
    node: FakeClient,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
) -> None:
    monkeypatch.setattr(measured, "cache_path", lambda: home / "measured")
    if stored != "nothing":
        times = {"own": 2.0, "torch": 2.5}
        measured.measure_once("few rows of bf16", "1024", 2, lambda: times)
    if stored == "damaged":
        for record in (home / "measured").glob("*.json"):
            record.write_text("[{")

    text, found = meshllm("doctor"), json.loads(meshllm("doctor", "--json").stdout)

    if stored == "measured":
        assert "kernels    few rows of bf16: own, 1.25 (1 shape; threads: 2)" in text.stdout
        (kernel,) = found["kernels"]
        assert time.time() - kernel.pop("at_s") < 60
        assert kernel == {
            "what": "few rows of bf16", "shape": "1024", "threads": 2, "best": "own",
            "seconds": {"own": 2.0, "torch": 2.5}, "gain": 1.25,
        }  # fmt: skip
    else:
        assert "kernels    none measured yet" in text.stdout
        assert found["kernels"] == []
    assert (home / "measured").exists() is (stored != "nothing")


def test_a_relay_has_no_effect_on_the_checks(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("doctor", "--relay", "relay.example:7777")

    assert (result.exit_code, "No such option" in result.stderr) == (2, True)


def test_a_machine_with_a_node_is_checked_with_its_peers(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("doctor", "--json")

    found = {each["what"]: each["found"] for each in json.loads(result.stdout)["findings"]}
    assert found["peer"] == "desk desk1bc direct, 1.84 ms"
    assert "listening" in found
    assert "port" not in found


@pytest.mark.parametrize("words", [("--model", "builtin, no/model"), ()])
def test_each_model_that_a_node_can_hold_is_checked(
    meshllm: Invoke, node: FakeClient, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    if not words:
        monkeypatch.setenv("MESHLLM_MODEL", "builtin, no/model")

    result = meshllm("doctor", *words, "--json")

    found = [each for each in json.loads(result.stdout)["findings"] if each["what"] in OF_MODEL]
    assert [each["what"] for each in found] == ["model", "weights", "execution", "model"]
    assert found[-1]["verdict"] == "fail"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError, ValueError])
def test_a_broken_installation_of_torch_is_one_failed_check(
    meshllm: Invoke,
    node: FakeClient,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    device: str,
) -> None:
    def import_heavy(*_: str) -> None:
        raise kind("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(checks, "import_heavy", import_heavy)

    result = meshllm("doctor", "--model", "builtin, builtin", "--device", device, "--json")

    found = json.loads(result.stdout)["findings"]
    (failed,) = (each for each in found if each["verdict"] == "fail")
    assert (result.exit_code, failed["what"]) == (1, "torch")
    assert failed["found"].endswith("imported: libcudart.so.12: cannot open shared object file")
    assert failed["advice"].startswith("install both again")
    assert {"memory", "transport", "versions"} <= {each["what"] for each in found}


def test_torch_that_is_not_installed_is_one_failed_check(
    meshllm: Invoke, node: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checks, "version", version)
    monkeypatch.setattr(model_record, "version", version)

    result = meshllm("doctor", "--model", "builtin", "--device", "cpu", "--json")

    found = {each["what"]: each for each in json.loads(result.stdout)["findings"]}
    assert (result.exit_code, found["torch"]["found"]) == (1, "torch is not installed")
    assert found["versions"]["found"].endswith("torch not installed, transformers not installed")


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failed_check_fails_the_command(
    meshllm: Invoke, node: FakeClient, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    def examine(_: object, status: object, transports: object) -> Iterator[Finding]:
        assert not isinstance(status, MeshError)
        assert transports == ()
        yield Finding("ok", "key", "yours")
        yield Finding(verdict, "clock", "late")  # type: ignore[arg-type]  # one of three

    monkeypatch.setattr(checks, "examine", examine)

    result = meshllm("doctor")

    assert result.exit_code == code
    assert result.stderr == ("error: 1 of 2 checks failed\n" if code else "")
    assert len(result.stdout.splitlines()) == 2
