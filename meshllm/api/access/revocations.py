"""Revoked API keys, shared by the members of a mesh.

A node publishes the tags of keys that its owner revoked, in its profile, and stores those that it
hears from others: they hold at its API servers when their member is away, and after a restart. What
a member says can void only keys that it knows (see `accounts`), it says at most `MAX_REVOKED` at a
time, and of each member a bounded number is stored.
"""

import asyncio
import logging
import sqlite3
from contextlib import aclosing

from meshllm.api.access.accounts import Accounts
from meshllm.api.port import NodePort

logger = logging.getLogger(__name__)


async def share_revocations(node: NodePort, accounts: Accounts) -> None:
    """Publish the revoked keys, and store those of other members, until the node's events end.

    What cannot be stored, such as on a full disk, is tried again after the next event.
    """
    await node.revoke(await asyncio.to_thread(accounts.revoked))
    stored: dict[str, tuple[bytes, ...]] = {}
    has_failed = False
    async with aclosing(node.events()) as events:
        async for _ in events:
            try:
                await _store(node, accounts, stored)
                has_failed = False
            except sqlite3.Error as error:
                if not has_failed:  # there may be many events
                    logger.warning("keys that others revoked are not refused here yet: %s", error)
                has_failed = True


async def _store(node: NodePort, accounts: Accounts, stored: dict[str, tuple[bytes, ...]]) -> None:
    """Store what is not ``stored`` of the keys that other members revoked."""
    for member, tags in node.revocations().items():
        if tags != stored.get(member):
            await asyncio.to_thread(accounts.store_revoked, member, tags)
            stored[member] = tags
