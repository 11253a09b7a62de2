"""One `Paths` machine: its probes, its replies and its route."""

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm_quic.net.network import Address
from meshllm_quic.path.candidates import (
    ANSWERS,
    FIRST_PAUSE,
    MAX_OFFERED,
    MAX_PROBES,
    MAX_REFLEXIVE,
    SERIES_S,
)
from meshllm_quic.path.liveness import HEARTBEAT, MIN_CHECK_S, SHORT_CHECK_S
from meshllm_quic.path.paths import (
    COMPARED,
    GAIN,
    MAX_ANSWERS,
    OFFER_AGAIN,
    OFFER_PAUSE,
    OFFER_RELAYED,
    PROBE_BACK_PAUSE,
    Action,
    OfferCandidates,
    Paths,
    RouteChanged,
    SendProbe,
    SendReply,
)
from meshllm_quic.path.probing import MAX_NONCES, Probing
from meshllm_quic.wire.packets import Probe
from meshllm_quic.wire.routes import Direct, Route, ViaRelay

KEY = bytes(range(32))
RELAY = ViaRelay(("203.0.113.100", 7700), b"t" * 12)
A: Address = ("192.0.2.1", 7000)
B: Address = ("192.0.2.2", 7000)
C: Address = ("192.0.2.3", 7000)
SIX: Address = ("2001:db8::2", 7000)
HERE: Address = ("198.51.100.1", 40000)
START = 100.0


class Side:
    """A machine, and the keys of its peer to make packets."""

    def __init__(self, route: Route = RELAY, *, locals_: Sequence[str] = ()) -> None:
        numbers = count()
        self.paths = Paths(
            KEY,
            route,
            lambda size: next(numbers).to_bytes(size, "big"),
            is_local=lambda host: host in locals_,
            is_dialer=True,
        )
        self.other = Probing(KEY, bytes, is_dialer=False)

    def offered(self, *addresses: Address, now: float = START) -> list[Action]:
        return self.paths.offered(addresses, now)

    def answer(self, probe: SendProbe, now: float) -> list[Action]:
        return self.paths.answered(self.other.answer(probe.packet, HERE), probe.to, now)

    def probe(self, source: Address, now: float) -> list[Action]:
        return self.paths.probed(self.other.probe(HERE, now), source, now)

    def run(
        self,
        now: float,
        until: float,
        *answering: Address,
        round_trip: float = 0.01,
        carries: int = 1 << 16,
    ) -> float:
        """Advance the clock; the ``answering`` addresses reply to probes of few enough bytes."""
        waiting: list[tuple[float, SendProbe]] = []
        self.actions: list[Action] = []
        while now < until:
            due = [at for at, _ in waiting] + [self.paths.deadline or until, until]
            now = min(due)
            actions = self.paths.expire(now)
            for at, probe in [each for each in waiting if each[0] <= now]:
                waiting.remove((at, probe))
                actions += self.answer(probe, now)
            arrived = [probe for probe in probes(actions) if probe.packet.length <= carries]
            answered = [probe for probe in arrived if probe.to in answering]
            waiting += [(now + round_trip, probe) for probe in answered]
            self.actions += actions
        return now


def probes(actions: Sequence[Action]) -> list[SendProbe]:
    return [action for action in actions if isinstance(action, SendProbe)]


def to(actions: Sequence[Action]) -> list[Address]:
    return [probe.to for probe in probes(actions)]


def direct(*, now: float = START, round_trip: float = 0.01) -> Side:
    """A side with a direct route to A, and a relay as backup."""
    side = Side()
    (probe,) = probes(side.offered(A, now=now))
    side.answer(probe, now + round_trip)
    assert side.paths.route == Direct(A)
    return side


def test_nothing_is_due_before_the_first_offer() -> None:
    for route, backup in ((RELAY, RELAY), (Direct(A), None)):
        side = Side(route)
        side.paths.sent(START)

        assert side.paths.heard(B, START) == []
        assert side.paths.deadline is None
        assert side.paths.expire(START) == []
        assert (side.paths.route, side.paths.backup) == (route, backup)
        assert (side.paths.size, side.paths.round_trip_s) == (1200, None)


