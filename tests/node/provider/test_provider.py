"""A watched engine: its models are offered while it answers, its process is started again."""

import asyncio
import ctypes
import errno
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshllm.errors import LinkLost, MeshError, TimedOut
from meshllm.node.provider import EngineClient, EngineProcess, Provider, process, provider
from meshllm.node.provider.engine import LIST_S
from meshllm.protocol.membership.records import ModelOffer
from meshllm.request import Request
from meshllm.testing.clock import run_virtual
from tests.builders.fake_engine import FakeEngine, serving
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

CUT = Request(({"role": "user", "content": "so cut"},), model="fox")
FOX = ModelOffer("fox", context=2048)
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
COMMAND = [sys.executable, "-m", "tests.builders.fake_engine", "{port}"]


class Watch:
    """The offers of a provider, as they change."""

    def __init__(self, watched: Provider) -> None:
        self.watched = watched
        self._news = asyncio.Event()

    def changed(self) -> None:
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await self._news.wait()
                self._news.clear()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "POLL_S", 0.05)
    monkeypatch.setattr(process, "FIRST_RESTART_S", 0.05)


async def test_models_are_offered_while_the_engine_answers() -> None:
    fake = FakeEngine(list_status=503)
    async with serving(fake) as url:
        watched = Provider(EngineClient(url))
        watch = Watch(watched)
        running = asyncio.ensure_future(watched.run(watch.changed))
        try:
            fake.list_status = 200
            await watch.until(lambda: watched.offers == (FOX,))
            fake.list_status = 503
            await watch.until(lambda: not watched.offers)
        finally:
            running.cancel()
            await asyncio.wait([running])


class Looked(EngineClient):
    """An engine whose looks end as they are told to; the last one then never ends."""

    def __init__(self, *looks: tuple[ModelOffer, ...] | MeshError) -> None:
        super().__init__("http://127.0.0.1:9/v1")
        self.at_end = asyncio.Event()
        self._looks = list(looks)

    async def models(self) -> tuple[ModelOffer, ...]:
        if not self._looks:
            self.at_end.set()
            await asyncio.Event().wait()
        look = self._looks.pop(0)
        if isinstance(look, MeshError):
            raise look
        return look


SILENT = TimedOut("The engine sent nothing for too long")


