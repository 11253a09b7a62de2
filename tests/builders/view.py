"""Builders of `NodeView`: a mesh of three nodes, two of which form the ring."""

from dataclasses import replace
from typing import Any

from meshllm.names import LossCause, NodeId
from meshllm.node.requests.counts import RequestCounters
from meshllm.node.view import LinkView, NodeView, RingView
from meshllm.protocol.agreement.groups import groups_of
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.identity import NodeKey
from meshllm.transport.contract import LinkStatistics, Network
from tests.builders.handshakes import FOUNDED
from tests.builders.snapshots import World, profile

KEYS = sorted((NodeKey(bytes([n]) * 32) for n in range(4)), key=lambda key: key.node)
A, B, C, D = (key.node for key in KEYS)
CLIENT = NodeKey(b"c" * 32).node
_NETWORK = Network("none", "no NAT", ("192.0.2.1:7700",), (("192.0.2.9:8790", "registered"),))


def view_of(**changes: Any) -> NodeView:
    """The view of the lowest node, `here`, with `there` in its ring and `spare` on standby."""
    names = {A: "here", B: "there", C: "spare"}
    world = World(
        {node: replace(profile(n), name=names[node], addresses=("loopback:x",))
         for node, n in {A: 3, B: 3, C: 1}.items()}
    )  # fmt: skip
    agreement = world.agree(A)
    view = NodeView(
        me=A,
        name="here",
        version="1.0",
        mesh=FOUNDED.mesh,
        incarnation=7,
        since_s=3.0,
        is_leaving=False,
        recomputed={LossCause.NODE_LOST: 3, LossCause.NODE_SILENT: 2},
        addresses=("loopback:a",),
        networks=(_NETWORK,),
        charter=world.charter,
        profiles=dict(world.profiles),
        states=dict(world.follow(agreement).view(A).states),
        inviters={B: (A,), C: (A, B, D)},
        alive=frozenset({A, B, C}),
        removed=(),
        links={B: link_of(Role.NODE), CLIENT: link_of(Role.CLIENT)},
        agreement=agreement,
        advice="",
        plan=agreement.plan,
        is_served=False,
        reason="they load",
        trouble="",
        sessions=0,
        counts=RequestCounters(),
        rings=(RingView(groups_of(world.charter)[0], agreement.plan, is_served=False),),
    )
    return replace(view, **changes)


def link_of(role: Role) -> LinkView:
    """A link with some traffic."""
    statistics = LinkStatistics(1, 100, 2, 200)
    return LinkView(role, (), 3, 2500, 0.5, -3.25, statistics, "loopback:y")


def plan_of(view: NodeView) -> Plan:
    """The plan of a view that has one."""
    assert view.plan is not None
    return view.plan


def with_state(view: NodeView, node: NodeId, **changes: Any) -> NodeView:
    """Change the state record of a node."""
    return replace(view, states={**view.states, node: replace(view.states[node], **changes)})
