from dataclasses import replace
from sys import getsizeof

import pytest

from meshllm.api.v1 import response_store
from meshllm.api.v1.response_store import ResponseStore, StoredResponse
from meshllm.request import ToolCall, Turn


def stored(text: str = "hi", owner: str = "me") -> StoredResponse:
    return StoredResponse(
        owner, b"", (Turn(role="user", content=text),), {text: (Turn(role="user", content=text),)}
    )


def test_a_response_is_its_owners() -> None:
    store = ResponseStore()
    store.put("a", stored())

    assert store.get("a", "me") == stored()
    assert store.get("a", "you") is None
    assert not store.drop("a", "you")
    assert store.drop("a", "me")
    assert store.get("a", "me") is None


def test_the_oldest_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    size = stored("xx").size
    monkeypatch.setattr(response_store, "MAX_BYTES", 4 * size)
    store = ResponseStore()
    for name in "abcd":
        store.put(name, stored("xx"))

    assert [bool(store.get(name, "me")) for name in "abcd"] == [False, True, True, True]
    large = stored("x" * (5 * size // 2))
    store.put("e", large)
    assert [bool(store.get(name, "me")) for name in "bcde"] == [False, False, False, True]
    store.put("f", stored("x" * 4 * size))
    assert [bool(store.get(name, "me")) for name in "ef"] == [True, False]
    assert store._bytes.total() == large.size


@pytest.mark.parametrize("limit", ["MAX_RESPONSES", "MAX_BYTES"])
def test_the_key_that_has_most_makes_room(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    most = {"MAX_RESPONSES": 4, "MAX_BYTES": 4 * stored("xx").size}[limit]
    monkeypatch.setattr(response_store, limit, most)
    store = ResponseStore()
    store.put("mine", stored("xx"))
    for name in "abcdefgh":
        store.put(name, stored("xx", owner="guest"))

    assert store.get("mine", "me")
    assert [name for name in "abcdefgh" if store.get(name, "guest")] == ["f", "g", "h"]


@pytest.mark.parametrize("place", ["content", "tool_call_id", "name", "arguments", "id"])
def test_all_that_a_response_holds_counts(place: str) -> None:
    text = "é" * 1000
    turn = Turn(role="assistant", content="")
    if place in turn or place == "tool_call_id":
        turn |= Turn(**{place: text})  # type: ignore[misc]
    else:
        turn["tool_calls"] = (replace(ToolCall("f", "{}"), **{place: text}),)

    kept, item = StoredResponse("", b"", (turn,)), StoredResponse("", b"", (), {"a": (turn,)})
    assert min(kept.size, item.size) > getsizeof(text)
    assert StoredResponse("", b"x" * 1000, ()).size > 1000


def test_an_item_is_its_owners() -> None:
    store = ResponseStore()
    store.put("a", stored("hi"))
    store.put("b", stored("you", owner="you"))

    assert store.item("hi", "me") == (Turn(role="user", content="hi"),)
    assert store.item("hi", "you") is None
    assert store.item("you", "me") is None
    assert store.drop("a", "me")
    assert store.item("hi", "me") is None
