import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

from meshllm.api.access.accounts import FILE, LAST_S, Accounts, KeyLimits, KeyUsage, tag_of
from meshllm.errors import UserError

NOW = 1_000_000.0


def test_a_created_key_is_found_with_its_limits(accounts: Accounts) -> None:
    limits = KeyLimits(2_000_000, ("a/b", "c"), 3, 400, ("attic",), 60, 0)

    key = accounts.create("laptop", limits, NOW)

    found = accounts.find(key)
    assert found
    assert (found.name, found.limits, found.state(NOW)) == ("laptop", limits, "active")
    assert accounts.list_keys() == [found]


def test_another_secret_of_the_same_id_is_not_found(accounts: Accounts) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)

    assert [accounts.find(each) for each in (key[:-1], f"{key}x", key[:20])] == [None] * 3


@pytest.mark.parametrize(
    "key", ["", "sk-meshllm-", "sk-meshllm-00000000-x", "\ud83d", "x" * 10_000]
)
def test_an_unknown_key_is_not_found(accounts: Accounts, key: str) -> None:
    assert accounts.find(key.encode("utf-8", "replace").decode()) is None


def test_no_file_contains_the_secret(accounts: Accounts, tmp_path: Path) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)

    secret = key.split("-", 3)[3].encode()
    files = [each for each in (tmp_path / "state").iterdir() if each.is_file()]
    assert len(files) >= 2
    assert [each.name for each in files if secret in each.read_bytes()] == []


def test_only_the_owner_can_read_the_files(accounts: Accounts, tmp_path: Path) -> None:
    accounts.create("laptop", KeyLimits(), NOW)

    files = list((tmp_path / "state").glob(f"{FILE}*"))
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}


def test_a_key_is_valid_with_the_same_node_only(accounts: Accounts, tmp_path: Path) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)
    with Accounts.open(tmp_path / "state") as again:
        assert again.find(key)

    (tmp_path / "state" / "node.key").write_text("11" * 32)
    with Accounts.open(tmp_path / "state") as other:
        assert other.find(key) is None


def test_a_revoked_key_stays_known(accounts: Accounts) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)

    accounts.revoke("laptop", NOW + 5)
    accounts.revoke("laptop", NOW + 9)

    found = accounts.find(key)
    assert found
    assert (found.state(NOW), found.revoked_s) == ("revoked", NOW + 5)


def test_a_key_expires_at_its_time(accounts: Accounts) -> None:
    accounts.create("laptop", KeyLimits(expires_s=int(NOW) + 1), NOW)

    (key,) = accounts.list_keys()
    assert [key.state(NOW), key.state(NOW + 1)] == ["active", "expired"]


@pytest.mark.parametrize(
    "wrong",
    [
        KeyLimits(expires_s=LAST_S + 1),
        KeyLimits(concurrency=1 << 63),
        KeyLimits(tokens_per_day=0),
        KeyLimits(models=("",)),
        KeyLimits(trust=("", "attic")),
        KeyLimits(deadline_s=0),
        KeyLimits(max_reasoning=-1),
        KeyLimits(models=("fox\udcff",)),
    ],
)
def test_limits_that_would_not_limit_are_refused(accounts: Accounts, wrong: KeyLimits) -> None:
    with pytest.raises(UserError, match="of a key"):
        accounts.create("laptop", wrong, NOW)

    assert accounts.list_keys() == []


def test_names_are_unique_and_must_exist(accounts: Accounts) -> None:
    accounts.create("laptop", KeyLimits(), NOW)

    with pytest.raises(UserError, match="already a key `laptop`"):
        accounts.create("laptop", KeyLimits(), NOW)
    with pytest.raises(UserError, match="no key `phone`"):
        accounts.revoke("phone", NOW)


