"""API keys and their usage, in one SQLite file of the state folder.

A key is ``sk-meshllm-ID-SECRET``. Only a keyed hash of it is stored, under its id; the hash key is
derived from the node's own, which is in another file. Several processes may use the file at once.
Methods block on the disk; call them off the event loop.

The members of a mesh tell each other which keys they revoked by *tags*: public hashes of keys, from
which no key can be found. Only who knows a key can make its tag, so that a member can revoke only
the keys that it was given. The tag of a stored key is encrypted, as long as it is not revoked.
"""

import errno
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields
from hmac import compare_digest
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self, TypeAlias

from blake3 import blake3

from meshllm.errors import UserError
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.membership.records import KEY_TAG_BYTES

FILE = "api.sqlite"
PREFIX = "sk-meshllm"
ID_BYTES = 4
SECRET_BYTES = 24
MAX_KEY_CHARS = 256
MAX_KEY_FILE_BYTES = 1 << 20  # with comments
BUSY_S = 5.0  # s to wait for another process that writes
MAX_HEARD = 1024  # keys revoked by one other member; its newest are kept
MAX_HEARD_IN_ALL = 64 * MAX_HEARD
MAX_COUNT = 1 << 53  # of a limit; JavaScript's numbers are exact up to it
LAST_S = 253_402_300_799  # Unix time of the end of 9999, the last year with a date

