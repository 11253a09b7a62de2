import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

from meshllm.api.page import view
from meshllm.api.page.view import PageModel, PageSpeed, PageStatus, PageTimes, view_of
from meshllm.config import PolicyName
from meshllm.names import LossCause, Span
from meshllm.status import LossCounts, Measured, MemoryStatus, NodeState, SessionCounts
from tests.builders.fake_node import FOX
from tests.builders.status import (
    RINGS,
    node_id,
    status_of,
    waiting,
    with_link,
    with_node,
    with_ring,
)


def test_the_page_offers_every_policy() -> None:
    page = (Path(view.__file__).parent / "static" / "index.html").read_text("utf-8")
    offered = page.partition('<select id="policy">')[2].partition("</select>")[0]

    assert re.findall(r"<option>(\w+)", offered) == [*get_args(PolicyName)]


def test_the_owner_sees_names_and_times() -> None:
    status = with_ring(status_of(3), measured=Measured(9.0, 30.0, 4, ()))

    seen = view_of(status, is_public=False)

    assert [node.name for node in seen.nodes] == [node.name for node in status.nodes]
    assert [hop.layers for hop in seen.hops] == [stage.layers for stage in status.ring.stages]
    assert seen.measured == PageSpeed(9.0, 30.0)
    assert status.ring.predicted
    assert seen.predicted == PageSpeed(status.ring.predicted.ms_per_token, 240.0)
    assert [hop.predicted.compute_ms for hop in seen.hops] == [14.3, 13.5, 14.5]
    assert [hop.id for hop in seen.hops] == [node.id for node in seen.nodes]
    assert seen.memory == status.memory
    assert seen.losses == status.sessions.losses


def test_the_terms_in_force_are_shown() -> None:
    status = with_ring(status_of(3), members=2, exclude=(node_id(2),))

    seen, guests = (view_of(status, is_public=is_public) for is_public in (False, True))

    assert (seen.members, seen.exclude) == (2, (status.nodes[2].short,))
    assert guests.exclude == ()


def test_members_that_do_not_answer_are_a_warning_to_the_owner() -> None:
    status = replace(status_of(1), unanswered=2, warnings=("desk is slow",))

    seen, guests = (view_of(status, is_public=is_public) for is_public in (False, True))

    assert seen.warnings[0].startswith("2 members of this mesh do not answer: they are off")
    assert seen.warnings[1:] == ("desk is slow",)
    assert guests.warnings == ()


def test_a_public_api_server_hides_who_takes_part() -> None:
    status = with_node(status_of(3), 1, state=NodeState.REFUSED, reason="layer 3 of desk differs")
    status = with_ring(status, advice="`desk` is slow", reason="desk is gone")
    status = replace(status, provided=(FOX,), warnings=("desk is slow",))
    seen = view_of(status, is_public=True)

    assert not {node.name for node in seen.nodes} & {node.name for node in status.nodes}
    assert {seen.reason, seen.advice, *(node.reason for node in seen.nodes)} == {""}
    assert not any(address in repr(seen) for node in status.nodes for address in node.addresses)
    assert [node.name for node in seen.nodes] == [node.short for node in status.nodes]
    assert {node.memory_bytes for node in seen.nodes} == {0}
    assert (seen.memory, seen.warnings) == (None, ())
    assert [(model.holders, model.count) for model in seen.models] == [((), 3), ((), 1)]


def test_a_public_api_server_hides_software_links_and_the_requests_of_others() -> None:
    counts = SessionCounts(1, 2, 3, 4, 5, (LossCounts(LossCause.NODE_LOST, 1, 0.5),))
    status = with_link(replace(status_of(2), sessions=counts), 1, round_trip_ms=2.5)
    own = replace(RINGS[0], status=replace(status.ring, execution="stock"))
    owner, guest = (
        view_of(replace(status, rings=(own,)), is_public=is_public) for is_public in (False, True)
    )

    def shown(seen: PageStatus) -> tuple[object, ...]:
        use = seen.active, seen.waiting, seen.served, seen.tokens, seen.losses
        links = [(node.round_trip_ms, node.path) for node in seen.nodes]
        return (*use, links[1], seen.rings[0].execution)

    assert shown(owner) == (1, 2, 3, 5, counts.losses, (2.5, "direct"), "stock")
    assert shown(guest) == (0, 0, 0, 0, (), (None, ""), "")


