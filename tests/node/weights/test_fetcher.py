"""Weights between two nodes: sent, resumed, verified; hostile holders are refused and replaced."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch

from meshllm.errors import LinkLost, ModelError
from meshllm.model.files.manifest import config_digest, manifest
from meshllm.model.files.parts import (
    LISTING,
    ModelParts,
    PartFolder,
    check_parts,
    most_bytes,
    part_name,
)
from meshllm.model.files.source import Source, open_folder
from meshllm.model.locate import INDEX
from meshllm.names import Digest, NodeId
from meshllm.node.net.secure import SecureLink
from meshllm.node.weights import WeightFetcher, WeightServer, fetcher, server
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    WeightMessage,
    decode,
    encode,
)
from meshllm.testing.clock import run_virtual
from meshllm.testing.models import tiny_model
from meshllm_loopback import LoopbackTransport, Shape
from tests.builders.mesh_members import House, Town, town
from tests.builders.snapshots import charter

T = TypeVar("T")
LAYERS = 6
Answer = Callable[[WantFile], Sequence[WeightMessage]]
Story = Callable[[Town], Coroutine[Any, Any, None]]


async def at_once(function: Callable[..., T], /, *args: Any) -> T:
    return function(*args)


async def digest_of(folder: Path) -> Digest:
    return Digest(config_digest(open_folder("llama", folder)))


async def checked(folder: Path, weights: Mapping[str, int]) -> None:
    check_parts(open_folder("llama", folder), weights)


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Story], None]:
    """Run a story in a town with a slow network; check that no task is left."""

    async def main(story: Story) -> None:
        async with town(tmp_path / "town", LoopbackTransport(Shape(delay_s=0.01))) as made:
            await story(made)
        await asyncio.sleep(2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda story: run_virtual(main(story))


class Nodes:
    """A node that fetches, and holders."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.source = source
        self.charter = replace(charter(), config_digest=Digest(config_digest(source)))
        self.digests = manifest(source, folder / "cache")[:-1]
        self.sizes = most_bytes(source)
        self.folder = folder / "fetched"
        self.asked: list[tuple[NodeId, str, int]] = []

    async def meet(self, town: Town, *names: str) -> list[House]:
        """Start the node that fetches, and linked holders that send the real model."""
        first, *rest = [await town.add(name) for name in ("attic", *names)]
        for each in rest:
            each.meet(first)
            each.send_weights = self.sending()
        await asyncio.sleep(2)
        self.fetcher = WeightFetcher(
            first.links.dial_weights, self.folder, digest_of, checked, at_once
        )
        return [first, *rest]

    def sending(self) -> Callable[[SecureLink], Awaitable[None]]:
        sends = WeightServer(at_once)

        async def parts() -> ModelParts:
            return ModelParts(self.source)

        sends.offer(self.charter.config_digest, parts)
        return sends.serve

    def scripted(self, house: House, answer: Answer) -> None:
        """Let a holder answer each request by a script."""

        async def serve(link: SecureLink) -> None:
            with suppress(LinkLost):
                while True:
                    _, data = await link.receive()
                    want = decode(data)
                    assert isinstance(want, WantFile)
                    self.asked.append((house.me, want.name, want.offset))
                    for message in answer(want):
                        await link.send(encode(message))
            await link.close()

        house.send_weights = serve

    def sending_slowly(self, house: House, most: int, pause_s: float) -> None:
        """Let a holder send the real model in small chunks, and pause before each."""

        async def serve(link: SecureLink) -> None:
            with suppress(LinkLost):
                while True:
                    _, data = await link.receive()
                    want = decode(data)
                    assert isinstance(want, WantFile)
                    self.asked.append((house.me, want.name, want.offset))
                    file = ModelParts(self.source).open(want.name)
                    await link.send(encode(FileSize(file.size)))
                    for at in range(want.offset, file.size, most):
                        await asyncio.sleep(pause_s)
                        await link.send(encode(FileChunk(file.read(at, min(most, file.size - at)))))
            await link.close()

        house.send_weights = serve

    async def describe(self, *houses: House) -> PartFolder:
        await self.fetcher.describe(self.charter, [house.me for house in houses])
        return self.fetcher.place(self.charter)

    async def fetch(self, parts: Sequence[int], *houses: House) -> None:
        wanted = {part: self.digests[part] for part in parts}
        holders = {house.me: frozenset(parts) for house in houses}
        await self.fetcher.fetch(self.charter, wanted, holders, self.sizes)

    def true(self, want: WantFile) -> list[WeightMessage]:
        """Return the right answer."""
        file = ModelParts(self.source).open(want.name)
        data = file.read(want.offset, file.size)
        chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        return [FileSize(file.size), *map(FileChunk, chunks)]

    @property
    def here(self) -> list[int]:
        place = self.fetcher.place(self.charter)
        return [part for part in range(LAYERS + 2) if (place.folder / part_name(part)).exists()]


