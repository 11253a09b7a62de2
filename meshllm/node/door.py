"""A node as its owner sees it: every figure is from this node's own records; changes nothing."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshllm.errors import MeshError, UserError
from meshllm.names import NodeId
from meshllm.node.desk import Counts
from meshllm.node.founding import find_node
from meshllm.protocol.advice import advise
from meshllm.protocol.agreement import Agreement
from meshllm.protocol.credential import Role, remove
from meshllm.protocol.identity import short, show
from meshllm.protocol.plan import Plan
from meshllm.protocol.prediction import Prediction, predict
from meshllm.protocol.records import Lifecycle, Profile, State
from meshllm.request import Event, Request

if TYPE_CHECKING:
    from meshllm.node.node import MeshNode

Fields = dict[str, Any]

MAX_LASTS_S = 100 * 365 * 24 * 3600  # s of a ticket: a century


class NodeDoor:
    """What the HTTP application shows of a node, and lets its owner do."""

    def __init__(self, node: "MeshNode") -> None:
        self._node = node
        self._advised: tuple[Agreement | None, str] = None, ""

    def status(self) -> Fields:
        """Tell how the node, its ring and its mesh are."""
        node, counts = self._node, self._node.desk.counts
        return {
            "mesh": node.mesh.hex(),
            "node": show(node.me),
            "name": node.name,
            "version": node.version,
            "model": self._model(),
            "ring": self._ring(),
            "nodes": [self._node_fields(each) for each in self._known()],
            "sessions": {
                "active": counts.active,
                "waiting": max(0, counts.active - node.standing.sessions),
                "served": counts.served,
                "failed": counts.failed,
                "tokens": counts.tokens,
            },
            "listening": list(node.place.addresses),
            "networks": [asdict(network) for network in node.place.survey()],
            "since_s": time.monotonic() - node.since,
        }

    def plan(self) -> Fields:
        """Tell who holds what, and why."""
        agreement, ring = self._node.agreement, self._ring()
        refused = agreement.refused if agreement else {}
        return {
            **ring,
            "reason": agreement.reason if agreement else ring["reason"],
            "standbys": [
                {"node": show(each.node), "name": self._name(each.node), "reason": each.reason}
                for each in (agreement.standbys if agreement else ())
            ],
            "refused": [
                {"node": show(each), "name": self._name(each), "reason": why}
                for each, why in refused.items()
            ],
        }

    def members(self) -> list[Fields]:
        """List who holds a credential of the mesh, as far as this node has heard."""
        machine = self._node.machine
        known = [
            self._member(each, str(Role.NODE), self._state(each)[0], machine.hosts(each))
            for each in self._known()
        ]
        clients = [
            self._member(
                peer, str(Role.CLIENT), "linked", [each.issuer for each in contact.credential.chain]
            )
            for peer, contact in machine.links.items()
            if contact.role is Role.CLIENT
        ]
        removed = [self._member(each, "", "removed") for each in machine.removals]
        return [*known, *clients, *removed]

    def models(self) -> list[str]:
        """List the models that answer here."""
        charter = self._node.machine.charter
        return [charter.shape.name] if charter else []

    def invite(self, role: str, expires_s: int, uses: int) -> str:
        """Make a ticket; 0 seconds or uses are without a limit."""
        if role not in tuple(Role):
            raise UserError(f"`{role}` is no role", hint="`node` or `client`")
        if not (0 <= expires_s <= MAX_LASTS_S and uses >= 0):
            raise UserError(
                f"A ticket cannot last {expires_s} s and {uses} uses",
                hint=f"at most {MAX_LASTS_S} s; 0 is without a limit",
            )
        return self._node.invite(Role(role), expires_s or None, uses or None)

    def remove(self, node: str) -> Fields:
        """Shut a member out for ever, and whom it invited, but for those here now: tell which."""
        own, machine = self._node, self._node.machine
        gone = find_node(node, machine.profiles)
        if gone == own.me:
            raise UserError("A node does not remove itself", hint="stop it with Ctrl-C")
        paths = ((*machine.hosts(each), each) for each in sorted(machine.alive))
        guests = {path[-1]: path[path.index(gone) + 1] for path in paths if gone in path[:-1]}
        spared = tuple(sorted(set(guests.values())))  # who invited a guest, where it did not
        removal = remove(own.keyring.key, own.mesh, gone, int(time.time()), spared)
        name = self._name(gone)  # which is forgotten with the rest of it
        own.expel(removal)
        if gone not in machine.removals:
            raise MeshError("The mesh remembers no more removals", hint="begin a new mesh")
        stay = [{"node": show(each), "name": self._name(each)} for each in guests]
        return {"node": show(gone), "name": name, "spared": stay}

    def leave(self) -> None:
        """Finish what is being answered, take no more, and leave the mesh."""
        self._node.leave()

    async def events(self) -> AsyncGenerator[Fields, None]:
        """Yield once at first, then whenever something may have changed."""
        async with aclosing(self._node.standing.changes()) as events:
            async for _ in events:
                ring = self._ring()
                yield {
                    "event": "changed",
                    "ring": ring["state"],
                    "epoch": ring["epoch"],
                    "digest": ring["digest"],
                    "nodes": {show(each): self._state(each)[0] for each in self._known()},
                }

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of a request; see `desk.Desk.generate`."""
        if self._node.is_leaving:
            raise UserError("This node is leaving the mesh", hint="ask another node")
        async with aclosing(self._node.desk.generate(request)) as events:
            async for event in events:
                yield event

    def _member(self, node: NodeId, role: str, state: str, hosts: Sequence[NodeId] = ()) -> Fields:
        return {
            "node": show(node),
            "short": short(node),
            "name": self._name(node) if role != Role.CLIENT else "",
            "role": role,
            "state": state,
            "self": node == self._node.me,
            "hosts": [show(each) for each in hosts],
        }

    def _known(self) -> list[NodeId]:
        machine = self._node.machine
        known = {*machine.profiles, self._node.me}
        return sorted(known, key=lambda node: (node != self._node.me, self._name(node), node))

    def _name(self, node: NodeId) -> str:
        profile = self._node.machine.profiles.get(node)
        return profile.name if profile else ""

    def _model(self) -> Fields | None:
        charter = self._node.machine.charter
        if charter is None:
            return None
        return {
            "name": charter.shape.name,
            "layers": charter.shape.layers,
            "hidden_size": charter.shape.hidden_size,
            "dtype": charter.dtype.name.lower(),
            "quant": str(charter.quant),
        }

    def _ring(self) -> Fields:
        node = self._node
        plan, charter = node.standing.plan, node.machine.charter
        stands = plan is not None and node.standing.standing_entry() is not None
        state = "waiting" if plan is None else ("serving" if stands else "forming")
        prediction = self._predict(plan) if plan else None
        return {
            "state": state,
            "reason": "" if stands else node.standing.reason(),
            "epoch": plan.epoch if plan else 0,
            "digest": plan.digest.hex()[:12] if plan else "",
            "policy": str(charter.policy) if charter else "auto",
            "entry": show(plan.stages[0].node) if plan else None,
            "stages": [
                {
                    "rank": rank,
                    "node": show(stage.node),
                    "name": self._name(stage.node),
                    "layers": str(stage.span),
                }
                for rank, stage in enumerate(plan.stages if plan else ())
            ],
            "predicted": _predicted(prediction) if prediction else None,
            "measured": _measured(node.desk.counts),
            "advice": self._advise(),
        }

    def _advise(self) -> str:
        """Say what would make the ring faster; thought out once for each agreement."""
        agreement = self._node.agreement
        if agreement is not None and agreement is not self._advised[0]:
            self._advised = agreement, advise(agreement)
        return self._advised[1]

    def _predict(self, plan: Plan) -> Prediction | None:
        agreement, charter = self._node.agreement, self._node.machine.charter
        if agreement is None or charter is None:
            return None
        offered = {offer.node for offer in agreement.offers}
        if not offered.issuperset(stage.node for stage in plan.stages):
            return None  # a member has gone, and another plan is on its way
        return predict(plan, agreement.offers, agreement.links, charter.shape)

    def _node_fields(self, node: NodeId) -> Fields:
        own, machine = self._node, self._node.machine
        profile, plan = machine.profiles.get(node, _NOBODY), own.standing.plan
        rank = plan.rank(node) if plan else None
        state, reason = self._state(node)
        return {
            "node": show(node),
            "short": short(node),
            "name": profile.name,
            "role": str(Role.NODE),
            "state": state,
            "reason": reason,
            "addresses": list(profile.addresses),
            "memory_bytes": profile.memory_bytes,
            "layers": str(plan.stages[rank].span) if plan and rank is not None else None,
            "rank": rank,
            "self": node == own.me,
            "incarnation": own.incarnation if node == own.me else self._instance(node),
            "version": profile.version,
            "link": self._link(node),
        }

    def _instance(self, node: NodeId) -> int:
        contact = self._node.machine.links.get(node)
        return contact.instance if contact else 0

    def _state(self, node: NodeId) -> tuple[str, str]:
        """Say what a node does, and why."""
        own, machine, agreement = self._node, self._node.machine, self._node.agreement
        state = machine.states.get(node, State())
        if node not in machine.alive:
            left = state.lifecycle is Lifecycle.LEFT
            return ("left", "") if left else ("down", "no link to it stands")
        if agreement and (why := agreement.refused.get(node)):
            return "refused", why
        if state.lifecycle is Lifecycle.JOIN:
            return "joining", "it looks at its model"
        if own.standing.plan and own.standing.plan.rank(node) is not None:
            if state.is_loaded:
                return "serving", ""
            return "loading", str(own.standing.trouble or "") if node == own.me else ""
        reasons = {each.node: each.reason for each in agreement.standbys} if agreement else {}
        return "standby", reasons.get(node, "")

    def _link(self, node: NodeId) -> Fields | None:
        link, contact = self._node.links.lines.get(node), self._node.machine.links.get(node)
        if link is None or contact is None:
            return None
        statistics = link.statistics
        return {
            "round_trip_ms": contact.round_trip_us / 1e3,
            "path": str(statistics.path),
            "path_reason": statistics.path_reason,
            "address": link.address,
            "bytes_sent": statistics.bytes_sent,
            "bytes_received": statistics.bytes_received,
            "heard_s": max(0.0, self._node.now() - contact.heard),
            "clock_s": contact.ahead_s,
        }


_NOBODY = Profile("", "", (), 0)


def _predicted(prediction: Prediction) -> Fields:
    return {
        "ms_per_token": prediction.seconds_per_token * 1e3,
        "ttft_ms": prediction.ttft_s * 1e3,
        "head_ms": prediction.head_s * 1e3,
        "hops": [
            {"rank": rank, "compute_ms": hop.compute_s * 1e3, "wire_ms": hop.wire_s * 1e3}
            for rank, hop in enumerate(prediction.hops)
        ],
    }


def _measured(counts: Counts) -> Fields | None:
    answer = counts.last
    if answer is None or not answer.ms_per_token:
        return None
    return {
        "ms_per_token": answer.ms_per_token,
        "ttft_ms": answer.ttft_ms,
        "tokens": counts.last_tokens,
        "hops": [
            {
                "rank": hop.rank,
                "node": hop.node,
                "layers": str(hop.span),
                "compute_ms": hop.compute_ms,
                "serialise_ms": hop.serialise_ms,
                "queue_ms": hop.queue_ms,
                "wire_ms": hop.wire_ms,
                "bytes_per_token": hop.bytes_per_token,
            }
            for hop in answer.hops
        ],
    }