def test_offered_addresses_are_probed_at_once_and_again() -> None:
    side = Side()

    actions = side.offered(A, B, SIX)

    assert to(actions) == [A, B, SIX]
    assert all(probe.packet.length == Probe.SIZE == 33 for probe in probes(actions))
    assert side.paths.deadline == pytest.approx(START + FIRST_PAUSE)
    assert to(side.paths.expire(START + FIRST_PAUSE)) == [A, B, SIX]


def test_the_first_reply_validates_the_path() -> None:
    side = Side()
    first, second = probes(side.offered(A, B))

    assert side.answer(second, START + 0.03) == [RouteChanged()]

    assert side.paths.route == Direct(B)
    assert side.paths.round_trip_s == pytest.approx(0.03)
    assert side.paths.reason == "192.0.2.2:7000 answers in 30.0 ms"
    assert side.answer(first, START + 0.031) == []


def test_a_probe_is_answered_with_where_it_came_from_and_probed_back_once() -> None:
    side = Side()

    answer, probe = side.probe(B, START)

    assert isinstance(answer, SendReply)
    assert (answer.to, answer.packet.address, answer.packet.length) == (B, B, 33)
    assert isinstance(probe, SendProbe)
    assert probe.to == B
    side.run(START, START + SERIES_S)
    assert to(side.actions) == []


def test_the_source_of_a_probe_becomes_the_route_by_its_reply() -> None:
    side = Side()
    _, probe = side.probe(B, START)
    assert isinstance(probe, SendProbe)

    assert side.answer(probe, START + 0.01) == [RouteChanged()]

    assert side.paths.route == Direct(B)


def test_probes_are_answered_after_the_path_is_found() -> None:
    side = direct()

    assert any(isinstance(action, SendReply) for action in side.probe(A, START + 50))


def test_answers_are_bounded() -> None:
    side = Side()

    answers = [side.probe(A, START) for _ in range(10 * MAX_ANSWERS)]

    assert sum(bool(actions) for actions in answers) == MAX_ANSWERS
    assert side.probe(A, START + 1)


def test_unauthenticated_probes_and_replies_are_ignored() -> None:
    side = Side()
    (probe,) = probes(side.offered(A))
    stranger = Probing(bytes(32), bytes, is_dialer=False)

    assert side.paths.probed(stranger.probe(HERE, START), A, START) == []
    assert side.paths.answered(stranger.answer(probe.packet, HERE), A, START) == []
    assert side.paths.probed(probe.packet, A, START) == []
    assert side.paths.route == RELAY


def test_a_silent_address_costs_a_bounded_number_of_probes() -> None:
    side = Side()
    sent = to(side.offered(A))

    side.run(START, START + OFFER_RELAYED - 1)

    assert len(sent + to(side.actions)) <= MAX_PROBES
    assert side.paths.reason == f"no answer to {len(sent + to(side.actions))} probes at 1 addresses"


def test_frequent_offers_are_delayed_and_the_last_one_counts() -> None:
    side = Side()
    side.offered(A)

    for number in range(100):
        assert side.offered(("192.0.2.9", 1 + number), now=START + 0.01) == []
    side.run(START + 0.01, START + OFFER_PAUSE + 0.01)

    assert {port for _, port in to(side.actions)} == {7000, 100}
    assert to(side.offered(B, now=START + 2 * OFFER_PAUSE)) == [B]


@pytest.mark.parametrize("own", [("127.0.0.1", 22), ("127.9.9.9", 22), ("::1", 22), HERE])
def test_hosts_of_this_machine_are_probed_only_if_the_peer_is_on_it(own: Address) -> None:
    here = [HERE[0]]

    assert to(Side(locals_=here).offered(own)) == ([own] if own == HERE else [])  # it may be there
    assert to(Side(Direct(A), locals_=here).offered(own)) == [A]
    assert to(Side(Direct((HERE[0], 7)), locals_=here).offered(own)) == [(HERE[0], 7), own]


def test_link_local_hosts_are_probed_only_if_the_peer_is_on_the_link() -> None:
    metadata, neighbour = ("169.254.169.254", 80), ("169.254.7.7", 7000)

    assert to(Side().offered(metadata)) == []
    assert to(Side(Direct(A)).offered(metadata)) == [A]
    assert to(Side(Direct(neighbour)).offered(metadata)) == [neighbour, metadata]


