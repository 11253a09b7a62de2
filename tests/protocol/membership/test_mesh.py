"""One node's view of its mesh: what it says to whom, and what it makes of what it hears."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from meshllm.errors import PeerFault
from meshllm.protocol.membership.actions import Action, Changed, Deliver, Dial, Drop, Parted, Send
from meshllm.protocol.membership.charter import Amendments, Term
from meshllm.protocol.membership.codec import (
    Ask,
    Beat,
    Bye,
    Items,
    Message,
    Summary,
    Unknown,
    Want,
    Why,
)
from meshllm.protocol.membership.gossip import Item, Kind
from meshllm.protocol.membership.link_table import BEAT, FRESH, GAP, RETELL, SILENCE
from meshllm.protocol.membership.mesh import RECLAIM, STABLE, Mesh
from meshllm.protocol.membership.records import Lifecycle
from meshllm.protocol.trust.credential import remove
from meshllm.protocol.trust.identity import NodeKey, short
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


def mesh(key: NodeKey = MIDDLE, *, incarnation: int = 1) -> Mesh:
    """A machine that has published a profile and a state at time 0."""
    made = Mesh(key, CREDENTIALS[key.node], incarnation, now=0.0, wall_s=WALL)
    made.publish(profile=PROFILE, state=STATE, now=0.0)
    return made


def link(
    node: Mesh, key: NodeKey, now: float = 1.0, *, instance: int = 1, dialled: bool = True
) -> list[Action]:
    return node.linked(key.node, instance, CREDENTIALS[key.node], dialled=dialled, now=now)


def linked(*keys: NodeKey) -> Mesh:
    node = mesh()
    for key in keys:
        link(node, key)
    tick(node, 1.0 + GAP)
    return node


def only(actions: Sequence[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: Sequence[Action], peer: NodeKey) -> list[Message]:
    return [action.message for action in only(actions, Send) if action.peer == peer.node]


def items(actions: Sequence[Action], peer: NodeKey) -> list[Item]:
    messages = said(actions, peer)
    return [item for at in messages if isinstance(at, Items) for item in at.items]


def tick(node: Mesh, now: float, wall_s: float = WALL) -> list[Action]:
    return node.expire(now, wall_s)


def test_a_link_begins_with_a_beat_what_we_are_and_the_summary_of_the_lower() -> None:
    node = mesh()
    node.publish(charter=CHARTER, now=0.0)

    higher, lower = link(node, LAST), link(node, FOUNDER)

    assert [type(message) for message in said(higher, LAST)[:3]] == [Beat, Items, Summary]
    assert [type(message) for message in said(lower, FOUNDER)[:2]] == [Beat, Items]
    assert not any(isinstance(message, Summary) for message in said(lower, FOUNDER))
    assert {item.kind for item in items(higher, LAST)} == {Kind.PROFILE, Kind.STATE}
    assert higher[-1] == Changed()


def test_a_link_that_begins_or_ends_is_told_at_once() -> None:
    node = mesh()

    begins = link(node, LAST)
    ends = node.unlinked(LAST.node, 2.0)

    (state,) = [item for item in items(begins, LAST) if item.seq == 3]
    assert state.kind is Kind.STATE
    assert node.states[MIDDLE.node].links == ()
    assert ends[-1] == Changed()
    assert node.unlinked(LAST.node, 3.0) == []


def test_many_changes_of_links_are_told_together() -> None:
    node = mesh()
    link(node, LAST, 1.0)

    link(node, FOUNDER, 1.0 + GAP / 2)
    before = node.states[MIDDLE.node].links
    tick(node, 1.0 + GAP)

    assert [peer for peer, _ in before] == [LAST.node]
    assert [peer for peer, _ in node.states[MIDDLE.node].links] == [FOUNDER.node, LAST.node]


def test_the_first_beat_is_answered_at_once() -> None:
    node = linked(LAST)

    first = node.receive(LAST.node, Beat(77, 0, 0, 0, bytes(8)), 1.01)
    second = node.receive(LAST.node, Beat(78, 0, 0, 0, bytes(8)), 1.5)

    (answer,) = said(first, LAST)
    assert isinstance(answer, Beat)
    assert answer.echo == 77
    assert said(second, LAST) == []


def test_beats_tell_the_time_of_day_and_compare_it() -> None:
    node = linked(LAST)
    tick(node, 2.0, WALL + 1)

    (answer,) = said(node.receive(LAST.node, Beat(5, 0, 0, 0, bytes(8)), 2.25), LAST)
    assert isinstance(answer, Beat)
    node.receive(LAST.node, Beat(6, 0, 0, answer.wall_ms + 7_000, bytes(8)), 2.25)

    assert answer.wall_ms == round((WALL + 1.25) * 1e3)
    assert node.links[LAST.node].ahead_s == pytest.approx(7)


def test_a_round_trip_is_told_when_it_is_measured_and_when_it_moved() -> None:
    node = linked(LAST)

    node.receive(LAST.node, Beat(5, 1_000_000, 0, 0, bytes(8)), 1.2)
    measured = node.states[MIDDLE.node].links
    for now in (2.0, 2.5, 3.0):
        node.receive(LAST.node, Beat(5, round((now - 1.9) * 1e6), 0, 0, bytes(8)), now)
    waits = node.states[MIDDLE.node].links
    for now in (4.0, 6.0, 1.2 + RETELL):
        node.receive(LAST.node, Beat(5, 0, 0, 0, bytes(8)), now)

    assert measured == waits == ((LAST.node, 200_000),)
    ((_, moved),) = node.states[MIDDLE.node].links
    assert moved > 250_000


def test_all_links_beat_and_silence_drops_them() -> None:
    node = linked(FOUNDER, LAST)
    now = 1.0
    while now < 1.0 + SILENCE:
        beats = tick(node, now)
        now = node.deadline

    assert {action.peer for action in only(beats, Send)} == {FOUNDER.node, LAST.node}
    assert [action.why for action in only(tick(node, now), Drop)] == [Why.SILENT] * 2
    assert node.links == {}


def test_before_the_deadline_nothing_is_due() -> None:
    node = linked(LAST)

    assert tick(node, node.deadline - 0.01) == []


def test_two_differing_beats_make_the_lower_id_send_a_summary() -> None:
    node = linked(FOUNDER, LAST)
    other = Beat(5, 0, 0, 0, b"mismatch")
    for peer in (FOUNDER, LAST):
        node.receive(peer.node, other, 1.1)

    first = node.receive(LAST.node, other, 1.5)
    second = node.receive(LAST.node, other, 2.0)
    lower = [node.receive(FOUNDER.node, other, now) for now in (1.5, 2.0, 2.5)]

    assert said(first, LAST) == []
    assert [type(message) for message in said(second, LAST)] == [Summary]
    assert [said(actions, FOUNDER) for actions in lower] == [[], [], []]


def test_a_summary_is_answered_with_what_is_lacking_and_wanted() -> None:
    node = linked(LAST)
    theirs = [sign(LAST, PROFILE), sign(LAST, STATE)]

    actions = node.receive(LAST.node, Summary(tuple(item.entry for item in theirs)), 2.0)
    nothing = node.receive(LAST.node, Summary(()), 2.5)

    assert {item.author for item in items(actions, LAST)} == {MIDDLE.node}
    assert said(actions, LAST)[-1] == Want(tuple(sorted(item.slot for item in theirs)))
    assert [type(message) for message in said(nothing, LAST)] == [Items]


def test_what_is_wanted_is_sent_and_what_is_not_there_is_not() -> None:
    node = linked(LAST)
    slots = sign(MIDDLE, PROFILE).slot, sign(FOUNDER, PROFILE).slot

    assert [item.slot for item in items(node.receive(LAST.node, Want(slots), 2.0), LAST)] == [
        slots[0]
    ]


def test_what_the_gone_said_is_shared_with_nobody_but_who_says_it_older() -> None:
    node = linked(LAST)
    newer = sign(FOUNDER, replace(STATE, lifecycle=Lifecycle.LEFT), seq=2)
    node.receive(LAST.node, Items((sign(FOUNDER, PROFILE), newer)), 1.5)

    unasked = node.receive(LAST.node, Summary(()), 2.0)
    older = node.receive(LAST.node, Summary((sign(FOUNDER, STATE).entry,)), 2.5)

    assert FOUNDER.node not in {item.author for item in items(unasked, LAST)}
    assert newer in items(older, LAST)


def test_news_go_on_to_those_that_the_author_does_not_name() -> None:
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


def test_two_that_name_each_other_are_alive_together() -> None:
    node = linked(LAST)
    state = replace(STATE, links=((MIDDLE.node, 1),))

    node.receive(LAST.node, Items((sign(LAST, PROFILE), sign(LAST, state))), 2.0)
    together = node.alive
    node.unlinked(LAST.node, 3.0)

    assert together == {MIDDLE.node, LAST.node}
    assert node.alive == {MIDDLE.node}
    assert node.profiles.keys() == {MIDDLE.node, LAST.node}


def test_an_item_that_comes_back_newer_is_signed_over_soon() -> None:
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

    assert [type(message) for message in said(greeting, CLIENT)] == [Beat]
    assert node.states[MIDDLE.node].links == ()
    (drop,) = only(actions, Drop)
    assert (drop.peer, drop.why) == (CLIENT.node, Why.RULES)
    assert drop.text == "Gossip on the link of a client"


def test_as_a_client_we_beat_and_ask() -> None:
    node = Mesh(CLIENT, CREDENTIALS[CLIENT.node], 1, now=0.0, wall_s=WALL)

    greeting = link(node, LAST)
    beat = node.receive(LAST.node, Beat(5, 0, 0, 0, bytes(8)), 1.1)
    gossip = node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 2.0)

    assert [type(message) for message in said(greeting, LAST)] == [Beat]
    assert [type(message) for message in said(beat, LAST)] == [Beat]
    assert only(gossip, Drop)[0].why is Why.RULES
    assert not node.profiles


def test_what_is_for_the_node_above_is_handed_up() -> None:
    node, ask = linked(CLIENT), Ask(bytes(16), b"{}")

    assert node.receive(CLIENT.node, ask, 2.0) == [Deliver(CLIENT.node, ask)]


def test_who_is_not_linked_is_not_heard() -> None:
    assert mesh().receive(LAST.node, Items((sign(LAST, PROFILE),)), 2.0) == []


def test_a_forgery_drops_who_passed_it_on() -> None:
    node = linked(LAST)
    forged = replace(sign(FOUNDER, PROFILE), signature=bytes(64))

    actions = node.receive(LAST.node, Items((forged,)), 2.0)

    (drop,) = only(actions, Drop)
    assert (drop.peer, drop.why) == (LAST.node, Why.RULES)
    assert FOUNDER.node not in node.profiles
    assert node.links == {}


def test_a_goodbye_ends_the_link() -> None:
    node = linked(LAST)

    actions = node.receive(LAST.node, Bye(Why.TWIN), 2.0)

    assert actions == [Parted(LAST.node, Why.TWIN), Changed()]
    assert node.links == {}


@pytest.mark.parametrize("key", [STRANGER, MIDDLE], ids=["stranger", "itself"])
def test_who_is_no_other_member_is_not_linked(key: NodeKey) -> None:
    (drop,) = link(mesh(), key)

    why = Why.REMOVED if key is STRANGER else Why.TWIN
    assert drop == Drop(key.node, why, is_newcomer=True)


def test_crossing_dials_leave_the_one_of_the_lower_id() -> None:
    lower, higher = mesh(MIDDLE), mesh(LAST)

    link(lower, LAST, dialled=False)
    link(higher, MIDDLE, dialled=True)
    at_lower = link(lower, LAST, 1.1, dialled=True)
    at_higher = link(higher, MIDDLE, 1.1, dialled=False)
    again = link(higher, MIDDLE, 1.2, dialled=True)

    assert only(at_lower, Drop) == [Drop(LAST.node, Why.CROSSED)]
    assert only(at_higher, Drop) == [Drop(MIDDLE.node, Why.CROSSED)]
    assert again == [Drop(MIDDLE.node, Why.CROSSED, is_newcomer=True)]


def test_a_second_process_with_the_same_key_is_refused_while_the_first_is_heard() -> None:
    node = linked(LAST)

    refused = link(node, LAST, 1.0 + FRESH / 2, instance=2)
    taken = link(node, LAST, 1.0 + FRESH, instance=2)

    assert refused == [Drop(LAST.node, Why.TWIN, is_newcomer=True)]
    assert taken[0] == Drop(LAST.node, Why.CROSSED)
    assert node.links[LAST.node].instance == 2


def test_whom_others_know_is_dialled_by_the_lower_at_once() -> None:
    node = linked(FOUNDER)

    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)
    dials = only(tick(node, 2.0), Dial)
    node.refused(LAST.node, 2.1)
    again = node.deadline

    assert dials == [Dial(LAST.node, PROFILE.addresses)]
    assert again > 2.1
    assert only(tick(node, 5.0), Dial) == dials


def test_who_left_or_has_no_address_is_not_dialled() -> None:
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
        node.receive(LAST.node, Beat(5, 0, 0, 0, bytes(8)), now)
    tick(node, 3.0 + STABLE)

    node.unlinked(LAST.node, 3.0 + STABLE)

    assert [dial.peer for dial in only(tick(node, 3.0 + STABLE), Dial)] == [LAST.node]


def test_those_who_let_a_node_in_are_named() -> None:
    node = linked(FOUNDER, LAST)
    for key in (FOUNDER, LAST):
        node.receive(key.node, Items((sign(key, PROFILE),)), 1.2)

    assert node.hosts(FOUNDER.node) == ()
    assert node.hosts(LAST.node) == (FOUNDER.node,)
    assert node.hosts(CLIENT.node) == ()


def test_a_removal_cuts_the_link_of_the_removed_and_is_told() -> None:
    node = linked(FOUNDER, LAST)
    removal = remove(MIDDLE, MESH, LAST.node, int(WALL))

    actions = node.remove(removal, 2.0)

    assert next(item.kind for item in items(actions, FOUNDER)) is Kind.REMOVAL
    assert only(actions, Drop) == [Drop(LAST.node, Why.REMOVED)]
    assert node.removals == {LAST.node: removal}
    assert link(node, LAST, 3.0) == [Drop(LAST.node, Why.REMOVED, is_newcomer=True)]


def test_a_removal_that_is_heard_cuts_the_link_too() -> None:
    node = linked(FOUNDER, LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.5)

    removal = sign(FOUNDER, remove(FOUNDER, MESH, LAST.node, int(WALL)))
    actions = node.receive(FOUNDER.node, Items((removal,)), 2.0)

    assert only(actions, Drop) == [Drop(LAST.node, Why.REMOVED)]
    assert LAST.node not in node.profiles


def test_a_membership_that_expires_ends_the_link() -> None:
    node = linked(FOUNDER, LAST)
    node.receive(LAST.node, Items((sign(LAST, PROFILE),)), 1.5)

    early = tick(node, 1.6, WALL + DAY - 1)
    late = tick(node, 1.6 + BEAT, WALL + DAY)

    assert only(early, Drop) == []
    assert only(late, Drop) == [Drop(LAST.node, Why.REMOVED)]
    assert LAST.node not in node.profiles


def test_who_leaves_says_so_and_parts() -> None:
    node = linked(FOUNDER, LAST)

    actions = node.leave(2.0)

    (state,) = items(actions, LAST)
    assert node.states[MIDDLE.node].lifecycle is Lifecycle.LEFT
    assert state.kind is Kind.STATE
    assert [drop.why for drop in only(actions, Drop)] == [Why.LEAVING] * 2
    assert node.links == {}


def test_who_left_dials_nobody() -> None:
    node = linked(FOUNDER)
    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)

    node.leave(2.0)

    assert not any(only(tick(node, now), Dial) for now in (2.0, 5.0, 9.0))


def test_who_expires_at_the_moment_of_its_dial_is_not_asked_for_more() -> None:
    node = linked(FOUNDER)
    node.receive(FOUNDER.node, Items((sign(LAST, PROFILE),)), 2.0)

    dials = only(tick(node, 2.0, WALL + DAY), Dial)

    assert [dial.peer for dial in dials] == [LAST.node]
    assert LAST.node not in node.profiles


def test_who_never_spoke_leaves_too() -> None:
    node = Mesh(MIDDLE, CREDENTIALS[MIDDLE.node], 1, now=0.0, wall_s=WALL)
    link(node, LAST)

    assert only(node.leave(2.0), Drop) == [Drop(LAST.node, Why.LEAVING)]


def test_a_record_beyond_the_limits_is_not_published() -> None:
    node = mesh()

    with pytest.raises(PeerFault):
        node.publish(profile=replace(PROFILE, name="n" * 99), now=1.0)
    assert node.profiles == {MIDDLE.node: PROFILE}


def test_what_lasts_is_restored() -> None:
    node, again = linked(LAST), mesh(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 1.2)
    node.publish(charter=replace(CHARTER, members=2), now=1.5)
    node.remove(remove(MIDDLE, MESH, CLIENT.node, int(WALL)), 1.5)

    again.restore(node.lasting, 2.0)

    assert [item.kind for item in node.lasting] == [
        Kind.REMOVAL, Kind.CHARTER, Kind.AMENDMENTS,
    ]  # fmt: skip
    assert again.charter == replace(CHARTER, members=2)
    assert again.removals == node.removals
    assert again.author == node.author == FOUNDER.node
    assert mesh().author is None


def test_nodes_that_know_the_same_have_the_same_digest() -> None:
    node, other = mesh(MIDDLE), mesh(LAST)
    assert node.digest != other.digest


def test_a_message_of_a_later_version_proves_only_that_its_sender_is_there() -> None:
    node = linked(LAST)

    actions = node.receive(LAST.node, Unknown(99, b"whatever"), 1.0 + SILENCE)

    assert actions == []
    assert node.links[LAST.node].heard == 1.0 + SILENCE


def test_what_this_version_does_not_know_is_told_and_told_again_when_it_is_over() -> None:
    node = linked(LAST)
    asks = sign(LAST, Amendments((Term("policy", 1, "greenest"),)))
    takes_back = sign(LAST, Amendments((Term("policy", 2, "auto"),), version=2))

    begins = node.receive(LAST.node, Items((sign(FOUNDER, CHARTER), asks)), 2.0)
    obstacle = node.states[MIDDLE.node].obstacle
    ends = node.receive(LAST.node, Items((takes_back,)), 3.0)

    assert obstacle == (
        f"node `{short(LAST.node)}` asks for policy `greenest`, which this version does not have;"
        " update meshllm"
    )
    assert [item.kind for item in items(begins, LAST)] == [Kind.STATE]
    assert [item.kind for item in items(ends, LAST)] == [Kind.STATE]
    assert node.states[MIDDLE.node].obstacle == ""
    assert node.charter == CHARTER


def test_only_what_differs_from_the_charter_is_told_of_a_new_one() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 2.0)

    told = items(node.publish(charter=replace(CHARTER, members=2), now=2.0), LAST)

    assert [item.kind for item in told] == [Kind.AMENDMENTS]
    assert node.publish(charter=replace(CHARTER, members=2), now=2.0) == []


def test_what_we_changed_before_we_forgot_does_not_undo_what_we_change_now() -> None:
    node = linked(LAST)
    node.receive(LAST.node, Items((sign(FOUNDER, CHARTER),)), 2.0)
    node.publish(charter=replace(CHARTER, members=2), now=2.0)
    before = Amendments((Term("members", 5, "9"), Term("sessions", 4, "3")), version=7)

    actions = node.receive(LAST.node, Items((sign(MIDDLE, before),)), 3.0)

    assert node.charter == replace(CHARTER, members=2, sessions=3)
    assert [item.incarnation for item in items(actions, LAST)] == [8]
