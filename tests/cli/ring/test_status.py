from dataclasses import replace

import pytest

from meshllm.cli.ring.status import clean, duration, lay_out, ms
from meshllm.names import Span
from meshllm.status import NodeState, ProviderOffer
from tests.builders.fake_node import FOX
from tests.builders.status import (
    RINGS,
    status_of,
    waiting,
    with_link,
    with_node,
    with_ring,
)


def test_reasons_and_advice_have_the_names_and_ids_of_nodes() -> None:
    status = with_node(status_of(3), 2, reason="`desk1bc` refuses it")
    first, second = (each.short for each in status.nodes[:2])
    status = with_node(status, 0, name="")
    reason = f"`{second}` is leaving `{first}`, not `unknown`, of {second}"

    text = lay_out(with_ring(status, reason=reason, advice=f"`{second}` is slow"), 200)

    assert second == "desk1bc"
    assert f": `desk` (desk1bc) is leaving `{first}`, not `unknown`, of desk1bc\n" in text
    assert "`desk` (desk1bc) refuses it\n" in text
    assert "`desk` (desk1bc) is slow" in text


def test_the_layout_of_a_ring() -> None:
    text = lay_out(status_of(3), 80)

    assert text.startswith(
        "ring    serving\n"
        "model   Qwen/Qwen3-0.6B, 30 layers, bfloat16\n"
        "policy  auto, epoch 3, plan 4f2a91c0d3e1\n"
        "mesh    4fa1c09b2d7e, reported by attic, up 13 min\n"
    )
    assert "│ * attic │ 0.42 ms │ desk    │" in text
    assert "\n   desk1bc  desk    serving  10:20   8.0 GiB  ws://192.168.1.11:7700\n" in text
    assert "\ndesk     direct  1.84 ms     12.1 MiB  10.8 MiB  0.3 s ago\n" in text
    assert (
        "\nper token, times in ms:\n"
        "hop  node    compute  planned  serialise  queue  wire  planned  bytes\n"
        "  0  attic     12.50    14.30       0.09   0.03  0.42     0.42   2148\n"
        "  1  desk      13.50    13.50       0.09   0.03  1.42     1.42   2148\n"
    ) in text
    assert (
        "\nmeasured  46.8 ms per token, 21.4 tokens/s, first token 240 ms, over 96 tokens" in text
    )
    assert "\nplanned   45.3 ms per token, 22.1 tokens/s, first token 240 ms\n" in text
    assert "\nsessions  1 active, 0 waiting, 12 served, 0 failed, 4711 tokens\n" in text
    assert "\nlosses    survived, with the pauses of answers: 2 of a node" in text
    assert "(1.8 s, 96 tokens\n          replayed)\n" in text
    assert "\nrecomputed rows of single layers after losses: 480 of a node\n" in text
    assert text.endswith(
        "\nadvice    `studio` is the slowest: 3 of its layers on `attic` would save 4 ms"
    )


def test_all_rings_are_shown_if_there_are_several() -> None:
    text = lay_out(replace(status_of(3), rings=RINGS), 80)

    assert "ring of" not in lay_out(replace(status_of(3), rings=RINGS[:1]), 80)
    assert (
        "\n   ring of          replica  state    layers                  standby\n"
        "*  Qwen/Qwen3-0.6B        1  serving  attic 0:10, desk 10:20        -\n"
        "   big                    2  forming  -                             1\n"
        "   big (2): needs one more node with the model, with 2.1 GiB of memory\n"
    ) in text


def test_further_rings_of_the_node_are_shown_as_its_first() -> None:
    first = status_of(3)
    big = replace(with_ring(status_of(2), policy="latency", digest="00ff", execution="stock"))
    status = replace(
        first,
        rings=(replace(RINGS[0], status=first.ring), replace(RINGS[1], status=big.ring)),
        models=tuple(replace(each, name="big", layers=20) for each in (first.model,) if each),
    )

    text = lay_out(status, 80)

    assert (
        "\n\nring    serving\n"
        "model   big, 20 layers, bfloat16\n"
        "engine  stock\n"
        "policy  latency, epoch 3, plan 00ff\n\n"
    ) in text
    assert text.count("\nmeasured ") == text.count("per token, times in ms") == 2
    assert text.count("ring    serving") == 2
    last = text.index("policy  latency")
    assert (
        text.index("\nmeasured ") < last < text.index("\nsessions  ")
    )  # figures are with the ring
    assert lay_out(status, 80, rows=20).count("ring    serving") == 1


