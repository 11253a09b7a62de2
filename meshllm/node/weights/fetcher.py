"""Fetches the description and the parts of a model from other nodes of the mesh.

Theory of operation
-------------------
Every holder is asked for one file at a time, over a link for weights that stays open until nothing
is left to ask it. A file is collected beside its place and continues there after an interruption,
from any holder, because the file of a part has the same bytes on every node. A part takes its place
once it has the digest in force; if not, the holder is not asked again in this run. What an earlier
attempt left may be of other weights with the same configuration: then the file begins again first.

A holder that fails is given up, and an idle one sends the rest of the part. So it does if the part
takes long and the idle one is much faster, or not tried yet; the slow one goes on if that fails.

Nodes of one user on one machine share the folder: one of them fetches at a time, and what another
has fetched meanwhile is not fetched again. A lock ends with its process.

A part that was set aside, since the founder had another one, is put back if it is in force again.
"""

import asyncio
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshllm.errors import LinkLost, MeshError, ModelError, PeerFault
from meshllm.names import Digest, NodeId, short
from meshllm.node.event_loop import OffLoop
from meshllm.node.net.secure import SecureLink
from meshllm.node.timer import loop_time
from meshllm.node.weights.server import receive
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    WeightMessage,
    encode,
)
from meshllm.protocol.weights.holders import name_of

MAX_HOLDERS = 4  # asked at once
POLL_S = 1.0  # s between two looks at a folder into which another process fetches
IDLE_S = 30.0  # s without a chunk after which a holder is given up
DESCRIBE_S = 600.0  # s for the configuration and tokenizer, if there is another holder to ask
SLOWER = 4  # times as slow as an idle holder, over `IDLE_S` or more: that one continues
UNTRIED = 1 << 20  # bytes per second of a holder that has sent nothing yet, as far as is known

if TYPE_CHECKING:  # it imports torch, which a provider does not need
    from meshllm.model.files.parts import PartFolder

logger = logging.getLogger(__name__)


