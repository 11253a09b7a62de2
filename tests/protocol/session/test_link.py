"""Ring links: handshake, keep-alive, loss and round trip."""

import pytest

from meshllm.errors import PeerFault
from meshllm.names import Digest, NodeId, SessionId
from meshllm.protocol.session.link import (
    BEAT,
    MALFORMED_S,
    MAX_MALFORMED,
    MEASURE,
    SILENCE,
    Deliver,
    LinkState,
    Lost,
    NeighbourLink,
    Send,
)
from meshllm.protocol.session.messages import (
    Cancel,
    Heartbeat,
    Hello,
    Malformed,
    Message,
    UnknownRingMessage,
)

PLAN = Digest(bytes(32))
OURS = Hello(NodeId(b"a" * 32), 3, PLAN)
THEIRS = Hello(NodeId(b"b" * 32), 3, PLAN)
CANCEL = Cancel(SessionId(bytes(16)), 3, 1)


def malformed(number: int = 0, *, is_close: bool = False) -> Malformed:
    """An invalid message of one of many sessions."""
    return Malformed(SessionId(bytes([number] * 16)), 3, "Message with 0 rows", is_close=is_close)


def opened(now: float = 10.0) -> NeighbourLink:
    link = NeighbourLink(OURS)
    link.open(now)
    link.receive(THEIRS, now)
    return link


def met(now: float = 10.0) -> NeighbourLink:
    link = opened(now)
    link.receive(Heartbeat(1, 0, 0), now)
    return link


def test_each_side_sends_hello_without_waiting() -> None:
    assert NeighbourLink(OURS).open(10.0) == [Send(OURS)]


def test_a_link_sends_hello_once() -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)

    assert link.open(11.0) == []
    assert link.deadline == 10.0 + SILENCE


def test_a_hello_opens_the_link_and_is_answered_by_the_first_beat() -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)

    actions = link.receive(THEIRS, 10.1)

    assert actions == [Send(Heartbeat(stamp=10_100_000, echo=0, held=0))]
    assert link.state is LinkState.OPEN
    assert link.peer == THEIRS.node


def test_session_messages_are_delivered() -> None:
    assert opened().receive(CANCEL, 10.2) == [Deliver(CANCEL)]


def test_an_unknown_message_is_a_sign_of_life_and_is_dropped() -> None:
    link = opened(now=10.0)

    assert link.receive(UnknownRingMessage(99, b"later"), 10.0 + SILENCE - 0.1) == []
    assert not any(isinstance(action, Lost) for action in link.expire(10.0 + SILENCE))


def test_an_invalid_message_is_delivered_once_for_its_session_and_for_its_close() -> None:
    link = met(now=10.0)

    for message in (malformed(1), malformed(1, is_close=True), malformed(2)):
        assert link.receive(message, 10.1) == [Deliver(message)]
        assert link.receive(message, 10.2) == []
    assert link.receive(CANCEL, 10.3) == [Deliver(CANCEL)]
    assert link.state is LinkState.OPEN


def test_an_invalid_message_of_a_neighbour_that_has_sent_no_beat_ends_the_link() -> None:
    link = opened(now=10.0)

    with pytest.raises(PeerFault, match="Message with 0 rows"):
        link.receive(malformed(), 10.1)

    assert link.state is LinkState.GONE
    assert link.receive(CANCEL, 10.2) == []


def test_invalid_messages_of_ever_more_sessions_end_the_link() -> None:
    link = met(now=10.0)
    for number in range(MAX_MALFORMED):
        link.receive(malformed(number), 10.0)
        link.receive(malformed(number), 10.1)  # a repetition does not count

    with pytest.raises(PeerFault, match=r"More than 16 invalid messages .*: Message with 0 rows"):
        link.receive(malformed(MAX_MALFORMED), 11.0)

    assert link.receive(CANCEL, 11.1) == []


def test_invalid_messages_are_forgotten_after_a_while() -> None:
    link = met(now=10.0)
    for number in range(MAX_MALFORMED):
        link.receive(malformed(number), 10.0 + number)

    message = malformed(MAX_MALFORMED)

    assert link.receive(message, 10.0 + MALFORMED_S) == [Deliver(message)]
    with pytest.raises(PeerFault):
        link.receive(malformed(0), 10.5 + MALFORMED_S)


def test_silence_is_loss() -> None:
    link = opened(now=10.0)

    while link.state is LinkState.OPEN:
        assert link.deadline is not None
        now = link.deadline
        actions = link.expire(now)

    assert now == 10.0 + SILENCE
    assert actions == [Lost("No message from the neighbour for 3.0 s")]
    assert link.deadline is None
    assert link.expire(99.0) == []


def test_a_neighbour_that_never_sends_hello_is_lost() -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)

    assert link.deadline == 10.0 + SILENCE
    assert [type(action) for action in link.expire(10.0 + SILENCE)] == [Lost]


def test_every_message_is_a_sign_of_life() -> None:
    link = opened(now=10.0)

    link.receive(CANCEL, 10.0 + SILENCE - 0.1)
    actions = link.expire(10.0 + SILENCE)

    assert not any(isinstance(action, Lost) for action in actions)


@pytest.mark.parametrize("message", [CANCEL, Heartbeat(1, 0, 0), malformed()])
def test_anything_before_hello_is_refused(message: Message | Malformed) -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)

    with pytest.raises(PeerFault, match=f"{type(message).__name__} while dialing"):
        link.receive(message, 10.1)


