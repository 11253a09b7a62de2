from dataclasses import replace

import pytest

from meshllm.names import Digest, NodeId, Span, short
from meshllm.protocol.agreement.candidates import (
    MAX_BYTES_PER_S,
    MAX_MEMORY_BYTES,
    MIN_LAYER_S,
    NEAR_US,
    NO_LINK,
    Candidates,
    find_candidates,
    first_mismatch,
)
from meshllm.protocol.membership.records import MAX_BYTES, Lifecycle, Profile, StateRecord
from tests.builders.offers import A, B, C, D, model
from tests.builders.snapshots import World, charter, profile, weights

OTHER = b"x" * 16
ABSENT = bytes(16)


def look(
    profiles: dict[NodeId, Profile], ring: tuple[NodeId, ...] = (), **world: object
) -> Candidates:
    view = World(profiles, **world).view(min(profiles))  # type: ignore[arg-type]  # any field
    return find_candidates(view, view.alive(), ring)


def offered(found: Candidates) -> list[NodeId]:
    return [offer.node for offer in found.offers]


@pytest.mark.parametrize(
    ("index", "name"), [(0, "layer 0"), (3, "layer 3"), (4, "embedding"), (5, "head")]
)
def test_a_mismatch_names_the_part(index: int, name: str) -> None:
    assert first_mismatch(weights(), weights(changed={index: OTHER})) == name


def test_the_configuration_is_compared() -> None:
    assert first_mismatch(weights(), (*weights()[:-1], OTHER)) == "configuration"


def test_absent_parts_do_not_conflict() -> None:
    here, there = weights(changed={0: ABSENT, 2: OTHER}), weights(changed={2: ABSENT})

    assert first_mismatch(here, there) is None
    assert first_mismatch(there, here) is None
    assert first_mismatch(weights(), weights()) is None


def test_manifests_of_different_lengths_differ() -> None:
    assert first_mismatch(weights(4), weights(5)) == "number of layers"


def test_an_offer_copies_the_profile() -> None:
    brought = replace(profile(2, ms=3.0), head_s=0.5, reserve_bytes=7)

    (offer,) = look({A: brought}).offers

    assert (offer.node, offer.memory_bytes, offer.reserve_bytes) == (A, 200, 7)
    assert (offer.layer_s, offer.head_s) == (((1, 0.003),), 0.5)


def test_an_offer_is_within_what_a_machine_could_do() -> None:
    claims = replace(profile(1, ms=1e-9), memory_bytes=MAX_BYTES, head_s=0.0)
    big = replace(model(4, sizes=(1 << 30,) * 4), embed_bytes=1 << 40)

    (small,) = look({A: claims}).offers
    (large,) = look({A: claims}, charter=replace(charter(), shape=big)).offers

    assert (small.memory_bytes, small.layer_s) == (MAX_MEMORY_BYTES, ((1, MIN_LAYER_S),))
    assert large.layer_s == ((1, (1 << 30) / MAX_BYTES_PER_S),)
    assert large.head_s == (1 << 40) / MAX_BYTES_PER_S


def test_other_weights_are_refused_naming_the_part() -> None:
    found = look({A: profile(1), B: replace(profile(1), weights=weights(changed={1: OTHER}))})

    assert offered(found) == [A]
    assert found.refused == {B: f"its layer 1 differs from that of `{short(A)}`"}


def test_ring_nodes_take_precedence_over_the_author_and_lower_ids() -> None:
    one, other = profile(1), replace(profile(1), weights=weights(changed={1: OTHER}))

    assert offered(look({A: one, B: other, C: other}, ring=(C,))) == [B, C]
    assert offered(look({A: one, B: other, C: other}, ring=(D,))) == [A]


def test_the_author_takes_precedence_even_while_it_is_away() -> None:
    other = replace(profile(1), weights=weights(changed={1: OTHER}))

    found = look({A: profile(1), B: other, C: profile(1)}, gone={A})
    world = World({A: profile(1), B: other, C: profile(1)}, gone={A})
    view = world.view(B, author=A)

    assert offered(found) == [A]  # alone, as it sees itself
    assert offered(find_candidates(view, view.alive(), ())) == [C]


def test_an_unknown_author_is_ignored() -> None:
    view = World({A: profile(1)}).view(A, author=D)

    assert offered(find_candidates(view, view.alive(), ())) == [A]