Grouping: TypeAlias = Literal["key", "model", "day"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_CONTEXT = "meshllm 2026-11-25 API keys"  # of blake3's key derivation; changing it voids all keys
_TAG_CONTEXT = "meshllm 2026-11-26 tags of API keys"
_HINT = "check the disk and who may write there, or choose another folder with `--state`"
_DAMAGED = "move it away to begin without its keys, or put back a copy of it"
_FULL = "free some space there, or choose another folder with `--state`"
_OWN = ""  # the owner of this node, as the one who revoked
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY, id TEXT UNIQUE NOT NULL, hash BLOB NOT NULL, created_s INTEGER NOT NULL,
    expires_s INTEGER, models TEXT NOT NULL, concurrency INTEGER, tokens_per_day INTEGER,
    revoked_s INTEGER, owner INTEGER NOT NULL DEFAULT 0, trust TEXT NOT NULL DEFAULT '',
    deadline_s INTEGER, max_reasoning INTEGER
);
CREATE TABLE IF NOT EXISTS usage (
    day TEXT, key TEXT, model TEXT, requests INTEGER NOT NULL, errors INTEGER NOT NULL,
    read INTEGER NOT NULL, cached INTEGER NOT NULL, written INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tags (id TEXT PRIMARY KEY, sealed BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS revoked (
    place INTEGER PRIMARY KEY AUTOINCREMENT, tag BLOB NOT NULL, node TEXT NOT NULL,
    UNIQUE (tag, node)
);
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
    trust: tuple[str, ...] = ()
    """Names or ids of the only nodes that may see its requests."""
    deadline_s: int | None = None
    """Maximum seconds for an answer."""
    max_reasoning: int | None = None
    """Maximum tokens of reasoning of an answer."""


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
            "revoked_s": self.revoked_s,
            **asdict(self.limits),
        }


def is_of_owner(key: ApiKey | None) -> bool:
    """Return whether the owner asks: what comes without a key is from this machine."""
    return key is None or key.is_owner


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
        self._lock = RLock()

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Self]:
        """Open the file in a state folder, or create it; only its owner can read it.

        Raises:
            UserError: the folder or the file cannot be used.
        """
        seed = StateStore.open(folder).key.seed
        accounts = cls(_connect(folder / FILE), blake3(seed, derive_key_context=_CONTEXT).digest())
        with closing(accounts):
            yield accounts

    def close(self) -> None:
        """Close the file, once no thread uses it: an abandoned one may still be at work."""
        with self._lock:
            self._database.close()

    def create(self, name: str, limits: KeyLimits, now_s: float, *, is_owner: bool = False) -> str:
        """Create a key and return it: it is not stored.

        Raises:
            UserError: the name is taken or invalid, or a limit is out of range.
        """
        _check_limits(limits)
        if not _NAME.fullmatch(name):
            hint = "use 1 to 64 letters, digits, `.`, `_`, `@` and `-`, a letter or digit first"
            raise UserError(f"Invalid name `{name[:100]}`", hint=hint)
        key_id = secrets.token_hex(ID_BYTES)
        key = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        row = (
            name, key_id, self._hash(key), int(now_s), limits.expires_s, "\n".join(limits.models),
            limits.concurrency, limits.tokens_per_day, None, is_owner, "\n".join(limits.trust),
            limits.deadline_s, limits.max_reasoning,
        )  # fmt: skip
        tag = key_id, self._seal(key_id, tag_of(key))
        try:
            with self._transaction():
                self._rows(f"INSERT INTO keys ({_COLUMNS}) VALUES ({_VALUES})", row)
                self._rows("INSERT INTO tags VALUES (?, ?)", tag)
        except sqlite3.IntegrityError:
            hint = "choose another name; `meshllm key list` shows all"
            raise UserError(f"There is already a key `{name}`", hint=hint) from None
        return key

    def list_keys(self) -> list[ApiKey]:
        """List the keys by age."""
        rows = self._rows(f"SELECT {_KEY} FROM keys ORDER BY created_s, name")
        return [_key_of(row) for row in rows]

    def revoke(self, name: str, now_s: float) -> None:
        """Revoke a key at once and permanently; raise `UserError` if there is none."""
        with self._transaction():
            done = self._rows(_REVOKE, (int(now_s), name))
            if not done:
                hint = "`meshllm key list` shows all"
                raise UserError(f"There is no key `{name}`", hint=hint)
            ((key_id,),) = done
            for (sealed,) in self._rows("SELECT sealed FROM tags WHERE id = ?", (key_id,)):
                self._add(self._seal(key_id, sealed), _OWN)  # earlier versions stored none

    def revoke_key(self, key: str, now_s: float) -> None:
        """Revoke a key, which may be stored elsewhere or in a file of keys."""
        with self._transaction():
            if stored := self.find(key):
                self._rows(_REVOKE, (int(now_s), stored.name))
            self._add(tag_of(key), _OWN)

    def store_revoked(self, node: str, tags: Sequence[bytes]) -> None:
        """Store keys that another member revoked, the newest of it and of all within limits."""
        with self._transaction():
            for tag in tags:
                self._add(tag, node)
            for where, most in (("node = ?", MAX_HEARD), ("node != ?", MAX_HEARD_IN_ALL)):
                newest = f"SELECT place FROM revoked WHERE {where} ORDER BY place DESC LIMIT {most}"
                query = f"DELETE FROM revoked WHERE {where} AND place NOT IN ({newest})"
                named = node if most == MAX_HEARD else _OWN
                self._rows(query, (named, named))

    def revoked(self) -> list[bytes]:
        """Return the tags of keys that the owner of this node revoked, the newest last."""
        query = "SELECT tag FROM revoked WHERE node = ? ORDER BY place"
        return [bytes(tag) for (tag,) in self._rows(query, (_OWN,))]

    def is_revoked(self, key: str) -> bool:
        """Return whether this node or another member revoked a key."""
        query = "SELECT 1 FROM revoked WHERE tag = ? LIMIT 1"
        return bool(self._rows(query, (tag_of(key),)))

    def find(self, key: str) -> ApiKey | None:
        """Return the stored key, expired or revoked ones too; in a time that depends on its id."""
        key_id = key[len(PREFIX) + 1 :].partition("-")[0]
        (row,) = self._rows(f"SELECT hash, {_KEY} FROM keys WHERE id = ?", (key_id,)) or (None,)
        given, stored = self._hash(key), row[0] if row else bytes(32)
        return _key_of(row[1:]) if compare_digest(given, stored) and row else None

    def record(self, day: str, key: str, model: str, used: KeyUsage) -> None:
        """Add to the usage of a key, which is empty for requests without one."""
        self._rows(_RECORD, (day, key, model, *astuple(used)))

    def tokens(self, day: str, key: str) -> int:
        """Return how many tokens a key read and wrote on a day."""
        query = "SELECT coalesce(sum(read + written), 0) FROM usage WHERE day = ? AND key = ?"
        ((found,),) = self._rows(query, (day, key))
        return int(found)

    def usage(self, by: Grouping) -> list[tuple[str, KeyUsage]]:
        """Return the usage by key, model or day."""
        sums = ", ".join(f"sum({each.name})" for each in fields(KeyUsage))
        rows = self._rows(f"SELECT {by}, {sums} FROM usage GROUP BY {by} ORDER BY {by}")
        return [(name, KeyUsage(*counts)) for name, *counts in rows]

    def _add(self, tag: bytes, node: str) -> None:
        self._rows("INSERT OR IGNORE INTO revoked (tag, node) VALUES (?, ?)", (tag, node))

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run one statement; return its rows."""
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _seal(self, key_id: str, tag: bytes) -> bytes:
        """Encrypt or decrypt the tag of a stored key, with a key stream of its own."""
        stream = blake3(key_id.encode(), key=self._hash_key).digest(KEY_TAG_BYTES)
        return bytes(one ^ other for one, other in zip(tag, stream, strict=True))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._rows("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._rows("ROLLBACK")
                raise
            self._rows("COMMIT")

    def _hash(self, key: str) -> bytes:
        return blake3(key.encode(), key=self._hash_key).digest()


def keys_in(text: str) -> tuple[str, ...]:
    """Return the keys of a file of keys, one on a line; `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in text.replace("\r", "\n").split("\n"))
    return tuple(filter(None, lines))


def tag_of(key: str) -> bytes:
    """Return the tag of a key, the same on every node."""
    return blake3(key.encode(), derive_key_context=_TAG_CONTEXT).digest(KEY_TAG_BYTES)


_KEY = (
    "name, id, created_s, expires_s, models, concurrency, tokens_per_day, revoked_s, owner, trust, "
    "deadline_s, max_reasoning"
)
_REVOKE = "UPDATE keys SET revoked_s = coalesce(revoked_s, ?) WHERE name = ? RETURNING id"
_COLUMNS = _KEY.replace("id, ", "id, hash, ", 1)
_VALUES = ", ".join("?" for _ in _COLUMNS.split(", "))
_ADDED = {
    "owner": "INTEGER NOT NULL DEFAULT 0",
    "trust": "TEXT NOT NULL DEFAULT ''",
    "deadline_s": "INTEGER",
    "max_reasoning": "INTEGER",
}
"""Columns that files of earlier versions lack."""
_NAMES = [each.name for each in fields(KeyUsage)]
_RECORD = (
    f"INSERT INTO usage VALUES (?, ?, ?, {', '.join('?' for _ in _NAMES)}) "
    "ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _NAMES)
)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        _create(path)
        database = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from None
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
        for name, kind in _ADDED.items():
            _add_column(database, name, kind)
    except sqlite3.Error as error:
        database.close()
        raise _unusable(path, error) from None
    return database


def _unusable(path: Path, error: OSError | sqlite3.Error) -> UserError:
    code = getattr(error, "sqlite_errorcode", None)
    is_full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC
    is_damaged = code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
    hint = _DAMAGED if is_damaged else _FULL if is_full else _HINT
    return UserError(f"`{path}` cannot be used: {error}", hint=hint)


def _create(path: Path) -> None:
    """Create the file for its owner alone, unless it exists; called by one thread.

    An existing one must not be opened here: closing it would drop the locks of this process, also
    those of SQLite, and another process would then delete the log that this one writes to.
    """
    with suppress(FileExistsError):  # of a link, the file that it names
        os.close(os.open(path.resolve(), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _check_limits(limits: KeyLimits) -> None:
    """Raise `UserError` for a limit that cannot be stored, or that would be read as no limit."""
    bounds = {
        "expires_s": (1, LAST_S),
        "concurrency": (1, MAX_COUNT),
        "tokens_per_day": (1, MAX_COUNT),
        "deadline_s": (1, MAX_COUNT),
        "max_reasoning": (0, MAX_COUNT),
    }
    for field, (least, most) in bounds.items():
        value = getattr(limits, field)
        if value is not None and not least <= value <= most:
            text = f"`{field}` of a key is {value}, not between {least} and {most}"
            raise UserError(text, hint="without it there is no limit")
    for field in ("models", "trust"):
        for name in getattr(limits, field):
            if not (name and name.isprintable()):
                raise UserError(f"A name in `{field}` of a key is empty or not printable")


def _add_column(database: sqlite3.Connection, column: str, kind: str) -> None:
    """Add a column that files of earlier versions lack."""
    if column in {name for _, name, *_ in database.execute("PRAGMA table_info(keys)")}:
        return
    try:
        database.execute(f"ALTER TABLE keys ADD COLUMN {column} {kind}")
    except sqlite3.OperationalError as error:
        if "duplicate column" not in str(error):  # else another process has just added it
            raise


def _key_of(row: Sequence[Any]) -> ApiKey:
    found = dict(zip(_KEY.split(", "), row, strict=True))
    for name in ("models", "trust"):
        found[name] = tuple(filter(None, found[name].split("\n")))
    limits = KeyLimits(**{each.name: found[each.name] for each in fields(KeyLimits)})
    return ApiKey(
        found["name"],
        found["id"],
        found["created_s"],
        limits,
        found["revoked_s"],
        found["owner"] == 1,
    )
