"""Ids of the buckets of a token sequence, which show shared prefixes and nothing else.

A bucket is `BUCKET` tokens. Its id is a keyed hash of its tokens and of the id before it, so that
two sequences share an id exactly if they share all tokens up to the end of that bucket. Without the
key nobody can test guesses at a text, and the ids of different keys share nothing.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

BUCKET: Final = 16  # tokens; fewer would tell more of a text, more would hide shared prefixes
ID_BYTES: Final = 8  # 2**32 buckets until two are likely to collide
KEY_BYTES: Final = 32
MAX_BUCKETS: Final = 1 << 16  # of one sequence: a million tokens

_PACK = struct.Struct(f"<{BUCKET}Q").pack


class Buckets:
    """The ids of one sequence, as far as it has come."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = b""
        self._rest: list[int] = []
        self.count = 0
        """Tokens so far."""
        self.ids: list[str] = []
        """In hexadecimal; a bucket that is not full has none."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens; those after `MAX_BUCKETS` are counted only."""
        self.count += len(tokens)
        self._rest += tokens
        full = len(self._rest) // BUCKET * BUCKET
        for at in range(0, full, BUCKET):
            if len(self.ids) == MAX_BUCKETS:
                break
            data = self._last + _PACK(*self._rest[at : at + BUCKET])
            self._last = blake2b(data, key=self._key, digest_size=ID_BYTES).digest()
            self.ids.append(self._last.hex())
        del self._rest[:full]
