from collections import Counter

from meshllm_quic.relay.relay import Refusal, Statistics
from meshllm_quic.relay.relay_metrics import exposition


def test_every_metric_is_present() -> None:
    done = Statistics(3, 40, 48_000, Counter({Refusal.RATE: 5}))

    lines = exposition(done, streams=2, lost=7).splitlines()

    assert [line for line in lines if line[0] != "#" and not line.endswith(" 0")] == [
        "meshllm_relay_registered 3",
        "meshllm_relay_streams 2",
        "meshllm_relay_datagrams_total 40",
        "meshllm_relay_bytes_total 48000",
        'meshllm_relay_refused_total{reason="rate"} 5',
        "meshllm_relay_lost_total 7",
    ]


def test_every_refusal_reason_starts_at_zero() -> None:
    text = exposition(Statistics(), streams=0, lost=0)

    assert all(f'{{reason="{reason}"}} 0\n' in text for reason in Refusal)
    assert text.endswith("\n")


def test_every_metric_has_help_and_type() -> None:
    lines = exposition(Statistics(), streams=0, lost=0).splitlines()
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in lines if line.startswith("# HELP")}

    assert named == helped == {line.split("{")[0].split()[0] for line in lines if line[0] != "#"}