def test_another_configuration_is_another_model() -> None:
    agreed = replace(charter(), config_digest=Digest(b"d" * 32))

    found = look({A: profile(1)}, charter=agreed)

    assert found.refused == {A: "its model `tiny` differs from `tiny` of the mesh"}


def test_another_number_of_layers_is_refused() -> None:
    found = look({A: replace(profile(1), weights=weights(5))})

    assert found.refused == {A: "it has digests of 5 layers, but the model has 4"}


def test_another_version_of_the_program_is_refused() -> None:
    newer = replace(profile(1), version="1.1")

    assert look({A: profile(1), B: newer}).refused == {
        B: f"it runs version 1.1, but `{short(A)}` runs 1.0"
    }
    world = World({A: profile(1), B: newer}, gone={A})
    view = world.view(B, author=A)
    assert find_candidates(view, view.alive(), ()).refused == {}


def test_nodes_that_are_not_ready_wait() -> None:
    states = {
        at: StateRecord(links=tuple((to, 1) for to in (A, B, C, D) if to != at)) for at in (A, B)
    }
    view = World({A: replace(profile(1), weights=()), B: replace(profile(1), layer_s=())}).view(A)
    view = replace(view, states={**states, C: StateRecord(links=((A, 1), (B, 1)))})

    found = find_candidates(view, view.alive(), ())

    assert found.waiting == {
        A: "it has no model yet",
        B: "it has measured no speed, or cannot load layers now",
        C: "its profile has not arrived yet",
    }


def test_one_of_several_overlapping_spans_is_kept() -> None:
    def wish(start: int, stop: int) -> Profile:
        return profile(4, span=Span(start, stop))

    found = look({A: wish(1, 2), B: wish(0, 2), C: wish(2, 4), D: wish(3, 5)})

    assert found.spans == {B: Span(0, 2), C: Span(2, 4)}
    assert found.waiting == {
        A: f"its span `1:2` overlaps that of `{short(B)}`",
        D: "it holds `3:5`, but the model has 4 layers",
    }
    assert look({A: wish(1, 2), B: wish(0, 2)}, ring=(A,)).spans == {A: Span(1, 2)}


def test_the_fixed_span_of_an_excluded_node_is_ignored() -> None:
    agreed = replace(charter(), exclude=(A,))
    found = look({A: profile(4, span=Span(0, 4)), B: profile(4, span=Span(0, 2))}, charter=agreed)

    assert found.spans == {B: Span(0, 2)}
    assert offered(found) == [A, B]


@pytest.mark.parametrize(
    ("one_us", "other_us", "latency_us"),
    [
        (1000, 1000, 512),
        (1000, 0, 512),
        (9000, 1020, 512),
        (10, 10, NEAR_US / 2 + 3),
        (60_000_000, 60_000_000, 29_360_128),
    ],
)
def test_wire_time_is_half_the_shorter_round_trip_rounded(
    one_us: int, other_us: int, latency_us: float
) -> None:
    view = World({A: profile(1), B: profile(1)}).view(A)
    states = {A: StateRecord(links=((B, one_us),)), B: StateRecord(links=((A, other_us),))}

    links = find_candidates(replace(view, states=states), {A, B}, ()).links

    assert links.between(A, B).latency_s == pytest.approx(latency_us / 1e6)
    assert links.between(B, A) == links.between(A, B)


def test_noise_does_not_change_the_wire_time() -> None:
    ways = {
        find_candidates(view, {A, B}, ()).links.between(A, B)
        for us in range(8200, 9200, 50)
        for view in [
            World({A: profile(1), B: profile(1)}, apart_ms={frozenset({A, B}): us / 1e3}).view(A)
        ]
    }

    assert len(ways) == 1


def test_unmeasured_links_are_not_used() -> None:
    view = World({A: profile(1), B: profile(1), C: profile(1)}).view(A)
    states = {
        A: StateRecord(links=((B, 0), (C, 500))),
        B: StateRecord(links=((A, 0),)),
        C: StateRecord(links=()),
    }

    links = find_candidates(replace(view, states=states), {A, B, C}, ()).links

    assert links.between(A, B) == links.between(A, C) == links.between(B, C) == NO_LINK


def test_departed_and_removed_nodes_are_not_candidates() -> None:
    view = World({A: profile(1), B: profile(1), C: profile(1)}, removed={C}).view(A)

    assert view.alive() == {A, B}
    assert replace(view, me=C).alive() == set()
    left = {**view.states, A: replace(view.states[A], lifecycle=Lifecycle.LEFT)}
    assert replace(view, states=left).alive() == set()
