"""A watched engine: its models are offered while it answers, its process is started again."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from meshllm.errors import LinkLost, MeshError, TimedOut
from meshllm.node.provider import EngineClient, EngineProcess, Provider, process, provider
from meshllm.node.provider.engine import LIST_S
from meshllm.node.provider.provider import NO_ANSWER, NO_MODELS, STARTING
from meshllm.protocol.membership.records import ModelOffer
from meshllm.request import Request
from meshllm.testing.clock import run_virtual
from tests.builders.engine_children import is_running, written_pid
from tests.builders.fake_engine import FakeEngine, serving
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

CUT = Request(({"role": "user", "content": "so cut"},), model="fox")
FOX = ModelOffer("fox", context=2048)
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

    async def scenario() -> None:
        looked = Stopped((FOX,), *[SILENT] * looks)
        watched = Provider(looked)
        running = asyncio.ensure_future(watched.run(lambda: None))
        await looked.at_end.wait()
        running.cancel()
        await asyncio.wait([running])
        assert watched.offers == offers

    run_virtual(scenario())


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


async def test_an_engine_says_why_it_serves_nothing() -> None:
    gone = LinkLost("No engine answers")
    looked = Looked((), (FOX,), gone, (), (FOX,))
    watched, told = Provider(looked), list[str]()
    assert watched.trouble == STARTING
    running = asyncio.ensure_future(watched.run(lambda: told.append(watched.trouble)))
    try:
        await looked.at_end.wait()
    finally:
        running.cancel()
        await asyncio.wait([running])

    assert told == [NO_MODELS, "", NO_ANSWER, NO_MODELS, ""]


class FailingProcess(EngineProcess):
    """A process that ends twice before it runs."""

    async def run(self, ended: Callable[[str], None] = lambda _: None) -> None:
        for code in (1, 2):
            ended(f"ended with code {code}")
            await asyncio.sleep(10)
        self.is_running = True
        await asyncio.Event().wait()

    is_running = False

    @property
    def pid(self) -> int | None:
        return 1 if self.is_running else None


def test_an_engine_that_ended_is_down_until_it_lists_models() -> None:
    async def scenario() -> None:
        gone = LinkLost("No engine answers")
        looked = Looked(gone, gone, (FOX,))
        watched, told = Provider(looked, FailingProcess(COMMAND)), list[str]()
        running = asyncio.ensure_future(watched.run(lambda: told.append(watched.trouble)))
        await looked.at_end.wait()
        running.cancel()
        await asyncio.wait([running])

        assert told == ["its engine ended with code 1", "its engine ended with code 2", ""]

    run_virtual(scenario())


@pytest.mark.parametrize("command", ["no-such-command", "true"])
async def test_a_process_says_how_it_ended_without_a_path(command: str, tmp_path: Path) -> None:
    told = asyncio.get_running_loop().create_future()
    path = str(tmp_path / command) if command != "true" else command
    running = asyncio.ensure_future(EngineProcess([path]).run(told.set_result))
    try:
        assert await told == (
            "ended with code 0" if command == "true" else "is not installed any more"
        )
    finally:
        running.cancel()
        await asyncio.wait([running])


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
    await until(lambda: written_pid(note))
    watched.kill()
    await until(lambda: not is_running(written_pid(note)))
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

    async def run(self, ended: Callable[[str], None] = lambda _: None) -> None:
        await self.ending.wait()
        ended("ended with code 1")


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