def test_usage_adds_up_in_every_grouping(accounts: Accounts) -> None:
    accounts.record("2026-11-24", "laptop", "a", KeyUsage(1, 0, 10, 5, 3))
    accounts.record("2026-11-25", "laptop", "a", KeyUsage(1, 1, 20, 0, 0))
    accounts.record("2026-11-25", "laptop", "a", KeyUsage(1, 0, 30, 0, 7))
    accounts.record("2026-11-25", "", "b", KeyUsage(1, 0, 1, 0, 1))

    assert accounts.usage("day") == [
        ("2026-11-24", KeyUsage(1, 0, 10, 5, 3)),
        ("2026-11-25", KeyUsage(3, 1, 51, 0, 8)),
    ]
    assert accounts.usage("key") == [
        ("", KeyUsage(1, 0, 1, 0, 1)),
        ("laptop", KeyUsage(3, 1, 60, 5, 10)),
    ]
    assert accounts.usage("model") == [
        ("a", KeyUsage(3, 1, 60, 5, 10)),
        ("b", KeyUsage(1, 0, 1, 0, 1)),
    ]
    assert accounts.tokens("2026-11-25", "laptop") == 57
    assert accounts.tokens("2026-11-25", "nobody") == 0


def test_a_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FILE).write_text("not a database, at all" * 50)

    with (
        pytest.raises(UserError, match="cannot be used") as raised,
        Accounts.open(tmp_path / "state"),
    ):
        pass

    assert raised.value.hint
    assert raised.value.hint.startswith("move it away")


def test_processes_share_the_file(accounts: Accounts, tmp_path: Path) -> None:
    with Accounts.open(tmp_path / "state") as other:
        key = other.create("laptop", KeyLimits(), NOW)
        assert accounts.find(key)
        other.revoke("laptop", NOW)

    found = accounts.find(key)
    assert found
    assert found.state(NOW) == "revoked"


def test_a_key_revoked_by_another_process_is_so_where_the_file_was_opened_twice(
    accounts: Accounts, tmp_path: Path
) -> None:
    key, state = accounts.create("laptop", KeyLimits(), NOW), tmp_path / "state"
    script = f"""if True:
        from pathlib import Path
        from meshllm.api.access.accounts import Accounts
        with Accounts.open(Path({str(state)!r})) as accounts:
            accounts.revoke("laptop", {NOW})
    """

    with Accounts.open(state) as second:  # as a node with an API server does
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
        found = [each.find(key) for each in (accounts, second)]

        assert [each and each.state(NOW) for each in found] == ["revoked", "revoked"]
        assert (state / f"{FILE}-wal").exists()


def test_the_connection_is_closed_at_the_end(tmp_path: Path) -> None:
    with Accounts.open(tmp_path / "state") as accounts:
        pass

    with pytest.raises(sqlite3.ProgrammingError):
        accounts.list_keys()


def test_a_key_of_the_owner_is_one(accounts: Accounts) -> None:
    owners = accounts.create("me", KeyLimits(), NOW, is_owner=True)
    users = accounts.create("guest", KeyLimits(), NOW)

    found = [accounts.find(owners), accounts.find(users), *accounts.list_keys()]

    assert [each and (each.name, each.is_owner) for each in found] == [
        ("me", True), ("guest", False), ("guest", False), ("me", True),
    ]  # fmt: skip
    assert accounts.list_keys()[1].fields(NOW)["owner"] is True


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "x" * 65])
def test_an_invalid_name_is_refused(accounts: Accounts, name: str) -> None:
    with pytest.raises(UserError, match="Invalid name"):
        accounts.create(name, KeyLimits(), NOW)


def test_keys_of_an_earlier_version_are_users(tmp_path: Path) -> None:
    with Accounts.open(tmp_path) as accounts:
        key = accounts.create("old", KeyLimits(), NOW)
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        for column in ("owner", "trust", "deadline_s", "max_reasoning"):
            database.execute(f"ALTER TABLE keys DROP COLUMN {column}")

    for number in range(2):
        with Accounts.open(tmp_path) as accounts:
            found = accounts.find(key)
            assert found
            assert (found.name, found.limits, found.is_owner) == ("old", KeyLimits(), False)
            limits = KeyLimits(deadline_s=60, max_reasoning=7)
            new = accounts.find(accounts.create(f"new{number}", limits, NOW))
            assert new
            assert new.limits == limits


