"""What a node would miss after a restart: the charter, the removals, and where others were."""

from meshllm.node.keyring import Keyring
from meshllm.protocol.gossip import Item
from meshllm.protocol.mesh import Mesh
from meshllm.protocol.records import MAX_MEMBERS

_NAME = "records"
_LENGTH_BYTES = 4


def write_down(keyring: Keyring, machine: Mesh) -> None:
    """Keep what lasts in the state folder; of whom it did not meet this time, what it knew before.

    Raises:
        UserError: the folder cannot be written.
    """
    items = [item.encode() for item in machine.lasting]
    keyring.remember(_NAME, b"".join(len(item).to_bytes(_LENGTH_BYTES) + item for item in items))
    met = {node: profile.addresses for node, profile in machine.profiles.items()}
    known = met | {node: at for node, at in keyring.peers.items() if node not in met}
    lasting = [node for node in known if node != machine.me and node not in machine.removals]
    keyring.peers = {node: known[node] for node in lasting[:MAX_MEMBERS]}


def read_back(keyring: Keyring) -> list[Item]:
    """Read what was kept; raise `PeerFault` when it was damaged since."""
    data = keyring.recall(_NAME)
    items, at = [], 0
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start])
        items.append(Item.decode(data[start:at]))
    return items
