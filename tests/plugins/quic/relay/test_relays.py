"""Registrations at relays over UDP, and over TCP while UDP is blocked."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest

from meshllm_quic.base.identity import Identity
from meshllm_quic.net.network import Address
from meshllm_quic.relay import relays as relays_module
from meshllm_quic.relay.registration import MAX_RETRY_S, REFRESH_S, SILENT_S
from meshllm_quic.relay.relay import LASTS_S, Relay
from meshllm_quic.relay.relay_limiter import stream_source
from meshllm_quic.relay.relays import MAX_RELAYS, MAX_TRIED, Relays, RelayUsage
from meshllm_quic.wire.packets import decode
from tests.simulation.ears import virtual

OURS = "20.0.0.9", 7700
FIRST, SECOND, THIRD, FOURTH, FIFTH = ((f"20.0.1.{number}", 8790) for number in range(5))
LONG_S = 60.0


class Shore:
    """A node with relays that reply at once, over UDP unless that is blocked."""

    def __init__(self) -> None:
        self.random: Callable[[int], bytes] = Random(1).randbytes
        self.is_blocked = False
        self.silent = set[Address]()
        self.tcp = asyncio.Event()
        self.tcp.set()
        self.streams = 0
        """All streams that were ever open."""
        self.usages: dict[Address, RelayUsage] = {}
        self.relays = Relays(self, Identity(bytes(32)))
        self._others: dict[Address, Relay] = {}
        self._loop = asyncio.get_running_loop()

    def send_packet(self, packet: bytes, to: Address) -> None:
        if not self.is_blocked and to not in self.silent:
            self._loop.call_soon(self.ask, packet, to, OURS)

    def ask(self, packet: bytes, to: Address, source: Address) -> None:
        """Let a relay reply."""
        relay = self._others.setdefault(to, Relay(lambda _: True, observer_port=8791))
        now = self._loop.time()
        for answer, _ in relay.receive(decode(packet), source, len(packet), now):
            self.relays.receive(decode(answer), to, now)

    def restart(self, relay: Address) -> None:
        """Drop the state of a relay, its secrets included."""
        self._others.pop(relay)

    def arrived(self, packet: bytes, relay: Address) -> None:
        raise AssertionError("nothing comes by itself")

    def relays_changed(self) -> None:
        pass

    def usage(self, relay: Address) -> RelayUsage:
        return self.usages.get(relay, RelayUsage.NONE)

    @property
    def states(self) -> dict[Address, str]:
        return dict(self.relays.states())

    @property
    def relay_addresses(self) -> list[Address]:
        return list(self.states)


class FakeStream:
    """Replaces a stream over TCP."""

    shore: Shore

    def __init__(self, uri: str, _: object, changed: Callable[[], None], __: object) -> None:
        host, _, port = uri.removeprefix("ws://").removesuffix("/relay").rpartition(":")
        self._relay = host, int(port)
        self._changed = changed
        self.is_open = False
        self.last_error: str | None = None

    def send(self, packets: Sequence[bytes]) -> None:
        for packet in packets:
            self.shore._loop.call_soon(
                self.shore.ask, packet, self._relay, stream_source("20.0.0.9", 1)
            )

    async def run(self) -> None:
        await self.shore.tcp.wait()
        self.is_open = True
        self.shore.streams += 1
        self._changed()
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _no_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays_module, "RelayStream", FakeStream)


def shore() -> Shore:
    FakeStream.shore = made = Shore()
    return made


@virtual
async def test_udp_is_used_again_when_it_works() -> None:
    here = shore()
    here.is_blocked = True
    here.relays.add(FIRST, is_wanted=True)
    await asyncio.sleep(SILENT_S + 1.0)
    assert here.states == {FIRST: "registered over TCP"}
    assert here.relays.observations.candidates() == []

    here.is_blocked = False
    await asyncio.sleep(LONG_S)

    assert here.states == {FIRST: "registered over UDP"}
    assert here.relays.observations.candidates() == [OURS]
    here.relays.stop()


@virtual
async def test_a_restarted_relay_is_reached_over_udp_again() -> None:
    here = shore()
    here.relays.add(FIRST, is_wanted=True)
    await asyncio.sleep(1.0)

    here.is_blocked = True
    here.tcp.clear()
    await asyncio.sleep(LONG_S)
    assert here.states[FIRST] != "registered over UDP"
    here.restart(FIRST)
    here.is_blocked = False
    await asyncio.sleep(MAX_RETRY_S + 1.0)
    here.tcp.set()
    await asyncio.sleep(LONG_S)

    assert here.states == {FIRST: "registered over UDP"}
    assert here.streams == 0
    here.relays.stop()


@virtual
async def test_a_needed_relay_evicts_an_unused_one() -> None:
    here = shore()
    for relay in (FIRST, SECOND, THIRD):
        here.relays.add(relay, is_wanted=False, is_needed=True)
    await asyncio.sleep(0.1)
    here.usages = {FIRST: RelayUsage.ROUTE, SECOND: RelayUsage.RESERVE}

    here.relays.add(FOURTH, is_wanted=False, is_needed=True)
    await asyncio.sleep(0.1)
    assert here.relay_addresses == [FIRST, SECOND, FOURTH]
    here.usages[FOURTH] = RelayUsage.ROUTE
    here.relays.add(THIRD, is_wanted=False, is_needed=True)
    await asyncio.sleep(0.1)
    assert here.relay_addresses == [FIRST, FOURTH, THIRD]
    here.usages[THIRD] = RelayUsage.ROUTE
    here.relays.add(FIFTH, is_wanted=False, is_needed=True)

    assert here.relay_addresses == [FIRST, FOURTH, THIRD]
    here.relays.stop()


@virtual
async def test_a_relay_that_has_forgotten_this_node_is_dropped_unless_a_link_uses_it() -> None:
    here = shore()
    here.tcp.clear()
    here.relays.add(FIRST, is_wanted=True)
    for relay in (SECOND, THIRD):
        here.relays.add(relay, is_wanted=False)
    here.usages = {SECOND: RelayUsage.RESERVE}
    await asyncio.sleep(0.1)

    here.is_blocked = True
    await asyncio.sleep(REFRESH_S + SILENT_S + 1.0)
    assert here.relay_addresses == [FIRST, SECOND, THIRD]
    await asyncio.sleep(LASTS_S)

    assert here.relay_addresses == [FIRST, SECOND]
    here.relays.stop()


@virtual
async def test_configured_relays_come_first_and_stay() -> None:
    here = shore()
    here.relays.add(FIRST, is_wanted=False)
    here.relays.add(SECOND, is_wanted=True)
    here.relays.add(THIRD, is_wanted=True)
    here.usages = {FIRST: RelayUsage.ROUTE}

    here.relays.add(FOURTH, is_wanted=True)
    here.relays.add(FIFTH, is_wanted=False, is_needed=True)
    here.relays.add(FIRST, is_wanted=False)

    assert here.relay_addresses == [SECOND, THIRD, FOURTH]
    assert len(here.relay_addresses) == MAX_RELAYS
    here.relays.stop()


@virtual
async def test_a_relay_that_a_dial_waits_for_is_not_evicted() -> None:
    here = shore()
    here.is_blocked = True
    here.tcp.clear()
    for relay in (FIRST, SECOND, THIRD):
        here.relays.add(relay, is_wanted=False, is_needed=True)
    waiting = [asyncio.create_task(here.relays.wait_ready(each)) for each in (FIRST, SECOND, THIRD)]
    await asyncio.sleep(0.1)

    here.relays.add(FOURTH, is_wanted=False, is_needed=True)
    here.relays.give_up(FIRST)
    assert here.relay_addresses == [FIRST, SECOND, THIRD, FOURTH]
    here.is_blocked = False
    assert await asyncio.gather(*waiting) == [True] * MAX_RELAYS
    assert here.relays.registered == (FIRST, SECOND, THIRD)

    here.relays.give_up(FIRST)
    assert FIRST not in here.relays
    here.relays.stop()


@virtual
async def test_relays_that_do_not_answer_keep_no_dial_from_another_relay() -> None:
    here = shore()
    here.silent = {FIRST, SECOND, THIRD}
    here.tcp.clear()
    for relay in here.silent:
        here.relays.add(relay, is_wanted=False, is_needed=True)
    waiting = [asyncio.create_task(here.relays.wait_ready(each)) for each in here.silent]
    await asyncio.sleep(0.1)

    here.relays.add(FOURTH, is_wanted=False, is_needed=True)
    async with asyncio.timeout(1.0):
        assert await here.relays.wait_ready(FOURTH)

    assert here.relays.registered == (FOURTH,)
    for task in waiting:
        task.cancel()
    here.relays.stop()


@virtual
async def test_a_fallback_gives_way_only_to_a_relay_that_has_answered() -> None:
    here = shore()
    here.silent = {FOURTH}
    here.tcp.clear()
    for relay in (FIRST, SECOND, THIRD):
        here.relays.add(relay, is_wanted=False, is_needed=True)
        here.usages[relay] = RelayUsage.RESERVE
    await asyncio.sleep(0.1)

    here.relays.add(FOURTH, is_wanted=False, is_needed=True)
    waiting = asyncio.create_task(here.relays.wait_ready(FOURTH))
    await asyncio.sleep(SILENT_S + 1.0)
    assert here.relays.registered == (FIRST, SECOND, THIRD)
    assert FOURTH not in here.relays
    here.silent.clear()

    assert await waiting
    assert here.relays.registered == (SECOND, THIRD, FOURTH)
    assert FOURTH in here.relays
    here.relays.stop()


@virtual
async def test_a_relay_that_answers_when_all_in_use_carry_links_is_dropped() -> None:
    here = shore()
    here.silent = {FIRST}
    here.tcp.clear()
    here.relays.add(FIRST, is_wanted=False, is_needed=True)
    waiting = asyncio.create_task(here.relays.wait_ready(FIRST))
    for relay in (SECOND, THIRD, FOURTH):
        here.relays.add(relay, is_wanted=False, is_needed=True)
        here.usages[relay] = RelayUsage.ROUTE
    await asyncio.sleep(0.1)
    here.silent.clear()

    assert not await waiting
    assert not await here.relays.wait_ready(FIRST)
    assert here.relay_addresses == [SECOND, THIRD, FOURTH]
    here.relays.stop()


@virtual
async def test_of_too_many_relays_that_do_not_answer_the_oldest_is_dropped_unless_configured() -> (
    None
):
    here = shore()
    here.is_blocked = True
    here.tcp.clear()
    for relay in (FIRST, SECOND):
        here.relays.add(relay, is_wanted=False, is_needed=True)
    here.relays.add(FIRST, is_wanted=True)
    waiting = asyncio.create_task(here.relays.wait_ready(SECOND))
    await asyncio.sleep(0.1)

    for number in range(MAX_TRIED):
        here.relays.add((f"20.0.2.{number}", 8790), is_wanted=False, is_needed=True)

    assert not await waiting
    assert here.relay_addresses[:2] == [FIRST, ("20.0.2.0", 8790)]
    assert len(here.relay_addresses) == 1 + MAX_TRIED
    here.relays.stop()


@virtual
async def test_a_relay_that_does_not_answer_is_dropped_once_nothing_needs_it() -> None:
    here = shore()
    here.is_blocked = True
    here.tcp.clear()
    for relay in (FIRST, SECOND, THIRD, FOURTH):
        here.relays.add(relay, is_wanted=False, is_needed=True)
    here.usages[SECOND] = RelayUsage.RESERVE
    here.relays.add(THIRD, is_wanted=True)
    waiting = asyncio.create_task(here.relays.wait_ready(FOURTH))

    await asyncio.sleep(SILENT_S + 1.0)
    assert here.relay_addresses == [SECOND, THIRD, FOURTH]
    waiting.cancel()
    await asyncio.sleep(MAX_RETRY_S + 1.0)

    assert here.relay_addresses == [SECOND, THIRD]
    here.relays.stop()
