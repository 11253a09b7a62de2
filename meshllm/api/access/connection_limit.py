"""A limit on connections of one kind, by key."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from meshllm.api.access.accounts import ApiKey, is_of_owner
from meshllm.errors import MeshError


class ConnectionLimit:
    """Counts connections by key; other keys cannot take the places of the owner."""

    def __init__(self, most: int, most_of_key: int) -> None:
        """Allow ``most`` to the owner, and as many to all other keys together."""
        self._most, self._most_of_key = most, most_of_key
        self._owners, self._others = Counter[str](), Counter[str]()

    @contextmanager
    def counted(self, key: ApiKey | None, full: MeshError) -> Iterator[None]:
        """Count one more inside the context; raise ``full`` if there are too many."""
        is_owners, name = is_of_owner(key), key.name if key else ""
        alike = self._owners if is_owners else self._others
        if alike.total() >= self._most or (not is_owners and alike[name] >= self._most_of_key):
            raise full
        alike[name] += 1
        try:
            yield
        finally:
            alike[name] -= 1
            if not alike[name]:
                del alike[name]
