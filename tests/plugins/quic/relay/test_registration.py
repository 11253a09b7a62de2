import random
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshllm_quic.net.network import Address
from meshllm_quic.relay.registration import (
    MAX_RETRY_S,
    MIN_REFRESH_S,
    REFRESH_S,
    RETRY_S,
    UNKNOWN_S,
    Action,
    Registration,
    RegistrationChanged,
    SendToRelay,
)
from meshllm_quic.relay.relay import LASTS_S, Relay
from meshllm_quic.wire.packets import (
    TAG_BYTES,
    ZERO_COOKIE,
    AddressRequest,
    Cookie,
    Packet,
    Register,
    Registered,
    UnknownTag,
    decode,
)

RELAY, HOME, CAFE = ("203.0.113.1", 8790), ("192.0.2.1", 4000), ("192.0.2.77", 5000)
COOKIE = b"c" * 16
SECRET = Ed25519PrivateKey.from_private_bytes(bytes(32))
KEY = SECRET.public_key().public_bytes_raw()
OTHERS = b"nonce567"


def make() -> Registration:
    return Registration(RELAY, KEY, SECRET.sign, random.Random(1).randbytes)


def sent(actions: list[Action]) -> Register:
    """Return the only packet to send."""
    (packet,) = (each.packet for each in actions if isinstance(each, SendToRelay))
    return packet


def is_signed(packet: Register) -> bool:
    SECRET.public_key().verify(packet.signature, packet.signed)
    return True


def register(ours: Registration, now: float, actions: list[Action] | None = None) -> list[Action]:
    """Complete a round, from its first packet or from its start."""
    packet = sent(ours.start(now) if actions is None else actions)
    if packet.cookie == ZERO_COOKIE:
        packet = sent(ours.receive(Cookie(packet.nonce, COOKIE), now))
    return ours.receive(Registered(packet.nonce, HOME, LASTS_S, 8791), now)


def wait(ours: Registration) -> tuple[float, list[Action]]:
    """Advance to the deadline."""
    now = ours.deadline
    assert now is not None
    return now, ours.expire(now)


def test_the_first_register_has_no_cookie() -> None:
    ours = make()

    packet = sent(ours.start(0.0))

    assert packet.key == KEY
    assert packet.cookie == ZERO_COOKIE
    assert packet.signature == bytes(64)
    assert not ours.is_registered


def test_a_cookie_is_signed() -> None:
    ours = make()
    first = sent(ours.start(0.0))

    second = sent(ours.receive(Cookie(first.nonce, COOKIE), 0.1))

    assert second.cookie == COOKIE
    assert second.nonce != first.nonce
    assert is_signed(second)


def test_a_registration_reports_the_observed_address() -> None:
    ours = make()

    actions = register(ours, 0.0)

    assert actions == [RegistrationChanged()]
    assert ours.is_registered
    assert ours.observed == HOME
    assert ours.observer == (RELAY[0], 8791)
    assert ours.deadline == REFRESH_S


def test_a_relay_and_a_client_agree() -> None:
    seeded, ours = random.Random(1), make()
    relay = Relay(lambda key: key == KEY, observer_port=8791, random=seeded.randbytes)

    def run(actions: list[Action], source: Address, now: float) -> None:
        for each in actions:
            if isinstance(each, SendToRelay):
                size = len(each.packet.encode())
                for data, _ in relay.receive(each.packet, source, size, now):
                    run(ours.receive(decode(data), now), source, now)

    run(ours.start(0.0), HOME, 0.0)
    seen = [ours.observed]
    for _ in range(20):  # longer than the validity of a cookie
        now = ours.deadline
        assert now is not None
        run(ours.expire(now), HOME, now)
    run(ours.restart(500.0), CAFE, 500.0)
    seen.append(ours.observed)

    assert now == 20 * REFRESH_S
    assert seen == [HOME, CAFE]
    assert ours.is_registered
    assert relay.statistics.registered == 1


def test_a_relay_without_a_second_port_is_not_an_observer() -> None:
    ours = make()
    packet = sent(ours.start(0.0))

    ours.receive(Registered(packet.nonce, HOME, LASTS_S, 0), 0.0)

    assert ours.observed == HOME
    assert ours.observer is None


def test_no_address_is_observed_through_a_stream() -> None:
    ours = make()
    packet = sent(ours.start(0.0))

    ours.receive(Registered(packet.nonce, ("2002:c000:201::1", 0), LASTS_S, 8791), 0.0)

    assert ours.is_registered
    assert ours.observed is None
    assert ours.observer is None


