"""The owner's views: who may see them, and what they do."""

import sqlite3
from collections.abc import AsyncIterator

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits, KeyUsage
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from meshllm.api.metrics import exposition
from meshllm.api.owner import owner_views
from meshllm.status import PlannedRing, PlanTerms, from_json
from tests.builders.fake_node import FakeNode

VIEWS = [
    ("GET", "/owner/keys"),
    ("POST", "/owner/keys"),
    ("POST", "/owner/keys/revoke"),
    ("GET", "/owner/usage"),
    ("GET", "/owner/metrics"),
    ("POST", "/owner/plan"),
]
FILE_KEY = "f" * 20


@pytest.fixture(params=[False, True], ids=["open", "shut"])
async def owned(
    api_server: FakeNode, accounts: Accounts, request: pytest.FixtureRequest
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an API server; with a key where a key is needed, and on loopback without."""
    policy = AccessPolicy(needs_key=request.param, file_keys=(FILE_KEY,))
    application = public_application(
        Service(api_server, accounts), policy, owner_views(api_server, accounts, policy)
    )
    transport = httpx2.ASGITransport(application, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def owner(accounts: Accounts) -> dict[str, str]:
    return bearer(accounts.create("me", KeyLimits(), 0, is_owner=True))


@pytest.mark.parametrize(("method", "path"), VIEWS)
async def test_the_views_need_a_key_of_the_owner(
    owned: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode, method: str, path: str
) -> None:
    revoked = bearer(accounts.create("gone", KeyLimits(), 0, is_owner=True))
    accounts.revoke("gone", 1)
    users = bearer(accounts.create("guest", KeyLimits(), 0))
    sent: tuple[dict[str, str], ...] = ({}, bearer("sk-wrong"), revoked, users, bearer(FILE_KEY))

    told = [await owned.request(method, path, headers=headers) for headers in sent]

    assert [each.status_code for each in told] == [401, 401, 401, 403, 403]
    assert told[3].json()["error"]["code"] == "owner_key_required"
    assert "meshllm key create NAME --owner" in told[3].text
    assert api_server.calls == []


async def test_a_web_page_of_another_site_is_refused(
    owned: httpx2.AsyncClient, accounts: Accounts
) -> None:
    headers = {**owner(accounts), "origin": "https://evil.example"}

    assert (await owned.get("/owner/keys", headers=headers)).status_code == 403


async def test_keys_are_created_listed_and_revoked(
    owned: httpx2.AsyncClient, accounts: Accounts
) -> None:
    me = owner(accounts)
    asked = {
        "name": "ci", "models": ["a"], "concurrency": 2, "tokens_per_day": 9, "expires_s": 1,
        "trust": ["attic"], "deadline_s": 60, "max_reasoning": 0,
    }  # fmt: skip

    made = await owned.post("/owner/keys", headers=me, json=asked)
    again = await owned.post("/owner/keys", headers=me, json=asked)
    gone = await owned.post("/owner/keys/revoke", headers=me, json={"name": "ci"})
    nobody = await owned.post("/owner/keys/revoke", headers=me, json={"name": "x"})
    listed = await owned.get("/owner/keys", headers=me)

    key = accounts.find(made.json()["key"])
    assert key
    assert (key.limits, key.is_owner) == (KeyLimits(1, ("a",), 2, 9, ("attic",), 60, 0), False)
    assert [each.status_code for each in (made, again, gone, nobody)] == [200, 400, 200, 400]
    assert listed.headers["cache-control"] == "no-store"
    found = {each["name"]: each for each in listed.json()["keys"]}
    assert (found["ci"]["state"], found["me"]["owner"]) == ("revoked", True)
    assert [found["ci"][each] for each in ("deadline_s", "max_reasoning")] == [60, 0]
    assert made.json()["key"] not in listed.text


async def test_the_mesh_is_told_of_revoked_keys(
    owned: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode
) -> None:
    me = owner(accounts)
    for name in ("a", "b"):
        accounts.create(name, KeyLimits(), 0)

    told = await owned.post("/owner/keys/revoke", headers=me, json={"name": "a"})
    assert api_server.calls == [tuple(accounts.revoked())]
    api_server.is_away = True
    later = await owned.post("/owner/keys/revoke", headers=me, json={"name": "b"})

    assert (told.json()["is_told"], later.json()["is_told"]) == (True, False)
    assert len(accounts.revoked()) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"name": "x", "concurrency": 0},
        {"name": "x", "expires_s": 1 << 60},
        {"name": "x", "models": ["a\nb"]},
        {"name": "x", "models": [""]},
        {"name": "x", "trust": [""]},
        {"name": "x", "deadline_s": 0},
        {"name": "x", "max_reasoning": -1},
        {"name": "x", "owner": True},
        {},
    ],
)
async def test_an_invalid_key_is_not_created(
    owned: httpx2.AsyncClient, accounts: Accounts, wrong: dict[str, object]
) -> None:
    made = await owned.post("/owner/keys", headers=owner(accounts), json=wrong)

    assert made.status_code == 400
    assert [each.name for each in accounts.list_keys()] == ["me"]


@pytest.mark.parametrize("by", ["day", "key", "model"])
async def test_usage_is_shown(owned: httpx2.AsyncClient, accounts: Accounts, by: str) -> None:
    accounts.record("2026-11-25", "ci", "fox", KeyUsage(3, 1, 10, 4, 20))

    found = await owned.get(f"/owner/usage?by={by}", headers=owner(accounts))

    (row,) = found.json()["usage"]
    assert row[by] in ("2026-11-25", "ci", "fox")
    assert (row["requests"], row["cached"], row["written"]) == (3, 4, 20)


async def test_the_metrics_can_be_scraped_on_tcp(
    owned: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode
) -> None:
    said = await owned.get("/owner/metrics", headers=owner(accounts))

    assert said.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert said.text == exposition(api_server.report())


async def test_an_unknown_grouping_is_refused(
    owned: httpx2.AsyncClient, accounts: Accounts
) -> None:
    found = await owned.get("/owner/usage?by=name;drop", headers=owner(accounts))

    assert found.status_code == 400


async def test_a_plan_is_tried_out(
    owned: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode
) -> None:
    me = owner(accounts)

    found = await owned.post("/owner/plan", headers=me, json={"policy": "fastest"})
    wrong = await owned.post("/owner/plan", headers=me, json={"policy": "bad"})

    assert from_json(PlannedRing, found.json()).stages == api_server.report().ring.stages
    assert api_server.calls[0] == (PlanTerms("fastest"),)
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "Unknown policy `bad`")


async def test_a_file_that_cannot_be_used_is_named(
    owned: httpx2.AsyncClient, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = owner(accounts)

    def full(_: Accounts, by: str) -> None:
        raise sqlite3.OperationalError("disk is full")

    monkeypatch.setattr(Accounts, "usage", full)
    found = await owned.get("/owner/usage", headers=me)

    assert (found.status_code, "disk is full" in found.text) == (500, True)
