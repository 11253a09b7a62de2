import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshllm.api.access.accounts import Accounts, tag_of
from meshllm.api.access.revocations import share_revocations
from tests.builders.fake_node import FakeNode


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


async def test_own_ones_are_published_and_others_stored(node: FakeNode, tmp_path: Path) -> None:
    node.revoked = {"node-b": (tag_of("heard"),)}
    with Accounts.open(tmp_path / "state") as accounts:
        accounts.revoke_key("own", 0)
        sharing = asyncio.ensure_future(share_revocations(node, accounts))
        async with asyncio.timeout(60):
            await node.begun.wait()
            node.revoked = {"node-b": (tag_of("heard"),), "node-c": (tag_of("later"),)}
            node.go.set()
            await sharing

        assert [accounts.is_revoked(each) for each in ("own", "heard", "later")] == [True] * 3
        assert accounts.revoked() == [tag_of("own")]
    assert node.calls == [(tag_of("own"),)]
    assert node.closed.is_set()


@pytest.mark.parametrize("failures", [1, 2])
async def test_what_a_full_disk_does_not_take_is_tried_again(
    node: FakeNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failures: int,
) -> None:
    heard: list[str] = []
    store = Accounts.store_revoked

    def fail(accounts: Accounts, member: str, tags: Sequence[bytes]) -> None:
        heard.append(member)
        if len(heard) <= failures:
            raise sqlite3.OperationalError("database or disk is full")
        store(accounts, member, tags)

    monkeypatch.setattr(Accounts, "store_revoked", fail)
    node.revoked = {"node-b": (tag_of("heard"),)}
    node.go.set()
    with Accounts.open(tmp_path / "state") as accounts:
        async with asyncio.timeout(60):
            await share_revocations(node, accounts)

        assert accounts.is_revoked("heard") is (failures == 1)
    assert heard == ["node-b"] * 2
    (told,) = caplog.messages
    assert told.endswith("not refused here yet: database or disk is full")


async def test_it_ends_with_the_node(node: FakeNode, tmp_path: Path) -> None:
    with Accounts.open(tmp_path / "state") as accounts:
        sharing = asyncio.ensure_future(share_revocations(node, accounts))
        async with asyncio.timeout(60):
            await node.begun.wait()
            sharing.cancel()
            await asyncio.wait([sharing])
    assert sharing.cancelled()
    assert node.closed.is_set()
