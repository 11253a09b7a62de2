"""Prometheus metrics of a relay; they contain no node ids or addresses.

https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4)
"""

from collections.abc import Iterator

from meshllm_quic.relay.relay import Refusal, Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(statistics: Statistics, *, streams: int, lost: int) -> str:
    """Format the counters of a relay and of its WebSocket streams."""
    done = statistics
    refused = [(f'{{reason="{reason}"}}', done.refused[reason]) for reason in Refusal]
    lines = [
        *_family("registered", "gauge", "Registered nodes.", ("", done.registered)),
        *_family("streams", "gauge", "Open WebSocket streams.", ("", streams)),
        *_family("datagrams_total", "counter", "Datagrams forwarded.", ("", done.forwarded)),
        *_family("bytes_total", "counter", "Bytes forwarded.", ("", done.forwarded_bytes)),
        *_family("refused_total", "counter", "Refused datagrams, by reason.", *refused),
        *_family("lost_total", "counter", "Packets dropped by full streams.", ("", lost)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, *samples: tuple[str, int]) -> Iterator[str]:
    yield f"# HELP meshllm_relay_{name} {text}"
    yield f"# TYPE meshllm_relay_{name} {kind}"
    for labels, value in samples:
        yield f"meshllm_relay_{name}{labels} {value}"
