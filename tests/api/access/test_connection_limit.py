"""A limit on connections by key."""

from contextlib import ExitStack

import pytest

from meshllm.api.access.accounts import ApiKey
from meshllm.api.access.connection_limit import ConnectionLimit
from meshllm.errors import Busy

OWNER = ApiKey("me", "", 0, is_owner=True)
FULL = Busy("full")
A, B, C = (ApiKey(name, "", 0) for name in "abc")


def test_a_key_and_all_keys_together_have_a_limit_that_the_owner_does_not_share() -> None:
    limit = ConnectionLimit(3, 2)
    with ExitStack() as opened:
        for key in (A, A, B, OWNER, None, OWNER):
            opened.enter_context(limit.counted(key, FULL))
        for key in (A, B, C, OWNER, None):
            with pytest.raises(Busy, match="full"), limit.counted(key, FULL):
                pass

    with limit.counted(C, FULL), limit.counted(A, FULL), limit.counted(A, FULL):
        pass


def test_one_key_leaves_connections_to_another() -> None:
    limit = ConnectionLimit(3, 2)
    with limit.counted(A, FULL), limit.counted(A, FULL):
        with pytest.raises(Busy), limit.counted(A, FULL):
            pass
        with limit.counted(B, FULL):
            pass
