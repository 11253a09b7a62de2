import json
from pathlib import Path

import pytest

from meshllm.names import Span
from meshllm.request import Answer, FinishReason, HopReport
from tests.bench import wan
from tests.bench.wan import Cell, Network, lines, main, missed


def _answer(ms_per_token: float, computing_ms: float = 10.0, size: float = 2500.0) -> Answer:
    hops = [
        HopReport(rank, "node", Span(rank, rank + 1), computing_ms, 0.5, 0.25, 50.0, size)
        for rank in range(2)
    ]
    return Answer(
        "", (1, 2), 3, FinishReason.LENGTH, 9.0, ms_per_token, 1e3 / ms_per_token, 1.0, tuple(hops)
    )


def _cell(*answers: Answer, network: Network = (2, 100.0, 10.0)) -> Cell:
    return Cell.of("quic", network, answers, echo_ms=101.0)


def test_the_bound_is_compute_plus_latency_and_transfer_per_link() -> None:
    cell = _cell(_answer(ms_per_token=251.0))

    assert cell.compute_ms == 21.5
    assert cell.bound_ms == 21.5 + 2 * (50 + 2)
    assert cell.of_bound == 0.5
    assert cell.kept == pytest.approx(21.5 / 251)
    assert (cell.ttft_ms, cell.tokens_per_s) == pytest.approx((9.0, 1e3 / 251))


def test_an_answer_is_compared_with_its_own_compute_time() -> None:
    slow = _answer(ms_per_token=2 * (201.5 + 104), computing_ms=100.0)
    answers = [_answer(ms_per_token=2 * (21.5 + 104)), slow, slow]

    assert _cell(*answers).of_bound == 0.5


@pytest.mark.parametrize(
    ("network", "answer", "binds"),
    [
        ((2, 100.0, 1000.0), _answer(200.0), "latency"),
        ((2, 1.0, 1000.0), _answer(200.0), "compute"),
        ((2, 1.0, 10.0), _answer(200.0, size=50_000.0), "bandwidth"),
    ],
)
def test_a_cell_names_the_bottleneck(network: Network, answer: Answer, binds: str) -> None:
    assert _cell(answer, network=network).binds == binds


def test_a_cell_below_the_bar_without_bandwidth_bottleneck_fails() -> None:
    near, far = _cell(_answer(251.0 / 1.9)), _cell(_answer(251.0))
    choked = _cell(_answer(500.0, size=50_000.0), network=(2, 1.0, 10.0))

    assert choked.of_bound < wan.BAR
    assert missed([near, far, choked]) == [
        "quic, 2 nodes, 100 ms, 10 Mbit/s: 0.50 of the bound, 0.9 at least"
    ]


def test_the_first_cell_is_printed_with_a_header() -> None:
    head, line = lines([_cell(_answer(251.0))], is_first=True)

    assert len(list(lines([_cell(_answer(251.0))], is_first=False))) == 1
    assert line.split()[:6] == ["2", "100", "10", "quic", "3.98", "251.0"]
    assert line.index("0.50") + 4 == head.index("of bound") + 8


def test_without_namespaces_the_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wan, "reason", lambda: "namespaces need root")
    file = tmp_path / "wan.json"

    assert main(["--json", str(file)]) == 0

    assert capsys.readouterr().out == "Nothing measured: namespaces need root\n"
    written = json.loads(file.read_text())
    assert (written["skipped"], written["rows"]) == ("namespaces need root", [])


@pytest.mark.parametrize("words", [["--nodes", "1"], ["--transports", "tin"], ["--rounds", "0"]])
def test_invalid_options_are_rejected(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
