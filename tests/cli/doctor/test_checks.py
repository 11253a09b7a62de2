import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshllm.cli.doctor import checks
from meshllm.cli.doctor.finding import Finding
from meshllm.config import Settings
from meshllm.errors import LinkLost, PeerFault, PluginError
from meshllm.model import device
from meshllm.model.locate import find_folder
from meshllm.model.parity.verdict import known_verdicts
from meshllm.model.steps.execution import Execution, Strategy
from meshllm.names import show
from meshllm.node.membership.state_store import StateStore
from meshllm.status import NodeState
from meshllm.transport.registry import Registry
from tests.builders.status import status_of, waiting, with_link, with_node


def test_a_missing_state_folder_is_ok(home: Path) -> None:
    assert [each.verdict for each in checks.check_state(home / "none")] == ["ok"]
    assert not (home / "none").exists()


def test_a_private_state_folder_shows_its_id(home: Path) -> None:
    node = StateStore.open(home / "state").key.node

    folder, key = checks.check_state(home / "state")

    assert (folder.verdict, key) == ("ok", Finding("ok", "key", show(node)))


@pytest.mark.parametrize(
    ("name", "mode", "advice"), [(".", 0o750, "700"), ("node.key", 0o640, "600")]
)
def test_wrong_permissions_fail_and_are_not_repaired(
    home: Path, name: str, mode: int, advice: str
) -> None:
    StateStore.open(home / "state")
    path = home / "state" / name
    path.chmod(mode)

    (found,) = checks.check_state(home / "state")

    assert (found.verdict, found.advice) == (
        "fail",
        f"run `chmod {advice} {home / 'state' / name}`",
    )
    assert path.stat().st_mode & 0o777 == mode


def test_a_private_folder_of_another_user_is_not_called_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)

    (found,) = checks.check_state(home)

    assert (found.verdict, found.found) == ("fail", f"{home} belongs to another user")
    assert "chmod" not in found.advice


def test_a_folder_that_cannot_be_written_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)

    assert [each.verdict for each in checks.check_state(home)] == ["fail"]


def test_a_missing_folder_that_cannot_be_created_fails(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != home)

    (found,) = checks.check_state(home / "a" / "b")

    assert (found.verdict, f"{home} cannot be written" in found.found) == ("fail", True)


def test_a_missing_folder_where_nothing_can_be_stored_fails(home: Path) -> None:
    (home / "file").touch()

    for folder, why in (
        (Path("/proc/none/state"), "the disk of /proc has 0 B left"),
        (home / "file" / "state", f"{home / 'file'} is not a folder"),
    ):
        (found,) = checks.check_state(folder)
        assert found == Finding(
            "fail", "state", f"{folder} cannot be created: {why}", "choose one with `--state`"
        )


def test_what_this_user_may_not_look_at_counts_as_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(self: Path, **_: object) -> os.stat_result:
        if self != home and home in self.parents:
            raise PermissionError
        return os.stat(self)  # noqa: PTH116 -- the method is replaced

    monkeypatch.setattr(Path, "stat", stat)

    assert [each.verdict for each in checks.check_state(home / "a" / "b")] == ["ok"]
    assert checks.check_no_node(home / "a", LinkLost("No node is running")).advice.startswith(
        "start"
    )


def test_a_full_disk_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.chmod(0o700)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))

    (found,) = checks.check_state(home)

    assert (found.verdict, "4.0 KiB left" in found.found) == ("fail", True)


def test_a_folder_without_a_key_is_ok(home: Path) -> None:
    home.chmod(0o700)

    assert [each.verdict for each in checks.check_state(home)] == ["ok", "ok"]
    assert not (home / "node.key").exists()


def test_an_invalid_key_fails(home: Path) -> None:
    home.chmod(0o700)
    (home / "node.key").write_text("nonsense")
    (home / "node.key").chmod(0o600)

    *_, key = checks.check_state(home)

    assert (key.verdict, key.what) == ("fail", "key")
    assert key.advice


