"""Turns with the threads that read long prompts and compile grammars."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from meshllm.errors import Busy
from meshllm.node.session.text_turns import TextTurns
from meshllm.protocol.kv_cache.admission import MAX_WAITING

OWNER = None, ""


async def test_an_asker_with_many_long_prompts_leaves_the_next_turn_to_others() -> None:
    turns, read, go = TextTurns(), list[str](), asyncio.Event()

    async def hold(who: str, turn: AbstractAsyncContextManager[None]) -> None:
        async with turn:
            await go.wait()
            read.append(who)

    asking = [hold("key", turns.text((None, "key"), 4 << 20)) for _ in range(9)]
    asking += [hold("other", turns.text((None, "other"), 4 << 20))]
    tasks = [asyncio.ensure_future(each) for each in asking]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)

    assert read.index("other") <= 2


async def test_grammars_have_turns_of_their_own() -> None:
    turns = TextTurns()

    async with turns.text(OWNER, 1), turns.grammar(OWNER), turns.grammar(OWNER):
        pass


async def test_a_full_queue_names_what_is_waited_for() -> None:
    turns, go = TextTurns(), asyncio.Event()

    async def hold(turn: AbstractAsyncContextManager[None]) -> None:
        async with turn:
            await go.wait()

    holding = [asyncio.ensure_future(hold(turns.text(OWNER, 1))) for _ in range(MAX_WAITING + 1)]
    await asyncio.sleep(0)

    with pytest.raises(Busy, match="Too many requests wait for long prompts to be read"):
        await hold(turns.text(OWNER, 1))
    go.set()
    await asyncio.gather(*holding)
