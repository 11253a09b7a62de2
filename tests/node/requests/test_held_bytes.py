"""The memory of requests in progress: bounded by asker, with a share of the owner's own."""

from contextlib import ExitStack, suppress
from dataclasses import replace
from sys import getsizeof
from typing import Any

import pytest

from meshllm.errors import Busy
from meshllm.node.requests.held_bytes import ID_BYTES, MAX_HELD_BYTES, HeldBytes, size_of
from meshllm.node.requests.request_json import REQUEST_BYTES
from meshllm.protocol.kv_cache.admission import requester_of
from meshllm.protocol.kv_cache.prefix_scope import OWNERS
from meshllm.request import Request, ToolCall, Tools, Turn

LONGEST = Request(raw="x" * REQUEST_BYTES)
MOST = MAX_HELD_BYTES // size_of(LONGEST)
CALL = ToolCall("f", "x" * 999)


def held_by(held: HeldBytes, stack: ExitStack, scope: str) -> int:
    """Hold long requests of a scope until one is refused; return how many are held."""
    for count in range(2 * MOST):
        try:
            stack.enter_context(held.holding(requester_of((None, scope)), size_of(LONGEST)))
        except Busy:
            return count
    raise AssertionError


def test_askers_cannot_fill_the_share_of_the_owner_nor_all_of_that_of_others() -> None:
    held = HeldBytes()

    with ExitStack() as stack:
        counts = [held_by(held, stack, scope) for scope in ("a key", "another", "third")]
        own = held_by(held, stack, "")
        api_server = held_by(held, stack, OWNERS + "api")

    assert counts[0] == own == MOST
    assert counts[0] > counts[1] > counts[2] > 0
    assert api_server == 0  # the owner, too


def test_what_ends_is_free_again() -> None:
    held = HeldBytes()
    with suppress(ValueError), ExitStack() as stack:
        held_by(held, stack, "a key")
        raise ValueError

    with ExitStack() as stack:
        assert held_by(held, stack, "a key") == MOST
        assert held.total == MOST * size_of(LONGEST)
    assert held.total == 0
    assert not held._held


@pytest.mark.parametrize(
    "fields",
    [
        {"raw": "x" * 999},
        {"turns": ({"role": "user", "content": "x" * 999},)},
        {"turns": ({"role": "assistant", "content": "", "tool_calls": (CALL,)},)},
        {"schema": "x" * 999},
        {"tools": Tools("x" * 999)},
        {"stop": ("x" * 999,)},
    ],
    ids=["raw", "turn", "call", "schema", "tools", "stop"],
)
def test_all_texts_count(fields: dict[str, Any]) -> None:
    assert size_of(Request(**fields)) >= getsizeof("x" * 999)


@pytest.mark.parametrize("name", ["ids", "given"])
def test_token_ids_count(name: str) -> None:
    ids = tuple(range(1000, 2000))
    fields: dict[str, Any] = {name: ids}

    assert size_of(Request(**fields)) - size_of(Request()) == 1000 * ID_BYTES
    assert sum(map(getsizeof, ids)) + getsizeof(ids) - getsizeof(()) == 1000 * ID_BYTES


def test_turns_and_requests_themselves_count() -> None:
    turns: list[Turn] = [{"role": "user", "content": ""} for _ in range(1000)]
    requests = [Request(raw="hi") for _ in range(1000)]

    assert size_of(Request(tuple(turns))) > sum(map(getsizeof, turns))
    assert size_of(*requests) > sum(map(getsizeof, requests))


def test_what_requests_share_counts_once() -> None:
    turn, ids = Turn(role="user", content="x" * 999), tuple(range(1000))
    one = Request((turn,), stop=("y" * 999,), ids=ids)

    alike = size_of(one, replace(one, max_tokens=1))

    assert alike == size_of(one) + getsizeof(one)