def test_retransmissions_back_off() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    tries: list[float] = []

    while len(tries) < 7:
        now, actions = wait(ours)
        tries += [now for each in actions if each == SendToRelay(first)]

    gaps = [round(b - a, 6) for a, b in zip([0.0, *tries], tries, strict=False)]
    assert gaps == [0.5, 1.0, 2.0, 4.0, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]


def test_only_changes_are_reported() -> None:
    ours = make()

    first = ours.start(0.0)
    second = ours.receive(Cookie(sent(first).nonce, COOKIE), 0.1)
    third = ours.receive(Registered(sent(second).nonce, HOME, LASTS_S, 8791), 0.2)

    assert RegistrationChanged() not in [*first, *second]
    assert third == [RegistrationChanged()]


def test_nothing_is_done_before_it_is_due() -> None:
    ours = make()
    ours.start(0.0)

    assert ours.expire(0.4) == []


def test_a_late_reply_counts() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    wait(ours)
    wait(ours)

    assert is_signed(sent(ours.receive(Cookie(first.nonce, COOKIE), 1.6)))


def test_three_seconds_without_a_reply_are_silence() -> None:
    ours = make()
    ours.start(10.0)
    changed = None

    while changed is None:
        now, actions = wait(ours)
        changed = now if RegistrationChanged() in actions else None

    assert changed == 13.0
    assert ours.is_silent


def test_a_silent_relay_is_over_when_it_has_forgotten_this_node() -> None:
    known, unknown = make(), make()
    register(known, 0.0)
    unknown.start(0.0)
    begun = known.is_over(LASTS_S), unknown.is_over(LASTS_S)
    for ours in (known, unknown):
        while not ours.is_silent:
            now, _ = wait(ours)

    assert begun == (False, False)
    assert unknown.is_over(now)
    assert [known.is_over(now), known.is_over(LASTS_S)] == [False, True]


def test_any_reply_ends_silence() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    while not ours.is_silent:
        wait(ours)

    actions = ours.receive(Cookie(first.nonce, COOKIE), 9.0)

    assert RegistrationChanged() in actions
    assert not ours.is_silent