def test_loopback_is_probed_only_if_the_peer_is_on_this_machine() -> None:
    local: Address = ("127.0.0.1", 22)

    assert to(Side(locals_=["127.0.0.1"]).offered(local)) == []
    assert to(Side(Direct(A), locals_=["127.0.0.1"]).offered(local)) == [A]
    assert to(Side(Direct(A), locals_=["192.0.2.1"]).offered(local)) == [A, local]


def test_a_relayed_connection_offers_again_once_a_minute() -> None:
    side = Side()
    side.offered(A)

    side.run(START, START + OFFER_RELAYED - 0.1)
    assert OfferCandidates() not in side.actions
    side.run(START + OFFER_RELAYED - 0.1, START + OFFER_RELAYED)

    assert side.actions.count(OfferCandidates()) == 1
    assert to(side.actions) == [A]


def test_a_direct_connection_offers_nothing_again() -> None:
    side = direct()

    side.run(START, START + 3 * OFFER_RELAYED, A)

    assert OfferCandidates() not in side.actions


def test_an_idle_path_is_probed_every_few_seconds() -> None:
    side = direct()
    side.run(START, START + SERIES_S, A)

    side.run(START + SERIES_S, START + SERIES_S + 100, A)

    short = [probe for probe in probes(side.actions) if probe.packet.length == Probe.SIZE]
    assert len(short) in {100 // HEARTBEAT - 1, 100 // HEARTBEAT}
    assert RouteChanged() not in side.actions


def test_a_silent_route_falls_back_to_the_relay_and_a_new_offer_follows() -> None:
    side = direct()
    side.run(START, START + SERIES_S, A)
    side.paths.heard(A, START + SERIES_S)
    side.paths.sent(START + SERIES_S)

    side.run(START + SERIES_S, START + SERIES_S + MIN_CHECK_S)

    assert side.paths.route == RELAY
    assert side.actions.index(RouteChanged()) < side.actions.index(OfferCandidates())
    assert (side.paths.size, side.paths.round_trip_s) == (1200, None)
    assert side.paths.reason == "192.0.2.1:7000 stopped answering"


def test_a_timed_out_path_needs_two_replies_to_return() -> None:
    side = direct()
    side.paths.sent(START + 20)
    side.run(START + 20, START + 20 + MIN_CHECK_S)
    first, second = probes(side.actions)[-1:] + probes(side.paths.expire(START + 30))[-1:]

    assert side.answer(first, START + 22) == []
    assert side.answer(second, START + 30) == [RouteChanged()]
    assert side.paths.route == Direct(A)


def test_own_offers_are_rate_limited() -> None:
    side = direct()
    side.paths.backup = None

    offers = 0
    for second in range(60):
        side.paths.sent(START + second)
        side.run(START + second, START + second + 1)
        offers += side.actions.count(OfferCandidates())

    assert 60 / (OFFER_AGAIN + MIN_CHECK_S + 1) - 1 <= offers <= 60 / OFFER_AGAIN


def test_without_a_relay_a_silent_path_is_kept_at_the_smallest_size() -> None:
    side = Side(Direct(A))
    side.offered(A)
    side.run(START, START + SERIES_S, A)
    assert side.paths.size == 1452

    side.run(START + SERIES_S, START + SERIES_S + HEARTBEAT + MIN_CHECK_S)

    assert side.paths.route == Direct(A)
    assert side.paths.size == 1200
    assert RouteChanged() in side.actions


def test_a_relay_set_later_is_used_as_fallback() -> None:
    side = Side(Direct(A))
    side.offered(A)
    side.paths.backup = RELAY

    side.run(START, START + HEARTBEAT + MIN_CHECK_S)

    assert side.paths.route == RELAY


def test_data_through_the_relay_replaces_a_silent_route_at_once() -> None:
    side = Side(Direct(A))
    side.offered(A)
    now = side.run(START, START + HEARTBEAT + MIN_CHECK_S)
    before, side.paths.backup = side.paths.route, RELAY

    assert RouteChanged() not in side.actions
    assert side.paths.heard(None, now) == [RouteChanged()]
    assert (before, side.paths.route) == (Direct(A), RELAY)
    assert side.paths.deadline is not None
    assert side.paths.deadline > now


def test_a_live_route_is_kept_despite_data_through_the_relay() -> None:
    side = Side(Direct(A))
    side.offered(A)
    now = side.run(START, START + HEARTBEAT + MIN_CHECK_S)
    now = side.run(now, now + HEARTBEAT, A)
    side.paths.backup = RELAY

    assert side.paths.heard(None, now) == []
    assert side.paths.route == Direct(A)


def test_a_dialled_path_is_measured_and_reported() -> None:
    side = Side(Direct(SIX))
    assert side.paths.reason == "dialled at [2001:db8::2]:7000, not measured yet"

    (probe,) = probes(side.offered())
    assert side.answer(probe, START + 0.02) == [RouteChanged()]

    assert side.paths.reason == "[2001:db8::2]:7000 answers in 20.0 ms"


def test_reasons_for_a_relay() -> None:
    side = Side()
    assert side.paths.reason == "not tried yet"

    side.offered()

    assert side.paths.reason == "the peer has offered no usable address"


@pytest.mark.parametrize(
    ("here", "there", "other", "moves"),
    [
        (0.050, 0.050 - GAIN + 0.001, B, False),
        (0.050, 0.050 - GAIN - 0.001, B, True),
        (0.050, 0.050 - 0.0021, SIX, True),
        (0.050, 0.050 - 0.0019, SIX, False),
    ],
)
def test_the_route_changes_only_for_a_real_gain(
    here: float, there: float, other: Address, moves: bool
) -> None:
    side = Side(Direct(A))
    now, sent = START, probes(side.offered(A, other))

    for _ in range(ANSWERS):
        for probe in sorted(sent, key=lambda probe: probe.to == other):
            if probe.packet.length == Probe.SIZE:
                side.answer(probe, now + (there if probe.to == other else here))
        now += 1.0
        sent = probes(side.paths.expire(now))

    assert (side.paths.route == Direct(other)) == moves


def test_round_trips_are_compared_after_three_replies() -> None:
    side = Side(Direct(A))
    now, sent, routes = START, probes(side.offered(A, B)), list[Route]()

    for _ in range(COMPARED):
        for probe in sorted(sent, key=lambda probe: probe.to == B):
            if probe.packet.length == Probe.SIZE:
                side.answer(probe, now + (0.010 if probe.to == B else 0.050))
        routes.append(side.paths.route)
        now += 1.0
        sent = probes(side.paths.expire(now))

    assert routes == [Direct(A), Direct(A), Direct(B)]
    assert COMPARED == 3


def test_a_silent_route_is_left_sooner_if_another_address_replies() -> None:
    side = direct()
    side.run(START, START + 7, A)
    now = START + 7

    (knock,) = probes(side.paths.heard(B, now))
    side.paths.expire(now)
    assert side.answer(knock, now) == []  # a reply from when the check began counts
    side.run(now, now + SHORT_CHECK_S)

    assert side.paths.route == Direct(B)


@pytest.mark.parametrize("source", [None, B])
def test_a_route_is_checked_if_the_peer_sends_from_elsewhere(source: Address | None) -> None:
    side = direct()
    side.run(START, START + 7, A)
    assert side.paths.deadline is not None
    assert side.paths.deadline > START + 7

    side.paths.heard(source, START + 7)

    assert A in to(side.paths.expire(START + 7))


def test_data_from_the_route_starts_no_check() -> None:
    side = direct()
    side.run(START, START + 7, A)
    before = side.paths.deadline

    side.paths.sent(START + 7)
    side.paths.heard(A, START + 7)

    assert side.paths.deadline == before


def test_a_reflexive_address_without_reply_gets_no_series() -> None:
    side = Side()
    side.probe(B, START)
    side.paths.expire(START)

    actions = side.offered(A, now=START + 1)

    assert to(actions) == [A]


def test_a_reply_from_an_evicted_address_is_ignored() -> None:
    side = Side()
    found = [probes(side.probe(("192.0.2.9", port), START)) for port in range(11)]
    route, last = Direct(("192.0.2.9", 3)), ("192.0.2.9", 1)

    for (probe,) in found[3:] + found[2:3]:
        side.answer(probe, START + 0.01)
    (first,) = found[1]

    assert first.to == last
    assert side.answer(first, START + 0.02) == []
    assert side.paths.route == route


def test_a_size_proven_on_another_route_is_ignored() -> None:
    side = direct()
    (long,) = [p for p in probes(side.paths.expire(START + 0.01)) if p.packet.length == 1452]
    side.run(START + 0.02, START + 20)
    assert side.paths.route == RELAY

    assert side.answer(long, START + 4.9) == []
    assert side.paths.size == 1200


def test_a_size_proven_on_the_last_route_is_ignored() -> None:
    side = direct()
    (long,) = [p for p in probes(side.paths.expire(START + 0.01)) if p.packet.length == 1452]
    (knock,) = probes(side.paths.heard(B, START + 1.5))
    side.paths.expire(START + 1.5)
    side.answer(knock, START + 1.51)
    side.run(START + 1.51, START + 2.5)
    assert side.paths.route == Direct(B)

    assert side.answer(long, START + 3) == []
    assert side.paths.size == 1200


def test_a_size_proven_after_the_route_timed_out_is_ignored() -> None:
    side = Side(Direct(A))
    (probe,) = probes(side.offered(A))
    side.answer(probe, START + 0.01)
    (long,) = [p for p in probes(side.paths.expire(START + 0.01)) if p.packet.length == 1452]
    side.paths.sent(START + 1)
    side.run(START + 1, START + 1 + MIN_CHECK_S)

    assert side.answer(long, START + 3) == []
    assert side.paths.size == 1200


def test_a_path_that_no_longer_carries_long_datagrams_gets_short_ones() -> None:
    side = direct()
    side.run(START, START + 7, A)
    assert side.paths.size == 1452

    side.run(START + 7, START + 20, A, carries=1200)

    assert (side.paths.route, side.paths.size) == (Direct(A), 1200)
    assert side.actions.count(RouteChanged()) == 1


def test_a_slow_route_has_three_round_trips_to_reply() -> None:
    side = direct(round_trip=0.5)
    side.run(START + 0.5, START + 7, A, round_trip=0.5)
    side.paths.sent(START + 7)

    routes = list[Route]()
    for begun, until in ((7, 8.9), (8.9, 9)):
        side.run(START + begun, START + until)
        routes.append(side.paths.route)

    assert routes == [Direct(A), RELAY]


def test_of_several_other_addresses_the_fastest_becomes_the_route() -> None:
    side = direct()
    side.run(START, START + 7, A)
    knocks = [probes(side.probe(source, START + 7))[0] for source in (B, C)]
    side.paths.heard(B, START + 7)
    side.paths.expire(START + 7)

    side.answer(knocks[1], START + 7.01)
    side.answer(knocks[0], START + 7.05)
    side.run(START + 7.05, START + 7 + SHORT_CHECK_S)

    assert side.paths.route == Direct(C)


def test_a_source_that_has_replied_does_not_delay_the_probe_of_another() -> None:
    side = direct()
    (knock,) = probes(side.paths.heard(B, START + 1))
    side.answer(knock, START + 1.01)

    assert side.paths.heard(B, START + 2) == []
    assert to(side.paths.heard(C, START + 2)) == [C]


def test_sources_of_probes_displace_no_route_and_no_address_that_replies() -> None:
    side, later = Side(), START + HEARTBEAT + 1
    for source, now in ((B, START), (C, START), (C, later)):
        (probe,) = probes(side.probe(source, now))
        side.answer(probe, now + 0.01)

    for port in range(1, 100):
        side.probe(("198.51.100.9", port), later)

    assert side.paths.route == Direct(B)
    assert side.paths.round_trip_s == pytest.approx(0.01)


def test_a_live_route_is_kept_despite_other_sources() -> None:
    side = direct()
    side.run(START, START + 7, A)
    now = START + 7

    (knock,) = probes(side.paths.heard(B, now))
    side.answer(knock, now + 0.01)
    side.run(now, now + 30, A)

    assert side.paths.route == Direct(A)


def test_probes_to_unknown_sources_are_limited_to_ten_per_second() -> None:
    side = direct()
    sent = []

    for number in range(1000):
        source = ("198.51.100.9", 1 + number)
        sent += to(side.paths.heard(source, START + 20 + number / 1000))

    assert len(sent) == 1 / PROBE_BACK_PAUSE
    assert side.paths.route == Direct(A)


def test_a_silent_relay_leads_to_probes_of_formerly_validated_paths() -> None:
    side = direct()
    side.run(START, START + 20)
    assert side.paths.route == RELAY
    side.run(START + 20, START + 40)
    side.probe(B, START + 40)  # which has never replied
    side.paths.heard(None, START + 40)
    side.paths.sent(START + 40)

    side.run(START + 40, START + 40 + MIN_CHECK_S)

    assert to(side.actions) == [A]


@pytest.mark.parametrize(("locals_", "size"), [([], 1452), (["192.0.2.1"], 16000)])
def test_datagrams_grow_to_the_path_mtu(locals_: list[str], size: int) -> None:
    side = Side(locals_=locals_)
    (probe,) = probes(side.offered(A))
    side.answer(probe, START + 0.01)
    assert side.paths.size == 1200

    side.run(START + 0.01, START + 1, A)

    assert side.paths.size == size
    assert RouteChanged() in side.actions


def test_a_size_is_probed_again_after_two_round_trips() -> None:
    side = direct(round_trip=0.5)
    first = START + 0.5
    assert 1452 in [probe.packet.length for probe in probes(side.paths.expire(first))]

    sent = [probes(side.paths.expire(first + later)) for later in (0.9, 1.01)]

    assert [1452 in [probe.packet.length for probe in each] for each in sent] == [False, True]


def test_only_a_reply_to_the_whole_probe_proves_its_size() -> None:
    side = direct()
    (long,) = [p for p in probes(side.paths.expire(START + 0.01)) if p.packet.length == 1452]
    short = Probe(long.packet.path, long.packet.nonce, long.packet.mac, 1300)

    side.paths.answered(side.other.answer(short, HERE), A, START + 0.02)

    assert side.paths.size == 1300


def test_a_new_route_starts_with_the_minimum_size() -> None:
    side = direct()
    side.run(START, START + 1, A)
    assert side.paths.size == 1452

    (knock,) = probes(side.paths.heard(B, START + 20))
    side.paths.expire(START + 20)
    side.answer(knock, START + 20.01)
    side.run(START + 20.01, START + 21)

    assert (side.paths.route, side.paths.size) == (Direct(B), 1200)


CALLS = st.tuples(
    st.sampled_from(["offer", "probe", "answer", "heard", "relay", "sent", "expire"]),
    st.floats(0, 3),
    st.integers(0, 300),
)


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(CALLS, max_size=60), is_direct=st.booleans())
def test_memory_is_bounded_and_deadlines_advance_for_any_input(
    calls: list[tuple[str, float, int]], is_direct: bool
) -> None:
    side = Side(Direct(A) if is_direct else RELAY)
    now, under_way = START, list[SendProbe]()
    proven = {side.paths.route}

    for call, wait, number in calls:
        now += wait
        source: Address = (f"192.0.2.{number % 250}", 1 + number)
        match call:
            case "offer":
                actions = side.offered(*[(source[0], source[1] + n) for n in range(20)], now=now)
            case "probe":
                actions = side.probe(source, now)
            case "answer" if under_way:
                probe = under_way[number % len(under_way)]
                proven.add(Direct(probe.to))
                actions = side.answer(probe, now)
            case "heard" | "relay":
                actions = side.paths.heard(source if call == "heard" else None, now)
            case "sent":
                side.paths.sent(now)
                actions = []
            case _:
                actions = side.paths.expire(now) + side.paths.expire(now)
                assert side.paths.deadline is None or side.paths.deadline > now
        under_way = (under_way + probes(actions))[-600:]
        is_begun = bool(actions) or side.paths.deadline is not None
        assert side.paths.route in proven
        assert side.paths.deadline is not None or not is_begun or call == "heard"
        assert len(list(side.paths._candidates)) <= MAX_OFFERED + MAX_REFLEXIVE + 2
        assert len(side.paths._probing._sent) <= MAX_NONCES


def test_both_sides_derive_the_same_path_id() -> None:
    side = Side()

    assert side.paths.id == side.other.id
    assert len(side.paths.id) == 8
    assert side.paths.id not in KEY


def test_without_a_relay_the_first_reply_replaces_a_route_that_timed_out() -> None:
    side = Side(Direct(A))
    side.offered(A)
    now = side.run(START, START + 3, A)
    now = side.run(now, now + HEARTBEAT + MIN_CHECK_S)
    assert side.paths.route == Direct(A)

    (probe,) = probes(side.paths.heard(B, now))
    actions = side.answer(probe, now + 0.01)

    assert actions == [RouteChanged()]
    assert side.paths.route == Direct(B)