class WeightFetcher:
    """Fetches files of one model at a time."""

    def __init__(
        self,
        dial: Callable[[NodeId], Awaitable[SecureLink]],
        folder: Path,
        digest_of: Callable[[Path], Awaitable[Digest]],
        check_parts: Callable[[Path, Mapping[str, int]], Awaitable[None]],
        off_loop: OffLoop,
    ) -> None:
        """Dial holders by ``dial``; collect models in folders of ``folder``.

        ``digest_of`` returns the digest of the configuration in a folder; ``check_parts`` raises
        `PeerFault` if tensors are listed that are not those of that configuration.
        """
        self._dial = dial
        self._folder = folder
        self._digest_of, self._check_parts = digest_of, check_parts
        self.off_loop = off_loop
        self._turn = asyncio.Lock()
        self.progress = ""
        """What is fetched now, a phrase; empty for nothing."""

    def place(self, charter: Charter) -> "PartFolder":
        """Return the folder of a model."""
        from meshllm.model.files.parts import PartFolder

        return PartFolder(self._folder / name_of(charter))

    def collects(self, folder: Path) -> bool:
        """Return whether a folder of a model is one that this collects, not one of the user."""
        return folder.resolve().parent == self._folder.resolve()

    async def describe(self, charter: Charter, nodes: Sequence[NodeId]) -> Path:
        """Fetch config, tokenizer and index of a model, unless they are here; return its folder.

        Raises:
            ModelError: none of the nodes sends them.
        """
        place = self.place(charter)
        async with self._turn:
            if place.is_described:
                return place.folder
            await self.off_loop(place.prepare)
            reason = "no node of the mesh has it"
            async with self._alone(place):
                if self.place(charter).is_described:  # by another process meanwhile
                    return place.folder
                self.progress = "fetching the configuration of the model"
                for left, node in zip(range(len(nodes) - 1, -1, -1), nodes, strict=True):
                    try:
                        with _writing(place.folder):
                            await self._describe_within(left > 0, node, charter, place)
                    except _Unwritable:
                        raise
                    except _NoSpace as error:
                        reason = str(error)
                        logger.warning("the model of node %s: %s", short(node), error)
                    except MeshError as error:
                        reason = f"{short(node)}: {error}"
                        logger.warning("node %s sent no model: %s", short(node), error)
                    else:
                        return place.folder
        raise ModelError(f"The configuration of the model cannot be fetched: {reason}")

    async def fetch(
        self,
        charter: Charter,
        parts: Mapping[int, bytes],
        holders: Mapping[NodeId, Collection[int]],
        sizes: Sequence[int],
    ) -> None:
        """Fetch parts with their digests from holders; ``sizes`` are the most bytes of each part.

        Raises:
            ModelError: a part cannot be fetched from any holder, or there is no room for it.
        """
        async with self._turn:
            place = self.place(charter)
            async with self._alone(place):
                with _writing(place.folder):
                    for part, digest in parts.items():
                        await self.off_loop(place.restore, part, digest)
                left = {part: digest for part, digest in parts.items() if not place.has(part)}
                run = _Run(self, charter.config_digest, place, left, sizes)
                async with asyncio.TaskGroup() as group:
                    for node, has in holders.items():
                        group.create_task(run.ask(node, has))
        if run.fault:
            raise run.fault
        if run.left:
            reason = run.reason or "no node of the mesh has them"
            raise ModelError(f"The weights of parts {sorted(run.left)} cannot be fetched: {reason}")

    async def set_aside(
        self, charter: Charter, choose: Callable[[], Awaitable[Mapping[int, bytes]]]
    ) -> None:
        """Set parts aside that were fetched before; raise `ModelError` if they cannot be moved.

        ``choose`` returns the parts, with the digests that they should have. It is called under the
        lock: another node of this user may have replaced them meanwhile.
        """
        async with self._turn:
            place = self.place(charter)
            async with self._alone(place):
                parts = await choose()
                with _writing(place.folder):
                    await self.off_loop(place.set_aside, parts)

    async def remove_damaged(self, folder: Path, cache: Path) -> list[str]:
        """Delete the damaged parts in the folder of a model; return their names.

        Another node of this user may have replaced them meanwhile: what counts is what is there
        under the lock. Nobody waits for it if nothing is damaged.

        Raises:
            ModelError: a part cannot be read, or not be deleted.
        """
        from meshllm.model.files.parts import PartFolder

        place = PartFolder(folder)
        if not await self.off_loop(place.damaged, cache):
            return []
        async with self._turn, self._alone(place):
            with _writing(place.folder):
                return await self.off_loop(place.remove_damaged, cache)

    @asynccontextmanager
    async def _alone(self, place: "PartFolder") -> AsyncIterator[None]:
        """Wait until no other process fetches into a folder; show that meanwhile."""
        try:
            while True:
                with place.locked() as is_locked:
                    if is_locked:
                        yield
                        return
                self.progress = "another node on this machine fetches weights"
                await asyncio.sleep(POLL_S)
        finally:
            self.progress = ""

    async def _describe_within(
        self, is_limited: bool, node: NodeId, charter: Charter, place: "PartFolder"
    ) -> None:
        try:
            async with asyncio.timeout(DESCRIBE_S if is_limited else None):
                await self._describe(node, charter, place)
        except TimeoutError:
            raise LinkLost(f"The configuration took more than {DESCRIBE_S:.0f} s") from None

    async def _describe(self, node: NodeId, charter: Charter, place: "PartFolder") -> None:
        from meshllm.model.files.parts import LISTING, Listing, limit_of

        model = charter.config_digest
        async with self.link(node) as link:
            path = place.partial(LISTING)
            path.unlink(missing_ok=True)  # it may be that of another node
            await self.collect(link, model, LISTING, place, limit_of(LISTING, ()))
            listing = Listing.parse(await self.off_loop(path.read_bytes))
            place.remove_unlisted(listing)
            for name in listing.files:
                place.partial(name).unlink(missing_ok=True)
                await self.collect(link, model, name, place, limit_of(name, ()))
                place.finish(name)
            if await self._digest_of(place.folder) != model:
                raise PeerFault("The configuration is not that of the mesh")
            await self._check_parts(place.folder, listing.weights)
            await self.off_loop(place.describe, charter.shape.name, listing)
            path.unlink()

    @asynccontextmanager
    async def link(self, node: NodeId) -> AsyncIterator[SecureLink]:
        """Open a link to a holder, and close it at the end."""
        async with AsyncExitStack() as stack:
            link = await self._dial(node)
            stack.push_async_callback(link.close)
            yield link

    async def collect(
        self,
        link: SecureLink,
        model: Digest,
        name: str,
        place: "PartFolder",
        limit: int,
        *,
        received: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Collect a file, from where an earlier attempt ended.

        ``received`` gets the number of bytes of each chunk, and may raise `MeshError`.

        Raises:
            MeshError: the holder refuses, is lost, or sends something invalid.
            OSError: the file cannot be written.
        """
        with place.partial(name).open("ab") as file:
            offset = file.tell()
            size = await self._size(link, WantFile(model, name, offset))
            if size < offset:  # what was left is of another file
                file.truncate(0)
                offset = 0
                size = await self._size(link, WantFile(model, name, offset))
            if not offset <= size <= limit:
                file.truncate(0)
                raise PeerFault(f"`{name}` of {size} bytes; allowed are {offset} to {limit}")
            try:
                place.check_space(size - offset)
            except ModelError as error:
                raise _NoSpace(str(error)) from None
            while offset < size:
                data = await self._chunk(link)
                due = min(CHUNK_BYTES, size - offset)
                if len(data) != due:  # tiny ones could keep the fetcher busy without end
                    raise PeerFault(f"`{name}` in a chunk of {len(data)} bytes instead of {due}")
                offset += len(data)
                await self.off_loop(file.write, data)
                received(len(data))

    async def _size(self, link: SecureLink, want: WantFile) -> int:
        await link.send(encode(want))
        match await self._receive(link):
            case FileSize(size):
                return size
            case FileRefused(reason):
                raise ModelError(f"Refused: {reason}")
            case other:
                raise PeerFault(f"{type(other).__name__} instead of the size of a file")

    async def _chunk(self, link: SecureLink) -> bytes:
        match await self._receive(link):
            case FileChunk(data):
                return bytes(data)
            case FileRefused(reason):
                raise ModelError(f"Refused: {reason}")
            case other:
                raise PeerFault(f"{type(other).__name__} instead of the next bytes of a file")

    async def _receive(self, link: SecureLink) -> WeightMessage:
        try:
            return await receive(link, IDLE_S)
        except TimeoutError:
            raise LinkLost(f"The holder sent nothing for {IDLE_S:.0f} s") from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the disk, such as that it is full, into a `ModelError`."""
    try:
        yield
    except OSError as error:
        raise _Unwritable(f"`{folder}` cannot be written: {error.strerror}") from None


class _Unwritable(ModelError):
    """The disk of this node is full or fails: no other holder can help."""


class _NoSpace(ModelError):
    """The disk of this node has no room for a file as large as a holder says: others may differ."""


class _TooSlow(LinkLost):
    """A part may come faster from another holder."""


@dataclass(slots=True)
class _Holder:
    """A holder, and how fast it sends the part that it was asked for last."""

    node: NodeId
    has: Collection[int]
    begin: float = 0.0
    """In loop time."""
    received: int = 0
    """Bytes of that part."""
    rate: float = UNTRIED
    """Bytes per second."""

    def receive(self, count: int) -> float:
        """Note received bytes; return for how many seconds the part has been sent."""
        self.received += count
        took_s = loop_time() - self.begin
        self.rate = self.received / max(took_s, 1e-3)
        return took_s


class _Run:
    """Parts that are fetched from several holders at once."""

    def __init__(
        self,
        fetcher: WeightFetcher,
        model: Digest,
        place: "PartFolder",
        left: dict[int, bytes],
        sizes: Sequence[int],
    ) -> None:
        self.left = left
        """Digests of the parts that are not here yet."""
        self.reason = ""
        """Why the last holder failed."""
        self.fault: _Unwritable | None = None
        """Of the disk here: no further part is asked for."""
        self._fetcher = fetcher
        self._model = model
        self._place = place
        self._sizes = sizes
        self._count = len(left)
        self._taken: set[int] = set()
        self._idle: list[_Holder] = []
        self._room = asyncio.Semaphore(MAX_HOLDERS)

    async def ask(self, node: NodeId, has: Collection[int]) -> None:
        """Fetch one part after the other from a holder, once fewer than `MAX_HOLDERS` are asked.

        What it did not send is fetched from holders that have nothing else to send.
        """
        async with self._room:
            self._idle.append(_Holder(node, has))
            while holder := self._take_idle():
                if await self._ask(holder):
                    self._idle.append(holder)

    async def _ask(self, holder: _Holder) -> bool:
        """Fetch what a holder has; return whether it can be asked again."""
        part: int | None = None
        try:
            async with self._fetcher.link(holder.node) as link:
                while (part := self._next(holder.has)) is not None:
                    self._taken.add(part)
                    done = self._count - len(self.left)
                    self._fetcher.progress = f"fetching weights, {done} of {self._count} parts"
                    with _writing(self._place.folder):
                        await self._fetch(link, holder, part)
                    del self.left[part]
        except _Unwritable as error:
            self.fault = error
            return False
        except _TooSlow as error:
            logger.info("node %s: %s", short(holder.node), error)
        except _NoSpace as error:
            self.reason = str(error)
            logger.warning("weights of node %s: %s", short(holder.node), error)
            return False
        except MeshError as error:
            self.reason = f"{short(holder.node)}: {error}"
            logger.warning("node %s sent no weights: %s", short(holder.node), error)
            return False
        finally:
            self._taken.discard(-1 if part is None else part)
        return True

    def _take_idle(self) -> _Holder | None:
        """Return the fastest holder that is not asked now, and has a part that nobody sends."""
        able = (each for each in self._idle if self._next(each.has) is not None)
        found = max(able, key=lambda each: each.rate, default=None)
        if found:
            self._idle.remove(found)
        return found

    def _next(self, has: Collection[int]) -> int | None:
        if self.fault:
            return None
        return next((part for part in self.left if part in has and part not in self._taken), None)

    async def _fetch(self, link: SecureLink, holder: _Holder, part: int) -> None:
        from meshllm.model.files.parts import limit_of, part_name

        def received(count: int) -> None:
            took_s = holder.receive(count)
            fastest = max((each.rate for each in self._idle if part in each.has), default=0.0)
            if took_s > IDLE_S and fastest > SLOWER * holder.rate:
                raise _TooSlow(
                    f"`{name}` takes {took_s:.0f} s so far: another holder may be faster"
                )

        fetcher, place = self._fetcher, self._place
        name = part_name(part)
        limit = limit_of(name, self._sizes)
        is_begun = place.has_begun(name)
        holder.begin, holder.received = loop_time(), 0
        collect = partial(fetcher.collect, link, self._model, name, place, limit, received=received)
        await collect()
        try:
            await fetcher.off_loop(place.verify, part, self.left[part])
        except PeerFault:
            if not is_begun:
                raise
            logger.info("the partial download of `%s` is of other weights: starting over", name)
            await collect()
            await fetcher.off_loop(place.verify, part, self.left[part])
