"""Weights between two nodes: sent, resumed, verified; hostile holders are refused and replaced."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.errors import ModelError
from meshllm.model.files.manifest import manifest
from meshllm.model.files.parts import LISTING, ModelParts, PartFolder, part_name
from meshllm.model.files.source import open_folder
from meshllm.model.locate import INDEX
from meshllm.names import Digest
from meshllm.node.weights import WeightFetcher, fetcher
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.weights.codec import FileChunk, FileRefused, FileSize, WantFile, WeightMessage
from meshllm.testing.models import tiny_model
from tests.builders.mesh_members import MemberNetwork, MeshMember
from tests.builders.weight_nodes import LAYERS, Nodes, Scenario, at_once, checked, digest_of


def test_a_model_is_described_and_its_parts_are_fetched(
    run: Callable[[Scenario], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
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

    run(scenario)


def test_parts_come_from_several_holders_each_once(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        await nodes.describe(barn)
        for member_node in (barn, cellar):
            nodes.scripted(member_node, nodes.true)
        await nodes.fetch(range(LAYERS), barn, cellar)

        assert nodes.here == list(range(LAYERS))
        assert sorted(name for _, name, _ in nodes.asked) == [*map(part_name, range(LAYERS))]
        assert {node for node, _, _ in nodes.asked} == {barn.me, cellar.me}

    run(scenario)


def test_a_part_continues_where_another_holder_stopped(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
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

    run(scenario)


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
    run: Callable[[Scenario], None],
    nodes: Nodes,
    left: Callable[[bytes], bytes],
    offsets: list[int | None],
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
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

    run(scenario)


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
        (lambda want, true: [FileSize(4), FileChunk(b"1234")], "lack the digest of the mesh"),
        (lambda want, true: [WantFile(want.model, "x", 0)], "WantFile instead of the size"),
        (lambda want, true: [], "sent nothing for 30 s"),
    ],
)
def test_a_holder_that_sends_something_else_is_given_up(
    run: Callable[[Scenario], None],
    nodes: Nodes,
    answer: Callable[[WantFile, list[WeightMessage]], list[WeightMessage]],
    reason: str,
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        await nodes.describe(cellar)
        nodes.scripted(barn, lambda want: answer(want, nodes.true(want)))
        with pytest.raises(ModelError, match=reason):
            await nodes.fetch([1], barn)
        assert nodes.here == []

        await nodes.fetch([1], cellar)
        assert nodes.here == [1]

    run(scenario)


SMALL = 1024  # bytes of a chunk


async def slow_and_fast(nodes: Nodes, network: MemberNetwork) -> tuple[MeshMember, MeshMember]:
    """Return two holders, of which the first takes 20 s for each chunk."""
    _, slow, fast = await nodes.meet(network, "barn", "cellar")
    await nodes.describe(fast)
    nodes.sending_slowly(slow, SMALL, pause_s=20.0)
    nodes.sending_slowly(fast, SMALL, pause_s=0.01)
    return slow, fast


def test_a_part_of_a_holder_that_is_much_slower_than_an_idle_one_comes_from_that(
    run: Callable[[Scenario], None], nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        barn, cellar = await slow_and_fast(nodes, network)
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

    run(scenario)


@pytest.mark.parametrize("is_refused", [False, True], ids=["sent", "refused"])
def test_a_part_that_takes_long_comes_from_an_idle_holder_that_was_not_tried_if_that_sends_it(
    run: Callable[[Scenario], None],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    is_refused: bool,
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        barn, cellar = await slow_and_fast(nodes, network)
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

    run(scenario)


def test_a_description_of_another_model_is_refused(
    run: Callable[[Scenario], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        other = ModelParts(tiny_model(tmp_path / "gpt2", "gpt2"))

        def answer(want: WantFile) -> list[WeightMessage]:
            file = other.open(want.name)
            return [FileSize(file.size), FileChunk(file.read(want.offset, file.size))]

        nodes.scripted(barn, answer)
        with pytest.raises(ModelError, match="not that of the mesh"):
            await nodes.describe(barn)
        assert not nodes.fetcher.place(nodes.charter).is_described

        assert (await nodes.describe(barn, cellar)).is_described

    run(scenario)


def test_a_holder_that_describes_a_model_slowly_is_asked_only_if_it_is_the_last(
    run: Callable[[Scenario], None], nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        monkeypatch.setattr(fetcher, "CHUNK_BYTES", SMALL)
        nodes.sending_slowly(barn, SMALL, pause_s=29.0)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(fetcher, "DESCRIBE_S", 30.0)
        nodes.sending_slowly(cellar, SMALL, pause_s=0.0)

        begin = loop.time()
        assert (await nodes.describe(barn, cellar)).is_described
        assert 30 <= loop.time() - begin < 40

        shutil.rmtree(nodes.folder)
        assert (await nodes.describe(barn)).is_described
        assert loop.time() - begin > 100

    run(scenario)


def test_a_file_of_a_holder_that_failed_is_not_part_of_the_model(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        listing = json.loads(ModelParts(nodes.source).listing().header)
        template = "chat_template.jinja"
        assert template not in listing["files"]
        more = json.dumps(listing | {"files": [template, *listing["files"]]}).encode()
        sent = {LISTING: more, template: b"{{ 'evil' }}"}

        def answer(want: WantFile) -> list[WeightMessage]:
            if want.name in sent:
                return [FileSize(len(sent[want.name])), FileChunk(sent[want.name])]
            return [FileRefused("busy")]

        nodes.scripted(barn, answer)
        place = await nodes.describe(barn, cellar)

        assert place.is_described
        assert not (place.folder / template).exists()

    run(scenario)


def test_a_listing_of_other_parts_is_refused(run: Callable[[Scenario], None], nodes: Nodes) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        listing = json.loads(ModelParts(nodes.source).listing().header)
        weights = {name: (part + 1) % LAYERS for name, part in listing["weights"].items()}
        lie = json.dumps(listing | {"weights": weights}).encode()

        def answer(want: WantFile) -> list[WeightMessage]:
            if want.name == LISTING:
                return [FileSize(len(lie)), FileChunk(lie)]
            return nodes.true(want)

        nodes.scripted(barn, answer)
        with pytest.raises(ModelError, match="does not match the tensors of the model"):
            await nodes.describe(barn)

        assert (await nodes.describe(barn, cellar)).is_described
        await nodes.fetch([1], cellar)
        assert nodes.here == [1]

    run(scenario)


def test_a_model_that_nobody_describes(run: Callable[[Scenario], None], nodes: Nodes) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        nodes.charter = replace(nodes.charter, config_digest=Digest(b"?" * 32))

        with pytest.raises(ModelError, match="no node of the mesh has it"):
            await nodes.describe()
        with pytest.raises(ModelError, match="does not have the file"):
            await nodes.describe(barn)
        with pytest.raises(ModelError, match="no node of the mesh has them"):
            await nodes.fetch([1])

    run(scenario)


def test_a_full_disk_ends_the_fetching_and_is_not_blamed_on_holders(
    run: Callable[[Scenario], None],
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        reason = "cannot be fetched: This node has too little space: .* has 0 bytes left"
        with monkeypatch.context() as full:
            full.setattr("meshllm.model.files.parts.FREE_BYTES", 1 << 60)
            with pytest.raises(ModelError, match=reason):
                await nodes.describe(barn)
        await nodes.describe(barn)
        monkeypatch.setattr("meshllm.model.files.parts.FREE_BYTES", 1 << 60)
        with pytest.raises(ModelError, match=reason):
            await nodes.fetch([1], barn)

    run(scenario)
    assert "sent no" not in caplog.text


def test_a_folder_that_vanishes_ends_the_fetching(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        place = await nodes.describe(barn)
        shutil.rmtree(place.folder)
        with pytest.raises(ModelError, match="cannot be written"):
            await nodes.fetch([1], barn)

    run(scenario)


def test_a_disk_that_fails_is_not_blamed_on_holders(
    run: Callable[[Scenario], None], nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn, cellar = await nodes.meet(network, "barn", "cellar")
        place = await nodes.describe(barn)
        place.partial(part_name(1)).mkdir()
        with pytest.raises(ModelError, match=r"^`[^`]*` cannot be written"):
            await nodes.fetch([1], barn, cellar)

    run(scenario)
    assert "sent no weights" not in caplog.text


def test_nodes_that_share_a_folder_fetch_each_part_once(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        attic, barn = await nodes.meet(network, "barn")
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

    run(scenario)


def test_a_model_whose_index_is_cut_is_described_again(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        place = await nodes.describe(barn)
        await nodes.fetch([1], barn)
        whole = (place.folder / INDEX).read_bytes()
        (place.folder / INDEX).write_bytes(whole[:100])

        await nodes.describe(barn)
        assert (place.folder / INDEX).read_bytes() == whole
        assert nodes.here == [1]

    run(scenario)


def test_a_part_that_is_in_force_again_is_not_fetched_again(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
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

    run(scenario)


def test_of_nodes_that_share_a_folder_none_removes_what_another_has_fetched_again(
    run: Callable[[Scenario], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
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

    run(scenario)


def test_of_nodes_that_share_a_folder_none_sets_aside_what_another_has_fetched_again(
    run: Callable[[Scenario], None], nodes: Nodes, tmp_path: Path
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
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

    run(scenario)


def test_a_file_that_cannot_be_put_in_its_place_ends_the_fetching(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        place = await nodes.describe(barn)
        (place.folder / part_name(1)).mkdir()
        with pytest.raises(ModelError, match="cannot be written"):
            await nodes.fetch([1], barn)

    run(scenario)


def test_parts_are_fetched_from_more_holders_than_are_asked_at_once(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        names = [f"barn{number}" for number in range(fetcher.MAX_HOLDERS)]
        _, *barns, cellar = await nodes.meet(network, *names, "cellar")
        await nodes.describe(cellar)
        for barn in barns:
            nodes.scripted(barn, lambda want: [FileRefused("busy")])
        await nodes.fetch([1, 2], *barns, cellar)

        assert nodes.here == [1, 2]

    run(scenario)


def test_a_part_that_a_holder_does_not_send_comes_from_one_that_had_nothing_to_send_in_its_turn(
    run: Callable[[Scenario], None], nodes: Nodes
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        names = [f"barn{number}" for number in range(fetcher.MAX_HOLDERS)]
        _, *barns, cellar = await nodes.meet(network, *names, "cellar")
        await nodes.describe(cellar)
        nodes.scripted(barns[0], lambda want: nodes.true(want)[:1])  # and is silent
        wanted = {part: nodes.digests[part] for part in range(len(barns))}
        holders = {barn.me: frozenset({part}) for part, barn in enumerate(barns)}
        holders[cellar.me] = frozenset({0})
        await nodes.fetcher.fetch(nodes.charter, wanted, holders, nodes.sizes)

        assert nodes.here == list(wanted)

    run(scenario)


def test_a_client_gets_no_weights(run: Callable[[Scenario], None], nodes: Nodes) -> None:
    async def scenario(network: MemberNetwork) -> None:
        _, barn = await nodes.meet(network, "barn")
        client = await network.add("client", Role.CLIENT)
        client.meet(barn)
        await asyncio.sleep(2)
        mine = WeightFetcher(client.links.dial_weights, nodes.folder, digest_of, checked, at_once)
        with pytest.raises(ModelError, match="cannot be fetched"):
            await mine.describe(nodes.charter, [barn.me])

    run(scenario)