@pytest.mark.parametrize(
    ("looks", "silent_s", "offers"),
    [
        (((FOX,), SILENT, SILENT), 3600.0, (FOX,)),
        (((FOX,), SILENT), 0.0, ()),
        (((FOX,), SILENT, LinkLost("No engine answers")), 3600.0, ()),
        ((SILENT,), 3600.0, ()),
    ],
    ids=["busy", "silent for too long", "gone", "never heard of"],
)
async def test_an_engine_that_is_silent_is_busy_for_a_while(
    looks: Sequence[tuple[ModelOffer, ...] | MeshError],
    silent_s: float,
    offers: tuple[ModelOffer, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider, "SILENT_S", silent_s)
    looked = Looked(*looks)
    watched = Provider(looked)
    running = asyncio.ensure_future(watched.run(lambda: None))
    try:
        await looked.at_end.wait()
        assert watched.offers == offers
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(("looks", "offers"), [(4, (FOX,)), (5, ())])
def test_a_look_in_which_this_process_was_stopped_counts_as_any_other(
    looks: int, offers: tuple[ModelOffer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "POLL_S", 2.0)

    class Stopped(Looked):
        async def models(self) -> tuple[ModelOffer, ...]:
            stops_s = 10 * provider.SILENT_S if len(self._looks) == looks else LIST_S
            await asyncio.sleep(stops_s)  # in virtual time
            return await super().models()

    async def story() -> None:
        looked = Stopped((FOX,), *[SILENT] * looks)
        watched = Provider(looked)
        running = asyncio.ensure_future(watched.run(lambda: None))
        await looked.at_end.wait()
        running.cancel()
        await asyncio.wait([running])
        assert watched.offers == offers

    run_virtual(story())


@pytest.mark.parametrize("is_own", [True, False])
async def test_an_own_engine_need_not_answer_at_once(
    caplog: pytest.LogCaptureFixture, *, is_own: bool
) -> None:
    gone = LinkLost("No engine answers")
    looked = Looked(gone, (FOX,), gone, (FOX,))
    watched = Provider(looked, EngineProcess(("sleep", "60")) if is_own else None)
    with caplog.at_level("INFO", logger="meshllm.node.provider.provider"):
        running = asyncio.ensure_future(watched.run(lambda: None))
        try:
            await looked.at_end.wait()
        finally:
            running.cancel()
            await asyncio.wait([running])

    told = [(each.levelname, each.message) for each in caplog.records]
    assert told == [
        ("INFO" if is_own else "WARNING", "No engine answers"),
        ("WARNING", "No engine answers"),
        ("WARNING", "the engine answers again"),
    ]


async def test_an_engine_that_answers_a_request_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider, "SILENT_S", 3600.0)
    async with serving(FakeEngine()) as url:
        looked = Looked(SILENT)
        looked.url = url
        watched = Provider(looked)
        watched.offers = (FOX,)
        fox = Request(({"role": "user", "content": "a fox"},), model="fox")
        assert [each async for each in watched.generate(fox)]
    running = asyncio.ensure_future(watched.run(lambda: None))
    try:
        await looked.at_end.wait()
        assert watched.offers == (FOX,)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_model_that_is_not_offered_is_not_asked_for() -> None:
    watched = Provider(EngineClient("http://127.0.0.1:9/v1"))

    with pytest.raises(LinkLost, match="does not serve `fox`"):
        await anext(watched.generate(Request(model="fox")))


async def test_requests_in_progress_are_counted() -> None:
    async with serving(FakeEngine()) as url:
        watched = Provider(EngineClient(url))
        watched.offers = (FOX,)
        events = watched.generate(Request(({"role": "user", "content": "so wait"},), model="fox"))
        await anext(events)

        assert watched.active == 1
        await events.aclose()
        assert watched.active == 0


@pytest.mark.timeout(180)
async def test_a_process_is_started_again_and_stopped() -> None:
    engine = EngineProcess(COMMAND)
    watched = Provider(EngineClient(engine.url), engine)
    watch = Watch(watched)
    running = asyncio.ensure_future(watched.run(watch.changed))
    try:
        await watch.until(lambda: watched.offers == (FOX,))
        first = engine.pid
        with pytest.raises(LinkLost):
            await anext(
                watched.generate(Request(({"role": "user", "content": "die"},), model="fox"))
            )
        await watch.until(lambda: not watched.offers or engine.pid != first)
        await watch.until(lambda: watched.offers == (FOX,) and engine.pid != first)
    finally:
        running.cancel()
        await asyncio.wait([running])

    assert engine.pid is None


async def test_an_engine_that_is_killed_leaves_no_child(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = f"import os, time; print(os.getpid(), file=open({str(note)!r}, 'w')); time.sleep(600)"
    engine = EngineProcess(["sh", "-c", '"$0" -c "$1"; true', sys.executable, child])
    watched = Provider(EngineClient(engine.url), engine)
    running = asyncio.ensure_future(watched.run(lambda: None))
    await until(lambda: _told(note))
    watched.kill()
    await until(lambda: not _runs(_told(note)))
    running.cancel()
    await asyncio.wait([running])


class EndingProcess(EngineProcess):
    """A process at this URL that ends when told to."""

    def __init__(self, url: str) -> None:
        super().__init__(COMMAND)
        self.port = urlsplit(url).port or 0
        self.ending = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self.ending.is_set() else 1

    async def run(self, ended: Callable[[], None] = lambda: None) -> None:
        await self.ending.wait()
        ended()


@pytest.mark.parametrize("how", ["its process ends", "a request fails"])
async def test_an_engine_in_trouble_is_looked_at_at_once(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "POLL_S", 3600)
    fake = FakeEngine()
    async with serving(fake) as url:
        engine = EndingProcess(url)
        watched = Provider(EngineClient(url), engine)
        watch = Watch(watched)
        running = asyncio.ensure_future(watched.run(watch.changed))
        try:
            await watch.until(lambda: watched.offers == (FOX,))
            if how == "its process ends":
                engine.ending.set()  # what answers at its port now is not the engine
            else:
                fake.list_status = 503
                with pytest.raises(LinkLost):
                    [each async for each in watched.generate(CUT)]
            await watch.until(lambda: not watched.offers)
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_command_that_cannot_be_run_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = asyncio.ensure_future(EngineProcess(["/nonexistent/engine"]).run())
    try:
        await until(lambda: caplog.text.count("No such file") >= 2)
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many"), RuntimeError("too many"), OSError("too many")]
)
async def test_a_restart_that_the_system_refuses_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = EngineProcess(["true"])

    def refuse() -> int:
        raise error

    monkeypatch.setattr(process, "_free_port", refuse)

    assert await engine._run_once(lambda: None) == "too many"
    assert engine.pid is None


async def test_each_start_has_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_free_port", itertools.count(7001).__next__)
    told: asyncio.Queue[str] = asyncio.Queue()
    engine = EngineProcess(["true"])
    running = asyncio.ensure_future(engine.run(lambda: told.put_nowait(engine.url)))
    try:
        async with asyncio.timeout(60):
            first, second = await told.get(), await told.get()
    finally:
        running.cancel()
        await asyncio.wait([running])

    assert first != second


@pytest.mark.parametrize("has_crashed", [True, False])
async def test_no_child_of_an_engine_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_crashed: bool
) -> None:
    monkeypatch.setattr(process, "STOP_S", 0.5)
    monkeypatch.setattr(process, "FIRST_RESTART_S", 60.0)
    told = tmp_path / "pid"
    engine = _with_stubborn_child(told, "" if has_crashed else "wait")
    running = asyncio.ensure_future(engine.run())
    await until(lambda: _told(told))
    if not has_crashed:
        running.cancel()
        await asyncio.wait([running])
        assert not _runs(_told(told))
    await until(lambda: not _runs(_told(told)))
    running.cancel()
    await asyncio.wait([running])