def test_a_revoked_key_is_told_by_a_tag_that_was_encrypted(
    accounts: Accounts, tmp_path: Path
) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)
    files = [each for each in (tmp_path / "state").iterdir() if each.is_file()]
    assert [each.name for each in files if tag_of(key) in each.read_bytes()] == []
    assert (accounts.revoked(), accounts.is_revoked(key)) == ([], False)

    accounts.revoke("laptop", NOW)
    accounts.revoke("laptop", NOW)

    assert (accounts.revoked(), accounts.is_revoked(key)) == ([tag_of(key)], True)


def test_a_key_of_another_node_can_be_revoked(accounts: Accounts) -> None:
    accounts.revoke_key("a key of elsewhere", NOW)
    accounts.revoke_key("another one", NOW)

    assert accounts.revoked() == [tag_of("a key of elsewhere"), tag_of("another one")]
    assert accounts.is_revoked("a key of elsewhere")
    assert not accounts.is_revoked("a key of elsewher")


def test_a_stored_key_can_be_revoked_by_itself(accounts: Accounts) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)

    accounts.revoke_key(key, NOW + 5)

    (listed,) = accounts.list_keys()
    assert (listed.state(NOW + 6), listed.revoked_s) == ("revoked", NOW + 5)
    assert accounts.is_revoked(key)


def test_what_others_revoked_is_stored_and_not_told_again(
    accounts: Accounts, tmp_path: Path
) -> None:
    accounts.store_revoked("node-b", [tag_of("one"), tag_of("two")])
    accounts.store_revoked("node-b", [tag_of("two")])

    with Accounts.open(tmp_path / "state") as again:
        assert [again.is_revoked(each) for each in ("one", "two", "three")] == [True, True, False]
        assert again.revoked() == []


def test_a_member_that_revokes_without_end_displaces_only_its_own(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.api.access.accounts.MAX_HEARD", 3)
    accounts.revoke_key("own", NOW)
    accounts.store_revoked("node-b", [tag_of("of b")])

    accounts.store_revoked("node-c", [tag_of(str(number)) for number in range(5)])

    kept = [each for each in ("own", "of b", *map(str, range(5))) if accounts.is_revoked(each)]
    assert kept == ["own", "of b", "2", "3", "4"]


def test_many_members_displace_the_oldest_and_never_the_owners(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.api.access.accounts.MAX_HEARD_IN_ALL", 2)
    accounts.revoke_key("own", NOW)

    for number in range(4):
        accounts.store_revoked(f"node-{number}", [tag_of(str(number))])

    kept = [each for each in ("own", *map(str, range(4))) if accounts.is_revoked(each)]
    assert kept == ["own", "2", "3"]


def test_a_key_of_an_earlier_version_is_revoked_here(accounts: Accounts, tmp_path: Path) -> None:
    key = accounts.create("laptop", KeyLimits(), NOW)
    with closing(sqlite3.connect(tmp_path / "state" / FILE)) as database:
        database.execute("DELETE FROM tags")
        database.commit()

    accounts.revoke("laptop", NOW)

    found = accounts.find(key)
    assert found
    assert (found.state(NOW), accounts.revoked()) == ("revoked", [])


def test_a_name_that_is_taken_leaves_nothing_behind(accounts: Accounts) -> None:
    accounts.create("laptop", KeyLimits(), NOW)
    with pytest.raises(UserError, match="already a key"):
        accounts.create("laptop", KeyLimits(), NOW)

    accounts.revoke("laptop", NOW)

    assert len(accounts.revoked()) == 1


def test_a_thread_that_nobody_waits_for_finds_the_file_open_or_closed(tmp_path: Path) -> None:
    """SQLite crashes when a connection is closed while another thread uses it."""
    ends: list[type[Exception] | None] = []

    def read(accounts: Accounts, begun: Event) -> None:
        try:
            while True:
                accounts.revoked()
                begun.set()
        except Exception as error:
            ends.append(type(error))

    for _ in range(20):
        begun = Event()
        with Accounts.open(tmp_path / "state") as accounts:
            reader = Thread(target=read, args=(accounts, begun))
            reader.start()
            assert begun.wait(60)
        reader.join(60)
        assert not reader.is_alive()

    assert ends == [sqlite3.ProgrammingError] * 20