@pytest.mark.parametrize(
    "packet",
    [
        Cookie(OTHERS, COOKIE), Registered(OTHERS, CAFE, LASTS_S, 1), UnknownTag(b"t" * TAG_BYTES),
        AddressRequest(OTHERS), Register(KEY, OTHERS, COOKIE, bytes(64)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_registered", [False, True])
def test_unsolicited_replies_are_ignored(packet: Packet, is_registered: bool) -> None:
    ours = make()
    register(ours, 0.0) if is_registered else ours.start(0.0)
    before = ours.deadline, ours.observed, ours.is_registered

    assert ours.receive(packet, 0.1) == []
    assert (ours.deadline, ours.observed, ours.is_registered) == before


def test_an_answer_counts_once() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    second = sent(ours.receive(Cookie(first.nonce, COOKIE), 0.1))
    ours.receive(Registered(second.nonce, HOME, LASTS_S, 0), 0.2)

    assert ours.receive(Cookie(first.nonce, COOKIE), 0.3) == []
    assert ours.receive(Registered(second.nonce, CAFE, LASTS_S, 0), 0.3) == []
    assert ours.observed == HOME


def test_before_the_start_nothing_happens() -> None:
    ours = make()

    assert ours.deadline is None
    assert ours.expire(100.0) == []
    assert ours.receive(UnknownTag(KEY[:TAG_BYTES]), 100.0) == []


def test_a_refresh_uses_the_cookie_again() -> None:
    ours = make()
    register(ours, 0.0)

    now, actions = wait(ours)

    assert now == REFRESH_S
    assert len(actions) == 1
    assert sent(actions).cookie == COOKIE
    assert is_signed(sent(actions))
    assert register(ours, now, actions) == []
    assert ours.deadline == 2 * REFRESH_S


def test_a_refresh_may_need_a_new_cookie() -> None:
    ours = make()
    register(ours, 0.0)
    now, actions = wait(ours)

    packet = sent(ours.receive(Cookie(sent(actions).nonce, b"d" * 16), now))

    assert packet.cookie == b"d" * 16
    assert is_signed(packet)
    assert ours.is_registered


@pytest.mark.parametrize(
    ("lasts_s", "refresh_s"), [(0, MIN_REFRESH_S), (30, 10.0), (60, 20.0), (65535, REFRESH_S)]
)
def test_a_refresh_comes_long_before_the_expiry(lasts_s: int, refresh_s: float) -> None:
    ours = make()
    packet = sent(ours.start(0.0))

    ours.receive(Registered(packet.nonce, HOME, lasts_s, 0), 0.0)

    assert ours.deadline == refresh_s


def test_three_refreshes_without_success_end_it() -> None:
    ours = make()
    register(ours, 0.0)
    ended = None

    while ended is None:
        now, actions = wait(ours)
        ended = None if ours.is_registered else now

    assert ended == REFRESH_S + 0.5 + 1.0 + 2.0
    assert RegistrationChanged() in actions
    assert ours.observed is None
    assert ours.observer is None
    assert ours.is_silent


def test_a_lost_registration_comes_back() -> None:
    ours = make()
    register(ours, 0.0)
    while ours.is_registered:
        now, actions = wait(ours)

    actions = register(ours, now, actions)

    assert actions == [RegistrationChanged()]
    assert (ours.is_registered, ours.is_silent) == (True, False)


def test_a_success_resets_the_backoff() -> None:
    ours = make()
    register(ours, 0.0)
    while ours.is_registered:
        now, actions = wait(ours)
    register(ours, now, actions)

    now, _ = wait(ours)

    assert ours.deadline == now + RETRY_S


def test_after_a_move_registration_restarts_at_once_and_stays_valid() -> None:
    ours = make()
    register(ours, 0.0)

    actions = ours.restart(7.0)

    assert sent(actions).cookie == ZERO_COOKIE
    assert RegistrationChanged() in actions
    assert ours.observed is None
    assert ours.is_registered


def test_a_move_ends_silence_and_begins_the_backoff_again() -> None:
    ours = make()
    ours.start(0.0)
    waited = [wait(ours) for _ in range(3)]
    now = waited[-1][0]

    actions = ours.restart(now)

    assert RegistrationChanged() in waited[-1][1]
    assert RegistrationChanged() in actions
    assert not ours.is_silent
    tries = [now]
    while len(tries) < 4:
        at, actions = wait(ours)
        tries += [at] if any(isinstance(each, SendToRelay) for each in actions) else []
    assert [round(at - now, 6) for at in tries] == [0.0, 0.5, 1.5, 3.5]


def test_after_a_move_replies_to_the_old_address_are_ignored() -> None:
    ours = make()
    before = sent(ours.start(0.0))

    ours.restart(0.1)

    assert ours.receive(Registered(before.nonce, HOME, LASTS_S, 0), 0.2) == []


def test_an_unknown_reply_triggers_a_registration() -> None:
    ours = make()
    register(ours, 0.0)

    actions = ours.receive(UnknownTag(KEY[:TAG_BYTES]), 7.0)

    assert sent(actions).cookie == COOKIE
    assert ours.is_registered


def test_an_unknown_reply_during_a_round_is_ignored() -> None:
    ours = make()
    ours.start(0.0)

    assert ours.receive(UnknownTag(KEY[:TAG_BYTES]), 0.1) == []


def test_forged_unknown_replies_cost_little() -> None:
    ours = make()
    register(ours, 0.0)
    rounds = []

    for step in range(200):
        now = 1.0 + step / 10
        if actions := ours.receive(UnknownTag(KEY[:TAG_BYTES]), now):
            rounds.append(now)
            register(ours, now, actions)

    assert len(rounds) == round(20 / UNKNOWN_S)
    assert ours.is_registered


def test_repeated_cookies_do_not_cause_a_storm() -> None:
    ours = make()
    packet = sent(ours.start(0.0))
    signed = 0

    for step in range(1000):
        now = step / 100
        answer = Cookie(packet.nonce, step.to_bytes(16))
        for each in [*ours.receive(answer, now), *ours.expire(now)]:
            if isinstance(each, SendToRelay):
                packet = each.packet
                signed += packet.signature != bytes(64)

    assert 2 < signed < 25
    assert not ours.is_registered


def test_an_early_cookie_is_used_by_the_next_retry() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    second = sent(ours.receive(Cookie(first.nonce, COOKIE), 0.1))

    early = ours.receive(Cookie(second.nonce, b"d" * 16), 0.2)
    _, actions = wait(ours)

    assert early == []
    assert sent(actions).cookie == b"d" * 16
    assert is_signed(sent(actions))


def test_a_reply_with_a_changed_byte_is_ignored() -> None:
    ours = make()
    first = sent(ours.start(0.0))
    seeded = random.Random(1)

    for _ in range(1000):
        forged = bytearray(first.nonce)
        forged[seeded.randrange(8)] ^= seeded.randrange(1, 256)
        assert ours.receive(replace(Cookie(first.nonce, COOKIE), nonce=bytes(forged)), 0.0) == []
