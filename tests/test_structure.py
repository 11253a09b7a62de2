"""Names of classes, exports of rooms, test files of modules, and waiting in tests.

A room is a package. Its ``__all__`` lists the modules that other rooms may import. No room imports
a private module or name of another.
"""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from meshllm.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of ours; ``room`` is its package."""

    tree: ast.Module
    room: str


Modules: TypeAlias = dict[str, Module]
Rule: TypeAlias = Callable[[Modules], Iterator[str]]


@cache
def modules() -> Modules:
    """Parse all modules, by name; a package has the name of its folder."""
    found = {}
    for base, top in ((ROOT, "meshllm"), (ROOT / "plugins", "meshllm_*")):
        for path in (each for folder in base.glob(top) for each in folder.rglob("*.py")):
            *room, stem = path.relative_to(base).with_suffix("").parts
            name = ".".join(room if stem == "__init__" else (*room, stem))
            found[name] = Module(ast.parse(path.read_text("utf-8"), str(path)), ".".join(room))
            nodes(found[name].tree)
    gc.freeze()  # a million nodes, which each collection of later tests would visit
    return found


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """List all nodes of a module, once for all rules."""
    return tuple(ast.walk(tree))


@cache
def imports(importer: Module) -> list[tuple[str, str]]:
    """List what a module takes of others: a module or package, and a name in it.

    `from a import b` and then `b.c` is taking `c` of `a.b`.
    """
    taken: list[tuple[str, str]] = []
    for node in nodes(importer.tree):
        match node:
            case ast.ImportFrom(module=str(owner), names=names):
                taken += [(owner, each.name) for each in names]
            case ast.Import(names=names):
                taken += [
                    (each.name.rpartition(".")[0], each.name.split(".")[-1]) for each in names
                ]
    full_names = aliases(importer.tree)
    for node in nodes(importer.tree):
        if isinstance(node, ast.Attribute) and (base := full_names.get(dotted(node.value) or "")):
            taken.append((base, node.attr))
    return taken


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return the full name of each name that a module imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(owner), names=names):
                found |= {each.asname or each.name: f"{owner}.{each.name}" for each in names}
            case ast.Import(names=names):
                found |= {each.asname or each.name: each.name for each in names}
    return found


def dotted(node: ast.expr) -> str | None:
    """Return `a.b.c` as it is written; None for other expressions."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if before := dotted(value):
            return f"{before}.{attr}"
    return None


def crossings(modules: Modules) -> Iterator[tuple[str, str, str]]:
    """Yield each import across rooms: importer, module or package, name in it."""
    for importer, module in modules.items():
        for owner, name in imports(module):
            if owner in modules and modules[owner].room != module.room:
                yield importer, owner, name


def exports(module: Module) -> list[str] | None:
    """Read `__all__`; None if there is none."""
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    return None


def names(module: Module) -> Iterator[str]:
    """Yield the top-level names of a module."""
    for node in module.tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.ImportFrom(names=taken) | ast.Import(names=taken):
                yield from (each.asname or each.name for each in taken)
            case ast.Assign(targets=targets):
                yield from (each.id for each in targets if isinstance(each, ast.Name))


def repeated_classes(modules: Modules) -> Iterator[str]:
    """Yield each name of several classes, with their modules."""
    owners = defaultdict(list)
    for name, module in modules.items():
        for node in nodes(module.tree):
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
    yield from (f"{each}: {', '.join(at)}" for each, at in owners.items() if len(at) > 1)


def private_imports(modules: Modules) -> Iterator[str]:
    """Yield imports of private modules and names of other rooms."""
    for importer, owner, name in crossings(modules):
        path = f"{owner}.{name}"
        if any(each.startswith("_") and not each.endswith("__") for each in path.split(".")):
            yield f"{importer}: {path}"


def missing_exports(modules: Modules) -> Iterator[str]:
    """Yield what an `__all__` lists and its module does not have."""
    for name, module in modules.items():
        for each in exports(module) or ():
            if each not in names(module) and f"{name}.{each}" not in modules:
                yield f"{name}.{each}"


