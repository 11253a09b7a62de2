"""Records that survive a restart."""

from pathlib import Path

import pytest

from meshllm.names import NodeId
from meshllm.node.membership.saved_records import SavedRecords, save_records
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.records import MAX_MEMBERS

ME, ANN, BOB, EVE = (NodeId(bytes([number]) * 32) for number in range(4))


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore.open(tmp_path)


def met(*nodes: NodeId, removed: tuple[NodeId, ...] = (), at: str = "loopback:new") -> SavedRecords:
    return SavedRecords((), dict.fromkeys((ME, *nodes), (at,)), frozenset((ME, *removed)))


def test_addresses_of_nodes_not_met_are_kept(store: StateStore) -> None:
    store.peers = {ANN: ["loopback:ann"], BOB: ["loopback:bob"]}

    save_records(store, met(BOB))

    assert store.peers == {ANN: ("loopback:ann",), BOB: ("loopback:new",)}


def test_addresses_of_removed_nodes_are_dropped(store: StateStore) -> None:
    store.peers = {ANN: ["loopback:ann"], EVE: ["loopback:eve"]}

    save_records(store, met(ANN, EVE, removed=(EVE,)))

    assert store.peers == {ANN: ("loopback:new",)}


def test_of_too_many_addresses_those_of_met_nodes_are_kept(store: StateStore) -> None:
    crowd = [NodeId(number.to_bytes(32)) for number in range(1000, 1000 + MAX_MEMBERS)]
    store.peers = {node: ["loopback:old"] for node in crowd}

    save_records(store, met(ANN))

    assert len(store.peers) == MAX_MEMBERS
    assert store.peers[ANN] == ("loopback:new",)
