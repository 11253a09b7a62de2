"""Two `Paths` machines with NATs, loss, attackers and broken networks between them."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm_quic.net.network import Address
from meshllm_quic.path.candidates import SERIES_S
from meshllm_quic.path.liveness import HEARTBEAT, MIN_CHECK_S
from meshllm_quic.path.paths import OFFER_RELAYED
from tests.plugins.quic.two_nats import BEAT, KINDS, World, meets

SEEDS = st.integers(0, 2**32)
KIND = st.sampled_from(KINDS)
PAIRS = [pair for pair in product(KINDS, KINDS) if meets(*pair)]


@pytest.mark.parametrize(("one", "other"), list(product(KINDS, KINDS)))
def test_traversable_nats_lead_to_a_direct_path(one: str, other: str) -> None:
    world = World(one, other, seed=1)

    world.run(SERIES_S + 5, until=world.is_direct)

    assert world.is_direct() == meets(one, other)
    assert meets(one, other) or world.is_relayed()


def test_a_direct_path_is_found_within_a_few_round_trips() -> None:
    world = World("port", "port", seed=1)

    assert world.run(10, until=world.is_direct) < 8 * world.delay + BEAT


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    seed=SEEDS,
    loss=st.floats(0, 0.3),
    twice=st.floats(0, 0.5),
    delay=st.floats(0.0005, 0.3),
    jitter=st.floats(0, 0.2),
)
def test_an_existing_path_is_found_and_kept(
    pair: tuple[str, str], seed: int, loss: float, twice: float, delay: float, jitter: float
) -> None:
    world = World(*pair, seed=seed, loss=loss, twice=twice, delay=delay, jitter=jitter)

    took = world.run(SERIES_S + 2, until=world.is_direct)

    assert world.is_direct()
    assert took < SERIES_S + 2


@settings(max_examples=40, deadline=None)
@given(pair=st.sampled_from(PAIRS), seed=SEEDS, calm=st.floats(0, 20), loss=st.floats(0, 0.1))
def test_when_the_direct_path_dies_the_relay_is_used_within_the_bound(
    pair: tuple[str, str], seed: int, calm: float, loss: float
) -> None:
    world = World(*pair, seed=seed, loss=loss)
    world.run(SERIES_S, until=world.is_direct)
    world.run(calm)
    assert world.is_direct()

    world.is_direct_up = False
    took = world.run(10, until=world.is_relayed)

    assert took <= MIN_CHECK_S + 2 * BEAT + 5 * world.delay + 0.3
    world.run(2)
    assert all(host.gap < MIN_CHECK_S + 1 for host in world.hosts)


def test_a_direct_path_that_comes_back_is_used_again() -> None:
    world = World("port", "port", seed=3)
    world.run(SERIES_S)
    world.is_direct_up = False
    world.run(20)
    assert world.is_relayed()

    world.is_direct_up = True
    world.run(OFFER_RELAYED + SERIES_S, until=world.is_direct)

    assert world.is_direct()


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, schedule=st.lists(st.tuples(st.booleans(), st.floats(0.1, 8)), max_size=12))
def test_a_flapping_path_never_stops_quic(seed: int, schedule: list[tuple[bool, float]]) -> None:
    world = World("restricted", "port", seed=seed)

    for is_up, seconds in schedule:
        world.is_direct_up = is_up
        world.run(seconds)
    world.run(3)

    assert all(host.gap < 2 * MIN_CHECK_S for host in world.hosts)


def test_a_dead_relay_does_not_affect_direct_routes() -> None:
    world = World("port", "restricted", seed=5)
    world.run(SERIES_S, until=world.is_direct)

    world.is_relay_up = False
    world.run(60)

    assert world.is_direct()
    assert all(host.gap < 1 for host in world.hosts)


def test_without_the_relay_a_formerly_validated_path_is_probed() -> None:
    world = World("full", "full", seed=6)
    world.run(SERIES_S, until=world.is_direct)
    world.is_direct_up = False
    world.run(30)
    assert world.is_relayed()

    world.is_direct_up, world.is_relay_up = True, False
    took = world.run(30, until=world.is_direct)

    assert took < 2 * MIN_CHECK_S


@pytest.mark.parametrize("is_dialer", [True, False])
def test_a_nat_that_rebinds_is_followed(is_dialer: bool) -> None:
    world = World("port", "full", seed=7)
    world.run(SERIES_S)
    host = world.hosts[not is_dialer]

    host.nat.rebind()
    world.run(1.5 * HEARTBEAT + 2 * SERIES_S, until=lambda: world.is_direct() and world.now > 125)

    assert world.is_direct()
    world.run(20)
    assert all(host.gap < MIN_CHECK_S + 1 for host in world.hosts)


@settings(max_examples=30, deadline=None)
@given(pair=st.tuples(KIND, KIND), seed=SEEDS)
def test_replayed_and_altered_packets_change_no_route(pair: tuple[str, str], seed: int) -> None:
    world = World(*pair, seed=seed)
    chance = random.Random(seed)
    strangers: list[Address] = [(f"198.51.100.{n}", 1000 + n) for n in range(40)]

    for _ in range(600):
        world.run(0.02)
        if world.captured:
            datagram, source, to = chance.choice(world.captured)
            changed = bytearray(datagram)
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            stranger = chance.choice(strangers)
            world.arrive(datagram, stranger, to)  # replayed from another address
            world.arrive(datagram, to, source)  # reflected, as if from the peer
            world.arrive(bytes(changed), source, to)

    to_strangers = sum(host.sent[stranger] for host in world.hosts for stranger in strangers)
    assert to_strangers <= 2 * 600
    routes = [host.paths.route for host in world.hosts]
    assert not any(getattr(route, "address", None) in strangers for route in routes)
    assert world.is_direct() == meets(*pair)


def test_an_idle_pair_sends_little() -> None:
    world = World("port", "port", seed=8)
    world.run(30)
    before = [host.sent.total() for host in world.hosts]

    world.run(100)

    for host, sent in zip(world.hosts, before, strict=True):
        assert host.sent.total() - sent <= 2 * 3 * 100 / HEARTBEAT
