"""Records that survive a restart."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from meshllm.errors import UserError
from meshllm.names import NodeId
from meshllm.node.membership import saved_records
from meshllm.node.membership.saved_records import (
    RETRY_S,
    RecordKeeper,
    SavedRecords,
    expected_nodes,
    restore_records,
    save_records,
)
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.testing.clock import run_virtual

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


def test_members_that_left_are_not_expected_until_they_are_met_again(store: StateStore) -> None:
    save_records(store, replace(met(ANN, BOB), left=frozenset((BOB,))))
    assert expected_nodes(store) == {ANN}

    save_records(store, met(EVE))  # after a restart
    assert expected_nodes(store) == {ANN, EVE}

    save_records(store, met(BOB))
    assert expected_nodes(store) == {ANN, BOB, EVE}


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
    credential = store.create_mesh()
    store.save("records", data)
    machine = Mesh(store.key, credential, 1, now=0.0, wall_s=0.0)

    with pytest.raises(UserError, match=r"mesh\.json` is damaged, or of another version") as caught:
        restore_records(store, machine, 0.0)
    assert "move the file away" in str(caught.value.hint)


class Kept:
    """Records that change, with a keeper that saves them on a virtual clock."""

    def __init__(self, store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records, self.saved = met(ANN), list[SavedRecords]()
        self.error: UserError | None = None
        monkeypatch.setattr(saved_records, "save_records", self._save)
        self.keeper = RecordKeeper(store, lambda: self.records, self._off_loop, pause_s=1.0)

    async def _off_loop(self, run: Any, *args: Any) -> Any:
        await asyncio.sleep(0.5)
        return run(*args)

    def _save(self, _: StateStore, records: SavedRecords) -> None:
        self.saved.append(records)
        if self.error is not None:
            raise self.error

    def change(self, records: SavedRecords) -> None:
        self.records = records
        self.keeper.changed()


Keep: TypeAlias = Callable[[Callable[[Kept], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def keep(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> Keep:
    async def main(scenario: Callable[[Kept], Coroutine[Any, Any, None]]) -> None:
        kept = Kept(store, monkeypatch)
        running = asyncio.ensure_future(kept.keeper.run())
        await scenario(kept)
        running.cancel()

    return lambda scenario: run_virtual(main(scenario))


def test_changes_within_a_while_are_saved_together(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        kept.change(met(ANN))
        await asyncio.sleep(0.5)
        kept.change(met(BOB))
        await asyncio.sleep(5)
        assert kept.saved == [met(BOB)]

    keep(scenario)


def test_what_changes_while_it_is_saved_is_saved_again(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        kept.change(met(ANN))
        await asyncio.sleep(1.2)
        kept.change(met(BOB))
        await asyncio.sleep(5)
        assert kept.saved == [met(ANN), met(BOB)]

    keep(scenario)


def test_a_folder_that_cannot_be_written_is_a_warning(
    keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(kept: Kept) -> None:
        kept.error = UserError("The disk is full")
        kept.change(met(ANN))
        await asyncio.sleep(5)
        assert "The disk is full" in caplog.text
        with pytest.raises(UserError):
            await kept.keeper.save()  # the caller waits for it

    keep(scenario)


def test_what_could_not_be_saved_is_tried_again(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        kept.error = UserError("The disk is full")
        kept.change(met(ANN))
        await asyncio.sleep(5)
        kept.error = None
        await asyncio.sleep(2 * RETRY_S)
        assert kept.saved == [met(ANN), met(ANN)]

    keep(scenario)


def test_the_end_saves_what_could_not_be_saved(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        kept.error = UserError("The disk is full")
        kept.change(met(ANN))
        await asyncio.sleep(5)
        kept.error = None
        await kept.keeper.close()
        assert kept.saved == [met(ANN), met(ANN)]

    keep(scenario)


def test_the_end_saves_what_is_not_saved(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        await kept.keeper.close()
        assert kept.saved == []
        kept.change(met(BOB))
        await kept.keeper.close()
        assert kept.saved == [met(BOB)]

    keep(scenario)


async def test_what_is_saved_at_once_is_saved_off_the_loop(store: StateStore) -> None:
    jobs = list[object]()

    async def elsewhere(function: Any, /, *args: Any) -> Any:
        assert not store.peers
        jobs.append(function)
        return function(*args)

    keeper = RecordKeeper(store, lambda: met(ANN), elsewhere)
    await keeper.save()

    assert len(jobs) == 1
    assert set(store.peers) == {ANN}


async def test_what_is_saved_at_the_end_is_saved_off_the_loop(store: StateStore) -> None:
    jobs = list[object]()

    async def elsewhere(function: Any, /, *args: Any) -> Any:
        assert not store.peers
        jobs.append(function)
        return function(*args)

    keeper = RecordKeeper(store, lambda: met(ANN), elsewhere)
    keeper.changed()
    await keeper.close()

    assert len(jobs) == 1
    assert set(store.peers) == {ANN}


def test_a_snapshot_that_was_overtaken_is_not_written(keep: Keep) -> None:
    async def scenario(kept: Kept) -> None:
        first, written = asyncio.Event(), list[SavedRecords]()

        async def overtaken(run: Any, *args: Any) -> Any:
            if not written:
                written.append(args[-1])
                await first.wait()
            return run(*args)

        kept.keeper._off_loop = overtaken
        kept.change(met(ANN))
        await asyncio.sleep(2)
        kept.change(met(BOB))
        await kept.keeper.save()
        first.set()
        await asyncio.sleep(0)
        await kept.keeper.close()
        assert (written, kept.saved[0]) == ([met(ANN)], met(BOB))
        assert met(ANN) not in kept.saved

    keep(scenario)
