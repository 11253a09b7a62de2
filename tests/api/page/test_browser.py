"""The page in a real browser, at the API server of a node that says what a test wants."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits, KeyUsage
from meshllm.api.page import routes
from meshllm.request import Logprob, Piece, TokenLogprobs
from meshllm.status import MeshStatus, NodeState, PlanTerms
from tests.api.page.conftest import Visit, ask, ready, visiting
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.status import RINGS, with_node, with_ring

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = [pytest.mark.socket, pytest.mark.asyncio(loop_scope="module")]

VIEWS = ["mesh", "chat", "models", "plan", "keys"]
HOSTILE = (
    "<img src=x onerror=alert(1)> **<script>alert(2)</script>**\n\n"
    "[here](javascript:alert(3)) [out](https://example.org/a?b)\n\n"
    "```html\n<iframe src=https://example.org></iframe>\n```\n\n"
    "| <b>a</b> | b |\n|---|---|\n| 1 | 2 |"
)
NAMES = """() => {
  const kinds = "a[href], button, input, select, textarea, summary, [tabindex='0']";
  const name = (e) => e.getAttribute("aria-label")
    || document.getElementById(e.getAttribute("aria-labelledby"))?.textContent
    || [...(e.labels ?? [])].map((label) => label.textContent).join(" ")
    || (e.matches("pre, main") ? "content" : "")
    || (e.matches("input, select, textarea") ? "" : e.textContent);
  const nameless = [...document.querySelectorAll(kinds)].filter((e) => !name(e).trim());
  return nameless.map((e) => e.outerHTML);
}"""
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (rgb) =>
    [0.2126, 0.7152, 0.0722].reduce((sum, part, at) => sum + part * linear(rgb[at] / 255), 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const found = parse(getComputedStyle(e).backgroundColor);
      if (found[3] !== 0) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const e = walker.currentNode.parentElement;
    if (!text || !e.checkVisibility() || e.closest(":disabled, .hidden, .skip")) continue;
    const style = getComputedStyle(e);
    const ink = parse(e.closest("svg") ? style.fill : style.color);
    const pair = [luminance(ink), luminance(ground(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) low.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


async def unlock(page: "Page", key: str) -> None:
    await page.click("#open-key")
    await page.fill("#key", key)
    await page.click("#use-key")


def asked(api_server: FakeNode) -> list[list[str]]:
    """Return the texts of the turns of each request."""
    return [[turn["content"] for turn in each.turns] for each in api_server.requests]


async def test_an_answer_is_shown_with_its_time(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")

    await ask(page, "Hi")

    shown = page.locator(".assistant")
    assert "hello w" in await shown.inner_text()
    note = await shown.locator(".actions .quiet").inner_text()
    assert "5 tokens, first after" in note
    assert f"seed {api_server.requests[0].sampling.seed}" in note
    assert asked(api_server) == [["Hi"]]


async def test_the_api_server_of_a_client_says_what_it_does_not_show(
    visit: Visit, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = api_server.report()
    assert status.model
    models = (replace(status.model, epoch=1),)
    ring = replace(status.ring, stages=(), predicted=None)
    seen = replace(status, models=models, nodes=(), ring=ring, provided=(FOX,), is_client=True)
    monkeypatch.setattr(api_server, "report", lambda: seen)
    page = await visit.open()

    await page.locator("#client-note").wait_for()
    hidden = [await page.is_visible(each) for each in ("#drawing", "#nodes-box", "#times-box")]
    figures = await page.locator("#figures").inner_text()
    await page.click("#to-models")
    await page.locator("#served tr").first.wait_for()
    served = await page.locator("#served tr").all_inner_texts()
    await page.click("#to-chat")
    await ask(page, "Hi")

    assert hidden == [False] * 3
    assert "of weights here" not in figures
    assert [each.split("\t") for each in served] == [
        ["builtin", "bfloat16", "unknown", "1 of 1 ring, 20 layers", "-"],
        ["fox", "bf16", "2,048 tokens", "an engine", "gpu"],
    ]
    assert asked(api_server) == [["Hi"]]


async def test_a_node_shows_no_note_of_a_client(visit: Visit) -> None:
    page = await visit.open()

    await page.locator("#nodes tr").first.wait_for()

    assert await page.is_visible("#drawing")
    assert not await page.is_visible("#client-note")


async def test_choosing_a_view_keeps_the_header_in_sight(visit: Visit) -> None:
    page = await visit.open(width=375)
    await page.locator("#nodes tr").first.wait_for()

    for view in (*VIEWS, "mesh"):
        await page.click(f"#to-{view}")
        assert await page.evaluate("() => scrollY") == 0, view


async def test_settings_reach_the_model(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await page.click("#conversation > details > summary")
    for name, value in {"temperature": "0.5", "top_p": "0.9", "most": "7", "seed": "3"}.items():
        await page.fill(f"#{name}", value)
    await page.fill("#system", "Be brief")

    await ask(page, "Hi")

    (request,) = api_server.requests
    assert asked(api_server) == [["Be brief", "Hi"]]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert request.max_tokens == 7


async def test_stop_cancels_the_answer_and_keeps_what_came(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at = 2
    page = await visit.open("chat")
    await page.locator("#model option").first.wait_for(state="attached")
    await page.fill("#question", "Hi")
    await page.press("#question", "Enter")
    await page.get_by_text("hello", exact=True).wait_for()

    await page.click("#stop")
    await api_server.closed.wait()
    await page.locator(".assistant .actions").wait_for()

    shown = await page.locator(".assistant").inner_text()
    assert shown.startswith("hello")
    assert "stopped" in shown
    assert await page.is_visible("#send")


async def test_an_answer_can_be_had_again(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "Hi")

    await page.get_by_role("button", name="Regenerate").click()
    await page.wait_for_function("() => document.querySelector('#turns').ariaBusy === 'false'")

    assert asked(api_server) == [["Hi"], ["Hi"]]
    assert api_server.requests[0].sampling.seed != api_server.requests[1].sampling.seed
    assert await page.locator(".turn").count() == 2


async def test_an_earlier_question_can_be_edited(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "One")
    await ask(page, "Two", answers=2)

    await page.get_by_role("button", name="Edit").first.click()
    field = page.get_by_label("Edit the message")
    assert await field.input_value() == "One"
    await field.fill("Three")
    await field.press("Enter")
    await page.locator(".assistant .actions").wait_for()

    assert asked(api_server)[-1] == ["Three"]
    assert await page.locator(".turn").count() == 2


async def test_editing_can_be_cancelled(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "One")

    await page.get_by_role("button", name="Edit").click()
    await page.get_by_role("button", name="Cancel").click()

    assert "One" in await page.locator(".user").inner_text()
    assert len(api_server.requests) == 1


async def test_conversations_survive_a_reload(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "One")
    await page.click("#new")
    await ask(page, "Two")

    await page.reload()
    await ready(page)

    assert "Two" in await page.locator("#turns").inner_text()
    await page.locator("#talks").get_by_role("button", name="One").click()
    assert "One" in await page.locator(".user").inner_text()
    page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await page.click("#drop")
    await page.reload()
    await ready(page)
    assert await page.locator("#talks").inner_text() == "Two"


async def test_two_tabs_do_not_undo_each_other(visit: Visit, api_server: FakeNode) -> None:
    first = await visit.open("chat")
    second = await first.context.new_page()
    visit.watch(second)
    await second.goto(f"{visit.url}#chat")
    await ready(second)
    await ask(first, "One")
    await ask(second, "Two")

    await first.locator("#talks").get_by_role("button", name="Two").wait_for()
    await second.reload()
    await ready(second)

    told = await second.locator("#talks").inner_text()
    assert sorted(told.split("\n")) == ["One", "Two"]


async def test_a_hostile_answer_is_shown_as_text(visit: Visit, api_server: FakeNode) -> None:
    api_server.said = (Piece(HOSTILE), answer_of(HOSTILE, 9))
    page = await visit.open("chat")
    page.on("dialog", lambda dialog: visit.faults.append(dialog.message))

    await ask(page, HOSTILE)

    for kind in ("img", "script", "iframe", "b"):
        assert await page.locator(f"#turns {kind}").count() == 0, kind
    shown = await page.locator(".assistant").inner_text()
    for text in ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "<b>a</b>"):
        assert text in shown
    assert "[here](javascript:alert(3))" in shown
    (link,) = await page.locator("#turns a").all()
    assert await link.get_attribute("href") == "https://example.org/a?b"
    assert "https://example.org/a?b" in await link.inner_text()
    assert "noopener" in (await link.get_attribute("rel") or "")


async def test_markdown_is_laid_out(visit: Visit, api_server: FakeNode) -> None:
    text = "# Title\n\n1. one\n   - deep\n2. two\n\n> said\n\n*a* **b** `c`\n\n---\n\n"
    text += "```py\nx = 1\n```"
    api_server.said = (Piece(text), answer_of(text, 9))
    page = await visit.open("chat")

    await ask(page, "Hi")

    found = {
        kind: await page.locator(f".assistant {kind}").all_inner_texts()
        for kind in ("h4", "ol > li > ul > li", "blockquote", "em", "strong", "p code", "pre")
    }
    assert list(found.values()) == [["Title"], ["deep"], ["said"], ["a"], ["b"], ["c"], ["x = 1"]]
    assert await page.locator(".assistant ol > li").count() == 2
    assert await page.locator(".assistant hr").count() == 1


async def test_lines_may_end_as_those_of_windows(visit: Visit, api_server: FakeNode) -> None:
    text = "- one\r\n- two\r\n\r\n```py\r\nx = 1\r\n```\r\n"
    api_server.said = (Piece(text), answer_of(text, 9))
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert await page.locator(".assistant li").all_inner_texts() == ["one", "two"]
    assert await page.locator(".assistant pre").all_inner_texts() == ["x = 1"]


async def test_the_probability_of_each_token_is_shown(visit: Visit, api_server: FakeNode) -> None:
    chosen, other = Logprob(1, "yes", tuple(b"yes"), -0.1), Logprob(2, "no", tuple(b"no"), -3.0)
    api_server.said = (
        Piece("yes", logprobs=(TokenLogprobs(chosen, (chosen, other)),)),
        answer_of("yes", 1),
    )
    page = await visit.open("chat")
    await page.click("#conversation > details > summary")
    await page.check("#probable")
    await ask(page, "Hi")

    await page.focus(".tokens .line")
    await page.keyboard.press("ArrowRight")

    assert await page.inner_text(".tokens p") == '"yes" 90.5 %; instead of "no" 5.0 %'
    await page.uncheck("#probable")
    assert await page.locator(".tokens").count() == 0
    assert "yes" in await page.inner_text(".assistant p")


async def test_reasoning_is_apart_from_the_answer(visit: Visit, api_server: FakeNode) -> None:
    api_server.said = (Piece("", reasoning="because"), Piece("so"), answer_of("so", 2))
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert await page.locator(".assistant details").text_content() == "Reasoningbecause"
    assert await page.inner_text(".assistant > p") == "so"


async def test_an_error_is_told(visit: Visit, api_server: FakeNode) -> None:
    api_server.fails_at = 2
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert "It broke" in await page.inner_text(".assistant .error")
    assert "hello" in await page.inner_text(".assistant")


async def test_the_mesh_is_drawn_and_a_loss_is_logged(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open()
    name = api_server.report().nodes[0].name
    await page.locator("#nodes tr").nth(1).wait_for()
    assert await page.inner_text("#summary") == "serving: builtin"
    assert name in (await page.text_content("#ring") or "")
    assert "3.00 ms" in (await page.text_content("#ring") or "")
    assert "tokens/s measured" in await page.inner_text("#figures")

    lost = with_node(api_server.report(), 1, state=NodeState.DOWN, reason="no link to it")
    show(api_server, lost)
    await page.get_by_text("serving, now down").wait_for()

    assert "no link to it" in await page.inner_text("#nodes .bad")
    assert await page.locator("#ring .away").count() == 1


async def test_a_model_that_joins_can_be_asked(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await page.locator("#model option").first.wait_for(state="attached")
    api_server.provided = (FOX,)
    await page.locator("#model option").nth(1).wait_for(state="attached")
    await page.click("#conversation > details > summary")
    await page.select_option("#model", "fox")

    await ask(page, "Hi")

    assert api_server.requests[0].model == "fox"


async def test_the_model_that_was_chosen_stays_chosen_while_it_is_away(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.provided = (FOX,)
    page = await visit.open("chat")
    await page.locator("#model option").nth(1).wait_for(state="attached")
    await page.click("#conversation > details > summary")
    await page.select_option("#model", "fox")
    api_server.provided = ()
    await page.locator("#model option:disabled").wait_for(state="attached")

    away = await page.input_value("#model")
    api_server.provided = (FOX,)
    await page.locator("#model option:disabled").wait_for(state="detached")

    assert (away, await page.input_value("#model")) == ("fox", "fox")


async def test_models_and_who_has_them_are_listed(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("models")

    await page.locator("#served").get_by_text("builtin").wait_for()

    assert "1 of 1 ring, 20 layers" in await page.inner_text("#served")
    assert await page.is_hidden("#rings-box")
    show(api_server, replace(api_server.report(), rings=RINGS))
    await page.locator("#rings").get_by_text("with 2.1 GiB of memory").wait_for()
    assert api_server.report().nodes[0].name in await page.inner_text("#served")


async def test_the_owners_views_need_an_owners_key(
    browser: "Browser", api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("guest", KeyLimits(), 0)
    async with visiting(browser, api_server, accounts) as visit:
        page = await visit.open("keys")
        assert "needs an owner's key" in await page.inner_text("#keys-locked")
        assert "meshllm key create NAME --owner" in await page.inner_text("#keys-locked")
        assert visit.faults == []

        await unlock(page, key)
        await page.locator("#keys-locked").get_by_text("is not an owner's key").wait_for()

        assert await page.is_hidden("#keys-open")
        assert await page.locator("#key-rows tr").count() == 0
        await page.click("#to-plan")
        assert await page.is_hidden("#plan-open")
    assert api_server.calls == []


async def test_a_key_is_shown_with_the_nodes_that_it_trusts(
    visit: Visit, accounts: Accounts, owner: str
) -> None:
    limits = KeyLimits(tokens_per_day=1, trust=("attic", "desk"), deadline_s=60, max_reasoning=0)
    accounts.create("clinic", limits, 0)
    page = await visit.open("keys")

    await unlock(page, owner)

    told = "1 token a day; trusts attic, desk; 60 s an answer; 0 tokens of reasoning"
    await page.locator("#key-rows").get_by_text(told).wait_for()


async def test_the_owner_creates_and_revokes_keys(
    visit: Visit, accounts: Accounts, owner: str
) -> None:
    accounts.record("2026-11-25", "ci", "builtin", KeyUsage(3, 0, 10, 4, 20))
    page = await visit.open("keys")
    page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await unlock(page, owner)
    await page.fill("#key-name", "laptop")
    await page.fill("#key-days", "30")
    await page.fill("#key-tokens", "1000")
    await page.fill("#key-seconds", "60")
    await page.fill("#key-reasoning", "0")

    await page.click("#create-key")
    await page.locator("#made").wait_for()

    found = accounts.find(await page.input_value("#made-key"))
    assert found
    assert (found.name, found.is_owner) == ("laptop", False)
    limits = replace(found.limits, expires_s=None)
    assert limits == KeyLimits(tokens_per_day=1000, deadline_s=60, max_reasoning=0)
    assert "2026-11-25" in await page.inner_text("#usage-rows")
    await page.get_by_role("button", name="Revoke laptop").click()
    await page.locator("#key-rows").get_by_text("revoked").wait_for()
    await page.select_option("#by", "key")
    await page.locator("#usage-rows").get_by_text("ci").wait_for()


async def test_a_plan_is_predicted_before_anything_moves(
    visit: Visit, api_server: FakeNode, owner: str
) -> None:
    page = await visit.open("plan")
    await unlock(page, owner)
    first = api_server.report().nodes[0]
    await page.select_option("#policy", "throughput")
    await page.fill("#members", "2")
    await page.uncheck("#plan-nodes tr:nth-child(2) input[type=checkbox]")
    await page.fill("#plan-nodes tr:first-child input[type=number]", "2")

    await page.click("#predict")
    await page.locator("#plan-stages tr").first.wait_for()

    second = api_server.report().nodes[1]
    terms = PlanTerms("throughput", 2, (second.short,), {first.short: 2 << 30})
    assert api_server.calls == [(terms,)]
    assert "125.0 tokens/s" in await page.inner_text("#plan-figures")


async def test_a_plan_begins_with_the_terms_in_force(
    visit: Visit, api_server: FakeNode, owner: str
) -> None:
    status = api_server.report()
    second = status.nodes[1]
    show(api_server, with_ring(status, members=1, exclude=(second.node,)))
    page = await visit.open("plan")
    await unlock(page, owner)
    box = "#plan-nodes tr:nth-child(2) input[type=checkbox]"
    assert await page.input_value("#members") == "1"
    assert not await page.is_checked(box)

    await page.click("#predict")
    await page.locator("#plan-stages tr").first.wait_for()
    await page.check(box)
    await page.fill("#members", "")
    async with page.expect_response("**/owner/plan"):
        await page.click("#predict")

    assert api_server.calls == [(PlanTerms("auto"),), (PlanTerms("auto", 0, ()),)]


async def test_the_owner_plans_with_the_nodes_that_guests_do_not_see(
    browser: "Browser", api_server: FakeNode, accounts: Accounts, owner: str
) -> None:
    key = accounts.create("guest", KeyLimits(), 0)
    async with visiting(browser, api_server, accounts, needs_key=True) as visit:
        page = await visit.open("plan")
        await unlock(page, key)
        await page.locator("#plan-nodes tr").first.wait_for(state="attached")

        await unlock(page, owner)

        await page.locator("#plan-nodes").get_by_text(api_server.report().nodes[0].name).wait_for()
        assert await page.input_value("#plan-nodes tr:first-child input[type=number]") == "8"


async def test_an_api_server_that_needs_a_key_asks_for_it(
    browser: "Browser", api_server: FakeNode, accounts: Accounts, owner: str
) -> None:
    key = accounts.create("guest", KeyLimits(), 0)
    names = {node.name for node in api_server.report().nodes}
    async with visiting(browser, api_server, accounts, needs_key=True) as visit:
        page = await visit.open()
        await page.get_by_text("This server needs an API key").wait_for()
        await unlock(page, "wrong")
        await page.get_by_text("The server refuses this API key").wait_for()

        await unlock(page, key)
        await page.locator("#nodes tr").first.wait_for()
        guests = await page.inner_text("#mesh")
        await unlock(page, owner)
        await page.locator("#nodes").get_by_text("this node").first.wait_for()
        await page.locator("#figures").get_by_text("of weights here").wait_for()

        assert not [name for name in names if name in guests]
        assert [name for name in names if name in await page.inner_text("#mesh")]
        assert await page.is_hidden("#locked")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1280])
async def test_every_view_fits_and_can_be_read(
    visit: Visit, api_server: FakeNode, owner: str, theme: str, width: int
) -> None:
    text = HOSTILE + "\n\n" + "x" * 300
    api_server.said = (Piece(text), answer_of(text, 9))
    page = await visit.open("chat", theme=theme, width=width)
    await ask(page, "y" * 300)
    await unlock(page, owner)
    for view in VIEWS:
        await page.click(f"#to-{view}")
        await page.locator(f"#{view}").wait_for()
        if view in ("plan", "keys"):
            await page.locator(f"#{view}-open").wait_for()

        wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
        low = await page.evaluate(CONTRAST)
        nameless = await page.evaluate(NAMES)

        assert (view, wide, low, nameless) == (view, 0, [], [])


async def test_the_keyboard_reaches_everything_in_order(visit: Visit) -> None:
    page = await visit.open()
    await page.locator("#nodes tr").first.wait_for()
    await page.bring_to_front()

    async def tab(times: int) -> list[str]:
        """Return what gets the focus, which must be visible."""
        order = []
        for _ in range(times):
            await page.keyboard.press("Tab")
            active = "document.activeElement"
            name = f"{active}.id || {active}.className || {active}.tagName"
            order.append(await page.evaluate(name))
            assert await page.evaluate(f"getComputedStyle({active}).outlineStyle") != "none", order
        return order

    assert await tab(7) == [
        "skip", "to-mesh", "to-chat", "to-models", "to-plan", "to-keys", "open-key",
    ]  # fmt: skip
    await page.focus("#to-chat")
    await page.keyboard.press("Enter")
    await page.locator("#chat").wait_for()
    assert await tab(6) == ["new", "drop", "SUMMARY", "turns", "question", "send"]


async def test_shift_enter_breaks_the_line(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await page.fill("#question", "a")
    await page.press("#question", "Shift+Enter")
    await page.type("#question", "b")
    await page.locator("#model option").first.wait_for(state="attached")
    assert api_server.requests == []

    await page.press("#question", "Enter")
    await page.locator(".assistant .actions").wait_for()

    assert asked(api_server) == [["a\nb"]]


async def test_the_page_returns_when_the_server_does(
    browser: "Browser", api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "REFRESH_S", 0.02)
    async with visiting(browser, api_server, accounts) as visit:
        page = await visit.open()
        await page.locator("#nodes tr").first.wait_for()
        await page.route("**/page/events", lambda route: route.abort())
        await page.evaluate("dispatchEvent(new Event('key'))")
        await page.get_by_text("disconnected").wait_for()

        await page.unroute("**/page/events")
        await page.get_by_text("serving: builtin").wait_for()


async def test_a_hidden_page_leaves_its_connection_to_others(visit: Visit) -> None:
    page = await visit.open()
    await page.locator("#nodes tr").first.wait_for()
    hide = """(isHidden) => {
      Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""

    async with page.expect_event("requestfailed"):
        await page.evaluate(hide, True)
    shown = await page.inner_text("#summary")
    async with page.expect_request("**/page/events"):
        await page.evaluate(hide, False)

    assert shown == "serving: builtin"


async def test_a_stream_that_is_left_is_cancelled(visit: Visit) -> None:
    page = await visit.open()
    leave = """async () => {
      const { objects } = await import("/page/api.js");
      const start = (to) => to.enqueue(new TextEncoder().encode("data: {}\\n\\n"));
      const cancel = () => (document.body.dataset.left = "");
      for await (const _ of objects({ body: new ReadableStream({ start, cancel }) })) break;
    }"""

    await page.evaluate(leave)

    await page.locator("body[data-left]").wait_for()


async def test_an_error_of_the_mesh_is_not_drawn(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open()
    await page.locator("#nodes tr").first.wait_for()
    note = """() => new MutationObserver(() => (window.seen = [...(window.seen ?? []),
      document.getElementById("summary").textContent]))
      .observe(document.getElementById("summary"), { childList: true })"""
    await page.evaluate(note)
    said = 'data: {"error": {"message": "It broke"}}\n\n'
    await page.route("**/page/events", lambda route: route.fulfill(body=said))

    await page.evaluate("dispatchEvent(new Event('key'))")
    await page.wait_for_function("() => window.seen?.length > 2")

    assert set(await page.evaluate("window.seen")) == {"disconnected, trying again"}


async def test_advice_has_no_markup_of_the_names_in_it(visit: Visit, api_server: FakeNode) -> None:
    name = "a` [here](https://example.org) **now** `b"
    show(
        api_server,
        replace(with_ring(api_server.report(), advice=f"`{name}` is slow"), warnings=(name,)),
    )

    page = await visit.open()
    await page.locator("#advice").get_by_text("is slow").wait_for()

    assert await page.locator("#advice :not(code), #warnings a, #warnings strong").count() == 0
    assert await page.locator("#advice code").first.inner_text() == "a"


async def test_single_things_are_not_plural(visit: Visit, api_server: FakeNode) -> None:
    status = api_server.report()
    losses = (replace(status.sessions.losses[0], count=1),)
    assert status.model
    counts = replace(status.sessions, active=1, waiting=0, served=1, tokens=1, losses=losses)
    model = replace(status.model, layers=1)
    show(api_server, replace(status, model=model, nodes=status.nodes[:1], sessions=counts))
    page = await visit.open()

    await page.locator("#figures").get_by_text("loss survived").wait_for()

    names = await page.locator("#figures span").all_inner_texts()
    told = {"1 layer, bfloat16", "session", "answer, 1 token", "loss survived"}
    assert told <= set(names)
    assert "of 1 node." in (await page.text_content("#plan-now") or "")
    assert "1 of 1 ring, 1 layer" in (await page.text_content("#served") or "")


def show(api_server: FakeNode, status: MeshStatus) -> None:
    """Let a node report another status from now on."""
    shown = replace(status)

    async def report() -> MeshStatus:
        return shown

    api_server.status = report  # type: ignore[method-assign]