async def test_a_child_that_outlives_its_engine_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOP_S", 3600.0)
    monkeypatch.setattr(process, "FIRST_RESTART_S", 3600.0)
    told, ended = tmp_path / "pid", asyncio.Event()
    engine = _with_stubborn_child(told)
    running = asyncio.ensure_future(engine.run(ended.set))
    await ended.wait()
    assert engine.pid is None
    engine.kill()
    await until(lambda: not _runs(_told(told)))
    running.cancel()
    await asyncio.wait([running])


async def test_the_first_process_of_a_container_takes_in_orphans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux lets another process than the first take in orphans")
    monkeypatch.setattr(process, "STOP_S", 3600.0)
    control = ctypes.CDLL(None).prctl
    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        async with asyncio.timeout(60):
            told = await EngineProcess(["sh", "-c", "sleep 600 &"])._run_once(lambda: None)
    finally:
        control(PR_SET_CHILD_SUBREAPER, 0)

    assert told == "code 0"


async def test_an_engine_ends_with_its_provider(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    program = (
        "import asyncio, sys; from meshllm.node.provider import EngineProcess;"
        " asyncio.run(EngineProcess(sys.argv[1:]).run())"
    )
    note = tmp_path / "pid"
    engine = f"import os, time; print(os.getpid(), file=open({str(note)!r}, 'w')); time.sleep(600)"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, sys.executable, "-c", engine
    )
    await until(lambda: _told(note))
    parent.kill()
    await parent.wait()
    await until(lambda: not _runs(_told(note)))


def _with_stubborn_child(told: Path, last: str = "") -> EngineProcess:
    """An engine whose child writes its process id and ignores SIGTERM; ``last`` ends it."""
    child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    child += " print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(600)"
    command = f'{sys.executable} -c "$0" "$1" & while [ ! -s "$1" ]; do sleep 0.01; done; {last}'
    return EngineProcess(["sh", "-c", command, child, str(told)])


def _told(note: Path) -> int:
    """Return the process id that a process wrote; 0 until then."""
    return int(note.read_text() or 0) if note.exists() else 0


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
