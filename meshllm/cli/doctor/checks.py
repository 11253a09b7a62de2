"""The checks of `meshllm doctor`, one function each; imports no torch, except for a model."""

import os
import platform
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types

import meshllm
from meshllm.cli.doctor.finding import Finding, Verdict
from meshllm.cli.doctor.netchecks import check_listening, check_network, check_ports
from meshllm.cli.ring.status import MAX_SKEW_S, clean, ms, skewed_clocks
from meshllm.cli.shared.client import socket_path, start_command
from meshllm.cli.shared.local import import_heavy
from meshllm.cli.shared.model_record import ModelRecord
from meshllm.cli.terminal.render import bytes_of
from meshllm.config import TRANSPORTS, Settings, change, state_path
from meshllm.errors import LinkLost, MeshError
from meshllm.local_files import stat_all
from meshllm.model.hardware import allowed_cores, usable_cores, uses_cpu
from meshllm.model.kernels.measured import KernelTimes, remembered
from meshllm.names import counted, show
from meshllm.node.membership.state_store import StateStore
from meshllm.status import (
    NO_LINK,
    UNANSWERED_HINT,
    MeshStatus,
    NodeState,
    NodeStatus,
    RingState,
    unanswered,
)
from meshllm.transport.registry import Registry
from meshllm.units import listed

SLOW_MS = 100.0  # a longer round trip takes more time than a token of a small model
SILENCE_S = 3.0  # s of silence after which a peer counts as lost
DRIVER = Path("/proc/driver/nvidia")  # exists with a GPU, whether torch can use it or not
FREE_BYTES = 4 << 20  # on the disk of the state folder; its files have less than 1 MiB
LOW_MEMORY_BYTES = 1 << 30  # with less free memory no useful span fits

