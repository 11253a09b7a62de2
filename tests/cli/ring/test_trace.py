import json
from dataclasses import replace

import pytest

from meshllm.cli.ring.trace import lay_out
from meshllm.errors import PeerFault
from meshllm.names import Span
from meshllm.request import Answer, FinishReason, HopReport, Piece, Prefilled
from tests.builders.fake_client import FakeClient
from tests.builders.fake_ring import answer_of
from tests.cli.conftest import Invoke


def traced(*, ms_per_token: float = 50.0, name: str = "desk") -> Answer:
    hops = (
        HopReport(0, "attic", Span(0, 10), 18.0, 1.0, 1.0, 0.0, 2148.4),
        HopReport(1, name, Span(10, 20), 8.0, 1.0, 1.0, 10.0, 2148.4),
    )
    return Answer("secret", (1,) * 32, 9, FinishReason.LENGTH, 240.0, ms_per_token, 20.0, 1.0, hops)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    node = FakeClient(monkeypatch)
    node.answers = [Prefilled(1, 1), Piece("x"), traced()]
    return node


def test_a_trace_is_a_bar_for_each_hop_and_one_for_the_rest() -> None:
    assert lay_out(traced(), 80).splitlines() == [
        "per token, times in ms:",
        "hop  node   layers  compute  serialise  queue   wire  share",
        "  0  attic  0:10      18.00       1.00   1.00   0.00   40 %  █████████████████▓·",
        "  1  desk   10:20      8.00       1.00   1.00  10.00   40 %  ████████▓·▒▒▒▒▒▒▒▒▒",
        "  -  other  -             -          -      -      -   20 %  ░░░░░░░░░░",
        "█ compute  ▓ serialise  · queue  ▒ wire  ░ other",
        "",
        "9 prompt tokens, 32 generated, finish reason: length",
        "first token 240.0 ms, then 50.00 ms per token, 20.0 tokens/s",
    ]


def test_hops_that_account_for_all_time_leave_no_other_row() -> None:
    assert "-  other" not in lay_out(traced(ms_per_token=39.0), 80)


@pytest.mark.parametrize("name", ["desk", "a-name-that-is-as-long-as-names-may-be"])
def test_a_trace_fits_80_columns(name: str) -> None:
    assert max(map(len, lay_out(traced(name=name), 80).splitlines())) <= 80


def test_a_single_token_has_no_hops_to_time() -> None:
    assert lay_out(traced(ms_per_token=0), 80).endswith("\nfirst token 240.0 ms")


def test_the_answer_is_timed_and_not_shown(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "trace", "What is a ring?", "--tokens", "32")

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("per token, times in ms:\nhop  node ")
    assert "secret" not in result.stdout
    assert [(each.turns[0]["content"], each.max_tokens) for each in node.requests] == [
        ("What is a ring?", 32)
    ]


def test_an_empty_prompt_is_not_traced(meshllm: Invoke, node: FakeClient) -> None:
    result = meshllm("ring", "trace", "")

    assert (result.exit_code, node.requests) == (2, [])
    assert "The prompt is empty" in result.stderr


def test_hops_have_the_names_of_their_nodes(meshllm: Invoke, node: FakeClient) -> None:
    node.answers = [traced(name="lapt2bc")]

    told = json.loads(meshllm("ring", "trace", "--json").stdout)
    table = meshllm("ring", "trace").stdout

    assert [(hop["node"], hop["name"]) for hop in told["hops"]] == [
        ("attic", None), ("lapt2bc", "laptop"),
    ]  # fmt: skip
    assert "laptop" in table
    assert "lapt2bc" not in table


def test_a_trace_needs_no_prompt(meshllm: Invoke, node: FakeClient) -> None:
    assert meshllm("ring", "trace").exit_code == 0
    assert node.requests[0].turns[0]["content"]


def test_a_trace_as_json_has_every_hop(meshllm: Invoke, node: FakeClient) -> None:
    node.answers = [replace(answer_of("x", 4), reasoning="secret")]

    told = json.loads(meshllm("ring", "trace", "--json").stdout)

    assert [hop["wire_ms"] for hop in told["hops"]] == [0.05, 0.06]
    assert not {"text", "reasoning", "tokens"} & told.keys()


def test_a_node_that_ends_without_an_answer_is_a_peer_fault(
    meshllm: Invoke, node: FakeClient
) -> None:
    node.answers = [Prefilled(1, 1)]

    assert meshllm("ring", "trace").exit_code == PeerFault.exit_code


def test_a_name_is_escaped() -> None:
    text = lay_out(traced(name="\x1b[2J\nhop"), 80)

    assert "\\x1b[2J hop" in text
