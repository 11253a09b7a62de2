"""Revoked API keys, shared by the members of a mesh.

A node publishes the tags of keys that its owner revoked, in its profile, and stores those that it
hears from others: they hold at its doors when their member is away, and after a restart. What a
member says can void only keys that it knows (see `accounts`), it says at most `MAX_REVOKED` at a
time, and of each member a bounded number is stored.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from meshllm.api.access.accounts import Accounts
from meshllm.api.port import NodePort


async def share_revocations(node: NodePort, accounts: Accounts) -> None:
    """Publish the revoked keys, and store those of other members, until the node's events end."""
    await node.revoke(await asyncio.to_thread(accounts.revoked))
    known: Mapping[str, tuple[bytes, ...]] = {}
    async with aclosing(node.events()) as events:
        async for _ in events:
            before, known = known, node.revocations()
            for member, tags in known.items():
                if tags != before.get(member):
                    await asyncio.to_thread(accounts.hear, member, tags)