def test_a_clock_behind_the_last_run_is_reported(home: Path) -> None:
    (home / "mesh.json").touch()
    written = (home / "mesh.json").stat().st_mtime
    (home / "gone").symlink_to("nothing")  # as if it were removed while the folder is read

    assert checks.check_clock(home, written + 5).verdict == "ok"
    assert "is 60 s before the last run" in checks.check_clock(home, written - 60).found


def clocks(*differ_s: float | None) -> list[Finding]:
    status = status_of(1 + len(differ_s))
    for index, clock_s in enumerate(differ_s, start=1):
        status = with_link(status, index, clock_s=clock_s)
    return list(checks.check_clocks(status.nodes))


def test_clocks_that_agree_are_ok() -> None:
    assert clocks(0.02, -4.9) == [Finding("ok", "clocks", "within 4.9 s of 2 other nodes")]
    assert clocks(0.02) == [Finding("ok", "clocks", "within 0.0 s of 1 other node")]


def test_unknown_clocks_are_not_reported() -> None:
    assert clocks() == []
    assert clocks(None) == []


@pytest.mark.parametrize(
    ("differ_s", "found", "where"),
    [
        ((7, 0.1), "desk is 7 s ahead", "that is wrong"),
        ((-200, 0.1), "desk is 3 min behind", "that is wrong"),
        ((60,), "desk is 1 min ahead", "that is wrong"),
        ((90000, 90000), "desk is 1 d ahead, laptop is 1 d ahead", "on this machine"),
        ((253_402_300_799.0, None), "desk is 2932897 d ahead", "that is wrong"),
    ],
)
def test_clock_skew_is_reported_with_a_hint(
    differ_s: tuple[float | None, ...], found: str, where: str
) -> None:
    (told,) = clocks(*differ_s)

    assert (told.verdict, told.found) == ("warn", f"more than 5 s apart: {found}")
    assert told.advice.startswith(f"set the clock {where}: `timedatectl set-ntp true`")


def test_no_running_node_is_a_warning(home: Path) -> None:
    never = checks.check_no_node(home / "door.sock", LinkLost("No node is running"))
    (home / "door.sock").touch()
    killed = checks.check_no_node(home / "door.sock", LinkLost("No node is running"))

    assert (never.verdict, never.advice) == (
        "warn",
        f"start one with `meshllm node --state {home}`",
    )
    assert (killed.verdict, "was killed" in killed.advice) == ("warn", True)


def test_an_invalid_response_of_the_node_fails(home: Path) -> None:
    found = checks.check_no_node(home / "door.sock", PeerFault("No JSON", hint="update it"))

    assert found == Finding("fail", "node", "No JSON", "update it")


def test_a_socket_open_to_other_users_fails(home: Path) -> None:
    path = home / "door.sock"
    path.touch(0o600)

    assert checks.check_node(path, status_of(2)).verdict == "ok"
    assert checks.check_node(path, waiting("alone")) == Finding(
        "warn", "node", "node attic is running, ring waiting: alone"
    )
    path.chmod(0o666)
    assert checks.check_node(path, status_of(2)).verdict == "fail"


@pytest.mark.parametrize(
    ("node", "link", "verdict", "found"),
    [
        ({}, {}, "ok", "desk desk1bc direct, 1.84 ms"),
        (
            {},
            {"path": "relay", "path_reason": "no answer to 64 probes"},
            "ok",
            "desk desk1bc relay, 1.84 ms: no answer to 64 probes",
        ),
        ({}, {"round_trip_ms": None}, "ok", "desk desk1bc direct, round trip not measured yet"),
        ({}, {"round_trip_ms": 250.0}, "warn", "desk desk1bc direct, 250 ms"),
        ({}, {"heard_s": 9.0}, "fail", "desk desk1bc direct, 1.84 ms, silent for 9 s"),
        ({"version": "9"}, {}, "warn", "desk desk1bc direct, 1.84 ms, meshllm 9"),
        ({"state": NodeState.LEFT}, {}, "warn", "desk desk1bc left"),
        ({"state": NodeState.REFUSED, "reason": "layer 3 differs"}, {}, "fail",
         "desk desk1bc refused: layer 3 differs"),
        ({"link": None}, {}, "fail", "desk desk1bc is unreachable at ws://192.168.1.11:7700"),
        ({"link": None, "addresses": ()}, {}, "fail",
         "desk desk1bc is unreachable at an unknown address"),
    ],
)  # fmt: skip
def test_the_link_to_a_peer_is_checked(
    node: dict[str, Any], link: dict[str, Any], verdict: str, found: str
) -> None:
    peer = with_node(with_link(status_of(2), 1, **link), 1, **node).nodes[1]

    told = checks.check_peer(peer, "0.2.0")

    assert (told.verdict, told.found) == (verdict, found)


