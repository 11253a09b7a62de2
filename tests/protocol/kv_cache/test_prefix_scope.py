"""Names of scopes: who shares cached prefixes with whom."""

from meshllm.names import NodeId
from meshllm.protocol.kv_cache.prefix_scope import (
    MAX_SCOPE_CHARS,
    OWN,
    OWNERS,
    SECRET_BYTES,
    ScopeNames,
    is_owners,
)

NAMES = ScopeNames(bytes(SECRET_BYTES))


def test_each_asker_has_scopes_of_its_own() -> None:
    pairs = (b"", ""), (b"", "a"), (b"a", ""), (b"a", "a"), (b"aa", ""), (b"b", "")
    names = [NAMES.name(*pair) for pair in pairs]

    assert len({"", *names}) == len(pairs) + 1
    assert names == [NAMES.name(*pair) for pair in pairs]
    assert {len(name) <= MAX_SCOPE_CHARS for name in names} == {True}


def test_another_node_gives_no_scope_of_the_owner() -> None:
    other = NodeId(bytes(32))
    scopes = [OWN, (None, OWNERS + "1"), (None, "key"), (other, ""), (other, OWNERS + "1")]

    assert [is_owners(scope) for scope in scopes] == [True, True, False, False, False]
    assert len(OWNERS + NAMES.name(b"key")) <= MAX_SCOPE_CHARS


def test_a_name_can_be_computed_with_the_secret_only() -> None:
    assert NAMES.name(b"a") != ScopeNames(bytes([1]) * SECRET_BYTES).name(b"a")