def unlisted_imports(modules: Modules) -> Iterator[str]:
    """Yield imports from outside of a room that its `__all__` does not list."""
    for importer, owner, name in crossings(modules):
        if f"{owner}.{name}" in modules or modules[owner].room == owner:
            room, taken = owner, name
        else:
            room, _, taken = owner.rpartition(".")
        listed = exports(modules[room])
        is_outside = not f"{modules[importer].room}.".startswith(f"{room}.")
        if is_outside and listed is not None and taken not in listed:
            yield f"{importer}: {owner}.{name}"


RULES: list[Rule] = [repeated_classes, private_imports, missing_exports, unlisted_imports]
PLANTS: dict[str, tuple[Rule, str, str]] = {
    "a class of the same name": (
        repeated_classes,
        "meshllm.node.net.planted",
        "class Plan: ...",
    ),
    "a class of the same name in a function": (
        repeated_classes,
        "meshllm_quic.planted",
        "def make():\n    class Plan: ...",
    ),
    "a private name": (
        private_imports,
        "meshllm.node.ring.planted",
        "from meshllm.node.session.entry import _Lane",
    ),
    "a private name, by its module": (
        private_imports,
        "meshllm.node.ring.planted",
        "def late():\n    from meshllm.node.session import entry as at\n    return at._lane",
    ),
    "a private name, by the whole path": (
        private_imports,
        "meshllm.node.ring.planted",
        "import meshllm.node.session.entry\nx = meshllm.node.session.entry._lane",
    ),
    "a private module": (
        private_imports,
        "meshllm.node.ring.planted",
        "from meshllm.node.session import _entry",
    ),
    "a lost name": (missing_exports, "meshllm.node.planted", "__all__ = ['lost']"),
    "a module that a room keeps": (
        unlisted_imports,
        "meshllm.node.planted",
        "from meshllm.node.session import sample_batch",
    ),
    "a name of a module that a room keeps": (
        unlisted_imports,
        "meshllm.node.ring.planted",
        "from meshllm.node.session.sample_batch import SampleJob",
    ),
    "a name that a package keeps": (
        unlisted_imports,
        "meshllm.node.planted",
        "from meshllm_loopback import kept",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(rule: Rule) -> None:
    assert [*rule(modules())] == []


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_violation_is_found(plant: str) -> None:
    rule, name, text = PLANTS[plant]
    planted = Module(ast.parse(text), name.rpartition(".")[0])

    found = [*rule({**modules(), name: planted})]

    assert len(found) == 1
    assert name in found[0]


BROAD = {
    "meshllm.cli.app._wants_traceback": "part of the boundary: it reports an error already",
    "meshllm.cli.app.main": "the boundary: no traceback without --debug",
    "meshllm.errors.foreign_code": "third-party code may raise anything: it gets a type",
    "meshllm.node.compute.batcher._report": "handed to the supervisor of all sessions",
    "meshllm.node.compute.worker._run_step": "handed to the caller on another thread",
    "meshllm.node.supervisor.contained": "the supervisor: a bug ends the job of one peer",
}
"""The functions that may catch `Exception`, and why; elsewhere errors are named."""


def catching_all(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Yield the function of each handler of `Exception`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(each is None or ast.unparse(each) == "Exception" for each in caught):
                yield inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from catching_all(node, node.name)
        else:
            yield from catching_all(node, inside)


def test_exceptions_are_caught_by_name_but_in_listed_places() -> None:
    found = {
        f"{name}.{function}"
        for name, module in modules().items()
        for function in catching_all(module.tree)
    }

    assert found == BROAD.keys()


@pytest.mark.parametrize("caught", ["", " Exception", " (OSError, Exception)"])
def test_a_planted_handler_of_everything_is_found(caught: str) -> None:
    tree = ast.parse(f"def f():\n    try:\n        g()\n    except{caught}:\n        pass\n")

    assert list(catching_all(tree)) == ["f"]


def test_a_room_uses_what_it_keeps() -> None:
    planted = Module(
        ast.parse("from meshllm.node.session.sample_batch import SampleJob"), "meshllm.node.session"
    )

    found = [*unlisted_imports({**modules(), "meshllm.node.session.planted": planted})]

    assert found == []


TOPS = {"meshllm", "meshllm_quic"}
PUBLIC = ("meshllm.testing", "meshllm.transport")
"""Rooms for authors of plugins."""


def test_every_room_lists_what_others_may_import() -> None:
    rooms = {module.room for module in modules().values()}
    silent = {room for room in rooms if exports(modules()[room]) is None}

    assert silent == TOPS


def test_no_room_lists_a_module_that_no_other_uses() -> None:
    used = {each for _, owner, name in crossings(modules()) for each in (owner, f"{owner}.{name}")}
    used |= {f"meshllm.cli.{place.partition(':')[0]}" for _, place, _ in COMMANDS}  # by name
    idle = [
        f"{room}.{each}"
        for room, module in modules().items()
        for each in exports(module) or ()
        if f"{room}.{each}" in modules() and f"{room}.{each}" not in used and room not in PUBLIC
    ]

    assert idle == []


APART = {
    "bench", "builders", "builtin", "clients", "engines", "integration", "manual", "processes",
    "property", "security", "simulation",
}  # fmt: skip
"""Folders of tests that mirror no package."""


def strays(folder: Path) -> Iterator[str]:
    """Yield folders of tests that mirror no package, and are not `APART`."""
    for each in sorted(folder.rglob("test_*.py")):
        place, *below = each.parent.relative_to(folder).parts or ("",)
        if place in APART:
            continue
        room = Path("meshllm", place, *below)
        if place == "plugins":
            room = Path("plugins", f"meshllm_{below[0]}" if below else "", *below[1:])
        if not (ROOT / room / "__init__.py").exists():
            yield str(each.relative_to(folder))


def test_every_folder_of_tests_mirrors_a_package() -> None:
    assert [*strays(ROOT / "tests")] == []


ELSEWHERE = {
    "meshllm.__main__": "calls `meshllm.cli.app.main`",
    "meshllm.api.app": "wiring, which every test of a route goes through",
    "meshllm.api.generation.prompts": "`v1/test_completions.py` and `v1/test_embeddings.py`",
    "meshllm.api.generation.structured": "the tests of each dialect in `v1`",
    "meshllm.api.generation.tools": "the tests of each dialect in `v1`",
    "meshllm.api.port": "only protocols",
    "meshllm.bench.engines": "`bench/test_engine_table.py` runs its table",
    "meshllm.cli.doctor.finding": "only data",
    "meshllm.cli.ring.toml_fields": "`test_spec.py` has the table of its errors",
    "meshllm.config_file": "`test_config.py`",
    "meshllm.model.modules.quant_matrix": "`test_int8.py` and `test_int4.py`, with their kernels",
    "meshllm.model.text.answer_parser": "joins two parsers; `node/session/test_text.py` runs it",
    "meshllm.node.view": "only data; `node/test_report.py` and `builders/view.py` make it",
    "meshllm.protocol.membership.actions": "only data, which `test_mesh.py` compares",
    "meshllm.request": "only data",
    "meshllm.testing.counting": "makes what tests use",
    "meshllm.transport.contract": "protocols; `testing/test_links.py` checks their sizes",
    "meshllm.transport.laned_link": "`test_stream.py`, with its byte stream",
    "meshllm_quic.link.listener": "`test_connection.py` and `test_endpoint.py`",
    "meshllm_quic.net.network": "only protocols",
    "meshllm_quic.path.path_control": "only protocols",
    "meshllm_quic.wire.routes": "only data",
    "meshllm_websocket.listener": "`test_hostile.py`, which `meshllm help security` cites",
}
"""Modules without a test file of their name, and why or where they are tested."""


def untested(names: Iterable[str], folder: Path) -> Iterator[str]:
    """Yield the modules that have no test file of their name; packages need none."""
    for name in names:
        top, *rooms, stem = name.split(".")
        place = folder if top == "meshllm" else folder / "plugins" / top.removeprefix("meshllm_")
        if not place.joinpath(*rooms, f"test_{stem}.py").exists():
            yield name


def modules_proper() -> Iterator[str]:
    """Yield the names of all modules except packages."""
    return (name for name, module in modules().items() if name != module.room)


def test_every_module_has_the_test_file_of_its_name_but_listed_ones() -> None:
    assert {*untested(modules_proper(), ROOT / "tests")} == ELSEWHERE.keys()


def test_a_module_without_a_test_file_is_found(tmp_path: Path) -> None:
    for name in "node/net/test_link.py", "plugins/quic/test_dialer.py", "test_words.py":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    tested = "meshllm.node.net.link", "meshllm_quic.dialer", "meshllm.words"
    lost = "meshllm.node.link", "meshllm_quic.net.dialer", "meshllm_loopback.dialer"

    assert [*untested((*tested, *lost), tmp_path)] == [*lost]


SLEEPS = {
    "builders/fake_ring.py": "paces an answer without end, until it is cancelled",
    "builders/training.py": "in virtual time: `node/training/conftest.py` runs its nodes",
    "builders/waiting.py": "polls what has no event, without a bound",
    "builders/weight_nodes.py": "in virtual time: `node/weights/conftest.py` runs its nodes",
    "node/requests/test_peer_requests.py": "in virtual time: `World.run` runs its helper",
    "node/test_event_loop.py": "stops a process for some time, and longer if that was too short",
    "plugins/quic/stranger.py": "in virtual time: on the clock of its network",
    "processes/fleet.py": "polls processes, for two minutes",
    "processes/fork_server.py": "polls a process, until its caller's limit",
    "testing/test_clock.py": "gives virtual time the occasion to pass, which it must not",
}
"""The modules that sleep in real time, and why; other tests wait for events, or in virtual time."""

BY_HAND = {"bench", "clients", "engines", "security"}
"""Folders of which the gate runs only the tests."""
CLOCKS = "meshllm.testing.clock", "tests.simulation"
WAITS = {"sleep", "timeout", "timeout_at", "wait", "wait_for"}
"""The last names of functions that wait for a time."""
LIMITS = "delay", "timeout", "when"
"""Parameters that are seconds, or a time."""


def real_waits(text: str) -> Iterator[str]:
    """Yield the sleeps, and the deadlines under a minute, that are in real time.

    pytest runs a test that is a coroutine on a real event loop, unless a decorator says otherwise;
    one that is none chooses a clock for those in it. So do helpers of a module with such a clock.
    """
    if not re.search(rf"\b({'|'.join(WAITS)})\b", text):
        return
    tree = ast.parse(text)
    has_clock = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").startswith(CLOCKS)
        for node in tree.body
    )
    full_names = aliases(tree)
    for top in tree.body:
        name, decorators = getattr(top, "name", ""), getattr(top, "decorator_list", [])
        is_test = name.startswith("test_")
        is_real = isinstance(top, ast.AsyncFunctionDef) if is_test else not has_clock
        is_real &= not any(ast.unparse(each).startswith("virtual") for each in decorators)
        for node in ast.walk(top):
            if isinstance(node, ast.Call) and is_wait(node, full_names, is_real=is_real):
                yield f"{ast.unparse(node)} at {node.lineno}"


def is_wait(call: ast.Call, full_names: dict[str, str], *, is_real: bool) -> bool:
    """Return whether a call waits for a time, on a real event loop or for real."""
    limits = [*call.args, *(each.value for each in call.keywords if each.arg in LIMITS)]
    match call.func:
        case ast.Name(id=name):
            called = full_names.get(name, name)
        case ast.Attribute(attr=name) if name in WAITS:
            first, *rest = ast.unparse(call.func).split(".")
            called = ".".join((full_names.get(first, first), *rest))
        case _:
            return False
    if not limits:
        return False
    match called:
        case "time.sleep":
            return ast.unparse(limits[-1]) != "0"
        case "asyncio.sleep":
            return is_real and ast.unparse(limits[-1]) != "0"
        case "asyncio.timeout" | "asyncio.timeout_at" | "asyncio.wait_for" | "asyncio.wait":
            return is_real and is_short(limits[-1])
        case name:  # of threads and processes, never in virtual time
            return name.endswith(".wait") and is_short(limits[-1])


def is_short(limit: ast.expr) -> bool:
    """Return whether a number under 60 is in an expression, beside none of a named constant."""
    parts = [*ast.walk(limit)]
    if any(isinstance(each, ast.Name) and each.id.isupper() for each in parts):
        return False
    numbers = (each.value for each in parts if isinstance(each, ast.Constant))
    return any(isinstance(each, int | float) and 0 < each < 60 for each in numbers)


def test_tests_wait_for_events_but_in_listed_modules() -> None:
    folder = ROOT / "tests"
    found = {
        each.relative_to(folder).as_posix(): waits
        for each in folder.rglob("*.py")
        if each.relative_to(folder).parts[0] not in BY_HAND or each.name.startswith("test_")
        if (waits := [*real_waits(each.read_text("utf-8"))])
    }

    assert {name: waits for name, waits in found.items() if name not in SLEEPS} == {}
    assert found.keys() == SLEEPS.keys()


WITH_A_CLOCK = "from meshllm.testing.clock import run_virtual\n"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("async def test_it():\n    await asyncio.sleep(0.1)", True),
        ("async def test_it():\n    await asyncio.sleep(0)", False),
        ("async def test_it():\n    async with asyncio.timeout(5):\n        pass", True),
        ("async def test_it():\n    async with asyncio.timeout(60):\n        pass", False),
        ("async def test_it():\n    await asyncio.wait_for(it(), 5)", True),
        ("async def test_it():\n    await asyncio.wait_for(it, timeout=5)", True),
        ("async def test_it():\n    await asyncio.wait_for(it, LIMIT_S)", False),
        ("async def test_it():\n    await asyncio.wait({x}, timeout=1)", True),
        ("async def test_it():\n    await asyncio.wait({x})", False),
        ("async def test_it():\n    async with asyncio.timeout(2 * 2):\n        pass", True),
        ("async def test_it():\n    async with asyncio.timeout(2 * LIMIT_S):\n        pass", False),
        ("async def test_it():\n    async with asyncio.timeout_at(now + 5):\n        pass", True),
        ("async def test_it():\n    await asyncio.sleep(delay=1)", True),
        ("from asyncio import sleep\nasync def test_it():\n    await sleep(1)", True),
        ("from asyncio import sleep as nap\nasync def test_it():\n    await nap(1)", True),
        ("import asyncio as aio\nasync def test_it():\n    await aio.sleep(1)", True),
        ("def test_it():\n    time.sleep(1)", True),
        ("from time import sleep\ndef test_it():\n    sleep(1)", True),
        ("def test_it():\n    threading.Event().wait(0.5)", True),
        ("def test_it():\n    event.wait(timeout=0.5)", True),
        ("def test_it():\n    event.wait()", False),
        ("def test_it():\n    async def story():\n        await asyncio.sleep(1)", False),
        ("@virtual\nasync def test_it():\n    await asyncio.sleep(1)", False),
        ("async def helper():\n    await asyncio.sleep(1)", True),
        (f"{WITH_A_CLOCK}async def helper():\n    await asyncio.sleep(1)", False),
        (f"{WITH_A_CLOCK}async def test_it():\n    await asyncio.sleep(1)", True),
    ],
)  # fmt: skip
def test_a_planted_wait_is_found(text: str, is_found: bool) -> None:
    assert bool([*real_waits(text)]) is is_found


def test_a_stray_test_is_found(tmp_path: Path) -> None:
    names = "node/net", "node/lost", "plugins", "plugins/quic/link", "plugins/lost", "security/any"
    for name in names:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "test_it.py").touch()

    lost = "node/lost/test_it.py", "plugins/lost/test_it.py", "plugins/test_it.py"
    assert [*strays(tmp_path)] == [*lost]