@pytest.mark.parametrize(
    ("node", "link", "advice"),
    [
        ({"state": NodeState.DOWN, "link": None}, {}, "`meshllm ring remove desk1bc`"),
        ({"state": NodeState.REFUSED, "link": None}, {}, ""),
        ({}, {"heard_s": 99.0}, "look whether desk still runs"),
    ],
)
def test_what_to_do_about_a_lost_peer_is_told(
    node: dict[str, Any], link: dict[str, Any], advice: str
) -> None:
    peer = with_node(with_link(status_of(2), 1, **link), 1, **node).nodes[1]

    told = checks.check_peer(peer, "0.2.0").advice

    assert advice in told
    assert bool(advice) == bool(told)


def test_low_memory_and_high_load_are_warnings() -> None:
    assert checks.check_memory(1 << 20).verdict == "warn"
    assert checks.check_memory(8 << 30).verdict == "ok"
    assert checks.check_load(3.5, 2).verdict == "warn"
    assert checks.check_load(0.5, 1).found == "1 core, load 0.5"
    assert checks.check_load(0.5, 2) == Finding("ok", "threads", "2 cores, load 0.5")


def test_the_device_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(checks, "DRIVER", tmp_path)

    assert checks.check_device("cpu") == Finding("ok", "device", "cpu")
    assert checks.check_device("cuda").verdict == "fail"
    idle = checks.check_device("auto")
    monkeypatch.setattr(checks, "DRIVER", tmp_path / "nothing")
    assert checks.check_device("auto") == Finding("ok", "device", "cpu")
    assert (idle.verdict, idle.found) == (
        "warn", f"cpu: torch {torch.__version__} cannot use the GPU of this machine"
    )  # fmt: skip


def test_a_gpu_is_reported_with_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "choose", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(device, "name_of", lambda found: f"{found} Fake 100")
    monkeypatch.setattr(device, "free_bytes", lambda _: 3 << 30)
    monkeypatch.setattr(device, "missing_for_cuda_graphs", lambda: None)

    assert checks.check_device("auto") == Finding("ok", "device", "cuda:1 Fake 100, 3.0 GiB free")
    monkeypatch.setattr(device, "missing_for_cuda_graphs", lambda: "Triton")
    assert checks.check_device("auto") == Finding(
        "warn", "device", "cuda:1 Fake 100, 3.0 GiB free, slow without Triton", "install it"
    )