def test_a_second_replica_of_the_same_model_and_epoch_is_shown() -> None:
    first = status_of(3)
    other = replace(first.ring, digest="00ff")
    rings = replace(RINGS[0], status=first.ring), replace(RINGS[0], replica=1, status=other)

    text = lay_out(replace(first, rings=rings), 80)

    assert text.count(f"epoch {first.ring.epoch}, plan {first.ring.digest}") == 1
    assert text.count(f"epoch {first.ring.epoch}, plan 00ff") == 1


def test_clock_skew_is_shown_at_the_end() -> None:
    status = with_link(with_link(status_of(3), 1, clock_s=-6.0), 2, clock_s=7200.4)
    status = with_node(status, 2, name="")

    text = lay_out(status, 80)

    assert text.endswith(
        "\nclock     desk is 6 s behind, lapt2bc is 2 h ahead: see `meshllm doctor`"
    )
    assert "clock" not in lay_out(status_of(3), 80)


def test_an_unknown_clock_is_not_shown() -> None:
    status = with_link(status_of(2), 1, clock_s=None)

    assert lay_out(status, 80) == lay_out(status_of(2), 80)


def test_the_reached_address_of_a_node_is_shown() -> None:
    status = with_link(status_of(3), 1, address="ws://203.0.113.5:1")
    status = with_link(status, 2, address="")

    text = lay_out(status, 80)

    assert "8.0 GiB  ws://203.0.113.5:1\n" in text
    assert "8.0 GiB  ws://192.168.1.12:7700\n" in text


def test_an_address_is_cut_visibly_on_a_terminal_and_whole_in_a_file() -> None:
    address = f"quic://{'a' * 56}@203.0.113.5:8790"
    status = with_link(status_of(2), 1, address=address)

    cut, whole = lay_out(status, 80), lay_out(status, 80, is_whole=True)

    (line,) = [each for each in cut.splitlines() if "quic://" in each]
    assert (len(line), line[-1]) == (80, "…")
    assert f"  {address}\n" in whole


def test_hops_of_long_names_and_times_fit_80_columns() -> None:
    ring = status_of(2).ring
    assert ring.measured
    assert ring.predicted
    slow = replace(ring.measured.hops[1], queue_ms=12.5, wire_ms=123.45)
    planned = replace(ring.predicted.hops[1], compute_ms=1234.56)
    status = with_ring(
        status_of(2),
        stages=(ring.stages[0], replace(ring.stages[1], name="x" * 64)),
        measured=replace(ring.measured, hops=(ring.measured.hops[0], slow)),
        predicted=replace(ring.predicted, hops=(ring.predicted.hops[0], planned)),
    )

    assert max(map(len, lay_out(status, 80).splitlines())) <= 80


@pytest.mark.parametrize("columns", [40, 60])
def test_it_fits_a_narrow_terminal(columns: int) -> None:
    status = replace(status_of(2), rings=RINGS, provided=(FOX,))

    text = lay_out(status, columns)

    assert "measured" in text
    assert "fox" in text
    assert max(map(len, text.splitlines())) <= columns


def test_providers_of_a_ring_s_model_are_listed() -> None:
    status = status_of(2)
    assert status.model
    model = replace(status.model, beside=(ProviderOffer("gpu", "fp32", 8192),))

    text = lay_out(replace(status, models=(model,)), 80)

    row = text[text.index("provided model") :].splitlines()[1]
    assert row.split() == [model.name, "gpu", "fp32", "8192"]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_it_fits_80_columns(count: int) -> None:
    assert max(map(len, lay_out(status_of(count), 80).splitlines())) <= 80


def test_before_a_measurement_the_picture_shows_the_plan() -> None:
    text = lay_out(status_of(2, measured=False), 80)

    assert "~0.4 ms" in text
    assert "│ ~14 ms  │" in text  # with the LM head
    assert "\nmeasured  nothing yet, ~ marks planned times: run `meshllm ring trace`\n" in text


def test_the_capacity_of_the_ring_is_that_of_its_fullest_rank() -> None:
    status = status_of(3)
    rooms = (9000, 4711, None)
    stages = (
        replace(each, room_tokens=room)
        for each, room in zip(status.ring.stages, rooms, strict=True)
    )

    text = lay_out(with_ring(status, stages=tuple(stages)), 80)

    assert "\ncapacity  4711 tokens of KV cache for all sessions\n" in text
    assert "\ncapacity" not in lay_out(status, 80)


def test_single_things_are_not_plural() -> None:
    status = status_of(1)
    measured = status.ring.measured
    assert status.model
    assert measured
    losses = (replace(status.sessions.losses[0], tokens=1),)
    status = replace(
        status,
        model=replace(status.model, layers=1),
        sessions=replace(status.sessions, losses=losses),
    )

    text = lay_out(with_ring(status, measured=replace(measured, tokens=1)), 200)

    assert "Qwen/Qwen3-0.6B, 1 layer, bfloat16" in text
    assert "over 1 token\n" in text
    assert "1 token replayed" in text


