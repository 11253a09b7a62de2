"""Admission to a mesh: tickets, keys, state folders."""

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator

import httpx2
import pytest

from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.ticket import parse_ticket
from tests.processes.fleet import (
    ALONE,
    WAIT_S,
    Fleet,
    Node,
    free_address,
    meshllm,
    open_fleet,
    until,
)
from tests.processes.fork_server import ForkServer
from tests.security.removal import heard_by_a_former_member

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

NOT_AUTHORISED, USAGE = 5, 2
KEY = "a-key-that-several-doors-know"


@pytest.fixture(scope="module")
def pair(server: ForkServer) -> Iterator[Fleet]:
    """A founder and a node that joined it."""
    with open_fleet(server) as fleet:
        ticket = fleet.create_mesh("founder")
        fleet.node("founder").start("--members", "2", *ALONE)
        fleet.node("guest").start("--join", ticket, *ALONE)
        fleet.form()
        yield fleet


def ticket(node: Node, *options: str) -> str:
    """Create a ticket with a node."""
    return meshllm("ring", "ticket", *options, state=node.state).stdout.strip()


def test_a_state_folder_is_for_one_node(pair: Fleet) -> None:
    done = meshllm("node", *ALONE, state=pair.node("guest").state)

    assert done.returncode == USAGE
    assert done.stdout == ""
    assert done.stderr.startswith("error: A node is already running with the key in `")
    assert done.stderr.count("\n") == 2
    assert "--state FOLDER" in done.stderr


def test_a_copied_key_is_refused_while_its_owner_is_here(pair: Fleet) -> None:
    owner, twin = pair.node("guest"), pair.node("twin")
    # else the twin knows no address
    until(lambda: bool(StateStore.open(owner.state).peers), pair.told)
    left_out = shutil.ignore_patterns("api.sock", "lock")
    shutil.copytree(owner.state, twin.state, ignore=left_out)

    twin.start(*ALONE)

    assert twin.ended() == NOT_AUTHORISED
    assert "error: Another process runs with the key of this node\nhint: " in twin.stderr
    assert owner.is_running
    assert pair.node("founder").states() == {"founder": "serving", "guest": "serving"}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        pytest.param(
            ("--role", "client"), USAGE, "The ticket is for a client", marks=pytest.mark.slow
        ),
        (("--expires", "1s"), NOT_AUTHORISED, "The ticket has expired"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(
    pair: Fleet, options: tuple[str, ...], code: int, words: str
) -> None:
    made = ticket(pair.node("guest"), *options)
    if "--expires" in options:
        expires_s = parse_ticket(made).expires_s
        until(lambda: time.time() > expires_s)

    done = meshllm("node", *ALONE, "--join", made, state=pair.folder / options[1])

    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {words}\nhint: ")


def test_a_mistyped_ticket_says_so(pair: Fleet) -> None:
    made = ticket(pair.node("founder"))
    mistyped = f"{made[:40]}{'b' if made[40] == 'a' else 'a'}{made[41:]}"

    done = meshllm("node", *ALONE, "--join", mistyped, state=pair.folder / "mistyped")

    assert done.returncode == USAGE
    assert done.stderr.startswith("error: ")
    assert "bug" not in done.stderr


def test_a_member_that_is_removed_ends_and_never_returns(pair: Fleet) -> None:
    founder, member = pair.node("founder"), pair.node("member")
    once = ticket(pair.node("guest"))
    member.start("--join", once, *ALONE)
    until(lambda: founder.states().get("member") in {"serving", "standby"}, pair.told)

    done = meshllm("ring", "remove", member.status()["node"], "--yes", state=founder.state)
    code = member.ended()

    assert done.returncode == 0, done.stderr
    assert code == NOT_AUTHORISED
    assert "is removed from the mesh" in member.stderr
    until(lambda: "member" not in pair.node("guest").states(), pair.told)

    new = ticket(pair.node("guest"))
    assert member.start("--join", new, *ALONE).ended() == NOT_AUTHORISED
    assert "removed from the mesh" in member.stderr

    shutil.rmtree(member.state)
    assert member.start("--join", once, *ALONE).ended() == NOT_AUTHORISED
    assert "Ticket rejected" in member.stderr


def test_a_key_revoked_on_one_node_is_refused_at_the_api_server_of_another(fleet: Fleet) -> None:
    address, keys = free_address(), fleet.folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    invitation = fleet.create_mesh("founder")
    api_server = ("--serve", address, "--key-file", str(keys))
    fleet.node("founder").start("--members", "2", *ALONE)
    fleet.node("guest").start("--join", invitation, *api_server, *ALONE)
    fleet.form()
    assert models_status(address) == 200

    done = meshllm("key", "revoke", "-", state=fleet.node("founder").state, stdin=f"{KEY}\n")

    assert done.stderr == "the key is revoked at all API servers of the mesh\n"
    until(lambda: models_status(address) == 401, fleet.told)
    assert KEY not in fleet.told()


def models_status(address: str) -> int:
    """Ask an API server for its models with the key; return the HTTP status."""
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"http://{address}/v1/models"
    return httpx2.get(url, headers=headers, timeout=WAIT_S).status_code


def test_a_removal_shuts_out_one_member_and_no_other(fleet: Fleet) -> None:
    invitation = fleet.create_mesh("founder")
    founder = fleet.node("founder").start("--members", "1", *ALONE)
    fleet.form()
    unused = ticket(founder)
    away = fleet.node("away").start("--join", invitation, *ALONE)
    until(lambda: "away" in founder.states(), fleet.told)
    away.send(signal.SIGTERM)
    away.ended()
    heard = asyncio.run(heard_by_a_former_member(founder, ticket(founder), fleet.folder / "member"))

    away.start(*ALONE)  # with its own credential, issued before the removal
    fleet.node("later").start("--join", ticket(founder), *ALONE)
    fleet.node("early").start("--join", unused, *ALONE)

    assert heard == (True, 0)
    here = {"founder", "away", "later", "early"}
    until(lambda: names(founder, "serving", "standby") == here, fleet.told)


def names(node: Node, *states: str) -> set[str]:
    """Return the nodes that a node knows in one of these states."""
    return {name for name, state in node.states().items() if state in states}
