"""API keys and their usage, in one SQLite file of the state folder.

A key is ``sk-meshllm-ID-SECRET``. Only a keyed hash of it is stored, under its id; the hash key is
derived from the node's own, which is in another file. Several processes may use the file at once.
Methods block on the disk; call them off the event loop.
"""

import os
import re
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from hmac import compare_digest
from pathlib import Path
from typing import Literal, Self, TypeAlias

from blake3 import blake3

from meshllm.errors import UserError
from meshllm.node.membership.state_store import StateStore

FILE = "api.sqlite"
PREFIX = "sk-meshllm"
ID_BYTES = 4
SECRET_BYTES = 24
BUSY_S = 5.0  # s to wait for another process that writes

Grouping: TypeAlias = Literal["key", "model", "day"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_CONTEXT = "meshllm 2026-11-25 API keys"  # of blake3's key derivation; changing it voids all keys
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY, id TEXT UNIQUE NOT NULL, hash BLOB NOT NULL, created_s INTEGER NOT NULL,
    expires_s INTEGER, models TEXT NOT NULL, concurrency INTEGER, tokens_per_day INTEGER,
    revoked_s INTEGER, owner INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT, requests INTEGER NOT NULL, errors INTEGER NOT NULL,
    read INTEGER NOT NULL, cached INTEGER NOT NULL, written INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may do; None and an empty tuple mean no limit."""

    expires_s: int | None = None
    """Unix time."""
    models: tuple[str, ...] = ()
    concurrency: int | None = None
    """Requests at a time."""
    tokens_per_day: int | None = None
    """Read and written, in a day of UTC."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key, without its secret."""

    name: str
    id: str
    created_s: int
    limits: KeyLimits = KeyLimits()
    revoked_s: int | None = None
    is_owner: bool = False
    """It also opens the owner's views: keys, usage and plans."""

    def state(self, now_s: float) -> str:
        """Return `active`, `expired` or `revoked`."""
        if self.revoked_s is not None:
            return "revoked"
        is_expired = self.limits.expires_s is not None and self.limits.expires_s <= now_s
        return "expired" if is_expired else "active"

    def fields(self, now_s: float) -> dict[str, object]:
        """Lay it out as JSON."""
        return {
            "name": self.name,
            "id": self.id,
            "state": self.state(now_s),
            "owner": self.is_owner,
            "created_s": self.created_s,
            "expires_s": self.limits.expires_s,
            "revoked_s": self.revoked_s,
            "models": list(self.limits.models),
            "concurrency": self.limits.concurrency,
            "tokens_per_day": self.limits.tokens_per_day,
        }


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """Requests and their tokens."""

    requests: int = 0
    errors: int = 0
    read: int = 0
    """Tokens of prompts, those from the prefix cache included."""
    cached: int = 0
    """Tokens of prompts from the prefix cache."""
    written: int = 0
    """Generated tokens."""


class Accounts:
    """The keys and the usage of one state folder."""

    def __init__(self, database: sqlite3.Connection, hash_key: bytes) -> None:
        self._database = database
        self._hash_key = hash_key

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        """Open the file in a state folder, or create it; only its owner can read it.

        Raises:
            UserError: the folder or the file cannot be used.
        """
        seed = StateStore.open(folder).key.seed
        with closing(_connect(folder / FILE)) as database:
            yield cls(database, blake3(seed, derive_key_context=_CONTEXT).digest())

    def create(self, name: str, limits: KeyLimits, now_s: float, *, is_owner: bool = False) -> str:
        """Create a key and return it: it is not stored.

        Raises:
            UserError: the name is taken or invalid.
        """
        if not _NAME.fullmatch(name):
            hint = "use 1 to 64 letters, digits, `.`, `_`, `@` and `-`, a letter or digit first"
            raise UserError(f"Invalid name `{name[:100]}`", hint=hint)
        key_id = secrets.token_hex(ID_BYTES)
        key = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        row = (
            name, key_id, self._hash(key), int(now_s), limits.expires_s, "\n".join(limits.models),
            limits.concurrency, limits.tokens_per_day, None, is_owner,
        )  # fmt: skip
        try:
            self._database.execute(f"INSERT INTO keys ({_COLUMNS}) VALUES ({_VALUES})", row)
        except sqlite3.IntegrityError:
            hint = "choose another name; `meshllm key list` shows all"
            raise UserError(f"There is already a key `{name}`", hint=hint) from None
        return key

    def list_keys(self) -> list[ApiKey]:
        """List the keys by age."""
        rows = self._database.execute(f"SELECT {_KEY} FROM keys ORDER BY created_s, name")
        return [_key_of(row) for row in rows]

    def revoke(self, name: str, now_s: float) -> None:
        """Revoke a key at once and permanently; raise `UserError` if there is none."""
        done = self._database.execute(
            "UPDATE keys SET revoked_s = coalesce(revoked_s, ?) WHERE name = ?", (int(now_s), name)
        )
        if not done.rowcount:
            raise UserError(f"There is no key `{name}`", hint="`meshllm key list` shows all")

    def find(self, key: str) -> ApiKey | None:
        """Return the stored key, expired or revoked ones too; in a time that depends on its id."""
        key_id = key[len(PREFIX) + 1 :].partition("-")[0]
        row = self._database.execute(
            f"SELECT hash, {_KEY} FROM keys WHERE id = ?", (key_id,)
        ).fetchone()
        given, stored = self._hash(key), row[0] if row else bytes(32)
        return _key_of(row[1:]) if compare_digest(given, stored) and row else None

    def record(self, day: str, key: str, model: str, used: KeyUsage) -> None:
        """Add to the usage of a key, which is empty for requests without one."""
        self._database.execute(_RECORD, (day, key, model, *astuple(used)))

    def tokens(self, day: str, key: str) -> int:
        """Return how many tokens a key read and wrote on a day."""
        query = "SELECT coalesce(sum(read + written), 0) FROM usage WHERE day = ? AND key = ?"
        (found,) = self._database.execute(query, (day, key)).fetchone()
        return int(found)

    def usage(self, by: Grouping) -> list[tuple[str, KeyUsage]]:
        """Return the usage by key, model or day."""
        sums = ", ".join(f"sum({each.name})" for each in fields(KeyUsage))
        rows = self._database.execute(f"SELECT {by}, {sums} FROM usage GROUP BY {by} ORDER BY {by}")
        return [(name, KeyUsage(*counts)) for name, *counts in rows]

    def _hash(self, key: str) -> bytes:
        return blake3(key.encode(), key=self._hash_key).digest()


_KEY = "name, id, created_s, expires_s, models, concurrency, tokens_per_day, revoked_s, owner"
_COLUMNS = _KEY.replace("id, ", "id, hash, ", 1)
_VALUES = ", ".join("?" for _ in _COLUMNS.split(", "))
_NAMES = [each.name for each in fields(KeyUsage)]
_RECORD = (
    f"INSERT INTO usage VALUES (?, ?, ?, {', '.join('?' for _ in _NAMES)}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _NAMES)
)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"`{path}` cannot be used: {error}") from None
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
        _add_owner(database)
    except sqlite3.Error as error:
        database.close()
        raise UserError(f"`{path}` cannot be used: {error}") from None
    return database


def _add_owner(database: sqlite3.Connection) -> None:
    """Add the column that files of earlier versions lack."""
    if "owner" in {name for _, name, *_ in database.execute("PRAGMA table_info(keys)")}:
        return
    try:
        database.execute("ALTER TABLE keys ADD COLUMN owner INTEGER NOT NULL DEFAULT 0")
    except sqlite3.OperationalError as error:
        if "duplicate column" not in str(error):  # else another process has just added it
            raise


def _key_of(row: Sequence[object]) -> ApiKey:
    name, key_id, created_s, expires_s, models, concurrency, tokens_per_day, revoked_s, owner = row
    limits = KeyLimits(
        expires_s,  # type: ignore[arg-type]  # the types of the columns
        tuple(filter(None, str(models).split("\n"))),
        concurrency,  # type: ignore[arg-type]
        tokens_per_day,  # type: ignore[arg-type]
    )
    return ApiKey(
        str(name),
        str(key_id),
        created_s,  # type: ignore[arg-type]
        limits,
        revoked_s,  # type: ignore[arg-type]
        owner == 1,
    )
