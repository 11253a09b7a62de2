"""The membership machine: what it sends to which peer, and how it handles messages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar
from unittest.mock import patch

import pytest

from meshllm.errors import PeerFault
from meshllm.names import NodeId, short
from meshllm.protocol.membership import record_store
from meshllm.protocol.membership.actions import (
    Action,
    Changed,
    ClosedByPeer,
    DeliverRequest,
    Dial,
    Drop,
    SendToPeer,
)
from meshllm.protocol.membership.charter import Amendments, OverridableTerm, Term, merge
from meshllm.protocol.membership.codec import (
    MAX_HELD_US,
    Bye,
    CloseReason,
    FallbackList,
    Generate,
    Items,
    MeshHeartbeat,
    Message,
    Summary,
    UnknownMeshMessage,
    Want,
)
from meshllm.protocol.membership.dial_schedule import BACKOFF
from meshllm.protocol.membership.gossip import Item, Kind
from meshllm.protocol.membership.link_table import (
    BEAT,
    FRESH,
    LINKS_INTERVAL,
    PROBE_PAUSE,
    ROUND_TRIPS_INTERVAL,
    SILENCE,
)
from meshllm.protocol.membership.mesh import RECLAIM, STABLE, Mesh
from meshllm.protocol.membership.records import MAX_OBSTACLE_BYTES, Lifecycle, StateRecord
from meshllm.protocol.membership.sync import FORGET
from meshllm.protocol.trust.credential import ClientLimits, Role, issue, remove
from meshllm.protocol.trust.fallbacks import Fallback
from meshllm.protocol.trust.identity import NodeKey, verify
from tests.builders.identities import (
    CHARTER,
    CLIENT,
    CREDENTIALS,
    DAY,
    FOUNDER,
    LAST,
    MESH,
    MIDDLE,
    PROFILE,
    STATE,
    STRANGER,
    WALL,
    sign,
)

A = TypeVar("A", bound=Action)
YIELDS = (OverridableTerm("members", MIDDLE.node, None),)  # terms that a member set


def mesh(key: NodeKey = MIDDLE, *, incarnation: int = 1) -> Mesh:
    """Return a machine that published a profile and a state at time 0."""
    made = Mesh(key, CREDENTIALS[key.node], incarnation, now=0.0, wall_s=WALL)
    made.publish(profile=PROFILE, state=STATE, now=0.0)
    return made


def link(
    node: Mesh, key: NodeKey, now: float = 1.0, *, instance: int = 1, dialled: bool = True
) -> list[Action]:
    return node.linked(key.node, instance, CREDENTIALS[key.node], dialled=dialled, now=now)


def linked(*keys: NodeKey) -> Mesh:
    node = mesh()
    tick(node, 1.0)
    for key in keys:
        link(node, key)
    tick(node, 1.0 + LINKS_INTERVAL)
    return node


def only(actions: Sequence[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: Sequence[Action], peer: NodeKey) -> list[Message]:
    return [action.message for action in only(actions, SendToPeer) if action.peer == peer.node]


def items(actions: Sequence[Action], peer: NodeKey) -> list[Item]:
    messages = said(actions, peer)
    return [item for at in messages if isinstance(at, Items) for item in at.items]


def tick(node: Mesh, now: float, wall_s: float = WALL) -> list[Action]:
    return node.expire(now, wall_s)


def test_a_new_link_starts_with_a_beat_our_items_and_a_summary_from_the_lower_id() -> None:
    node = mesh()
    node.publish(charter=CHARTER, now=0.0)

    higher, lower = link(node, LAST), link(node, FOUNDER)

    assert [type(message) for message in said(higher, LAST)[:3]] == [MeshHeartbeat, Items, Summary]
    assert [type(message) for message in said(lower, FOUNDER)[:2]] == [MeshHeartbeat, Items]
    assert not any(isinstance(message, Summary) for message in said(lower, FOUNDER))
    assert {item.kind for item in items(higher, LAST)} == {Kind.PROFILE, Kind.STATE}
    assert higher[-1] == Changed()


def test_link_changes_are_published_at_once() -> None:
    node = mesh()

    begins = link(node, LAST)
    ends = node.unlinked(LAST.node, 2.0)

    (state,) = [item for item in items(begins, LAST) if item.seq == 3]
    assert state.kind is Kind.STATE
    assert node.states[MIDDLE.node].links == ()
    assert ends[-1] == Changed()
    assert node.unlinked(LAST.node, 3.0) == []


def test_many_link_changes_are_published_together() -> None:
    node = mesh()
    link(node, LAST, 1.0)

    link(node, FOUNDER, 1.0 + LINKS_INTERVAL / 2)
    before = node.states[MIDDLE.node].links
    tick(node, 1.0 + LINKS_INTERVAL)

    assert [peer for peer, _ in before] == [LAST.node]
    assert [peer for peer, _ in node.states[MIDDLE.node].links] == [FOUNDER.node, LAST.node]


def test_the_first_beat_is_answered_at_once() -> None:
    node = linked(LAST)

    first = node.receive(LAST.node, MeshHeartbeat(77, 0, 0, 0, bytes(8)), 1.01)
    second = node.receive(LAST.node, MeshHeartbeat(78, 0, 0, 0, bytes(8)), 1.5)

    (answer,) = said(first, LAST)
    assert isinstance(answer, MeshHeartbeat)
    assert answer.echo == 77
    assert said(second, LAST) == []


def test_beats_carry_the_time_of_day_and_measure_the_offset() -> None:
    node = linked(LAST)
    tick(node, 2.0, WALL + 1)

    (answer,) = said(node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), 2.25), LAST)
    assert isinstance(answer, MeshHeartbeat)
    node.receive(LAST.node, MeshHeartbeat(6, 0, 0, answer.wall_ms + 7_000, bytes(8)), 2.25)

    assert answer.wall_ms == round((WALL + 1.25) * 1e3)
    assert node.links[LAST.node].ahead_s == pytest.approx(7)


def test_a_round_trip_is_published_when_measured_and_when_changed() -> None:
    node = linked(LAST)

    node.receive(LAST.node, MeshHeartbeat(5, 1_000_000, 0, 0, bytes(8)), 1.2)
    measured = node.states[MIDDLE.node].links
    for now in (2.0, 2.5, 3.0):
        tick(node, now)
        node.receive(LAST.node, MeshHeartbeat(5, round((now - 1.9) * 1e6), 0, 0, bytes(8)), now)
    waits = node.states[MIDDLE.node].links
    for now in (4.0, 6.0, 1.2 + ROUND_TRIPS_INTERVAL):
        node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), now)

    assert measured == waits == ((LAST.node, 200_000),)
    ((_, moved),) = node.states[MIDDLE.node].links
    assert moved > 250_000


def test_all_links_beat_and_silent_ones_are_dropped() -> None:
    node = linked(FOUNDER, LAST)
    now = 1.0
    while now < 1.0 + SILENCE:
        beats = tick(node, now)
        now = node.deadline

    assert {action.peer for action in only(beats, SendToPeer)} == {FOUNDER.node, LAST.node}
    assert [action.why for action in only(tick(node, now), Drop)] == [CloseReason.SILENT] * 2
    assert node.links == {}


@pytest.mark.parametrize("is_read_first", [True, False])
@pytest.mark.parametrize("stopped_s", [SILENCE - BEAT, SILENCE + BEAT / 5, 60.0])
def test_a_node_that_was_stopped_reads_what_waits_before_it_drops_its_peers(
    stopped_s: float, *, is_read_first: bool
) -> None:
    node = linked(FOUNDER, LAST)
    tick(node, 1.5)
    for peer in (FOUNDER, LAST):
        node.receive(peer.node, MeshHeartbeat(7, 1_500_000, 0, 0, bytes(8)), 1.51)
    tick(node, 2.0)  # what is sent now is answered at once, but waits

    woke = 2.01 + stopped_s
    waits, late = MeshHeartbeat(9, 2_000_000, 0, round(WALL * 1e3), bytes(8)), []
    if is_read_first:
        node.receive(LAST.node, waits, woke)
    late += tick(node, woke)
    node.receive(LAST.node, waits, woke + 0.01)
    ends = tick(node, woke + BEAT)

    assert only(late, Drop) == []
    assert only(ends, Drop) == [Drop(FOUNDER.node, CloseReason.SILENT)]
    assert node.woke == woke
    assert node.links[LAST.node].round_trip_us == 10_000
    (beat,) = [at for at in said(late, LAST) if isinstance(at, MeshHeartbeat)]
    assert (beat.echo, beat.held) == (7, min(round((woke - 1.51) * 1e6), MAX_HELD_US))
    node.receive(LAST.node, MeshHeartbeat(11, beat.stamp, 0, 0, bytes(8)), woke + BEAT + 0.01)
    assert node.links[LAST.node].echo == (11, woke + BEAT + 0.01)


def test_nodes_that_were_stopped_together_do_not_answer_each_beat_with_another() -> None:
    node = mesh()
    tick(node, 1.0)
    link(node, LAST)

    def beats(now: float) -> int:
        answer = node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), now)
        return sum(isinstance(message, MeshHeartbeat) for message in said(answer, LAST))

    assert [beats(60.0), beats(60.0)] == [0, 0]

    tick(node, 60.1)
    assert [beats(60.1 + BEAT), beats(60.2 + BEAT)] == [1, 0]


def test_a_beat_that_is_a_little_late_is_not_a_suspension() -> None:
    node = linked(LAST)

    tick(node, 1.0 + 2 * BEAT)

    assert node.woke < 1.0 + LINKS_INTERVAL


def test_a_node_is_silent_until_it_links_again_unless_its_link_closed() -> None:
    node = linked(FOUNDER, LAST)
    for peer in (FOUNDER, LAST):
        node.receive(peer.node, Items((sign(peer, PROFILE),)), 1.0)
    node.unlinked(FOUNDER.node, 1.0)
    assert node.silent == frozenset()
    while node.links:
        tick(node, node.deadline)
    assert node.silent == {LAST.node}
    link(node, LAST, 9.0)
    assert node.silent == frozenset()


def test_before_the_deadline_nothing_is_due() -> None:
    node = linked(LAST)

    assert tick(node, node.deadline - 0.01) == []


def test_two_differing_beats_make_the_lower_id_send_a_summary() -> None:
    node = linked(FOUNDER, LAST)
    other = MeshHeartbeat(5, 0, 0, 0, b"mismatch")
    for peer in (FOUNDER, LAST):
        node.receive(peer.node, other, 1.1)

    first = node.receive(LAST.node, other, 1.5)
    second = node.receive(LAST.node, other, 2.0)
    lower = [node.receive(FOUNDER.node, other, now) for now in (1.5, 2.0, 2.5)]

    assert said(first, LAST) == []
    assert [type(message) for message in said(second, LAST)] == [Summary]
    assert [said(actions, FOUNDER) for actions in lower] == [[], [], []]


def test_a_summary_is_answered_with_missing_items_and_a_request() -> None:
    node = linked(LAST)
    theirs = [sign(LAST, PROFILE), sign(LAST, STATE)]

    actions = node.receive(LAST.node, Summary(tuple(item.entry for item in theirs)), 2.0)
    nothing = node.receive(LAST.node, Summary(()), 2.5)

    assert {item.author for item in items(actions, LAST)} == {MIDDLE.node}
    assert said(actions, LAST)[-1] == Want(tuple(sorted(item.slot for item in theirs)))
    assert [type(message) for message in said(nothing, LAST)] == [Items]


def test_requested_items_are_sent_if_present() -> None:
    node = linked(LAST)
    slots = sign(MIDDLE, PROFILE).slot, sign(FOUNDER, PROFILE).slot

    assert [item.slot for item in items(node.receive(LAST.node, Want(slots), 2.0), LAST)] == [
        slots[0]
    ]


def test_items_of_departed_nodes_are_sent_only_to_peers_with_older_ones() -> None:
    node = linked(LAST)
    newer = sign(FOUNDER, replace(STATE, lifecycle=Lifecycle.LEFT), seq=2)
    node.receive(LAST.node, Items((sign(FOUNDER, PROFILE), newer)), 1.5)

    unasked = node.receive(LAST.node, Summary(()), 2.0)
    older = node.receive(LAST.node, Summary((sign(FOUNDER, STATE).entry,)), 2.5)

    assert FOUNDER.node not in {item.author for item in items(unasked, LAST)}
    assert newer in items(older, LAST)


def test_new_items_are_forwarded_to_peers_that_the_author_does_not_list() -> None:
    node = linked(FOUNDER, LAST, CLIENT)
    profile = sign(LAST, PROFILE)
    state = sign(LAST, replace(STATE, links=((FOUNDER.node, 1),)))

    first = node.receive(LAST.node, Items((profile,)), 2.0)
    second = node.receive(LAST.node, Items((state,)), 2.0)

    assert items(first, FOUNDER) == [profile]
    assert items(second, FOUNDER) == []
    assert items(first, LAST) == []
    assert said(first, CLIENT) == []
    assert first[-1] == Changed()


def test_a_peer_that_may_have_ended_gets_a_beat_at_once() -> None:
    node = linked(LAST)

    beats = [node.probe(LAST.node, now) for now in (2.0, 2.0 + PROBE_PAUSE / 2, 2.0 + PROBE_PAUSE)]

    assert [len(said(each, LAST)) for each in beats] == [1, 0, 1]
    assert node.probe(FOUNDER.node, 3.0) == []


def test_a_link_that_is_lost_elsewhere_is_probed_here() -> None:
    node = linked(FOUNDER, LAST)
    both = ((FOUNDER.node, 1), (MIDDLE.node, 1))
    known = sign(LAST, PROFILE), sign(LAST, replace(STATE, links=both))
    node.receive(LAST.node, Items(known), 2.0)

    lost = replace(STATE, links=((MIDDLE.node, 1),))
    actions = node.receive(LAST.node, Items((sign(LAST, lost, seq=2),)), 2.5)
    digest = node.digest
    again = node.receive(LAST.node, Items((sign(LAST, lost, seq=3),)), 3.0)
    node.receive(LAST.node, Items((sign(LAST, replace(STATE, links=both), seq=4),)), 3.5)
    restarted = node.receive(LAST.node, Items((sign(LAST, lost, incarnation=9),)), 4.0)
    alone = node.receive(LAST.node, Items((sign(LAST, STATE, incarnation=9, seq=2),)), 4.5)

    (beat,) = [message for message in said(actions, FOUNDER) if isinstance(message, MeshHeartbeat)]
    assert beat.digest == digest
    for others in (again, restarted, alone):
        assert MeshHeartbeat not in [type(message) for message in said(others, FOUNDER)]


def test_two_nodes_that_list_each_other_are_alive() -> None:
    node = linked(LAST)
    state = replace(STATE, links=((MIDDLE.node, 1),))

    node.receive(LAST.node, Items((sign(LAST, PROFILE), sign(LAST, state))), 2.0)
    together = node.alive
    node.unlinked(LAST.node, 3.0)

    assert together == {MIDDLE.node, LAST.node}
    assert node.alive == {MIDDLE.node}
    assert node.profiles.keys() == {MIDDLE.node, LAST.node}


def test_an_own_item_that_returns_newer_is_superseded_soon() -> None:
    node = linked(LAST)
    ours = sign(MIDDLE, STATE, incarnation=9, seq=5)

    actions = node.receive(LAST.node, Items((ours,)), 1.2)
    later = tick(node, 1.0 + RECLAIM)

    assert items(actions, LAST) == []
    assert [(item.kind, item.incarnation) for item in items(later, LAST)] == [
        (Kind.PROFILE, 9),
        (Kind.STATE, 9),
    ]
    assert min(item.seq for item in items(later, LAST)) > 5
    assert items(tick(node, 1.0 + 2 * RECLAIM), LAST) == []


@pytest.mark.parametrize(
    "message", [Items(()), Summary(()), Want(())], ids=["items", "sum", "want"]
)
def test_a_client_takes_no_part_in_the_gossip(message: Message) -> None:
    node = mesh()

    greeting = link(node, CLIENT)
    actions = node.receive(CLIENT.node, message, 2.0)

    assert [type(message) for message in said(greeting, CLIENT)] == [MeshHeartbeat]
    assert node.states[MIDDLE.node].links == ()
    (drop,) = only(actions, Drop)
    assert (drop.peer, drop.why) == (CLIENT.node, CloseReason.RULES)
    assert drop.text == "Gossip on a client link"


def test_a_client_sends_beats_and_requests_only() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    tick(node, 1.0)

    greeting = link(node, LAST)
    beat = node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), 1.1)
    gossip = node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 2.0)

    assert [type(message) for message in said(greeting, LAST)] == [MeshHeartbeat]
    assert [type(message) for message in said(beat, LAST)] == [MeshHeartbeat]
    assert only(gossip, Drop)[0].why is CloseReason.RULES
    assert not node.profiles


def removal(of: NodeKey, by: NodeKey = FOUNDER) -> Item:
    return sign(by, remove(by, MESH, of.node, int(WALL)))


def test_clients_are_told_of_removals_alone() -> None:
    node = linked(LAST, CLIENT)

    heard = node.receive(LAST.node, Items((sign(FOUNDER, PROFILE), removal(STRANGER))), 2.0)
    own = node.remove(remove(MIDDLE, MESH, FOUNDER.node, int(WALL)), 2.5)
    signed = node.remove(remove(MIDDLE, MESH, LAST.node, int(WALL)), 3.0)
    node.unlinked(CLIENT.node, 3.5)
    greeting = link(node, CLIENT, 4.0)

    assert [item.subject for item in items(heard, CLIENT)] == [STRANGER.node]
    assert items(own, CLIENT) == []  # nobody can remove the founder
    assert [item.subject for item in items(signed, CLIENT)] == [LAST.node]
    told = [item.subject for item in items(greeting, CLIENT)]
    assert told == sorted([STRANGER.node, LAST.node])


def test_a_client_refuses_the_members_of_whose_removal_it_was_told() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    for each in (MIDDLE, LAST):
        link(node, each)

    actions = node.receive(LAST.node, Items((removal(MIDDLE),)), 2.0)
    again = link(node, MIDDLE, 3.0)

    assert node.removals.keys() == {MIDDLE.node}
    assert only(actions, Drop) == [Drop(MIDDLE.node, CloseReason.REMOVED)]
    assert only(again, Drop) == [Drop(MIDDLE.node, CloseReason.REMOVED, is_newcomer=True)]
    assert said(actions, LAST) == []


def test_a_client_that_knows_a_better_removal_does_not_answer_with_it() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    link(node, FOUNDER)
    node.receive(FOUNDER.node, Items((removal(STRANGER),)), 2.0)
    link(node, LAST, 3.0)

    actions = node.receive(LAST.node, Items((removal(STRANGER, LAST),)), 4.0)

    assert not only(actions, Drop)
    assert items(actions, LAST) == []  # from a client it would be a violation
    assert node.removals[STRANGER.node].issuer == FOUNDER.node


@pytest.mark.parametrize("message", [Summary(()), Want(()), Items((sign(LAST, PROFILE),))])
def test_a_client_takes_nothing_but_removals(message: Message) -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    link(node, LAST)

    (drop,) = only(node.receive(LAST.node, message, 2.0), Drop)

    assert (drop.why, drop.text) == (CloseReason.RULES, "Gossip on a client link")


def test_a_client_takes_nothing_of_a_client() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    other = NodeKey(bytes([9]) * 32)
    shown = issue(FOUNDER, CREDENTIALS[FOUNDER.node], other.node, Role.CLIENT)
    node.linked(other.node, 1, shown, dialled=False, now=1.0)

    (drop,) = only(node.receive(other.node, Items((removal(LAST),)), 2.0), Drop)

    assert drop.why is CloseReason.RULES
    assert not node.removals


def fallbacks(actions: Sequence[Action], peer: NodeKey = CLIENT) -> list[set[NodeId]]:
    """Return the nodes of each list that a client is sent."""
    messages = [message for message in said(actions, peer) if isinstance(message, FallbackList)]
    return [{fallback.node for fallback in message.fallbacks} for message in messages]


def hear(node: Mesh, key: NodeKey, state: StateRecord, *, seq: int = 1) -> list[Action]:
    """Let a linked node publish its profile and that it is linked to this one."""
    shown = replace(state, links=((node.me, 1000),))
    news = Items((sign(key, PROFILE), sign(key, shown, seq=seq)))
    return node.receive(key.node, news, 2.0)


def test_a_client_is_told_the_living_nodes_at_once_and_when_they_change() -> None:
    node = linked(FOUNDER, LAST)
    hear(node, FOUNDER, STATE)

    first = link(node, CLIENT, 2.0)
    quiet = tick(node, 2.5)
    hear(node, LAST, STATE)
    grown = tick(node, 3.0)
    hear(node, FOUNDER, StateRecord(Lifecycle.LEAVING), seq=2)
    leaving = tick(node, 3.5)
    node.unlinked(LAST.node, 3.5)
    alone = tick(node, 4.0)

    assert fallbacks(first) == [{FOUNDER.node}]
    assert fallbacks(quiet) == []
    assert fallbacks(grown) == [{FOUNDER.node, LAST.node}]
    assert fallbacks(leaving) == [{LAST.node}]
    assert fallbacks(alone) == [set()]


def test_a_client_whose_list_was_out_of_date_is_told_the_next_one() -> None:
    node = linked(FOUNDER)
    hear(node, FOUNDER, STATE)
    first = NodeKey(bytes([9]) * 32)
    shown = issue(FOUNDER, CREDENTIALS[FOUNDER.node], first.node, Role.CLIENT)
    node.linked(first.node, 1, shown, dialled=False, now=2.0)
    tick(node, 2.5)
    hear(node, FOUNDER, StateRecord(Lifecycle.LEAVING), seq=2)
    between = link(node, CLIENT, 2.6)
    hear(node, FOUNDER, STATE, seq=3)

    after = tick(node, 3.0)

    assert fallbacks(between) == []
    assert fallbacks(after) == [{FOUNDER.node}]
    assert fallbacks(after, first) == []


def test_a_client_from_elsewhere_is_told_no_address_of_a_home_network() -> None:
    node = linked(LAST)
    home = replace(PROFILE, addresses=("ws://192.168.1.5:7700",))
    state = replace(STATE, links=((node.me, 1000),))
    node.receive(LAST.node, Items((sign(LAST, home), sign(LAST, state))), 2.0)
    own = CREDENTIALS[CLIENT.node]

    far = node.linked(CLIENT.node, 1, own, dialled=False, now=2.0, host="8.8.8.8")
    node.unlinked(CLIENT.node, 2.1)
    near = node.linked(CLIENT.node, 1, own, dialled=False, now=2.2, host="192.168.1.9")

    assert (fallbacks(far), fallbacks(near)) == ([], [{LAST.node}])


@pytest.mark.parametrize("tag", [b"", b"the tag of here."])
def test_a_client_is_told_the_machine_of_its_node_and_those_of_the_others(tag: bytes) -> None:
    node = linked(LAST)
    if tag:
        node.publish(profile=replace(PROFILE, machine=tag), now=1.5)
    theirs = replace(PROFILE, machine=b"another machine.")
    state = replace(STATE, links=((node.me, 1000),))
    node.receive(LAST.node, Items((sign(LAST, theirs), sign(LAST, state))), 2.0)

    said_now = said(link(node, CLIENT, 2.0), CLIENT)
    (told,) = [message for message in said_now if isinstance(message, FallbackList)]

    assert told.machine == tag
    assert [fallback.machine for fallback in told.fallbacks] == [b"another machine."]


@pytest.mark.parametrize("limits", [ClientLimits(1), ClientLimits(0, 1000)])
def test_a_client_with_limits_of_its_own_is_told_no_other_node_that_counts_by_itself(
    limits: ClientLimits,
) -> None:
    node = linked(FOUNDER)
    hear(node, FOUNDER, STATE)
    shown = issue(FOUNDER, CREDENTIALS[FOUNDER.node], CLIENT.node, Role.CLIENT, limits=limits)

    first = node.linked(CLIENT.node, 1, shown, dialled=False, now=2.0)
    hear(node, FOUNDER, StateRecord(Lifecycle.LEAVING), seq=2)

    assert fallbacks(first) == fallbacks(tick(node, 2.5)) == []


def test_nodes_are_told_no_fallbacks() -> None:
    node = linked(FOUNDER)
    hear(node, FOUNDER, STATE)

    assert fallbacks(link(node, LAST, 2.0), LAST) == fallbacks(tick(node, 2.5), LAST) == []


def test_a_client_keeps_the_fallbacks_that_the_latest_node_told() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    link(node, LAST)
    fallback = Fallback(FOUNDER.node, b"", ("ws://192.0.2.7:1",))

    actions = node.receive(LAST.node, FallbackList((fallback,), b"tag"), 2.0)
    again = node.receive(LAST.node, FallbackList((fallback,), b"tag"), 2.1)
    node.unlinked(LAST.node, 2.5)

    assert (node.fallbacks, node.teller) == ((fallback,), (LAST.node, b"tag"))
    assert (actions, again) == ([Changed()], [])
    assert only(tick(node, 9.0), Dial) == []


@pytest.mark.parametrize("teller", [CLIENT, LAST])
def test_fallbacks_for_a_node_end_the_link(teller: NodeKey) -> None:
    node = linked(teller)

    (drop,) = only(node.receive(teller.node, FallbackList(()), 2.0), Drop)

    assert (drop.why, node.fallbacks) == (CloseReason.RULES, ())


def test_fallbacks_that_a_client_tells_end_its_link() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    other = NodeKey(bytes([9]) * 32)
    shown = issue(FOUNDER, CREDENTIALS[FOUNDER.node], other.node, Role.CLIENT)
    node.linked(other.node, 1, shown, dialled=False, now=1.0)

    (drop,) = only(node.receive(other.node, FallbackList(()), 2.0), Drop)

    assert drop.why is CloseReason.RULES


def test_a_forged_removal_ends_the_link_of_a_client() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)
    link(node, LAST)
    forged = replace(removal(MIDDLE), signature=bytes(64))

    (drop,) = only(node.receive(LAST.node, Items((forged,)), 2.0), Drop)

    assert drop.why is CloseReason.RULES
    assert not node.removals


def test_request_messages_are_delivered_to_the_node() -> None:
    node, request = linked(CLIENT), Generate(bytes(16), b"{}")

    assert node.receive(CLIENT.node, request, 2.0) == [DeliverRequest(CLIENT.node, request)]


def test_messages_of_unlinked_peers_are_ignored() -> None:
    assert mesh().receive(LAST.node, Items((sign(LAST, PROFILE),)), 2.0) == []


def test_a_forged_item_drops_the_peer_that_sent_it() -> None:
    node = linked(LAST)
    forged = replace(sign(FOUNDER, PROFILE), signature=bytes(64))

    actions = node.receive(LAST.node, Items((forged,)), 2.0)

    (drop,) = only(actions, Drop)
    assert (drop.peer, drop.why) == (LAST.node, CloseReason.RULES)
    assert FOUNDER.node not in node.profiles
    assert node.links == {}


def test_a_bye_ends_the_link() -> None:
    node = linked(LAST)

    actions = node.receive(LAST.node, Bye(CloseReason.DUPLICATE), 2.0)

    assert actions == [ClosedByPeer(LAST.node, CloseReason.DUPLICATE), Changed()]
    assert node.links == {}


@pytest.mark.parametrize("key", [STRANGER, MIDDLE], ids=["stranger", "itself"])
def test_a_link_to_a_non_member_or_itself_is_dropped(key: NodeKey) -> None:
    (drop,) = link(mesh(), key)

    why = CloseReason.REMOVED if key is STRANGER else CloseReason.DUPLICATE
    assert drop == Drop(key.node, why, is_newcomer=True)


def test_of_crossing_dials_that_of_the_lower_id_is_kept() -> None:
    lower, higher = mesh(MIDDLE), mesh(LAST)

    link(lower, LAST, dialled=False)
    link(higher, MIDDLE, dialled=True)
    at_lower = link(lower, LAST, 1.1, dialled=True)
    at_higher = link(higher, MIDDLE, 1.1, dialled=False)
    again = link(higher, MIDDLE, 1.2, dialled=True)

    assert only(at_lower, Drop) == [Drop(LAST.node, CloseReason.CROSSED)]
    assert only(at_higher, Drop) == [Drop(MIDDLE.node, CloseReason.CROSSED)]
    assert again == [Drop(MIDDLE.node, CloseReason.CROSSED, is_newcomer=True)]


def test_a_second_process_with_the_same_key_is_refused_while_the_first_is_active() -> None:
    node = linked(LAST)

    refused = link(node, LAST, 1.0 + FRESH / 2, instance=2)
    taken = link(node, LAST, 1.0 + FRESH, instance=2)

    assert refused == [Drop(LAST.node, CloseReason.DUPLICATE, is_newcomer=True)]
    assert taken[0] == Drop(LAST.node, CloseReason.SILENT)
    assert node.links[LAST.node].instance == 2


def test_a_gossiped_node_is_dialled_at_once_by_the_lower_id() -> None:
    node = linked(FOUNDER)

    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)
    dials = only(tick(node, 2.0), Dial)
    node.refused(LAST.node, 2.1)
    again = node.deadline

    assert dials == [Dial(LAST.node, PROFILE.addresses)]
    assert again > 2.1
    assert only(tick(node, 5.0), Dial) == dials


def test_departed_nodes_and_nodes_without_addresses_are_not_dialled() -> None:
    node = linked(LAST)
    gone = sign(FOUNDER, replace(STATE, lifecycle=Lifecycle.LEFT))

    node.receive(LAST.node, Items((sign(FOUNDER, PROFILE), gone)), 2.0)
    node.receive(LAST.node, Items((sign(LAST, replace(PROFILE, addresses=())),)), 2.0)
    node.unlinked(LAST.node, 2.1)

    assert not any(only(tick(node, now), Dial) for now in (2.5, 5.0, 9.0))


def test_a_link_that_lasted_is_dialled_at_once_when_it_is_lost() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.0)
    node.unlinked(LAST.node, 2.0)
    tick(node, 2.0)
    link(node, LAST, 3.0)
    for now in (5.0, 7.0, 9.0, 11.0, 13.0):
        node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), now)
    tick(node, 3.0 + STABLE)

    node.unlinked(LAST.node, 3.0 + STABLE)

    assert [dial.peer for dial in only(tick(node, 3.0 + STABLE), Dial)] == [LAST.node]


def test_a_link_that_did_not_last_is_dialled_after_a_backoff() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.0)
    node.unlinked(LAST.node, 2.0)
    tick(node, 2.0)  # dials
    link(node, LAST, 3.0)
    for now in (4.0, 5.0, 6.0, 7.0):
        node.receive(LAST.node, MeshHeartbeat(5, 0, 0, 0, bytes(8)), now)
        tick(node, now)

    node.unlinked(LAST.node, 7.0)
    soon, later = (only(tick(node, now), Dial) for now in (7.0, 7.0 + 2 * BACKOFF))

    assert soon == []
    assert [dial.peer for dial in later] == [LAST.node]


def test_the_chain_of_inviters_begins_with_the_founder() -> None:
    node = linked(FOUNDER, LAST)
    for key in (FOUNDER, LAST):
        node.receive(key.node, Items((sign(key, PROFILE),)), 1.2)

    assert node.inviters(FOUNDER.node) == ()
    assert node.inviters(LAST.node) == (FOUNDER.node,)
    assert node.inviters(CLIENT.node) == ()


def test_a_removal_is_published_and_closes_the_link() -> None:
    node = linked(FOUNDER, LAST)
    removal = remove(MIDDLE, MESH, LAST.node, int(WALL))

    actions = node.remove(removal, 2.0)

    assert next(item.kind for item in items(actions, FOUNDER)) is Kind.REMOVAL
    assert only(actions, Drop) == [Drop(LAST.node, CloseReason.REMOVED)]
    assert node.removals == {LAST.node: removal}
    assert link(node, LAST, 3.0) == [Drop(LAST.node, CloseReason.REMOVED, is_newcomer=True)]


def test_a_received_removal_closes_the_link_too() -> None:
    node = linked(FOUNDER, LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.5)

    removal = sign(FOUNDER, remove(FOUNDER, MESH, LAST.node, int(WALL)))
    actions = node.receive(FOUNDER.node, Items((removal,)), 2.0)

    assert only(actions, Drop) == [Drop(LAST.node, CloseReason.REMOVED)]
    assert LAST.node not in node.profiles


def test_a_removal_before_a_forged_item_is_in_force_at_once() -> None:
    node = linked(FOUNDER, LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.5)
    forged = replace(sign(FOUNDER, PROFILE), signature=bytes(64))

    actions = node.receive(FOUNDER.node, Items((removal(LAST), forged)), 2.0)

    dropped = {drop.peer: drop.why for drop in only(actions, Drop)}
    assert dropped == {FOUNDER.node: CloseReason.RULES, LAST.node: CloseReason.REMOVED}
    assert LAST.node not in node.profiles


def test_a_removal_verifies_no_credential_again_but_that_of_its_author() -> None:
    node = linked(FOUNDER, LAST, CLIENT)
    for key in (FOUNDER, LAST):
        node.receive(key.node, Items((sign(key, PROFILE),)), 1.5)
    gone = NodeId(bytes([9]) * 32)
    item = sign(LAST, remove(LAST, MESH, gone, 1))

    with patch("meshllm.protocol.trust.credential.verify", wraps=verify) as verified:
        node.receive(LAST.node, Items((item,)), 2.0)

    assert node.removals.keys() == {gone}
    assert verified.call_count == len(CREDENTIALS[LAST.node].chain)


def test_a_removal_ends_the_links_and_profiles_of_those_whom_the_removed_one_invited() -> None:
    node, other = linked(FOUNDER, LAST), NodeKey(bytes([9]) * 32)
    shown = issue(LAST, CREDENTIALS[LAST.node], other.node, Role.NODE)
    node.linked(other.node, 1, shown, dialled=False, now=1.2)
    with patch.dict(CREDENTIALS, {other.node: shown}):
        node.receive(other.node, Items((sign(other, PROFILE),)), 1.5)
    assert other.node in node.profiles

    actions = node.receive(FOUNDER.node, Items((removal(LAST),)), 2.0)

    assert {drop.peer for drop in only(actions, Drop)} == {LAST.node, other.node}
    assert other.node not in node.profiles


def test_a_membership_that_expires_ends_the_link() -> None:
    node = linked(FOUNDER, LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.5)

    early = tick(node, 1.6, WALL + DAY - 1)
    assert not node.has_ended(LAST.node, CREDENTIALS[LAST.node])
    late = tick(node, 1.6 + BEAT, WALL + DAY)

    assert only(early, Drop) == []
    assert only(late, Drop) == [Drop(LAST.node, CloseReason.REMOVED)]
    assert LAST.node not in node.profiles
    assert node.has_ended(LAST.node, CREDENTIALS[LAST.node])


def test_a_ticket_that_expires_ends_the_link_of_a_client() -> None:
    node, until = linked(FOUNDER), int(WALL) + DAY
    shown = issue(FOUNDER, CREDENTIALS[FOUNDER.node], CLIENT.node, Role.CLIENT, until)
    node.linked(CLIENT.node, 1, shown, dialled=False, now=1.2)

    early = tick(node, 1.6, until - 1)
    late = tick(node, 1.6 + BEAT, until)

    assert only(early, Drop) == []
    assert only(late, Drop) == [Drop(CLIENT.node, CloseReason.REMOVED)]


def test_leaving_is_published_and_closes_all_links() -> None:
    node = linked(FOUNDER, LAST)

    actions = node.leave(2.0)

    (state,) = items(actions, LAST)
    assert node.states[MIDDLE.node].lifecycle is Lifecycle.LEFT
    assert state.kind is Kind.STATE
    assert [drop.why for drop in only(actions, Drop)] == [CloseReason.LEAVING] * 2
    assert node.links == {}


def test_after_leaving_no_peer_is_dialled() -> None:
    node = linked(FOUNDER)
    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)

    node.leave(2.0)

    assert not any(only(tick(node, now), Dial) for now in (2.0, 5.0, 9.0))


def test_a_node_that_departed_a_day_ago_is_forgotten_though_nothing_happens() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, PROFILE),)), 2.0)
    node.unlinked(LAST.node, 2.0)

    before, known = tick(node, 2.0 + FORGET), FOUNDER.node in node.profiles
    after = tick(node, 2.0 + FORGET + BEAT)

    assert (Changed() in before, known) == (False, True)
    assert (Changed() in after, {*node.profiles}) == (True, {MIDDLE.node})


def test_a_peer_that_expires_when_its_dial_is_due_is_not_dialled_again() -> None:
    node = linked(FOUNDER)
    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)

    dials = only(tick(node, 2.0, WALL + DAY), Dial)

    assert [dial.peer for dial in dials] == [LAST.node]
    assert LAST.node not in node.profiles


def test_a_node_that_never_published_can_leave() -> None:
    node = Mesh(MIDDLE, CREDENTIALS[MIDDLE.node], 1, now=0.0, wall_s=WALL)
    link(node, LAST)

    assert only(node.leave(2.0), Drop) == [Drop(LAST.node, CloseReason.LEAVING)]


def test_a_record_beyond_the_limits_is_not_published() -> None:
    node = mesh()

    with pytest.raises(PeerFault):
        node.publish(profile=replace(PROFILE, name="n" * 99), now=1.0)
    assert node.profiles == {MIDDLE.node: PROFILE}


def test_lasting_items_are_restored() -> None:
    node, again = linked(LAST), mesh(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 1.2)
    node.publish(charter=replace(CHARTER, members=2), now=1.5)
    node.remove(remove(MIDDLE, MESH, CLIENT.node, int(WALL)), 1.5)

    again.restore(node.lasting, 2.0)

    assert [item.kind for item in node.lasting] == [
        Kind.REMOVAL, Kind.CHARTER, Kind.AMENDMENTS,
    ]  # fmt: skip
    assert again.charter == node.charter == replace(CHARTER, members=2, yields=YIELDS)
    assert again.removals == node.removals
    assert again.author == node.author == FOUNDER.node
    assert mesh().author is None


def test_the_charter_is_merged_once_for_all_items_of_a_message() -> None:
    node = linked(LAST)
    said = [Amendments((Term("members", at, str(at)),), at) for at in (1, 2, 3)]
    amended = tuple(sign(LAST, each) for each in said)

    with patch.object(record_store, "merge", wraps=merge) as merged:
        node.receive(LAST.node, Items((sign(FOUNDER, CHARTER), *amended)), 1.2)

    assert merged.call_count == 1
    assert node.charter is not None
    assert node.charter.members == 3


def test_an_own_item_that_returns_does_not_undo_what_another_changes() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 1.2)
    node.publish(charter=replace(CHARTER, members=2), now=1.3)
    *_, own = node.lasting

    node.receive(LAST.node, Items((own, sign(LAST, Amendments((Term("members", 2, "3"),))))), 1.4)

    assert node.charter is not None
    assert node.charter.members == 3


def test_who_was_invited_again_can_amend_the_charter_again() -> None:
    """Its terms of before are void, as those of all whom a removed member invited."""
    guest = issue(LAST, CREDENTIALS[LAST.node], CLIENT.node, Role.NODE)
    before = Mesh(CLIENT, guest, 1, now=0.0, wall_s=WALL)
    before.restore([sign(FOUNDER, CHARTER)], 0.0)
    for members in (2, 3):
        before.publish(charter=replace(CHARTER, members=members), now=0.0)
    again = issue(FOUNDER, CREDENTIALS[FOUNDER.node], CLIENT.node, Role.NODE)
    after = Mesh(CLIENT, again, 2, now=1.0, wall_s=WALL)
    after.restore([*before.lasting, removal(LAST)], 1.0)
    void = after.charter

    after.publish(charter=replace(CHARTER, policy="throughput"), now=1.0)

    assert void == CHARTER
    assert after.charter == replace(CHARTER, policy="throughput")


def test_saved_items_count_though_the_last_is_known_already() -> None:
    node, again = linked(LAST), mesh(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER), removal(CLIENT))), 1.2)
    removed, charter = node.lasting
    again.restore([removed], 2.0)
    before = again.digest

    again.restore([charter, removed], 2.0)

    assert again.charter == CHARTER
    assert again.digest != before


def test_nodes_with_the_same_items_have_the_same_digest() -> None:
    node, other = mesh(MIDDLE), mesh(LAST)
    assert node.digest != other.digest


def test_an_unknown_message_only_resets_the_timeout() -> None:
    node = linked(LAST)

    actions = node.receive(LAST.node, UnknownMeshMessage(99, b"whatever"), 1.0 + SILENCE)

    assert actions == []
    assert node.links[LAST.node].heard == 1.0 + SILENCE


def test_an_obstacle_is_published_and_withdrawn() -> None:
    node = linked(LAST)
    asks = sign(FOUNDER, Amendments((Term("policy", 1, "greenest"),)))
    takes_back = sign(FOUNDER, Amendments((Term("policy", 2, "auto"),), version=2))

    begins = node.receive(LAST.node, Items((sign(FOUNDER, CHARTER), asks)), 2.0)
    obstacle = node.states[MIDDLE.node].obstacle
    ends = node.receive(LAST.node, Items((takes_back,)), 3.0)

    assert obstacle == (
        f"node `{short(FOUNDER.node)}` set policy `greenest`, unknown to this version;"
        " update meshllm"
    )
    assert [item.kind for item in items(begins, LAST)] == [Kind.STATE]
    assert [item.kind for item in items(ends, LAST)] == [Kind.STATE]
    assert node.states[MIDDLE.node].obstacle == ""
    assert node.charter == CHARTER


def test_a_long_obstacle_is_cut_between_characters() -> None:
    policies = ["\N{SNOWMAN}" * 400, "x" + "\N{SNOWMAN}" * 400]
    asks = [Amendments((Term("policy", at, name),), at) for at, name in enumerate(policies, 1)]
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 2.0)

    published = []
    for ask in asks:
        node.receive(LAST.node, Items((sign(FOUNDER, ask),)), 3.0)
        published.append(node.states[MIDDLE.node].obstacle)

    sizes = {len(each.encode()) for each in published}
    assert all(each.endswith("\N{SNOWMAN}") for each in published)
    assert sizes <= {MAX_OBSTACLE_BYTES - cut for cut in range(3)}
    assert len(sizes) > 1


def test_only_changed_terms_of_a_charter_are_published() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 2.0)

    told = items(node.publish(charter=replace(CHARTER, members=2), now=2.0), LAST)

    assert [item.kind for item in told] == [Kind.AMENDMENTS]
    assert node.publish(charter=replace(CHARTER, members=2), now=2.0) == []


def test_amendments_of_an_earlier_run_do_not_undo_current_ones() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 2.0)
    node.publish(charter=replace(CHARTER, members=2), now=2.0)
    before = Amendments((Term("members", 5, "9"), Term("replicas", 4, "3")), version=7)

    actions = node.receive(LAST.node, Items((sign(MIDDLE, before),)), 3.0)

    assert node.charter == replace(CHARTER, members=2, replicas=3, yields=YIELDS)
    assert [item.incarnation for item in items(actions, LAST)] == [8]
