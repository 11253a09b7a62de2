"""Records that survive a restart: the charter, the removals, and the addresses of members."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Self

from meshllm.errors import PeerFault, UserError
from meshllm.names import NODE_ID_BYTES, NodeId
from meshllm.node.event_loop import OffLoop
from meshllm.node.membership.state_store import FILE, StateStore
from meshllm.node.net.peer_address import LocalAddressPolicy, permitted
from meshllm.protocol.membership.gossip import Item
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_MEMBERS, Lifecycle

_NAME = "records"
_LEFT = "left"
_LENGTH_BYTES = 4
RETRY_S = 30.0  # s until what could not be saved is tried again, such as on a full disk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedRecords:
    """A snapshot of the records to save."""

    lasting: tuple[Item, ...]
    met: Mapping[NodeId, tuple[str, ...]]
    """Addresses of the known nodes."""
    gone: frozenset[NodeId]
    """Nodes whose addresses are not saved: this one, and removed members."""
    most: int = MAX_MEMBERS
    """Nodes whose addresses are saved, with earlier ones."""
    left: frozenset[NodeId] = frozenset()
    """Nodes that left the mesh, and may return."""

    @classmethod
    def of(cls, machine: Mesh, local_of: Callable[[NodeId], LocalAddressPolicy]) -> Self:
        """Take a snapshot, for another thread; only addresses that may be dialled are kept."""
        met = {
            node: permitted(profile.addresses, local_of(node))
            for node, profile in machine.profiles.items()
        }
        gone = frozenset((machine.me, *machine.removals))
        return cls(machine.lasting, met, gone, left=left_nodes(machine))


def save_records(store: StateStore, records: SavedRecords) -> None:
    """Save the records in the state folder; addresses of nodes not met in this run are kept.

    Raises:
        UserError: the folder cannot be written.
    """
    items = [item.encode() for item in records.lasting]
    store.save(_NAME, b"".join(len(item).to_bytes(_LENGTH_BYTES) + item for item in items))
    met = records.met
    known = {**met, **{node: at for node, at in store.peers.items() if node not in met}}
    lasting = [node for node in known if node not in records.gone]
    store.peers = {node: known[node] for node in lasting[: records.most]}
    left = records.left | (_left(store) - met.keys())
    store.save(_LEFT, b"".join(sorted(left & store.peers.keys())))


def left_nodes(machine: Mesh) -> frozenset[NodeId]:
    """Return the nodes that left the mesh while this one was there."""
    states = machine.states.items()
    return frozenset(node for node, state in states if state.lifecycle is Lifecycle.LEFT)


def expected_nodes(store: StateStore) -> frozenset[NodeId]:
    """Return the saved members, without those that left the mesh."""
    return frozenset(store.peers.keys() - _left(store))


def _left(store: StateStore) -> set[NodeId]:
    data = store.load(_LEFT)
    return {NodeId(data[at : at + NODE_ID_BYTES]) for at in range(0, len(data), NODE_ID_BYTES)}


class RecordKeeper:
    """Saves the records after they have changed; changes within ``pause_s`` together."""

    def __init__(
        self,
        store: StateStore,
        take: Callable[[], SavedRecords],
        off_loop: OffLoop = asyncio.to_thread,
        *,
        pause_s: float = 0.0,
    ) -> None:
        """Save in the state folder; ``take`` takes a snapshot."""
        self._store = store
        self._take = take
        self._off_loop = off_loop
        self._pause_s = pause_s
        self._unsaved = asyncio.Event()
        self._writing = Lock()
        self._taken = count(1)
        self._written = 0  # the number of the last snapshot on disk

    def changed(self) -> None:
        """Save soon: the records may have changed."""
        self._unsaved.set()

    async def save(self) -> SavedRecords:
        """Save now, on disk before this returns; return what was saved.

        Raises:
            UserError: the folder cannot be written.

        If cancelled, they may be saved all the same.
        """
        records = self._take()
        await self._off_loop(self._write, next(self._taken), records)
        return records

    async def close(self) -> None:
        """Save what is not saved yet, on disk before this returns, after all that was begun.

        If cancelled, it may be saved all the same.
        """
        if self._unsaved.is_set():
            try:
                await self.save()
            except UserError as error:
                _warn(error)

    async def run(self) -> None:
        """Save after each change until cancelled; what cannot be saved is tried again."""
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(self._pause_s)
            try:
                saved = await self.save()
            except UserError as error:
                _warn(error)
                await asyncio.sleep(RETRY_S)
            else:
                if saved == self._take():
                    self._unsaved.clear()

    def _write(self, number: int, records: SavedRecords) -> None:
        """Write a snapshot, unless a later one is on disk: threads may overtake each other."""
        with self._writing:
            if number > self._written:
                save_records(self._store, records)
                self._written = number


def _warn(error: UserError) -> None:
    """Log that the state folder cannot be written, such as on a full disk."""
    logger.warning("%s", error)


def restore_records(store: StateStore, machine: Mesh, now: float) -> None:
    """Give the saved records to a node that starts.

    Raises:
        UserError: they are damaged, or of a version that this one does not read. None is skipped:
            without a removal a removed member would be let in.
    """
    try:
        machine.restore(_load(store), now)
    except PeerFault as error:
        path = store.folder / FILE
        raise UserError(
            f"`{path}` is damaged, or of another version of meshllm: {error}",
            hint="use that version, or move the file away and found or join a mesh again",
        ) from error


def _load(store: StateStore) -> list[Item]:
    data = store.load(_NAME)
    items, at = [], 0
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start])
        items.append(Item.decode(data[start:at]))
    return items
