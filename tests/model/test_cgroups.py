"""The limits of containers, units and batch jobs are found in a made-up tree of cgroups."""

from math import inf
from pathlib import Path

import pytest

from meshllm.model import cgroups
from meshllm.model.cgroups import VERSION_2, cpu_quota, own_cgroups

JOB = "batch.slice/job/step"
VERSION_1 = ("11:cpuacct,cpu:/{path}", "4:memory:/elsewhere", "0::/")
V2, V1 = ("0::/{path}",), VERSION_1


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists the cgroups of this process."""
    file = tmp_path / "listed"
    monkeypatch.setattr(cgroups, "LISTED", file)
    return file


def limit_cpu(folder: Path, quota: str, period: str = "100000") -> None:
    """Limit a cgroup, of version 1 below the mount of its controller."""
    folder.mkdir(parents=True, exist_ok=True)
    if "cpu" in folder.parts:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    else:
        (folder / "cpu.max").write_text(f"{quota} {period}\n")


@pytest.mark.parametrize(
    ("lines", "controller", "path", "inner"),
    [
        (("0::/a/b",), VERSION_2, "", "a/b"),
        (("3:cpu,cpuacct:/a", "0::/z"), "cpu", "cpu", "a"),
        (("3:cpuacct,cpu:/a:b/c",), "cpu", "cpu", "a:b/c"),
        (("3:memory:/a",), "cpu", "cpu", "."),  # not listed: the mount
        (("0::/../a",), VERSION_2, "", "."),  # outside the mount
        (("no cgroups",), VERSION_2, "", "."),
        ((), VERSION_2, "", "."),
    ],
)
def test_our_cgroup_comes_first_and_the_mount_last(
    listed: Path, lines: tuple[str, ...], controller: str, path: str, inner: str
) -> None:
    listed.write_text("".join(f"{line}\n" for line in lines))

    found = [*own_cgroups(controller, Path("/mount"))]

    root = Path("/mount") / path
    assert found == [root / each for each in (Path(inner), *Path(inner).parents)]
    assert found[-1] == root


def test_a_system_without_cgroups_has_the_mount_alone(listed: Path) -> None:
    assert [*own_cgroups(VERSION_2, Path("/mount"))] == [Path("/mount")]
    assert cpu_quota(listed.parent) == inf


@pytest.mark.parametrize(("lines", "root"), [(V2, ""), (V1, "cpu")], ids=["version 2", "version 1"])
@pytest.mark.parametrize("limited", [JOB, "batch.slice", "."], ids=["its own", "around it", "all"])
def test_the_tightest_quota_from_our_cgroup_to_the_mount_binds(
    listed: Path, tmp_path: Path, lines: tuple[str, ...], root: str, limited: str
) -> None:
    listed.write_text("".join(f"{line}\n" for line in lines).format(path=JOB))
    mount = tmp_path / "mount"
    for name in (JOB, "batch.slice", "."):
        limit_cpu(mount / root / name, "250000" if name == limited else "600000")
    limit_cpu(mount / root / "batch.slice" / "other", "100000")

    assert cpu_quota(mount) == 2.5


@pytest.mark.parametrize(
    ("root", "quota", "period"),
    [
        ("", "max", "100000"),
        ("", "", ""),
        ("", "200000", "0"),
        ("cpu", "-1", "100000"),
        ("cpu", "?", "100000"),
    ],
)
def test_a_cgroup_without_a_quota_limits_nothing(
    listed: Path, tmp_path: Path, root: str, quota: str, period: str
) -> None:
    listed.write_text("0::/\n1:cpu:/\n")
    limit_cpu(tmp_path / root, quota, period)

    assert cpu_quota(tmp_path) == inf
