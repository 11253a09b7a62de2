"""Whose prompts share cached prefixes: those of one requester only.

A client that is shown how much of its prompt was cached, or measures it, could recover the prompts
of others token by token. So a request has a scope, and texts are matched within it. The node that
takes a request gives the scope: the owner's is empty, others are hashes, which reveal no name. The
entry keeps scopes of different nodes apart, so that none can name another's.
"""

from hashlib import blake2b

from meshllm.names import NodeId

MAX_SCOPE_CHARS = 64
OWNERS = "owner:"
"""Begins the scopes of this node's owner besides `OWN`: those of its API servers."""
SECRET_BYTES = 16
_HASH_BYTES = 16

PrefixScope = tuple[NodeId | None, str]
"""The node that sent a request, None for this one, and the scope that it gave."""

OWN: PrefixScope = (None, "")
"""The scope of the owner of the entry."""


def is_owners(scope: PrefixScope) -> bool:
    """Whether a scope is one of the owner of the entry."""
    node, name = scope
    return node is None and (not name or name.startswith(OWNERS))


class ScopeNames:
    """Names scopes by hashes that only the holder of the secret can compute."""

    def __init__(self, secret: bytes) -> None:
        """Hash with a random ``secret`` of `SECRET_BYTES`."""
        self._secret = secret

    def name(self, requester: bytes, within: str = "") -> str:
        """Return the scope of an asker, who may have given a scope ``within`` its own."""
        hashed = blake2b(key=self._secret, digest_size=_HASH_BYTES)
        hashed.update(len(requester).to_bytes(8, "big") + requester + within.encode("utf-8"))
        return hashed.hexdigest()
