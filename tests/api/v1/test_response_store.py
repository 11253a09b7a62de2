import pytest

from meshllm.api.v1 import response_store
from meshllm.api.v1.response_store import TURN_BYTES, ResponseStore, StoredResponse
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
    monkeypatch.setattr(response_store, "MAX_BYTES", 10)
    monkeypatch.setattr(response_store, "TURN_BYTES", 0)
    store = ResponseStore()
    for name in "abcd":
        store.put(name, stored("xx"))

    assert [bool(store.get(name, "me")) for name in "abcd"] == [False, True, True, True]
    store.put("e", stored("x" * 9))
    assert [bool(store.get(name, "me")) for name in "bcde"] == [False, False, False, True]
    store.put("f", stored("x" * 11))
    assert [bool(store.get(name, "me")) for name in "ef"] == [True, False]
    assert store._bytes == 9


def test_all_that_a_response_holds_counts() -> None:
    call = ToolCall("f", '{"x": 1}', "call_1")
    turn = Turn(role="assistant", content="é", tool_calls=(call,))

    assert StoredResponse("", b"x" * 100, (turn, turn)).size == 100 + 2 * (1 + 8) + 4 * TURN_BYTES


def test_an_item_is_its_owners() -> None:
    store = ResponseStore()
    store.put("a", stored("hi"))
    store.put("b", stored("you", owner="you"))

    assert store.item("hi", "me") == (Turn(role="user", content="hi"),)
    assert store.item("hi", "you") is None
    assert store.item("you", "me") is None
    assert store.drop("a", "me")
    assert store.item("hi", "me") is None
