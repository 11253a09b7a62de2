"""Fuzzing of the handshake: each mutation must end in one typed refusal.

``python -m tests.bench.handshake [--mutations N] [--seed S]``

A stranger changes bytes on the wire. An insider knows the mesh, and encrypts and signs its changes,
so that they pass the authentication that stops a stranger; its message may also be accepted. Any
outcome but `PeerFault`, `NotAuthorised` or acceptance stops the run with a traceback.
"""

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import perf_counter

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.protocol.trust.handshake import (
    HandshakeDialer,
    HandshakeListener,
    HandshakeState,
    LocalIdentity,
)
from meshllm.protocol.trust.transcript import HELLO_BYTES, HandshakeRandomness, Side, Transcript
from tests.bench.report import Report, parser_of
from tests.builders.handshakes import (
    AS_JOINER,
    AS_MEMBER,
    FOUNDED,
    FRESH_DIALER,
    GUEST,
    HOST,
    MEMBER,
    OTHER_FRESH,
    make_dialer,
    make_listener,
    said,
)

Machine = HandshakeDialer | HandshakeListener
TAKEN = "taken at its word"


@dataclass(frozen=True, slots=True)
class Row:
    """Outcomes of mutated messages."""

    changed_by: str
    outcome: str
    messages: int


def change(message: bytes, other: bytes, random: Random) -> bytes:
    """Mutate a message at random."""
    start = random.randrange(len(message) + 1)
    stop = random.randint(start, len(message))
    piece = message[start:stop]
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: message[:start] + bytes(byte ^ 1 << random.randrange(8) for byte in piece[:1]),
        lambda: message[:start] + random.randbytes(1) + message[start + 1 :],
        lambda: message[:start],
        lambda: message[:start] + message[stop:],
        lambda: message[:stop] + piece + message[stop:],
        lambda: message[:start] + random.randbytes(len(piece)) + message[stop:],
        lambda: message[:start] + bytes(len(piece)) + message[stop:],
        lambda: message + random.randbytes(random.randint(1, 1000)),
        lambda: message[:start] + other[start:],
        lambda: other,
        lambda: random.randbytes(random.randrange(1000)),
    )
    while (changed := random.choice(ways)()) == message:
        start, stop, piece = 0, len(message), message
    return changed


class Recording:
    """One valid handshake, message by message, and the machine state before each message."""

    def __init__(self, own: LocalIdentity, fresh: HandshakeRandomness) -> None:
        self._own, self._fresh = own, fresh
        dialer, listener = make_dialer(own, fresh=fresh), make_listener()
        first = said(dialer.start())
        second = said(listener.receive(first))
        third = said(dialer.receive(second))
        listener.receive(third)
        self.messages = (first, second, third, listener.admit(MEMBER)[0].message)

    def heard(self, due: int) -> Transcript:
        """Return the transcript before the message of this number, from 1."""
        transcript = Transcript(self._own.psk, self._fresh)
        transcript.add(self.messages[0])
        transcript.agree(transcript.add(self.messages[1][:HELLO_BYTES]))
        if due > 1:
            transcript.unseal("listener", self.messages[1][HELLO_BYTES:])
        if due > 2:
            transcript.unseal("dialer", self.messages[2])
        return transcript

    def before(self, due: int) -> Machine:
        """Return the machine that expects the message of this number, from 0."""
        if due in {0, 2}:
            listener = make_listener()
            for message in self.messages[0:due:2]:
                listener.receive(message)
            return listener
        dialer = make_dialer(self._own, fresh=self._fresh)
        dialer.start()
        for message in self.messages[1:due:2]:
            dialer.receive(message)
        return dialer


def by_stranger(good: Recording, other: Recording, random: Random) -> tuple[Machine, bytes]:
    """Mutate a message on the wire, or replay a message of another time."""
    due = random.randrange(4)
    # The first message of any member is always valid: it alone proves nothing.
    places = [place for place in range(4) if place != due or due > 0]
    return good.before(due), change(
        good.messages[due], other.messages[random.choice(places)], random
    )


def by_insider(good: Recording, _: Recording, random: Random) -> tuple[Machine, bytes]:
    """Mutate a message below the encryption, and sign it again or not."""
    due = random.randrange(1, 4)
    side: Side = "dialer" if due == 2 else "listener"
    key = GUEST if due == 2 else HOST
    hello = HELLO_BYTES if due == 1 else 0
    opened = good.heard(due).unseal(side, good.messages[due][hello:])
    changed, writer = change(opened, FOUNDED.encode() + MEMBER.encode(), random), good.heard(due)
    is_signed = due < 3 and random.random() < 0.5
    sealed = writer.identify(side, key, changed[96:]) if is_signed else writer.seal(side, changed)
    return good.before(due), good.messages[due][:hello] + sealed


def outcome(machine: Machine, message: bytes) -> str:
    """Pass a message to a machine; return the outcome."""
    try:
        machine.receive(message)
    except (PeerFault, NotAuthorised) as refusal:
        assert machine.state is HandshakeState.GONE
        assert machine.receive(message) == []
        return type(refusal).__name__
    return TAKEN


def fuzz(mutations: int, seed: int) -> Counter[tuple[str, str]]:
    """Count the outcomes of mutated messages, by attacker."""
    random = Random(seed)
    goods = [Recording(own, FRESH_DIALER) for own in (AS_MEMBER, AS_JOINER)]
    other = Recording(AS_MEMBER, OTHER_FRESH)
    outcomes: Counter[tuple[str, str]] = Counter()
    for _ in range(mutations):
        by = random.choice((by_stranger, by_insider))
        name = by.__name__.removeprefix("by_")
        outcomes[name, outcome(*by(random.choice(goods), other, random))] += 1
    assert ("stranger", TAKEN) not in outcomes
    return outcomes


def main() -> None:
    parser = parser_of("handshake", "Fuzz the handshake.")
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = Report(arguments)

    fuzz(100, arguments.seed)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, perf_counter()
    outcomes = fuzz(arguments.mutations, arguments.seed)
    seconds = perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    rows = [Row(*kind, count) for kind, count in sorted(outcomes.items())]
    report.say(f"{'changed by':<12}{'outcome':<22}{'messages':>10}")
    report.say(*(f"{row.changed_by:<12}{row.outcome:<22}{row.messages:>10}" for row in rows))
    report.say(f"{arguments.mutations} in {seconds:.1f} s, peak memory {grown} KiB higher")
    report.write(rows, mutations=arguments.mutations, seed=arguments.seed, seconds=seconds)


if __name__ == "__main__":
    main()