@pytest.fixture
def nodes(tmp_path: Path, source: Source) -> Nodes:
    return Nodes(tmp_path, source)


def test_a_model_is_described_and_its_parts_are_fetched(
    run: Callable[[Story], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        await nodes.fetch([1, 4, LAYERS], barn)

        found = manifest(open_folder("llama", place.folder), tmp_path / "cache")
        assert [part for part in range(LAYERS + 2) if found[part] == nodes.digests[part]] == [
            1,
            4,
            LAYERS,
        ]
        assert not list(place.folder.glob("*.partial"))
        assert nodes.fetcher.progress == ""
        assert nodes.fetcher.collects(place.folder)
        assert not nodes.fetcher.collects(nodes.source.folder)
        assert place.folder == (await nodes.describe()).folder  # asks nobody again

    run(story)


def test_parts_come_from_several_holders_each_once(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        await nodes.describe(barn)
        for house in (barn, cellar):
            nodes.scripted(house, nodes.true)
        await nodes.fetch(range(LAYERS), barn, cellar)

        assert nodes.here == list(range(LAYERS))
        assert sorted(name for _, name, _ in nodes.asked) == [*map(part_name, range(LAYERS))]
        assert {node for node, _, _ in nodes.asked} == {barn.me, cellar.me}

    run(story)


def test_a_part_continues_where_another_holder_stopped(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        await nodes.describe(barn)
        nodes.scripted(
            barn, lambda want: [*nodes.true(want)[:1], FileChunk(b"\0" * 8), FileRefused("no")]
        )
        nodes.scripted(cellar, nodes.true)
        path = nodes.fetcher.place(nodes.charter).partial(part_name(2))
        path.write_bytes(ModelParts(nodes.source).open(part_name(2)).read(0, 1000))
        await nodes.fetch([2], cellar)

        assert nodes.asked == [(cellar.me, part_name(2), 1000)]
        assert nodes.here == [2]

    run(story)


@pytest.mark.parametrize(
    ("left", "offsets"),
    [
        (lambda whole: whole, [None]),
        (lambda whole: b"x" * 1000, [1000, 0]),
        (lambda whole: b"x" * len(whole), [None, 0]),
        (lambda whole: whole + b"x", [None, 0]),
    ],
    ids=["whole", "of other weights", "whole of other weights", "longer"],
)
def test_what_a_node_that_died_has_left_is_continued_or_begun_again(
    run: Callable[[Story], None],
    nodes: Nodes,
    left: Callable[[bytes], bytes],
    offsets: list[int | None],
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        await nodes.describe(barn)
        nodes.scripted(barn, nodes.true)
        file = ModelParts(nodes.source).open(part_name(2))
        found = left(file.read(0, file.size))
        place = nodes.fetcher.place(nodes.charter)
        place.partial(part_name(2)).write_bytes(found)

        await nodes.fetch([2], barn)

        asked = [len(found) if offset is None else offset for offset in offsets]
        assert [offset for _, _, offset in nodes.asked] == asked
        assert nodes.here == [2]
        assert not place.partial(part_name(2)).exists()

    run(story)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda want, true: [FileRefused("busy")], "Refused: busy"),
        (lambda want, true: [true[0], FileRefused("gone")], "Refused: gone"),
        (lambda want, true: [FileChunk(b"x")], "FileChunk instead of the size"),
        (lambda want, true: [true[0], true[0]], "FileSize instead of the next bytes"),
        (lambda want, true: [FileSize(1 << 39)], "allowed are 0 to"),
        (lambda want, true: [FileSize(4), FileChunk(b"12345")], "chunk of 5 bytes instead of 4"),
        (lambda want, true: [true[0], FileChunk(b"1")], "chunk of 1 bytes instead of"),
        (lambda want, true: [FileSize(4), FileChunk(b"1234")], "not those of the mesh"),
        (lambda want, true: [WantFile(want.model, "x", 0)], "WantFile instead of the size"),
        (lambda want, true: [], "sent nothing for 30 s"),
    ],
)
def test_a_holder_that_sends_something_else_is_given_up(
    run: Callable[[Story], None],
    nodes: Nodes,
    answer: Callable[[WantFile, list[WeightMessage]], list[WeightMessage]],
    reason: str,
) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        await nodes.describe(cellar)
        nodes.scripted(barn, lambda want: answer(want, nodes.true(want)))
        with pytest.raises(ModelError, match=reason):
            await nodes.fetch([1], barn)
        assert nodes.here == []

        await nodes.fetch([1], cellar)
        assert nodes.here == [1]

    run(story)


SMALL = 1024  # bytes of a chunk


async def slow_and_fast(nodes: Nodes, town: Town) -> tuple[House, House]:
    """Return two holders, of which the first takes 20 s for each chunk."""
    _, slow, fast = await nodes.meet(town, "barn", "cellar")
    await nodes.describe(fast)
    nodes.sending_slowly(slow, SMALL, pause_s=20.0)
    nodes.sending_slowly(fast, SMALL, pause_s=0.01)
    return slow, fast


def test_a_part_of_a_holder_that_is_much_slower_than_an_idle_one_comes_from_that(
    run: Callable[[Story], None], nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(town: Town) -> None:
        barn, cellar = await slow_and_fast(nodes, town)
        monkeypatch.setattr(fetcher, "CHUNK_BYTES", SMALL)
        wanted = {part: nodes.digests[part] for part in range(4)}
        holders = {barn.me: frozenset(range(4)), cellar.me: frozenset(range(3))}
        await nodes.fetcher.fetch(nodes.charter, wanted, holders, nodes.sizes)

        assert nodes.here == [0, 1, 2, 3]
        assert nodes.asked == [
            (barn.me, part_name(0), 0),
            (cellar.me, part_name(1), 0),
            (cellar.me, part_name(2), 0),
            (cellar.me, part_name(0), 2 * SMALL),
            (barn.me, part_name(3), 0),
        ]

    run(story)


@pytest.mark.parametrize("is_refused", [False, True], ids=["sent", "refused"])
def test_a_part_that_takes_long_comes_from_an_idle_holder_that_was_not_tried_if_that_sends_it(
    run: Callable[[Story], None],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    is_refused: bool,
) -> None:
    async def story(town: Town) -> None:
        barn, cellar = await slow_and_fast(nodes, town)
        monkeypatch.setattr(fetcher, "CHUNK_BYTES", SMALL)
        if is_refused:
            nodes.scripted(cellar, lambda want: [FileRefused("busy")])
        await nodes.fetch([0], barn, cellar)

        assert nodes.here == [0]
        again = [(barn.me, part_name(0), 2 * SMALL)] if is_refused else []
        assert nodes.asked == [
            (barn.me, part_name(0), 0),
            (cellar.me, part_name(0), 2 * SMALL),
            *again,
        ]

    run(story)


def test_a_description_of_another_model_is_refused(
    run: Callable[[Story], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        other = ModelParts(tiny_model(tmp_path / "gpt2", "gpt2"))

        def answer(want: WantFile) -> list[WeightMessage]:
            file = other.open(want.name)
            return [FileSize(file.size), FileChunk(file.read(want.offset, file.size))]

        nodes.scripted(barn, answer)
        with pytest.raises(ModelError, match="not that of the mesh"):
            await nodes.describe(barn)
        assert not nodes.fetcher.place(nodes.charter).is_described

        assert (await nodes.describe(barn, cellar)).is_described

    run(story)


def test_a_listing_of_other_parts_is_refused(run: Callable[[Story], None], nodes: Nodes) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        listing = json.loads(ModelParts(nodes.source).listing().header)
        weights = {name: (part + 1) % LAYERS for name, part in listing["weights"].items()}
        lie = json.dumps(listing | {"weights": weights}).encode()

        def answer(want: WantFile) -> list[WeightMessage]:
            if want.name == LISTING:
                return [FileSize(len(lie)), FileChunk(lie)]
            return nodes.true(want)

        nodes.scripted(barn, answer)
        with pytest.raises(ModelError, match="not those of the model"):
            await nodes.describe(barn)

        assert (await nodes.describe(barn, cellar)).is_described
        await nodes.fetch([1], cellar)
        assert nodes.here == [1]

    run(story)


def test_a_model_that_nobody_describes(run: Callable[[Story], None], nodes: Nodes) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        nodes.charter = replace(nodes.charter, config_digest=Digest(b"?" * 32))

        with pytest.raises(ModelError, match="no node of the mesh has it"):
            await nodes.describe()
        with pytest.raises(ModelError, match="does not have the file"):
            await nodes.describe(barn)
        with pytest.raises(ModelError, match="no node of the mesh has them"):
            await nodes.fetch([1])

    run(story)


def test_a_full_disk_ends_the_fetching_and_is_not_blamed_on_holders(
    run: Callable[[Story], None],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        reason = "cannot be fetched: This node has too little space: .* has room for 0 bytes"
        with monkeypatch.context() as full:
            full.setattr("meshllm.model.files.parts.FREE_BYTES", 1 << 60)
            with pytest.raises(ModelError, match=reason):
                await nodes.describe(barn)
        await nodes.describe(barn)
        monkeypatch.setattr("meshllm.model.files.parts.FREE_BYTES", 1 << 60)
        with pytest.raises(ModelError, match=reason):
            await nodes.fetch([1], barn)

    run(story)
    assert "sent no" not in caplog.text


def test_a_folder_that_vanishes_ends_the_fetching(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        shutil.rmtree(place.folder)
        with pytest.raises(ModelError, match="cannot be written"):
            await nodes.fetch([1], barn)

    run(story)


def test_a_disk_that_fails_is_not_blamed_on_holders(
    run: Callable[[Story], None], nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(town: Town) -> None:
        _, barn, cellar = await nodes.meet(town, "barn", "cellar")
        place = await nodes.describe(barn)
        place.partial(part_name(1)).mkdir()
        with pytest.raises(ModelError, match=r"^`[^`]*` cannot be written"):
            await nodes.fetch([1], barn, cellar)

    run(story)
    assert "sent no weights" not in caplog.text


def test_nodes_that_share_a_folder_fetch_each_part_once(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        attic, barn = await nodes.meet(town, "barn")
        other = WeightFetcher(attic.links.dial_weights, nodes.folder, digest_of, checked, at_once)
        await asyncio.gather(nodes.describe(barn), other.describe(nodes.charter, [barn.me]))
        nodes.scripted(barn, nodes.true)
        wanted = {part: nodes.digests[part] for part in range(LAYERS)}
        holders = {barn.me: frozenset(wanted)}
        await asyncio.gather(
            nodes.fetch(range(LAYERS), barn),
            other.fetch(nodes.charter, wanted, holders, nodes.sizes),
        )

        assert sorted(name for _, name, _ in nodes.asked) == [*map(part_name, range(LAYERS))]
        assert nodes.here == list(range(LAYERS))

    run(story)


def test_a_model_whose_index_is_cut_is_described_again(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        await nodes.fetch([1], barn)
        whole = (place.folder / INDEX).read_bytes()
        (place.folder / INDEX).write_bytes(whole[:100])

        await nodes.describe(barn)
        assert (place.folder / INDEX).read_bytes() == whole
        assert nodes.here == [1]

    run(story)


def test_a_part_that_is_in_force_again_is_not_fetched_again(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        await nodes.describe(barn)
        await nodes.fetch([0, 1], barn)

        async def choose() -> dict[int, bytes]:
            return {0: nodes.digests[1], 1: nodes.digests[0]}  # of other weights

        await nodes.fetcher.set_aside(nodes.charter, choose)
        assert nodes.here == []

        nodes.scripted(barn, nodes.true)
        await nodes.fetch([1, 2], barn)
        assert nodes.here == [1, 2]
        assert [name for _, name, _ in nodes.asked] == [part_name(2)]

    run(story)


def test_of_nodes_that_share_a_folder_none_removes_what_another_has_fetched_again(
    run: Callable[[Story], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        await nodes.fetch([0, 1], barn)
        good = (place.folder / part_name(0)).read_bytes()
        (place.folder / part_name(0)).write_bytes(good[:-1])

        async def remove() -> list[str]:
            return await nodes.fetcher.remove_damaged(place.folder, tmp_path / "cache")

        with PartFolder(place.folder).locked() as is_locked:  # by another node of this user
            assert is_locked
            removing = asyncio.ensure_future(remove())
            await asyncio.sleep(5)
            assert nodes.fetcher.progress == "another node on this machine fetches weights"
            assert nodes.here == [0, 1]
            (place.folder / part_name(0)).write_bytes(good)
        assert await removing == []
        assert nodes.here == [0, 1]

        (place.folder / part_name(0)).write_bytes(good[:-1])
        assert await remove() == [part_name(0)]
        assert nodes.here == [1]
        with PartFolder(place.folder).locked():  # nothing is damaged: nobody waits
            assert await asyncio.wait_for(remove(), 1) == []

    run(story)


def test_of_nodes_that_share_a_folder_none_sets_aside_what_another_has_fetched_again(
    run: Callable[[Story], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        await nodes.fetch([0, 1], barn)
        path = place.folder / part_name(1)
        good = path.read_bytes()
        changed = good[:-1] + bytes([good[-1] ^ 1])
        path.write_bytes(changed)

        async def choose() -> dict[int, bytes]:
            here = manifest(open_folder("llama", place.folder), tmp_path / "cache")
            return {
                part: nodes.digests[part] for part in (0, 1) if here[part] != nodes.digests[part]
            }

        assert [*await choose()] == [1]  # this node compares
        with PartFolder(place.folder).locked() as is_locked:  # by another node of this user
            assert is_locked
            moving = asyncio.ensure_future(nodes.fetcher.set_aside(nodes.charter, choose))
            await asyncio.sleep(5)
            path.write_bytes(good)
        await moving
        assert path.read_bytes() == good

        path.write_bytes(changed)
        await nodes.fetcher.set_aside(nodes.charter, choose)
        assert nodes.here == [0]

    run(story)


def test_a_file_that_cannot_be_put_in_its_place_ends_the_fetching(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        place = await nodes.describe(barn)
        (place.folder / part_name(1)).mkdir()
        with pytest.raises(ModelError, match="cannot be written"):
            await nodes.fetch([1], barn)

    run(story)


def test_parts_are_fetched_from_more_holders_than_are_asked_at_once(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        names = [f"barn{number}" for number in range(fetcher.MAX_HOLDERS)]
        _, *barns, cellar = await nodes.meet(town, *names, "cellar")
        await nodes.describe(cellar)
        for barn in barns:
            nodes.scripted(barn, lambda want: [FileRefused("busy")])
        await nodes.fetch([1, 2], *barns, cellar)

        assert nodes.here == [1, 2]

    run(story)


def test_a_part_that_a_holder_does_not_send_comes_from_one_that_had_nothing_to_send_in_its_turn(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        names = [f"barn{number}" for number in range(fetcher.MAX_HOLDERS)]
        _, *barns, cellar = await nodes.meet(town, *names, "cellar")
        await nodes.describe(cellar)
        nodes.scripted(barns[0], lambda want: nodes.true(want)[:1])  # and is silent
        wanted = {part: nodes.digests[part] for part in range(len(barns))}
        holders = {barn.me: frozenset({part}) for part, barn in enumerate(barns)}
        holders[cellar.me] = frozenset({0})
        await nodes.fetcher.fetch(nodes.charter, wanted, holders, nodes.sizes)

        assert nodes.here == list(wanted)

    run(story)


def test_a_server_refuses_what_is_not_a_request_and_closes_idle_links(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        attic, barn = await nodes.meet(town, "barn")
        for message in (FileSize(1), FileChunk(b"x"), FileRefused("x")):
            link = await attic.links.dial_weights(barn.me)
            await link.send(encode(message))
            with pytest.raises(LinkLost):
                await link.receive()
        link = await attic.links.dial_weights(barn.me)
        await asyncio.sleep(server.IDLE_S + 1)
        with pytest.raises(LinkLost):
            await link.receive()

    run(story)


def test_a_server_ignores_messages_of_a_later_version(
    run: Callable[[Story], None], nodes: Nodes
) -> None:
    async def story(town: Town) -> None:
        attic, barn = await nodes.meet(town, "barn")
        link = await attic.links.dial_weights(barn.me)
        await link.send([b"\x09 of a later version"])
        await link.send(encode(WantFile(Digest(bytes(32)), "config", 0)))
        _, data = await link.receive()

        assert isinstance(decode(data), FileRefused)

    run(story)


def test_a_node_has_a_limit_of_links(run: Callable[[Story], None], nodes: Nodes) -> None:
    async def story(town: Town) -> None:
        attic, barn = await nodes.meet(town, "barn")
        most = server.MAX_LINKS_OF_NODE
        links = [await attic.links.dial_weights(barn.me) for _ in range(most)]
        await asyncio.sleep(1)
        with pytest.raises(ModelError, match="cannot be fetched"):
            await nodes.describe(barn)
        for link in links:
            await link.close()
        await asyncio.sleep(1)
        assert (await nodes.describe(barn)).is_described

    run(story)


class StuckLink:
    """A link whose other side asks for a file, and reads nothing."""

    def __init__(self, peer: bytes, want: WantFile) -> None:
        self.peer = NodeId(peer * 32)
        self.want = want
        self.is_asked = self.is_closed = False

    async def receive(self) -> tuple[None, bytes]:
        return None, b"".join(map(bytes, encode(self.want)))

    async def send(self, _: object) -> None:
        self.is_asked = True
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


class ReadingLink(StuckLink):
    """A link whose other side is lost after the first chunk of a file."""

    data = b""

    async def send(self, message: object) -> None:
        match decode(b"".join(map(bytes, cast("Sequence[bytes]", message)))):
            case FileChunk(data):
                self.data = bytes(data)
                raise LinkLost("It has enough")


def test_a_server_gives_up_nodes_that_read_nothing_and_refuses_more_than_it_can_serve(
    nodes: Nodes,
) -> None:
    async def story() -> None:
        serve = nodes.sending()
        want = WantFile(nodes.charter.config_digest, LISTING, 0)
        links = [StuckLink(bytes([peer]), want) for peer in range(server.MAX_LINKS + 1)]
        serving = [asyncio.ensure_future(serve(cast("SecureLink", link))) for link in links]
        await asyncio.sleep(1)
        assert [link.is_closed for link in links] == [False] * server.MAX_LINKS + [True]
        assert [link.is_asked for link in links] == [True] * server.MAX_LINKS + [False]

        await asyncio.sleep(server.IDLE_S)
        assert all(link.is_closed for link in links)
        await asyncio.gather(*serving)

    run_virtual(story())


def test_a_server_sends_the_model_that_was_offered_last(nodes: Nodes, tmp_path: Path) -> None:
    want = WantFile(nodes.charter.config_digest, part_name(1), 0)

    async def story() -> None:
        sends = WeightServer(at_once)
        found = []
        for source in (nodes.source, tiny_model(tmp_path / "other", dtype=torch.bfloat16)):

            async def parts(source: Source = source) -> ModelParts:
                return ModelParts(source)

            sends.offer(nodes.charter.config_digest, parts)
            link = ReadingLink(b"a", want)
            await sends.serve(cast("SecureLink", link))
            found.append(link.data)
        assert found[0] != found[1]

    run_virtual(story())


def test_a_client_gets_no_weights(run: Callable[[Story], None], nodes: Nodes) -> None:
    async def story(town: Town) -> None:
        _, barn = await nodes.meet(town, "barn")
        client = await town.add("client", Role.CLIENT)
        client.meet(barn)
        await asyncio.sleep(2)
        mine = WeightFetcher(client.links.dial_weights, nodes.folder, digest_of, checked, at_once)
        with pytest.raises(ModelError, match="cannot be fetched"):
            await mine.describe(nodes.charter, [barn.me])

    run(story)