def test_a_second_hello_is_refused() -> None:
    with pytest.raises(PeerFault, match="Hello while open"):
        opened().receive(THEIRS, 10.1)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (Hello(THEIRS.node, 4, PLAN), "epoch 4, this node at 3"),
        (Hello(THEIRS.node, 3, Digest(b"p" * 32)), "plan `707070707070`, this node `000000000000`"),
        (Hello(NodeId(b"c" * 32), 3, PLAN), "Unexpected node `mnrwgy3`"),
    ],
    ids=["epoch", "plan", "node"],
)
def test_a_hello_of_another_ring_or_node_is_refused(hello: Hello, words: str) -> None:
    link = NeighbourLink(OURS, peer=THEIRS.node)
    link.open(10.0)

    with pytest.raises(PeerFault, match=words):
        link.receive(hello, 10.1)


def test_after_a_fault_it_stays_gone() -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)
    with pytest.raises(PeerFault):
        link.receive(CANCEL, 10.1)

    assert link.state is LinkState.GONE
    assert link.receive(THEIRS, 10.2) == []
    assert link.deadline is None


def test_nothing_is_done_before_it_is_due() -> None:
    link = opened(now=10.0)

    assert link.deadline == 10.0 + BEAT
    assert link.expire(10.0 + BEAT / 2) == []


def test_a_beat_fills_the_silence_and_returns_the_last_stamp() -> None:
    link = opened(now=10.0)
    link.receive(Heartbeat(stamp=777, echo=0, held=0), 10.2)

    assert link.expire(10.5) == [Send(Heartbeat(stamp=10_500_000, echo=777, held=300_000))]
    assert link.deadline == 10.5 + BEAT


def test_other_messages_postpone_the_beat() -> None:
    link = opened(now=10.0)

    link.sent(10.4)

    assert link.deadline == 10.4 + BEAT


def test_a_busy_link_is_measured_all_the_same() -> None:
    link = opened(now=10.0)

    now = 10.0
    while not (actions := link.expire(now)):
        now += BEAT / 2
        link.sent(now)
        link.receive(CANCEL, now)

    assert now == 10.0 + MEASURE
    assert [type(action) for action in actions] == [Send]


def test_the_round_trip_excludes_the_time_the_peer_held_the_stamp() -> None:
    link = opened(now=10.0)

    link.receive(Heartbeat(stamp=1, echo=10_000_000, held=180_000), 10.2)

    assert link.round_trip_us == 20_000


def test_the_round_trip_is_smoothed() -> None:
    link = opened(now=10.0)

    link.receive(Heartbeat(stamp=1, echo=10_000_000, held=180_000), 10.2)
    link.receive(Heartbeat(stamp=2, echo=10_200_000, held=0), 10.3)

    assert link.round_trip_us == 20_000 + (100_000 - 20_000) // 8


@pytest.mark.parametrize("beat", [Heartbeat(1, 0, 0), Heartbeat(1, 10_000_000, 900_000)])
def test_an_impossible_echo_measures_nothing(beat: Heartbeat) -> None:
    link = opened(now=10.0)

    assert link.receive(beat, 10.2) == []
    assert link.round_trip_us == 0


def test_a_suspended_side_reads_before_it_declares_loss() -> None:
    link = opened(now=10.0)

    actions = link.expire(60.0)

    assert [type(action) for action in actions] == [Send]
    assert link.deadline == 60.0 + BEAT
    assert [type(action) for action in link.expire(60.0 + BEAT)] == [Lost]


@pytest.mark.parametrize("is_read_first", [True, False])
def test_beats_that_waited_for_a_suspended_side_measure_no_round_trip(
    *, is_read_first: bool
) -> None:
    link = opened(now=10.0)
    (first,) = link.expire(10.0 + BEAT)
    link.receive(Heartbeat(7, 10_500_000, 0), 10.51)
    waits = Heartbeat(9, 10_500_000, 0)

    actions = link.receive(waits, 12.0) if is_read_first else []
    actions += link.expire(12.0)
    link.receive(waits, 12.01)

    assert isinstance(first, Send)
    assert link.round_trip_us == 10_000
    assert actions == [Send(Heartbeat(12_000_000, 7, 1_490_000))]
    link.receive(Heartbeat(11, 12_000_000, 490_000), 12.0 + BEAT)
    assert link.round_trip_us == 10_000
    assert link.expire(12.0 + BEAT) == [Send(Heartbeat(12_500_000, 11, 0))]


def test_a_side_suspended_while_dialing_waits_one_beat_more() -> None:
    link = NeighbourLink(OURS)
    link.open(10.0)

    assert link.expire(60.0) == []
    assert link.deadline == 60.0 + BEAT


def test_two_ends_measure_their_round_trip() -> None:
    left, right = NeighbourLink(OURS), NeighbourLink(THEIRS)
    one_way = 0.02
    inbox: list[tuple[float, NeighbourLink, Message]] = []

    def post(now: float, to: NeighbourLink, actions: list[Deliver | Lost | Send]) -> None:
        inbox.extend((now + one_way, to, act.message) for act in actions if isinstance(act, Send))

    post(5.0, right, left.open(5.0))
    post(5.0, left, right.open(5.0))
    for tick in range(500, 700):
        now = tick / 100
        for due in [item for item in inbox if item[0] <= now]:
            inbox.remove(due)
            post(now, right if due[1] is left else left, due[1].receive(due[2], now))
        post(now, right, left.expire(now))
        post(now, left, right.expire(now))

    assert left.state is right.state is LinkState.OPEN
    assert left.round_trip_us == pytest.approx(2 * one_way * 1e6, abs=20_000)
    assert right.round_trip_us == pytest.approx(2 * one_way * 1e6, abs=20_000)
