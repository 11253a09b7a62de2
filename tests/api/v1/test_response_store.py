import pytest

from meshllm.api.v1 import response_store
from meshllm.api.v1.response_store import ResponseStore, StoredResponse
from meshllm.request import Turn


def stored(text: str = "hi", owner: str = "me") -> StoredResponse:
    return StoredResponse(owner, {"text": text}, (Turn(role="user", content=text),))


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
    monkeypatch.setattr(response_store, "MAX_CHARS", 10)
    store = ResponseStore()
    for name in "abcd":
        store.put(name, stored("xx"))

    assert [bool(store.get(name, "me")) for name in "abcd"] == [False, True, True, True]
    store.put("e", stored("x" * 9))
    assert [bool(store.get(name, "me")) for name in "bcde"] == [False, False, False, True]
    store.put("f", stored("x" * 11))
    assert [bool(store.get(name, "me")) for name in "ef"] == [True, False]
    assert store._chars == 9