def test_every_model_is_shown_with_its_holders() -> None:
    seen = view_of(replace(status_of(2), provided=(FOX,)), is_public=False)

    assert seen.models == (
        PageModel("Qwen/Qwen3-0.6B", "bfloat16", 0, 20, ("attic", "desk"), 2, 1, 1),
        PageModel("fox", "bf16", 2048, 0, ("gpu",), 1, 0, 0),
    )


def test_a_client_shows_which_models_answer_and_nothing_of_nodes() -> None:
    status = status_of(1)
    assert status.model
    models = tuple(replace(status.model, rings=rings, replicas=3) for rings in (0, 2))
    ring = replace(status.ring, stages=(), predicted=None)
    status = replace(status, models=models, provided=(FOX,), nodes=(), ring=ring, is_client=True)

    seen = view_of(status, is_public=False)

    shown = [(each.holders, each.replicas, each.serving) for each in seen.models]
    assert shown == [((), 1, 0), ((), 1, 1), (("gpu",), 0, 0)]
    assert (seen.nodes, seen.hops, seen.memory, seen.is_client) == ((), (), None, True)


def test_every_ring_of_the_mesh_is_shown() -> None:
    status = status_of(3)
    assert status.model
    models = (replace(status.model, replicas=1), replace(status.model, name="big", replicas=2))
    own = replace(RINGS[0], status=replace(status.ring, execution="stock", measured=None))
    status = replace(status, models=models, rings=(own, RINGS[1]))

    seen, guests = (view_of(status, is_public=is_public) for is_public in (False, True))

    assert [(each.name, each.holders, each.serving, each.replicas) for each in seen.models] == [
        ("Qwen/Qwen3-0.6B", ("attic", "desk"), 1, 1),
        ("big", (), 0, 2),
    ]
    assert [(each.model, each.replica, each.stages) for each in seen.rings] == [
        ("Qwen/Qwen3-0.6B", 1, ("attic 0:10", "desk 10:20")),
        ("big", 2, ()),
    ]
    assert [(each.policy, each.execution) for each in seen.rings] == [("auto", "stock"), ("", "")]
    assert (seen.rings[0].speed, seen.rings[1].speed) == (seen.predicted, None)
    assert "one more node" in seen.rings[1].reason
    shorts = [node.short for node in status.nodes]
    assert guests.rings[0].stages == (f"{shorts[0]} 0:10", f"{shorts[1]} 10:20")
    assert [(each.holders, each.count) for each in guests.models] == [((), 2), ((), 0)]
    assert guests.rings[1].reason == ""


def test_memory_is_rounded_so_that_no_event_is_sent_for_it() -> None:
    memory = MemoryStatus((5 << 20) + 1, weights=7, requests=9, other=(3 << 20) + 1)
    status = replace(status_of(1), memory=memory)

    seen = view_of(status, is_public=False).memory

    assert seen == MemoryStatus(5 << 20, weights=7, other=3 << 20)


def test_a_mesh_without_a_ring_shows_why() -> None:
    seen = view_of(waiting("alone"), is_public=False)

    assert (seen.state, seen.reason, seen.hops) == ("waiting", "alone", ())


def test_hops_without_measurement_have_no_times() -> None:
    status = with_ring(status_of(2), measured=Measured(9.0, 30.0, 4, ()))
    status = with_link(status, 1, round_trip_ms=2.5)

    seen = view_of(replace(status, model=None), is_public=False)

    assert [hop.measured for hop in seen.hops] == [PageTimes()] * 2
    assert seen.nodes[1].round_trip_ms == 2.5
    assert (seen.model, seen.precision) == ("", "")
    assert isinstance(seen.hops[0].layers, Span)


def test_times_of_an_earlier_ring_are_not_those_of_this_one() -> None:
    status = status_of(2)
    first = replace(status.ring.stages[0], layers=Span(0, 3))

    seen = view_of(with_ring(status, stages=(first, *status.ring.stages[1:])), is_public=False)

    assert seen.hops[0].measured == PageTimes()
    assert seen.hops[1].measured.compute_ms == 13.5


def test_times_of_a_lost_node_are_not_those_of_its_replacement() -> None:
    status = status_of(2)
    first = replace(status.ring.stages[0], node=node_id(3))

    seen = view_of(with_ring(status, stages=(first, *status.ring.stages[1:])), is_public=False)

    assert seen.hops[0].measured == PageTimes()
    assert seen.hops[1].measured.compute_ms == 13.5
