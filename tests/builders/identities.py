"""Members of a mesh for tests: a founder, two nodes that it invited, a client and a stranger."""

from blake3 import blake3

from meshllm.names import Digest, MeshId, NodeId
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.gossip import Item, Kind
from meshllm.protocol.membership.record_store import Record, slot_of
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.credential import Credential, Role, founder_credential, issue
from meshllm.protocol.trust.identity import NodeKey

WALL = 1_800_000_000.0  # s: the time of day
DAY = 86_400

KEYS = sorted(
    (NodeKey(blake3(b"person %d" % number).digest()) for number in range(3)),
    key=lambda key: key.node,
)
FOUNDER, MIDDLE, LAST = KEYS  # in order of node id
CLIENT, STRANGER = NodeKey(bytes([1]) * 32), NodeKey(bytes([2]) * 32)

FOUNDED = founder_credential(FOUNDER, bytes(16))
MESH: MeshId = FOUNDED.mesh
CREDENTIALS: dict[NodeId, Credential] = {
    FOUNDER.node: FOUNDED,
    MIDDLE.node: issue(FOUNDER, FOUNDED, MIDDLE.node, Role.NODE),
    LAST.node: issue(FOUNDER, FOUNDED, LAST.node, Role.NODE, int(WALL) + DAY),
    CLIENT.node: issue(FOUNDER, FOUNDED, CLIENT.node, Role.CLIENT),
    STRANGER.node: founder_credential(STRANGER, bytes(16)),
}

SHAPE = ModelSizes(
    "toy", (100,) * 4, (1,) * 4, 10, 10, tied=False, hidden_size=8, itemsize=4, context=8
)
CHARTER = Charter(1, SHAPE, DType.FLOAT32, Digest(bytes(32)))
PROFILE = Profile("desk", "1.0", ("sim:1",), 1000)
STATE = StateRecord(Lifecycle.SERVING)


def sign(key: NodeKey, record: Record, *, incarnation: int = 1, seq: int = 1) -> Item:
    """Make the signed item of a record by this member."""
    slot, version = slot_of(key.node, record)
    count = (incarnation, seq) if version is None else (version, 0)
    shown = b"" if slot.kind is Kind.STATE else CREDENTIALS[key.node].encode()
    item = Item(slot.kind, slot.subject, key.node, *count, shown, record.encode())
    return item.sign(key, MESH)