def test_the_model_is_found_and_can_be_split(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_model("builtin").found == "builtin: `qwen3` is bit-equal when split"
    assert checks.check_model("missing").verdict == "fail"
    monkeypatch.setattr(checks, "known_verdicts", dict)
    assert checks.check_model("builtin").verdict == "warn"


def test_a_model_without_a_tokenizer_cannot_be_the_entry(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_folder("builtin"), folder)
    (folder / "tokenizer.json").unlink()

    finding = checks.check_model(str(folder))

    assert finding.verdict == "warn"
    assert finding.found.startswith(f"The tokenizer in `{folder}` is missing")
    assert finding.found.endswith("it cannot be the entry")


def test_the_weights_are_hashed_and_missing_parts_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checks.check_weights("builtin", home / "cache")
    monkeypatch.setattr(checks, "manifest", lambda *_: (bytes(16), b"1" * 16))
    part = checks.check_weights("builtin", home / "cache")
    missing = checks.check_weights("no/model", home / "cache")

    assert (whole.verdict, whole.found[12:]) == ("ok", ", 11 parts hashed")
    assert (part.verdict, part.found[12:]) == ("warn", ", 1 of 2 parts are missing on this machine")
    assert missing.verdict == "fail"


def test_the_execution_strategy_is_reported() -> None:
    told = checks.check_execution(Settings(model="builtin"))
    wide = checks.check_execution(Settings(model="builtin", dtype="float32"))
    exact = checks.check_execution(Settings(model="builtin", exact=True))
    missing = checks.check_execution(Settings(model="no/model"))

    assert (told.verdict, wide.verdict, exact.verdict) == ("ok", "warn", "ok")
    assert "row-invariant" in told.found or "replayed" in told.found
    assert re.search(r"; \d+ threads?$", told.found)  # the fastest number, measured now
    asked = checks.check_execution(Settings(model="builtin", threads=3))
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
        torch.set_num_threads(cores + 1)
        if error:
            raise RuntimeError(error)
        return cores + 1

    monkeypatch.setattr("meshllm.node.compute.worker.calibrate", calibrate)

    told = checks.check_execution(Settings(model="builtin"))

    assert torch.get_num_threads() == before
    if error:
        assert (told.verdict, told.found) == ("fail", error.partition("\n")[0])
    else:
        assert told.found.endswith(f"; {before + 1} threads")


@pytest.mark.parametrize("is_fallback", [False, True])
def test_a_fallback_is_a_warning(monkeypatch: pytest.MonkeyPatch, *, is_fallback: bool) -> None:
    found = Execution(Strategy.STOCK, reason="why", is_fallback=is_fallback)
    monkeypatch.setattr("meshllm.model.steps.execution.forecast", lambda *_: found)

    told = checks.check_execution(Settings(model="builtin", threads=1))
    monkeypatch.setattr(device, "refused_gpu", lambda *_: "too old")
    refused = checks.check_execution(Settings(model="builtin", threads=1))

    assert told.verdict == ("warn" if is_fallback else "ok")
    assert told.found.startswith("stock (why); ")
    assert refused.verdict == "warn"
    assert refused.found.startswith("stock (too old; why); ")


def test_missing_compiled_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "meshllm.model.kernels.jit.limits", lambda: ("no compiled kernels: forbidden",)
    )

    told = checks.check_execution(Settings(model="builtin"))

    assert told.verdict == "warn"
    assert told.found.endswith("; no compiled kernels: forbidden")


def test_a_model_that_cannot_be_split_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = known_verdicts()["qwen3"]
    bad = type(verdict)("qwen3", equal=False, reason="it looks ahead")
    monkeypatch.setattr(checks, "known_verdicts", lambda: {"qwen3": bad})

    assert checks.check_model("builtin") == Finding(
        "fail", "model", "builtin: `qwen3` cannot be split: it looks ahead"
    )


def test_the_chosen_transport_is_loaded() -> None:
    installed = Registry.discover()

    *_, good, bad = checks.check_transports(("loopback", "pigeon"), installed)

    assert (good.verdict, bad.verdict) == ("ok", "fail")
    assert bad.advice


@pytest.mark.parametrize(
    ("broken", "verdict"), [({"quic"}, "warn"), ({"quic", "websocket"}, "fail")]
)
def test_a_broken_default_transport_is_a_failure_only_if_none_loads(
    monkeypatch: pytest.MonkeyPatch, broken: set[str], verdict: str
) -> None:
    installed = Registry.discover()
    load = installed.load

    def loaded(name: str) -> object:
        if name in broken:
            raise PluginError(f"Broken transport `{name}`")
        return load(name)

    monkeypatch.setattr(installed, "load", loaded)

    found = [each.verdict for each in checks.check_transports((), installed)]

    assert found[-1] == verdict
    assert found.count(verdict) == len(broken)
