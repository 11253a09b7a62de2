"""Records that survive a restart."""

from pathlib import Path

import pytest

from meshllm.errors import UserError
from meshllm.names import NodeId
from meshllm.node.membership.saved_records import SavedRecords, restore_records, save_records
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.mesh import Mesh
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


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x05later", b"\xff"])
def test_records_of_another_version_are_named_with_their_file(
    store: StateStore, data: bytes
) -> None:
    credential = store.found()
    store.remember("records", data)
    machine = Mesh(store.key, credential, 1, now=0.0, wall_s=0.0)

    with pytest.raises(UserError, match=r"mesh\.json` is damaged, or of another version") as caught:
        restore_records(store, machine, 0.0)
    assert "move the file away" in str(caught.value.hint)
