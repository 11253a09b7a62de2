import re
from dataclasses import replace

import httpx2
import pytest

from meshllm.api.metrics import exposition
from meshllm.status import RingState
from tests.builders.fake_node import FakeNode, mesh_status
from tests.builders.status import RINGS, with_link, with_ring

OWN = 'model="Qwen/Qwen3-0.6B",replica="0"'  # labels of the ring of the node
LINE = re.compile(
    r"# (HELP|TYPE) meshllm_[a-z_]+ .+"
    r"|meshllm_[a-z_]+(\{[a-z]+=\"([^\"\\\n]|\\[\\n\"])*\"(,[a-z]+=\"([^\"\\\n]|\\[\\n\"])*\")*\})?"
    r" -?[0-9.e+-]+"
)


def test_every_line_matches_the_text_format() -> None:
    text = exposition(mesh_status())

    assert text.endswith("\n")
    assert [line for line in text.splitlines() if not LINE.fullmatch(line)] == []


def test_each_family_is_described_once() -> None:
    types = re.findall(r"^# TYPE (\S+)", exposition(mesh_status()), re.MULTILINE)

    assert len(types) == len(set(types)) > 10


@pytest.mark.parametrize(
    "line",
    [
        'meshllm_info{version="0.2.0"} 1',
        'meshllm_nodes{state="serving"} 2',
        'meshllm_nodes{state="down"} 0',
        f'meshllm_ring_state{{{OWN},state="serving"}} 1.0',
        f'meshllm_ring_state{{{OWN},state="waiting"}} 0.0',
        f"meshllm_ring_epoch{{{OWN}}} 3",
        "meshllm_tokens_total 99",
        'meshllm_ring_losses_total{cause="node_lost"} 2',
        'meshllm_paused_seconds_total{cause="node_lost"} 1.75',
        f'meshllm_ring_info{{{OWN},policy="auto",plan="4f2a91c0d3e1",execution=""}} 1',
        'meshllm_replayed_tokens_total{cause="node_lost"} 96',
        'meshllm_recomputed_layer_rows_total{cause="node_lost"} 480',
        f'meshllm_token_seconds{{{OWN},source="measured"}} 0.01',
        f'meshllm_token_seconds{{{OWN},source="predicted"}} 0.008',
        f"meshllm_first_token_seconds{{{OWN}}} 0.04",
        f'meshllm_hop_compute_seconds{{{OWN},rank="0",node="atti0bc"}} 0.003',
        f'meshllm_hop_serialise_seconds{{{OWN},rank="0",node="atti0bc"}} 0.00025',
        f'meshllm_hop_queue_seconds{{{OWN},rank="0",node="atti0bc"}} 0.000125',
        f'meshllm_hop_wire_seconds{{{OWN},rank="0",node="atti0bc"}} 0.0005',
        'meshllm_link_round_trip_seconds{node="desk1bc",name="a \\"b\\"\\\\\\nc"} 0.0025',
        'meshllm_link_sent_bytes_total{node="desk1bc",name="a \\"b\\"\\\\\\nc"} 1000',
        'meshllm_open_sessions{state="active"} 1',
        'meshllm_sessions_total{result="failed"} 4',
        "meshllm_up_seconds 754.0",
    ],
)
def test_values_are_exported(line: str) -> None:
    assert line in exposition(mesh_status()).split("\n")


def test_no_two_families_share_a_name_in_openmetrics() -> None:
    names = re.findall(r"^# TYPE (\S+)", exposition(mesh_status()), re.MULTILINE)
    families = [each.removesuffix("_total") for each in names]  # which counters lose there

    assert len(set(families)) == len(families) > 20


def test_unknown_values_are_left_out() -> None:
    forming = with_ring(mesh_status(), state=RingState.FORMING, measured=None, predicted=None)
    text = exposition(with_link(forming, 1, round_trip_ms=None))

    assert "\nmeshllm_token_seconds" not in text
    assert "\nmeshllm_first_token_seconds" not in text
    assert "\nmeshllm_link_round_trip_seconds" not in text
    assert 'meshllm_ring_state{model="Qwen/Qwen3-0.6B",replica="0",state="forming"} 1.0' in text


async def test_the_metrics_have_a_route(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = await client.get("/metrics")

    assert said.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert said.text == exposition(api_server.report())


def test_every_ring_of_the_mesh_has_a_sample() -> None:
    text = exposition(replace(mesh_status(), rings=RINGS))

    assert 'meshllm_served_ring{model="Qwen/Qwen3-0.6B",replica="0"} True\n' not in text
    assert 'meshllm_served_ring{model="Qwen/Qwen3-0.6B",replica="0"} 1.0\n' in text
    assert 'meshllm_served_ring{model="big",replica="1"} 0.0\n' in text


def test_each_ring_of_the_node_has_samples_of_its_own() -> None:
    status = mesh_status()
    tiny = replace(status.ring, policy="throughput", digest="00ff", execution="stock", epoch=9)
    own = (replace(RINGS[0], status=status.ring), replace(RINGS[1], status=tiny))
    text = exposition(replace(status, rings=own))

    assert 'meshllm_ring_epoch{model="Qwen/Qwen3-0.6B",replica="0"} 3\n' in text
    assert 'meshllm_ring_epoch{model="big",replica="1"} 9\n' in text
    labels = 'policy="throughput",plan="00ff",execution="stock"'
    assert f'meshllm_ring_info{{model="big",replica="1",{labels}}} 1\n' in text
    assert text.count("\nmeshllm_ring_state{") == 2 * len(RingState)
    assert text.count("# TYPE meshllm_ring_epoch") == 1