_WITH_TORCH = "meshllm.cli.doctor.modelchecks"


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found of a model."""

    findings: tuple[Finding, ...]


_IMPORT_ERRORS = ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError
"""Of a missing shared library, or of versions that do not fit each other."""


class _BrokenInstallation(MeshError):
    """Torch, transformers or a library that they need cannot be imported."""


def examine(
    chosen: Settings, status: MeshStatus | MeshError, transports: Sequence[str]
) -> Iterator[Finding]:
    """Run every check; ``status`` is the node's report, or why there is none.

    ``transports`` are those that are named; without any, a node takes the default ones.
    """
    yield from check_state(state_path(chosen))
    yield check_clock(state_path(chosen), time.time())
    if isinstance(status, MeshError):
        yield check_no_node(socket_path(chosen), status)
        yield from check_ports(transports or TRANSPORTS, listed(chosen.listen) or ())
    else:
        report = clean(status)
        yield check_node(socket_path(chosen), report)
        yield from (check_listening(address) for address in report.listening)
        yield from (finding for each in report.networks for finding in check_network(each))
        yield from check_clocks(report.nodes)
        yield from (check_peer(each, report.version) for each in report.nodes if not each.is_self)
        yield from check_members(report)
    yield check_memory(psutil.virtual_memory().available)
    yield check_load(os.getloadavg()[0], usable_cores(), allowed_cores())
    yield from check_inference(chosen)
    yield from check_kernels(remembered())
    yield from check_transports(transports, Registry.discover())
    parts = map(_version_of, ("torch", "transformers"))
    found = ", ".join(
        (f"meshllm {meshllm.__version__}, python {platform.python_version()}", *parts)
    )
    yield Finding("ok", "versions", found)


def _version_of(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} not installed"


def check_state(folder: Path) -> Iterator[Finding]:
    """Check the permissions of the state folder and the key; create and repair nothing."""
    key = folder / "node.key"
    if not _is_there(folder):
        yield _check_creatable(folder)
        return
    paths = [path for path in (folder, key) if _is_there(path)]
    faults = [fault for path in paths if (fault := _not_private("state", path))]
    yield from faults
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("fail", "state", f"{folder} cannot be written", "choose one with `--state`")
    elif (free := shutil.disk_usage(folder).free) < FREE_BYTES:
        found = f"the disk of {folder} has {bytes_of(free)} left"
        yield Finding("fail", "state", found, "free space: keys and tickets cannot be stored")
    elif not faults:
        yield Finding("ok", "state", f"{folder} is private")
        yield _check_key(key)


def _check_creatable(folder: Path) -> Finding:
    """Check whether a folder can be created in the nearest one that exists.

    Root may write anywhere, also where there is no disk, as in /proc.
    """
    nearest = next(each for each in folder.parents if _is_there(each))
    if not nearest.is_dir():
        why = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} cannot be written"
    elif (free := shutil.disk_usage(nearest).free) < FREE_BYTES:
        why = f"the disk of {nearest} has {bytes_of(free)} left"
    else:
        return Finding("ok", "state", f"{folder} is created on first use")
    found = f"{folder} cannot be created: {why}"
    return Finding("fail", "state", found, "choose one with `--state`")


def check_clock(folder: Path, now_s: float) -> Finding:
    """Compare the clock, by which tickets expire, with the newest file of the state folder."""
    newest = max((each.st_mtime for each in stat_all(folder)), default=0.0)
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if newest > now_s + 1:
        behind = f"{found} is {newest - now_s:.0f} s before the last run of the node"
        return Finding("warn", "clock", behind, "set the clock, by which tickets expire")
    return Finding("ok", "clock", found)


def check_clocks(nodes: Sequence[NodeStatus]) -> Iterator[Finding]:
    """Compare the clock with the clocks that linked nodes report."""
    linked = [each.link for each in nodes if each.link]
    skews = [link.clock_s for link in linked if link.clock_s is not None]
    if not skews:
        return
    if not (wrong := skewed_clocks(nodes)):
        of = f"{len(skews)} other node{'s' * (len(skews) > 1)}"
        yield Finding("ok", "clocks", f"within {max(map(abs, skews)):.1f} s of {of}")
        return
    where = "on this machine" if len(wrong) == len(skews) > 1 else "that is wrong"
    yield Finding(
        "warn",
        "clocks",
        f"more than {MAX_SKEW_S:.0f} s apart: {', '.join(wrong)}",
        f"set the clock {where}: `timedatectl set-ntp true`; tickets expire by it",
    )


def check_no_node(path: Path, error: MeshError) -> Finding:
    """Report why the node did not respond; a node that is not running is only a warning."""
    if not isinstance(error, LinkLost):
        return Finding("fail", "node", str(error), error.hint or "")
    command = start_command(path)
    if _is_there(path):
        left = f"no process listens at {path}"
        return Finding("warn", "node", left, f"the node was killed; restart it with `{command}`")
    return Finding("warn", "node", "no node is running", f"start one with `{command}`")


def check_node(path: Path, status: MeshStatus) -> Finding:
    """Report the state of the ring, and check the permissions of the socket."""
    ring = status.ring
    why = f": {ring.reason}" if ring.reason else ""
    found = f"node {status.name} is running, ring {ring.state}{why}"
    if path.exists() and (fault := _not_private("node", path)):
        return fault
    return Finding("ok" if ring.state is RingState.SERVING else "warn", "node", found)


def check_peer(node: NodeStatus, own_version: str) -> Finding:
    """Check the state of a peer and the link to it."""
    who, link = f"{node.name} {node.short}", node.link
    if node.state in {NodeState.LEFT, NodeState.DOWN, NodeState.REFUSED}:
        verdict: Verdict = "warn" if node.state is NodeState.LEFT else "fail"
        advice = f"start it again there, or remove it: `meshllm ring remove {node.short}`"
        if node.state is NodeState.DOWN and node.reason != NO_LINK:
            advice = f"look at what `meshllm provide` and its engine print on {node.name}"
        found = f"{who} {node.state}: {node.reason}".rstrip(": ")
        return Finding(verdict, "peer", found, "" if node.state is NodeState.REFUSED else advice)
    if link is None:
        at = ", ".join(node.addresses) or "an unknown address"
        advice = f"check the firewalls of {node.name} and this machine, or set `--advertise`"
        return Finding("fail", "peer", f"{who} is unreachable at {at}", advice)
    trip = link.round_trip_ms
    found = f"{who} {link.path}, {'round trip not measured yet' if trip is None else ms(trip)}"
    found += f": {link.path_reason}" if link.path_reason else ""
    if link.heard_s > SILENCE_S:
        advice = f"look whether {node.name} still runs, and at the network between"
        return Finding("fail", "peer", f"{found}, silent for {link.heard_s:.0f} s", advice)
    if node.version != own_version:
        advice = f"install the same version on both; this machine has {own_version}"
        return Finding("warn", "peer", f"{found}, meshllm {node.version}", advice)
    if trip is not None and trip > SLOW_MS:
        return Finding("warn", "peer", found, "use a wired connection, or nearer nodes")
    return Finding("ok", "peer", found)


def check_members(status: MeshStatus) -> Iterator[Finding]:
    """Report that no member of the mesh answers: nobody tells a node that it was removed."""
    if found := unanswered(status):
        yield Finding("warn", "mesh", found, UNANSWERED_HINT)


def check_memory(free: int) -> Finding:
    """Check the free memory."""
    found = f"{bytes_of(free)} of {bytes_of(psutil.virtual_memory().total)} free"
    if free < LOW_MEMORY_BYTES:
        return Finding("warn", "memory", found, "close programs that use memory")
    return Finding("ok", "memory", found)


def check_load(load: float, usable: int, allowed: int) -> Finding:
    """Compare the load average of the last minute with the cores on which this process may run.

    The load is that of the machine, so the CPU quota of a container or job says nothing of it.
    """
    count = counted(usable, "core")
    if usable < allowed:
        count = f"{usable} of {counted(allowed, 'core')} by CPU quota"
    found = f"{count}, load {load:.1f}"
    if load > allowed:
        return Finding(
            "warn", "threads", found, "close other programs: the slowest rank limits the ring"
        )
    return Finding("ok", "threads", found)


def check_inference(chosen: Settings) -> Iterator[Finding]:
    """Check the device and each model until torch or transformers cannot be imported."""
    try:
        yield check_device(chosen.device)
        for name in listed(chosen.model) or (chosen.model,):
            yield from check_whole_model(change(chosen, {"model": name}))
    except _BrokenInstallation as error:
        yield Finding("fail", "torch", str(error), error.hint or "")
    except PackageNotFoundError as error:
        yield Finding("fail", "torch", f"{error.name} is not installed", "install meshllm again")


def check_kernels(measured: Sequence[KernelTimes]) -> Iterator[Finding]:
    """Report which kernels were chosen by measurement; measure none."""
    if not measured:
        yield Finding("ok", "kernels", "none measured yet: it is done when a large model is loaded")
        return
    latest = time.strftime("%Y-%m-%d", time.gmtime(max(each.at_s for each in measured)))
    head = f"measured here, last on {latest}; speed relative to the second fastest:"
    yield Finding("ok", "kernels", head)
    chosen = dict[str, dict[str, list[KernelTimes]]]()
    for each in measured:
        chosen.setdefault(each.what, {}).setdefault(each.best, []).append(each)
    for what, kernels in sorted(chosen.items()):
        found = "; ".join(f"{best}, {_summary(each)}" for best, each in sorted(kernels.items()))
        yield Finding("ok", "kernels", f"{what}: {found}")


def _summary(measured: Sequence[KernelTimes]) -> str:
    """Say how much faster a kernel was, for how many shapes and with which threads."""
    gains = [f"{choose(each.gain for each in measured):.2f}" for choose in (min, max)]
    shapes, threads = ({getattr(each, name) for each in measured} for name in ("shape", "threads"))
    many = f"{counted(len(shapes), 'shape')}; threads: {', '.join(map(str, sorted(threads)))}"
    return f"{' to '.join(dict.fromkeys(gains))} ({many})"


def check_device(wanted: str) -> Finding:
    """Report the device that a float32 model would use, and a GPU that torch cannot use."""
    if not uses_cpu(wanted):
        _import_checks()
        from meshllm.cli.doctor.modelchecks import check_gpu

        if found := check_gpu(wanted):
            return found
    if wanted == "auto" and DRIVER.exists():
        idle = f"cpu: torch {version('torch')} cannot use the GPU of this machine"
        return Finding("warn", "device", idle, "install a build of torch for it from pytorch.org")
    return Finding("ok", "device", "cpu")


def check_whole_model(chosen: Settings) -> Iterator[Finding]:
    """Check model, weights and execution.

    What was ok is kept, see `ModelRecord`; not on a busy machine, on which fewer threads are fast.
    """
    try:
        record = ModelRecord("doctor", chosen.model, chosen)
    except MeshError as error:
        yield Finding("fail", "model", str(error), error.hint or "")
        return
    if known := record.read(_Known):
        yield from known.findings
        return
    _import_checks()
    from meshllm.cli.doctor.modelchecks import examine_model

    findings = tuple(examine_model(chosen))
    if all(each.verdict == "ok" for each in findings) and not is_busy():
        record.write(_Known(findings))
    yield from findings


def _import_checks() -> None:
    try:
        import_heavy(_WITH_TORCH)
    except _IMPORT_ERRORS as error:
        reason = str(error).strip().partition("\n")[0]
        raise _BrokenInstallation(
            f"torch or transformers cannot be imported: {reason}",
            hint="install both again, in versions that fit this machine and each other",
        ) from error


def is_busy() -> bool:
    """Whether the load of the last minute exceeds the cores on which this process may run.

    The load is that of the machine, to which this process adds, whatever its CPU quota.
    """
    return os.getloadavg()[0] > allowed_cores()


def check_transports(named: Sequence[str], registry: Registry) -> Iterator[Finding]:
    """Load the selected transports and list the others.

    If none is ``named``, a node starts without a default one that is broken.
    """
    chosen, broken = named or TRANSPORTS, list[MeshError]()
    for offer in registry.describe():
        if offer.name not in chosen:
            yield Finding("ok", "transport", f"{offer.name} {offer.version} is installed")
    for name in chosen:
        try:
            registry.load(name)
        except MeshError as error:
            broken.append(error)
        else:
            yield Finding("ok", "transport", f"{name} is selected and loads")
    verdict: Verdict = "fail" if named or len(broken) == len(chosen) else "warn"
    for each in broken:
        yield Finding(verdict, "transport", str(each), each.hint or "")


def _check_key(path: Path) -> Finding:
    if not path.exists():
        return Finding("ok", "key", "none yet: it is created on first use")
    try:
        return Finding("ok", "key", show(StateStore.open(path.parent).key.node))
    except MeshError as error:
        return Finding("fail", "key", str(error), error.hint or "")


def _is_there(path: Path) -> bool:
    """Return whether a file exists, as far as this user may know."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _not_private(subject: str, path: Path) -> Finding | None:
    """Report a path of another user, or one that others may use."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        found = f"{path} belongs to another user"
        return Finding("fail", subject, found, "run this as that user, or choose another `--state`")
    if not status.st_mode & 0o077:
        return None
    wanted = "700" if path.is_dir() else "600"
    found = f"{path} is open to other users ({stat.filemode(status.st_mode)})"
    return Finding("fail", subject, found, f"run `chmod {wanted} {path}`")
