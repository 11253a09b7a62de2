"""Members that lie about themselves, and ranks that send what no rank computes."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshllm.node.agreement.load_watch import LOAD_S
from meshllm.protocol.membership.peer_limit import MAX_FAULTS
from meshllm.protocol.membership.records import MAX_BYTES, MIN_SECONDS, Lifecycle, StateRecord
from tests.processes.fleet import ALONE, POLL_S, Node, meshllm, open_fleet, until
from tests.security.attack import Attack, Outcome
from tests.security.member import Member, join

LISTEN_S = 3.0  # s; a beat is sent each half second
SPARE_S = 30.0  # s until the next ring serves
FLOOD_S = 40.0  # s; all that the liar has to send
SLACK_BYTES = 128 << 20  # what the computation of rows needs besides
LIAR = str(Path(__file__).with_name("liar.py"))
PROMPT = "What is a ring?"


def claim_to_be_the_fastest() -> Outcome:
    """Claim memory and speed of no machine, and load nothing; the owner has pinned the entry."""
    return _boasting(says_loaded=False)


def claim_to_have_loaded() -> Outcome:
    """Claim to have loaded as well, and open no link of the ring."""
    return _boasting(says_loaded=True)


def _boasting(*, says_loaded: bool) -> Outcome:
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        pinned = "--members", "2", "--entry", "self"
        owner = fleet.node("owner").start("--model", "builtin", *pinned, *ALONE)
        fleet.form()
        attack = _claim(ticket, fleet.folder / "attacker", owner, says_loaded=says_loaded)
        entries, waited_s = asyncio.run(attack)
        is_pinned = entries == {owner.status()["node"]}
    effect = f"entry {'stays' if is_pinned else 'moves'}, the owner waits {waited_s:.0f} s"
    held = is_pinned and waited_s < LOAD_S + SPARE_S
    return Outcome(effect, f"--entry self, {LOAD_S:.0f} s to load", held=held)


def send_nan() -> Outcome:
    """Send NaN as hidden states, while the owner asks."""
    return _sending("nan")


def send_wide_rows() -> Outcome:
    """Send hidden states with a column too many, while the owner asks."""
    return _sending("wide")


def _sending(lie: str) -> Outcome:
    with _pair(lie) as (owner, _):
        failed = 0
        while meshllm("chat", state=owner.state, stdin=f"{PROMPT}\n").returncode:
            failed += 1
            time.sleep(LISTEN_S)
        ring = owner.status()["ring"]
    reasons = " ".join(each["reason"] for each in ring["standbys"])
    held = 0 < failed <= MAX_FAULTS and "its data was invalid" in reasons
    return Outcome(f"{failed} requests fail, then it is left out", f"{MAX_FAULTS}", held=held)


def compute_wrong_values() -> Outcome:
    """Copy the digests and compute other values: nobody sees it before the owner removes it."""
    ask = "chat", "--temperature", "0", "--max-tokens", "20", PROMPT
    with _pair("wrong") as (owner, liar):
        spoiled = meshllm(*ask, state=owner.state)
        done = meshllm("ring", "remove", "--yes", liar.status()["node"], state=owner.state)
        assert done.returncode == 0, done.stderr
        until(lambda: len(owner.status()["ring"]["stages"]) == 1, lambda: owner.stderr)
        right = meshllm(*ask, state=owner.state)
    alone = meshllm("chat", "--model", "builtin", *ask[1:])
    is_spoiled = spoiled.stdout != alone.stdout
    effect = f"the answer is {'spoiled' if is_spoiled else 'right'}, right after `ring remove`"
    held = not spoiled.returncode and is_spoiled and right.stdout == alone.stdout != ""
    return Outcome(effect, "digests are claims, as this page says", held=held)


def exceed_the_context() -> Outcome:
    """As the entry, send rows of 64 sessions at positions that the model does not have."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("liar")
        pinned = "--members", "2", "--entry", "self"
        lying = fleet.node("liar")
        lying.start("--model", "builtin", *pinned, *ALONE, within=(sys.executable, LIAR, "beyond"))
        victim = fleet.node("victim").start("--join", ticket, *ALONE)
        fleet.form()
        before = victim.status()["memory"]
        most, until_s = before, time.monotonic() + FLOOD_S
        while time.monotonic() < until_s:
            now = victim.status()["memory"]
            most = {name: max(most[name], now[name]) for name in most}
            time.sleep(POLL_S)
        serves = victim.is_running and victim.status()["ring"]["state"] == "serving"
    grown, kept, room = most["process"] - before["process"], most["kv_cache"], most["kv_room"]
    effect = f"{kept >> 20} of {room >> 20} MiB of KV caches, {grown >> 20} MiB more memory"
    held = serves and 0 < kept <= room and grown <= kept + SLACK_BYTES
    return Outcome(effect, "32 sessions, the context, the memory offered", held=held)


@contextmanager
def _pair(lie: str) -> Iterator[tuple[Node, Node]]:
    """Start the owner's node and a liar that joins it; yield both when their ring serves."""
    with open_fleet() as fleet:
        ticket = fleet.create_mesh("owner")
        owner = fleet.node("owner").start("--model", "builtin", "--members", "2", *ALONE)
        within = sys.executable, LIAR, lie
        liar = fleet.node("liar").start("--join", ticket, *ALONE, within=within)
        fleet.form()
        yield owner, liar


async def _claim(
    ticket: str, state: Path, owner: Node, *, says_loaded: bool
) -> tuple[set[str], float]:
    """Return the entries that the owner saw, and how long its ring did not serve."""
    async with join(ticket, state) as member:
        await asyncio.sleep(LISTEN_S)
        _boast(member)
        entries, down_s, seen = set[str](), 0.0, time.monotonic()
        end = seen + LOAD_S + SPARE_S
        while (now := time.monotonic()) < end:
            ring = (await asyncio.to_thread(owner.status))["ring"]
            if says_loaded:
                _follow(member)
            entries.add(ring["entry"])
            down_s += 0.0 if ring["state"] == "serving" else now - seen
            seen = now
            await asyncio.sleep(0.2)
        return entries, down_s


def _boast(member: Member) -> None:
    (theirs,) = member.machine.profiles.values()
    profile = replace(
        theirs, name="attacker", addresses=(), memory_bytes=MAX_BYTES, reserve_bytes=0,
        layer_s=((1, MIN_SECONDS),), head_s=0.0, span=None,
    )  # fmt: skip
    now = asyncio.get_running_loop().time()
    state = StateRecord(Lifecycle.SERVING)
    member.links.act(member.machine.publish(profile=profile, state=state, now=now))


def _follow(member: Member) -> None:
    """Claim to have loaded the plan that the owner follows."""
    states = member.machine.states
    (plan,) = (state.followed for node, state in states.items() if node != member.machine.me)
    state = StateRecord(Lifecycle.SERVING, followed=plan, is_loaded=True)
    if (own := states.get(member.machine.me)) and own.followed != plan:
        now = asyncio.get_running_loop().time()
        member.links.act(member.machine.publish(state=state, now=now))


ATTACKS = (
    Attack("1e-12 s a layer, 2^50 bytes", "sole entry, reads prompts", claim_to_be_the_fastest),
    Attack("a span that is not loaded", "the ring waits without end", claim_to_have_loaded),
    Attack("NaN as hidden states", "blamed on the weights, nobody left out", send_nan),
    Attack("hidden states too wide", "blamed on rank 0, nobody left out", send_wide_rows),
    Attack("copied digests, wrong values", "the same", compute_wrong_values),
    Attack("positions up to 38,912 of 2,048", "all are computed and kept", exceed_the_context),
)
