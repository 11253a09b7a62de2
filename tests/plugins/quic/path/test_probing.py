"""Authentication of probes and replies."""

from dataclasses import replace
from itertools import count

import pytest

from meshllm_quic.net.network import Address
from meshllm_quic.path.probing import MAX_NONCES, NONCE_S, Probing, Sent
from meshllm_quic.wire.packets import Probe, ProbeReply

KEY = bytes(range(32))
THERE: Address = ("203.0.113.2", 7000)
HERE: Address = ("203.0.113.1", 40000)


def pair() -> tuple[Probing, Probing]:
    numbers = count()

    def random(size: int) -> bytes:
        return next(numbers).to_bytes(size, "big")

    return Probing(KEY, random, is_dialer=True), Probing(KEY, random, is_dialer=False)


@pytest.mark.parametrize("is_dialer", [True, False])
def test_a_reply_matches_its_probe(is_dialer: bool) -> None:
    one, other = pair() if is_dialer else reversed(pair())

    probe = one.probe(THERE, 5.0, 1452)
    answer = other.answer(probe, HERE)

    assert other.is_theirs(probe)
    assert (answer.address, answer.length) == (HERE, 1452)
    assert one.match(answer, THERE, 5.1) == Sent(THERE, 5.0, 1452)


def test_an_answer_counts_once() -> None:
    one, other = pair()
    answer = other.answer(one.probe(THERE, 5.0), HERE)

    assert one.match(answer, THERE, 5.1) is not None
    assert one.match(answer, THERE, 5.1) is None


def test_a_reply_from_another_address_is_ignored() -> None:
    one, other = pair()
    answer = other.answer(one.probe(THERE, 5.0), HERE)

    assert one.match(answer, ("203.0.113.2", 7001), 5.1) is None
    assert one.match(answer, THERE, 5.1) is not None


def test_a_late_probe_reply_is_ignored() -> None:
    one, other = pair()
    answer = other.answer(one.probe(THERE, 5.0), HERE)

    assert one.match(answer, THERE, 5.0 + NONCE_S + 0.1) is None
    assert one.match(answer, THERE, 5.0 + NONCE_S) is not None


def test_reflected_packets_fail_the_mac() -> None:
    one, _ = pair()
    probe = one.probe(THERE, 5.0)

    assert not one.is_theirs(probe)
    assert one.match(one.answer(probe, HERE), THERE, 5.1) is None


def test_nodes_of_all_versions_derive_the_same_keys() -> None:
    one, other = pair()

    probe = one.probe(THERE, 5.0)

    assert probe.mac.hex() == "4b365a50f7ed1a8a08d4b1302a7c469f"
    assert other.answer(probe, HERE).mac.hex() == "48c847caafef845a75f57720ea4dad27"


@pytest.mark.parametrize("field", ["path", "nonce", "mac"])
def test_an_altered_probe_is_rejected(field: str) -> None:
    one, other = pair()
    probe = one.probe(THERE, 5.0)

    changed = {field: b"\x99" * len(getattr(probe, field))}
    assert not other.is_theirs(replace(probe, **changed))  # type: ignore[arg-type]  # a table of fields


@pytest.mark.parametrize(
    "change",
    [{"mac": bytes(16)}, {"address": THERE}, {"length": 1452}, {"nonce": b"?" * 8}],
)
def test_an_altered_reply_is_rejected(change: dict[str, bytes | int | Address]) -> None:
    one, other = pair()
    answer: ProbeReply = other.answer(one.probe(THERE, 5.0), HERE)

    assert one.match(replace(answer, **change), THERE, 5.1) is None  # type: ignore[arg-type]  # a table of fields


def test_another_key_is_another_path() -> None:
    one, _ = pair()
    stranger = Probing(bytes(32), bytes, is_dialer=False)

    assert stranger.id != one.id
    assert not stranger.is_theirs(one.probe(THERE, 5.0))
    assert not stranger.is_theirs(replace(one.probe(THERE, 5.0), path=stranger.id))


def test_the_number_of_pending_probes_is_bounded() -> None:
    one, other = pair()

    probes: list[Probe] = [one.probe(THERE, 5.0) for _ in range(MAX_NONCES + 1)]

    assert one.match(other.answer(probes[0], HERE), THERE, 5.1) is None
    assert one.match(other.answer(probes[1], HERE), THERE, 5.1) is not None
