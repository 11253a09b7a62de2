import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshllm.cli.doctor import checks, modelchecks
from meshllm.cli.doctor.finding import Finding
from meshllm.config import Settings
from meshllm.errors import LinkLost, PeerFault, PluginError
from meshllm.model import hardware
from meshllm.model.kernels.measured import KernelTimes
from meshllm.names import show
from meshllm.node.membership.state_store import StateStore
from meshllm.status import NO_LINK, NodeState
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
    never = checks.check_no_node(home / "api.sock", LinkLost("No node is running"))
    (home / "api.sock").touch()
    killed = checks.check_no_node(home / "api.sock", LinkLost("No node is running"))

    assert (never.verdict, never.advice) == (
        "warn",
        f"start one with `meshllm node --state {home}`",
    )
    assert (killed.verdict, "was killed" in killed.advice) == ("warn", True)


def test_an_invalid_response_of_the_node_fails(home: Path) -> None:
    found = checks.check_no_node(home / "api.sock", PeerFault("No JSON", hint="update it"))

    assert found == Finding("fail", "node", "No JSON", "update it")


def test_a_socket_open_to_other_users_fails(home: Path) -> None:
    path = home / "api.sock"
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
        (
            {"state": NodeState.DOWN, "reason": NO_LINK, "link": None},
            {},
            "`meshllm ring remove desk1bc`",
        ),
        (
            {"state": NodeState.DOWN, "reason": "its engine does not answer"},
            {},
            "what `meshllm provide` and its engine print on desk",
        ),
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


@pytest.mark.parametrize(
    ("count", "found"),
    [
        (0, []),
        (1, ["1 member of this mesh does not answer"]),
        (2, ["2 members of this mesh do not answer"]),
    ],
)
def test_members_that_do_not_answer_are_a_warning(count: int, found: list[str]) -> None:
    told = [*checks.check_members(replace(status_of(1), unanswered=count))]

    assert [each.found for each in told] == found
    assert all(each.verdict == "warn" for each in told)
    assert all("this node was removed from the mesh" in each.advice for each in told)


def test_low_memory_and_high_load_are_warnings() -> None:
    assert checks.check_memory(1 << 20).verdict == "warn"
    assert checks.check_memory(8 << 30).verdict == "ok"
    assert checks.check_load(3.5, 2, 2).verdict == "warn"
    assert checks.check_load(0.5, 1, 1).found == "1 core, load 0.5"
    assert checks.check_load(0.5, 2, 2) == Finding("ok", "threads", "2 cores, load 0.5")


def test_the_load_of_a_machine_is_not_that_of_a_container_with_a_quota() -> None:
    found = checks.check_load(10.0, 2, 64)

    assert found == Finding("ok", "threads", "2 of 64 cores by CPU quota, load 10.0")
    assert checks.check_load(70.0, 2, 64).verdict == "warn"


def test_a_machine_is_busy_if_its_load_exceeds_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda: 8)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.getloadavg", lambda: (2.5, 0.0, 0.0))
    monkeypatch.setattr(hardware, "cpu_quota", lambda: inf)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert checks.is_busy()
    assert "2" in hardware.fingerprint.__wrapped__()

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert not checks.is_busy()
    monkeypatch.setattr(hardware, "cpu_quota", lambda: 2.0)  # the load is that of the machine
    assert not checks.is_busy()


@pytest.mark.parametrize("may_have_gpu", [False, True])
def test_the_device_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, may_have_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: may_have_gpu)
    monkeypatch.setattr(checks, "DRIVER", tmp_path)

    assert checks.check_device("cpu") == Finding("ok", "device", "cpu")
    assert checks.check_device("cuda").verdict == "fail"
    idle = checks.check_device("auto")
    monkeypatch.setattr(checks, "DRIVER", tmp_path / "nothing")
    assert checks.check_device("auto") == Finding("ok", "device", "cpu")
    assert (idle.verdict, idle.found) == (
        "warn", f"cpu: torch {version('torch')} cannot use the GPU of this machine"
    )  # fmt: skip


def test_a_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Finding("ok", "device", "cuda:1 Fake 100, 3.0 GiB free")
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: True)
    monkeypatch.setattr(modelchecks, "check_gpu", {"auto": gpu}.__getitem__)

    assert checks.check_device("auto") == gpu


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """Collect the settings of checks with torch, of a machine whose cache is empty."""
    examined: list[Settings] = []

    def examine_model(chosen: Settings) -> Iterator[Finding]:
        examined.append(chosen)
        yield Finding("warn" if chosen.quant == "int8" else "ok", "model", "qwen3", "a hint")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(modelchecks, "examine_model", examine_model)
    monkeypatch.setattr(hardware, "may_have_gpu", lambda: False)
    monkeypatch.setattr(checks, "is_busy", lambda: False)
    return examined


def test_a_model_that_passed_is_not_examined_again(examined: list[Settings]) -> None:
    first, again = (list(checks.check_whole_model(Settings())) for _ in range(2))

    assert first == again == [Finding("ok", "model", "qwen3", "a hint")]
    assert examined == [Settings()]


@pytest.mark.parametrize("settings", [Settings(quant="int8"), Settings(model="no/model")])
def test_a_model_that_did_not_pass_is_examined_again(
    examined: list[Settings], settings: Settings
) -> None:
    first, again = (list(checks.check_whole_model(settings)) for _ in range(2))

    assert first == again
    assert first[0].verdict == ("warn" if settings.quant == "int8" else "fail")
    assert examined == ([settings] * 2 if settings.quant == "int8" else [])


def test_nothing_is_kept_of_a_busy_machine(
    examined: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "is_busy", lambda: True)

    for _ in range(2):
        list(checks.check_whole_model(Settings()))

    assert len(examined) == 2


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


def test_kernels_are_summed_up_by_what_they_compute() -> None:
    def measured(what: str, shape: str, threads: int, own_s: float) -> KernelTimes:
        best = "own" if own_s < 6.0 else "torch"
        return KernelTimes(what, shape, threads, best, {"own": own_s, "torch": 6.0}, 86_400.0)

    findings = checks.check_kernels(
        [
            measured("few rows of bf16", "1024", 2, 5.0),
            measured("few rows of bf16", "1024", 1, 4.0),
            measured("few rows of bf16", "2048", 2, 7.5),
            measured("attention of prompts", "8x4", 1, 3.0),
        ]
    )

    assert [each.found for each in findings] == [
        "measured here, last on 1970-01-02; speed relative to the second fastest:",
        "attention of prompts: own, 2.00 (1 shape; threads: 1)",
        "few rows of bf16: own, 1.20 to 1.50 (1 shape; threads: 1, 2); "
        "torch, 1.25 (1 shape; threads: 2)",
    ]
