"""Nodes behind NATs of a real kernel: they meet, answer, and go on when the networks change."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.processes.capture import capturing
from tests.processes.conftest import QUESTION, STORY, Answers
from tests.processes.fleet import ask, asking, open_fleet, until
from tests.processes.namespaces import Router, can_make_namespaces, open_cafe, plug
from tests.processes.street import (
    ATTIC,
    BENCH,
    CELLAR,
    Residents,
    Traffic,
    block_udp,
    open_residents,
    renumbered,
)

NAMES = (ATTIC, BENCH, CELLAR)

pytestmark = [pytest.mark.slow, pytest.mark.socket, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    if reason := can_make_namespaces():
        pytest.skip(reason)


@contextmanager
def living(one: Router, two: Router) -> Iterator[Residents]:
    with open_fleet() as fleet, open_residents(one, two, fleet) as residents:
        residents.settle(*NAMES)
        yield residents


@pytest.fixture(scope="module")
def cones() -> Iterator[Residents]:
    """Three nodes of which two are behind NATs that keep ports."""
    with living(Router.CONE, Router.CONE) as residents:
        yield residents


@pytest.fixture(scope="module")
def symmetric() -> Iterator[Residents]:
    """Three nodes of which two are behind NATs that draw a port for each remote endpoint."""
    with living(Router.SYMMETRIC, Router.SYMMETRIC) as residents:
        yield residents


@contextmanager
def watching(residents: Residents) -> Iterator[Traffic]:
    with capturing(residents.street.router_of_one) as capture:
        yield Traffic(capture, residents.street)


def are_direct(residents: Residents) -> bool:
    return all(
        residents.paths(name) == dict.fromkeys(set(NAMES) - {name}, "direct") for name in NAMES
    )


def matches(pattern: str, lines: list[str]) -> bool:
    return any(re.match(pattern, line) for line in lines)


def are_registered(residents: Residents) -> bool:
    return all("@" in str(residents.node(name).status()["listening"]) for name in NAMES)


def test_nodes_behind_cones_answer_without_the_relay(cones: Residents, answers: Answers) -> None:
    with watching(cones) as traffic:
        until(lambda: are_direct(cones), cones.fleet.told)
        traffic.settle()
        begin = time.monotonic()
        said = [ask(cones.node(name), QUESTION) for name in NAMES]

    passed = traffic.direct(since=begin)
    assert said == [answers[QUESTION]] * 3
    assert {each.source[0] for each in passed} == {"203.0.113.10", "203.0.113.20"}
    assert len(passed) > 50
    assert traffic.relayed(since=begin) == []


def test_nodes_behind_symmetric_nats_answer_through_the_relay(
    symmetric: Residents, answers: Answers
) -> None:
    with watching(symmetric) as traffic:
        said = [ask(symmetric.node(name), QUESTION) for name in NAMES]

    assert said == [answers[QUESTION]] * 3
    assert traffic.direct() == []
    assert len(traffic.relayed()) > 50
    assert symmetric.paths(ATTIC) == {BENCH: "relay", CELLAR: "direct"}
    assert symmetric.paths(BENCH) == {ATTIC: "relay", CELLAR: "direct"}


def test_direct_paths_survive_a_killed_relay(cones: Residents, answers: Answers) -> None:
    until(lambda: are_direct(cones), cones.fleet.told)
    with watching(cones) as traffic:
        traffic.settle()

    with cones.without_relay():
        at_once = ask(cones.node(ATTIC), QUESTION)
        until(lambda: not are_registered(cones), cones.fleet.told)
        later = ask(cones.node(BENCH), QUESTION)
        paths = {path for name in NAMES for path in cones.paths(name).values()}
    until(lambda: are_registered(cones), cones.fleet.told)

    assert [at_once, later] == [answers[QUESTION]] * 2
    assert paths == {"direct"}


def test_a_running_answer_survives_a_change_of_network(cones: Residents, answers: Answers) -> None:
    home = cones.street.one
    until(lambda: are_direct(cones), cones.fleet.told)

    with open_cafe(cones.street, Router.CONE) as cafe:
        with asking(cones.node(ATTIC), STORY) as chat:
            plug(cafe, "cafe", instead_of="lan")
            was_under_way = chat.is_under_way
            roamed = chat.answer()
        until(lambda: are_direct(cones), cones.fleet.told)
        with asking(cones.node(BENCH), STORY) as chat:
            plug(home, "lan", instead_of="cafe")
            returned = chat.answer()
    until(lambda: are_direct(cones), cones.fleet.told)

    assert was_under_way
    assert [roamed, returned] == [answers[STORY]] * 2


def test_a_running_answer_survives_a_new_router_address(cones: Residents, answers: Answers) -> None:
    until(lambda: are_direct(cones), cones.fleet.told)

    with (
        asking(cones.node(BENCH), STORY) as chat,
        renumbered(cones.street.router_of_two, "203.0.113.21"),
    ):
        was_under_way = chat.is_under_way
        said = chat.answer()
        until(lambda: are_direct(cones), cones.fleet.told)

    assert was_under_way
    assert said == answers[STORY]


def test_a_node_without_udp_is_reached_through_a_websocket(answers: Answers) -> None:
    with open_fleet() as fleet, open_residents(Router.CONE, Router.CONE, fleet) as residents:
        block_udp(residents.street.router_of_one)
        residents.settle(ATTIC, BENCH)
        with watching(residents) as traffic:
            said = [ask(residents.node(name), QUESTION) for name in (ATTIC, BENCH)]
        paths = residents.paths(ATTIC), residents.paths(BENCH)

    assert said == [answers[QUESTION]] * 2
    assert traffic.direct() + traffic.relayed() == []
    assert paths == ({BENCH: "relay"}, {ATTIC: "relay"})


def findings(residents: Residents, name: str) -> dict[str, list[str]]:
    """Return what `meshllm doctor` found, by what it is about."""
    done = residents.command(name, "doctor", "--transport", "quic", "--json")
    found: dict[str, list[str]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["what"], []).append(each["found"])
    return found


def test_doctor_reports_the_nat_and_the_path_to_every_peer(
    cones: Residents, symmetric: Residents
) -> None:
    until(lambda: are_direct(cones), cones.fleet.told)

    cone, public, hard = findings(cones, ATTIC), findings(cones, CELLAR), findings(symmetric, BENCH)

    assert cone["nat"][0].startswith("endpoint-independent: seen as 203.0.113.10:7700; ")
    assert cone["relay"] == ["203.0.113.1:8790 registered over UDP"]
    assert matches(r"bench \w+ direct, .* ms: 203\.0\.113\.20:7700 answers in .* ms", cone["peer"])
    assert matches(r"cellar \w+ direct, .* ms: 203\.0\.113\.2:7700 answers in", cone["peer"])
    assert public["nat"][0].startswith("none: seen as 203.0.113.2:7700; ")
    assert hard["nat"][0].startswith("address-dependent: seen as 203.0.113.20:")
    assert hard["nat"][0].count("203.0.113.20:") >= 2
    assert matches(r"attic \w+ relay, .* ms: no answer to \d+ probes at \d", hard["peer"])


def test_the_status_of_a_ring_shows_each_path(symmetric: Residents) -> None:
    lines = symmetric.command(BENCH, "ring", "status").stdout.splitlines()

    assert {("attic", "relay"), ("cellar", "direct")} <= {tuple(each.split()[:2]) for each in lines}
