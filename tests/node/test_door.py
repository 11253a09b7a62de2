"""What the owner of a node is shown, and may do."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import MeshError, UserError
from meshllm.names import NodeId
from meshllm.node.desk import Counts
from meshllm.node.door import MAX_LASTS_S, NodeDoor
from meshllm.protocol.agreement import Agreement
from meshllm.protocol.credential import Removal, Role
from meshllm.protocol.identity import NodeKey, short, show
from meshllm.protocol.presence import Contact
from meshllm.protocol.records import Lifecycle, State
from meshllm.request import Event, Piece, Request
from meshllm.transport.contract import LinkStatistics, Network
from tests.cli.fake import answer_of
from tests.protocol.members import FOUNDED
from tests.protocol.meshes import World, profile

NETWORK = Network("none", "no NAT", ("192.0.2.1:7700",), (("192.0.2.9:8790", "registered"),))
KEYS = sorted((NodeKey(bytes([n]) * 32) for n in range(4)), key=lambda key: key.node)
A, B, C, D = (key.node for key in KEYS)
CLIENT = NodeKey(b"c" * 32).node


class Fake:
    """A node in a mesh of three, of which two make the ring."""

    def __init__(self) -> None:
        brought = {A: 3, B: 3, C: 1}
        names = {A: "here", B: "there", C: "spare"}
        self.world = World(
            {node: replace(profile(n), name=names[node], addresses=("loopback:x",))
             for node, n in brought.items()}
        )  # fmt: skip
        agreement = self.world.agree(A)
        assert agreement.plan is not None
        self.plan = agreement.plan
        view = self.world.follow(agreement).view(A)
        self.states = dict(view.states)
        contact = Contact(3, Role.NODE, FOUNDED, True, 0.0, 1.0, 2500, ahead_s=-3.25)
        client = Contact(1, Role.CLIENT, FOUNDED, True, 0.0, 1.0)
        self.key, self.me, self.name, self.version = KEYS[0], A, "here", "1.0"
        self.mesh, self.incarnation, self.since, self.is_leaving = FOUNDED.mesh, 7, 0.0, False
        self.keyring = SimpleNamespace(key=self.key)
        self.place = SimpleNamespace(addresses=("loopback:a",), survey=lambda: [NETWORK])
        self.agreement: Agreement | None = agreement
        self.machine = SimpleNamespace(
            charter=self.world.charter, profiles=dict(self.world.profiles), states=self.states,
            alive={A, B, C}, links={B: contact, CLIENT: client}, removals=dict[NodeId, Removal](),
            hosts=lambda node: self.hosts.get(node, ()),
        )  # fmt: skip
        statistics = LinkStatistics(1, 100, 2, 200)
        line = SimpleNamespace(statistics=statistics, address="loopback:y")
        self.links = SimpleNamespace(lines={B: line})
        self.standing = SimpleNamespace(
            plan=self.plan, trouble="", sessions=0, reason=lambda: "they load",
            standing_entry=lambda: self.entry, changes=self.changes,
        )  # fmt: skip
        self.hosts: dict[NodeId, tuple[NodeId, ...]] = {B: (A,), C: (A, B, D)}
        self.entry: NodeId | None = None
        self.desk = SimpleNamespace(counts=Counts(), generate=self.generate)
        self.invited: list[tuple[Any, ...]] = []
        self.expelled: list[Removal] = []
        self.left, self.is_full = 0, False
        self.door = NodeDoor(cast("Any", self))

    async def changes(self) -> AsyncGenerator[None, None]:
        while True:
            yield

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        yield Piece(request.raw or "")

    def now(self) -> float:
        return 1.5

    def invite(self, *wishes: Any) -> str:
        self.invited.append(wishes)
        return "ticket"

    def expel(self, removal: Removal) -> None:
        self.expelled.append(removal)
        if not self.is_full:
            self.machine.removals[removal.node] = removal
            self.machine.profiles.pop(removal.node, None)

    def leave(self) -> None:
        self.left += 1

    def load(self, *nodes: NodeId) -> None:
        for node in nodes:
            self.states[node] = replace(self.states[node], is_loaded=True)

    def of(self, node: NodeId) -> dict[str, Any]:
        (found,) = (each for each in self.door.status()["nodes"] if each["node"] == show(node))
        return cast("dict[str, Any]", found)


@pytest.fixture
def fake() -> Fake:
    return Fake()


RING = {"state", "reason", "epoch", "digest", "policy", "entry", "stages", "predicted", "measured",
        "advice"}  # fmt: skip
NODE = {"node", "short", "name", "role", "state", "reason", "addresses", "memory_bytes", "layers",
        "rank", "self", "incarnation", "version", "link"}  # fmt: skip
LINK = {"round_trip_ms", "path", "path_reason", "address", "bytes_sent", "bytes_received",
        "heard_s", "clock_s"}  # fmt: skip
STATUS = {"mesh", "node", "name", "version", "model", "ring", "nodes", "sessions", "listening",
          "networks", "since_s"}  # fmt: skip


def test_the_status_has_every_field_and_no_other(fake: Fake) -> None:
    status = fake.door.status()

    assert status.keys() == STATUS
    assert status["ring"].keys() == RING
    assert all(node.keys() == NODE for node in status["nodes"])
    assert fake.of(B)["link"].keys() == LINK
    assert status["model"] == {
        "name": "tiny", "layers": 4, "hidden_size": 4, "dtype": "bfloat16", "quant": "none",
    }  # fmt: skip
    assert status["sessions"].keys() == {"active", "waiting", "served", "failed", "tokens"}
    assert (status["mesh"], status["node"]) == (FOUNDED.mesh.hex(), show(A))
    assert status["listening"] == ["loopback:a"]


def test_the_ring_is_told_as_it_forms(fake: Fake) -> None:
    ring = fake.door.status()["ring"]

    assert (ring["state"], ring["reason"], ring["entry"]) == (
        "forming", "they load", show(fake.plan.stages[0].node),
    )  # fmt: skip
    assert ring["digest"] == fake.plan.digest.hex()[:12]
    assert ring["epoch"] == fake.plan.epoch
    assert [stage.keys() for stage in ring["stages"]] == [{"rank", "node", "name", "layers"}] * 2
    assert ring["predicted"]["ms_per_token"] > 0
    assert [hop["rank"] for hop in ring["predicted"]["hops"]] == [0, 1]

    fake.entry = A
    ring = fake.door.status()["ring"]
    assert (ring["state"], ring["reason"]) == ("serving", "")


def test_without_a_plan_it_waits(fake: Fake) -> None:
    fake.standing.plan = fake.agreement = fake.machine.charter = None
    fake.machine.profiles = {}

    status = fake.door.status()

    assert status["model"] is None
    assert status["ring"] == {
        "state": "waiting", "reason": "they load", "epoch": 0, "digest": "", "policy": "auto",
        "entry": None, "stages": [], "predicted": None, "measured": None, "advice": "",
    }  # fmt: skip
    assert [node["self"] for node in status["nodes"]] == [True]
    assert fake.door.models() == []
    assert fake.door.plan()["standbys"] == fake.door.plan()["refused"] == []


def test_what_cannot_be_predicted_is_not(fake: Fake) -> None:
    assert fake.agreement is not None
    fake.agreement = replace(fake.agreement, plan=None, offers=())
    assert fake.door.status()["ring"]["predicted"] is None

    fake.agreement = None
    assert fake.door.status()["ring"]["predicted"] is None


def test_this_node_comes_first(fake: Fake) -> None:
    nodes = fake.door.status()["nodes"]

    assert [(node["name"], node["self"]) for node in nodes] == [
        ("here", True), ("spare", False), ("there", False),
    ]  # fmt: skip
    assert [node["incarnation"] for node in nodes] == [7, 0, 3]
    assert [node["short"] for node in nodes] == [short(A), short(C), short(B)]


def test_a_link_is_told_with_its_figures(fake: Fake) -> None:
    assert fake.of(B)["link"] == {
        "round_trip_ms": 2.5, "path": "direct", "path_reason": "", "address": "loopback:y",
        "bytes_sent": 100, "bytes_received": 200, "heard_s": 0.5, "clock_s": -3.25,
    }  # fmt: skip
    assert fake.of(C)["link"] is None


def test_each_node_has_one_state(fake: Fake) -> None:
    fake.load(B)
    fake.standing.trouble = "no memory"

    assert (fake.of(A)["state"], fake.of(A)["reason"]) == ("loading", "no memory")
    assert (fake.of(B)["state"], fake.of(B)["layers"]) == (
        "serving", str(fake.plan.stages[fake.plan.rank(B) or 0].span),
    )  # fmt: skip
    assert fake.of(C)["state"] == "standby"
    assert fake.of(C)["reason"]
    assert (fake.of(C)["layers"], fake.of(C)["rank"]) == (None, None)

    fake.states[C] = replace(fake.states[C], lifecycle=Lifecycle.JOIN)
    assert fake.of(C)["state"] == "joining"
    assert fake.agreement is not None
    fake.agreement = replace(fake.agreement, refused={C: "other weights"})
    assert (fake.of(C)["state"], fake.of(C)["reason"]) == ("refused", "other weights")
    fake.machine.alive = {A, B}
    assert fake.of(C)["state"] == "down"
    fake.states[C] = State(Lifecycle.LEFT)
    assert (fake.of(C)["state"], fake.of(C)["reason"]) == ("left", "")
    del fake.states[C]
    assert fake.of(C)["state"] == "down"
    fake.agreement = None
    fake.machine.alive, fake.standing.plan = {A, B, C}, None
    assert (fake.of(B)["state"], fake.of(B)["reason"]) == ("standby", "")


def test_the_plan_says_who_has_no_part_and_why(fake: Fake) -> None:
    assert fake.agreement is not None
    fake.agreement = replace(fake.agreement, refused={B: "other weights"})

    plan = fake.door.plan()

    assert plan.keys() == RING | {"standbys", "refused"}
    assert plan["refused"] == [{"node": show(B), "name": "there", "reason": "other weights"}]
    (standby,) = plan["standbys"]
    assert (standby["node"], standby["name"]) == (show(C), "spare")


def test_what_was_measured_is_told(fake: Fake) -> None:
    fake.desk.counts = Counts(active=3, served=2, failed=1, tokens=9)
    assert fake.door.status()["ring"]["measured"] is None

    fake.desk.counts.last, fake.desk.counts.last_tokens = answer_of("", 0), 5
    fake.standing.sessions = 1
    status = fake.door.status()

    measured = status["ring"]["measured"]
    assert (measured["ms_per_token"], measured["ttft_ms"], measured["tokens"]) == (4.0, 20.0, 5)
    assert measured["hops"][0] == {
        "rank": 0, "node": "node-0", "layers": "0:4", "compute_ms": 1.25, "serialise_ms": 0.08,
        "queue_ms": 0.02, "wire_ms": 0.05, "bytes_per_token": 512.0,
    }  # fmt: skip
    assert status["sessions"] == {
        "active": 3, "waiting": 2, "served": 2, "failed": 1, "tokens": 9,
    }  # fmt: skip


def test_an_answer_of_one_token_measures_nothing(fake: Fake) -> None:
    fake.desk.counts.last = replace(answer_of("", 1), ms_per_token=0.0)

    assert fake.door.status()["ring"]["measured"] is None


def test_members_are_nodes_clients_and_the_removed(fake: Fake) -> None:
    fake.machine.removals[D] = Removal(D, A, 1)

    members = fake.door.members()

    assert [(each["role"], each["state"], each["self"]) for each in members] == [
        ("node", "loading", True), ("node", "standby", False), ("node", "loading", False),
        ("client", "linked", False), ("", "removed", False),
    ]  # fmt: skip
    assert members[-1]["node"] == show(D)
    assert [each["hosts"] for each in members] == [
        [], [show(A), show(B), show(D)], [show(A)], [], [],
    ]  # fmt: skip


def test_the_model_of_the_charter_answers(fake: Fake) -> None:
    assert fake.door.models() == ["tiny"]


def test_a_ticket_without_limits(fake: Fake) -> None:
    assert fake.door.invite("client", 0, 0) == "ticket"
    assert fake.door.invite("node", 60, 2) == "ticket"
    assert fake.invited == [(Role.CLIENT, None, None), (Role.NODE, 60, 2)]


@pytest.mark.parametrize(
    ("role", "expires_s", "uses"),
    [("king", 1, 1), ("", 0, 0), ("node", -1, 1), ("node", 1, -1), ("node", MAX_LASTS_S + 1, 1)],
)
def test_an_odd_ticket_is_refused(fake: Fake, role: str, expires_s: int, uses: int) -> None:
    with pytest.raises(UserError) as raised:
        fake.door.invite(role, expires_s, uses)

    assert raised.value.hint
    assert fake.invited == []


def test_a_removal_spares_who_is_here_and_who_let_it_in(fake: Fake) -> None:
    told = fake.door.remove("there")

    assert told == {
        "node": show(B), "name": "there", "spared": [{"node": show(C), "name": "spare"}],
    }  # fmt: skip
    (removal,) = fake.expelled
    assert (removal.node, removal.issuer, removal.spared) == (B, A, (D,))
    assert removal.is_signed(fake.mesh)


def test_a_removal_spares_nobody_whom_another_invited(fake: Fake) -> None:
    fake.hosts[C] = (A,)

    assert fake.door.remove("there")["spared"] == []
    assert fake.expelled[0].spared == ()


def test_the_guests_of_who_is_gone_are_not_spared(fake: Fake) -> None:
    fake.machine.alive = {A, B}

    assert fake.door.remove("there")["spared"] == []


def test_a_removal_that_the_mesh_cannot_remember_is_told(fake: Fake) -> None:
    fake.is_full = True

    with pytest.raises(MeshError, match="no more removals"):
        fake.door.remove("there")


def test_who_was_never_heard_can_be_removed_by_its_id(fake: Fake) -> None:
    assert fake.door.remove(show(D))["name"] == ""


@pytest.mark.parametrize("name", ["here", show(A)])
def test_nobody_removes_itself(fake: Fake, name: str) -> None:
    with pytest.raises(UserError, match="does not remove itself"):
        fake.door.remove(name)

    assert fake.expelled == []


async def test_events_begin_with_how_it_is(fake: Fake) -> None:
    async with aclosing(fake.door.events()) as events, asyncio.timeout(5):
        first = await anext(events)

    assert first == {
        "event": "changed", "ring": "forming", "epoch": fake.plan.epoch,
        "digest": fake.plan.digest.hex()[:12],
        "nodes": {show(A): "loading", show(B): "loading", show(C): "standby"},
    }  # fmt: skip


async def test_requests_go_to_the_desk_until_the_node_leaves(fake: Fake) -> None:
    assert [event async for event in fake.door.generate(Request(raw="x"))] == [Piece("x")]

    fake.is_leaving = True

    with pytest.raises(UserError, match="is leaving"):
        await anext(fake.door.generate(Request(raw="x")))


def test_leaving_is_the_business_of_the_node(fake: Fake) -> None:
    fake.door.leave()

    assert fake.left == 1
