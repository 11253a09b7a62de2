"""Records that survive a restart: the charter, the removals, and the addresses of members."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from meshllm.errors import PeerFault, UserError
from meshllm.names import NodeId
from meshllm.node.membership.state_store import FILE, StateStore
from meshllm.node.net.peer_address import Local, permitted
from meshllm.node.offloop import OffLoop
from meshllm.protocol.membership.gossip import Item
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_MEMBERS

_NAME = "records"
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

    @classmethod
    def of(cls, machine: Mesh, local_of: Callable[[NodeId], Local]) -> Self:
        """Take a snapshot, for another thread; only addresses that may be dialled are kept."""
        met = {
            node: permitted(profile.addresses, local_of(node))
            for node, profile in machine.profiles.items()
        }
        return cls(machine.lasting, met, frozenset((machine.me, *machine.removals)))


def save_records(store: StateStore, records: SavedRecords) -> None:
    """Save the records in the state folder; addresses of nodes not met in this run are kept.

    Raises:
        UserError: the folder cannot be written.
    """
    items = [item.encode() for item in records.lasting]
    store.remember(_NAME, b"".join(len(item).to_bytes(_LENGTH_BYTES) + item for item in items))
    met = records.met
    known = {**met, **{node: at for node, at in store.peers.items() if node not in met}}
    lasting = [node for node in known if node not in records.gone]
    store.peers = {node: known[node] for node in lasting[: records.most]}


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

    def changed(self) -> None:
        """Save soon: the records may have changed."""
        self._unsaved.set()

    def save(self) -> None:
        """Save now, on disk before this returns.

        Raises:
            UserError: the folder cannot be written.
        """
        save_records(self._store, self._take())

    def close(self) -> None:
        """Save what is not saved yet."""
        if self._unsaved.is_set():
            with _warned():
                self.save()

    async def run(self) -> None:
        """Save after each change until cancelled; what cannot be saved is tried again."""
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(self._pause_s)
            records, is_saved = self._take(), False
            with _warned():
                await self._off_loop(save_records, self._store, records)
                is_saved = True
            if not is_saved:
                await asyncio.sleep(RETRY_S)
            elif records == self._take():
                self._unsaved.clear()


@contextmanager
def _warned() -> Iterator[None]:
    """Log instead of raise if the state folder cannot be written, such as on a full disk."""
    try:
        yield
    except UserError as error:
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
    data = store.recall(_NAME)
    items, at = [], 0
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start])
        items.append(Item.decode(data[start:at]))
    return items