def test_on_a_low_terminal_tables_are_dropped_first() -> None:
    heights = [len(lay_out(status_of(8), 80, rows).splitlines()) for rows in (60, 45, 40, 25)]

    assert heights == sorted(heights, reverse=True)
    assert all(height <= rows for height, rows in zip(heights, (60, 45, 40, 25), strict=True))
    for rows in (60, 25):
        assert "▲" in lay_out(status_of(8), 80, rows)
        assert "\nadvice " in lay_out(status_of(8), 80, rows)


def test_a_waiting_ring_shows_its_reason() -> None:
    reason = "2 nodes are here, and the model needs 1.4 GiB more than both of them have together"

    text = lay_out(waiting(reason), 80)

    assert text.startswith("ring    waiting: 2 nodes are here, and the model needs")
    assert "┌" not in text
    assert "hop" not in text
    assert "advice" not in text


def test_a_ring_without_figures_is_still_drawn() -> None:
    status = with_ring(status_of(2), measured=None, predicted=None)

    text = lay_out(status, 80)

    assert "│ 0:10    │────────▶│ 10:20   │" in text
    assert "     └───────────────────┘" in text
    assert "ms" not in text.partition("link to")[0]


def test_the_reason_of_a_node_is_a_line_of_its_own() -> None:
    status = with_node(
        status_of(3), 2, state=NodeState.STANDBY, reason="its link adds 40 ms", layers=None
    )

    assert "\n   laptop (standby): its link adds 40 ms\n" in lay_out(status, 80)


def test_quantisation_is_shown() -> None:
    status = status_of(1)
    assert status.model
    status = replace(status, model=replace(status.model, quant="int8"))

    assert " layers, bfloat16, int8\n" in lay_out(status, 80)


def test_the_engine_of_this_node_is_shown() -> None:
    why = "stock (float32 on the CPU); attention: torch; linears: 42 torch"

    text = lay_out(with_ring(status_of(2), execution=why), 80)

    assert f"\nengine  {why}\npolicy  " in text
    assert "engine" not in lay_out(status_of(2), 80)


def test_a_node_without_a_model_is_shown() -> None:
    assert "\nmodel   no model\n" in lay_out(replace(waiting(""), model=None), 80)


def test_a_client_is_shown_as_client() -> None:
    status = with_node(
        status_of(2), 1, role="client", memory_bytes=0, layers=None, addresses=(), link=None
    )

    assert "\n   desk1bc  desk   client   -       -        -\n" in lay_out(status, 80)


def test_a_link_that_was_not_timed_has_no_round_trip() -> None:
    status = with_link(status_of(2), 1, round_trip_ms=None)

    assert "\ndesk     direct           -  12.1 MiB" in lay_out(status, 80)


def test_a_long_name_is_cut() -> None:
    status = with_node(status_of(2), 1, name="x" * 64)

    assert max(map(len, lay_out(status, 80).splitlines())) <= 80


def test_texts_of_other_nodes_cannot_forge_lines() -> None:
    status = with_node(status_of(2), 1, name="\x1b[2Jevil\nring serving\t")

    text = lay_out(clean(status), 200)

    assert "\x1b" not in text
    assert "\\x1b[2Jevil\\nri…" in text


def test_cleaning_keeps_other_values() -> None:
    same = (1, 2.5, None, True, NodeState.DOWN, Span(0, 4))

    assert clean((*same, ("\x07",))) == (*same, ("\\x07",))
    assert clean(status_of(3)) == status_of(3)


def test_a_warning_is_shown_at_the_end() -> None:
    status = replace(status_of(2), warnings=("the disk is full",))

    assert lay_out(status, 80).endswith("\nwarning   the disk is full")


def test_requested_members_that_are_missing_are_counted() -> None:
    text = lay_out(with_ring(status_of(2), members=3), 80)

    assert "\nmembers 2 of the 3 requested; others may join\n" in text
    assert "\nmembers " not in lay_out(with_ring(status_of(2), members=2), 80)


def test_members_that_do_not_answer_are_a_warning() -> None:
    told = lay_out(replace(status_of(1), unanswered=2), 200)

    assert "\nwarning   2 members of this mesh do not answer: they are off" in told
    assert "warning" not in lay_out(status_of(1), 200)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00 ms"), (0.424, "0.42 ms"), (12.34, "12.3 ms"), (1234, "1234 ms")]
)
def test_times_have_three_figures(value: float, text: str) -> None:
    assert ms(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
