"""The chat of the page in a real browser: reading, writing, tabs, and a server that goes away."""

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from meshllm.request import Event, Piece
from tests.api.page.conftest import Visit, ask, begin, ready
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [pytest.mark.socket, pytest.mark.asyncio(loop_scope="module")]

LONG = "\n\n".join(f"Paragraph {number}" for number in range(80))
REST = "(e => Math.round(e.scrollHeight - e.scrollTop - e.clientHeight))"
TURNS = 'document.querySelector("#turns")'
SCROLL_UP = f"""new Promise((seen) => {{
  {TURNS}.addEventListener("scroll", () => seen(), {{ once: true }});
  {TURNS}.scrollTop = 0;
}})"""
"""Scroll to the top, and wait until the page has noticed."""
ACTIVE = "document.activeElement.id || document.activeElement.textContent"


def saying(*texts: str) -> tuple[Event, ...]:
    return (*(Piece(text) for text in texts), answer_of("".join(texts), 9))


async def finished(page: "Page") -> None:
    await page.wait_for_function(f"() => {TURNS}.ariaBusy === 'false'")


async def rest(page: "Page") -> int:
    """Return how many pixels are below what is in view."""
    return int(await page.evaluate(f"{REST}({TURNS})"))


async def sent(page: "Page", *objects: object) -> None:
    """Let the server send these events, and then end."""
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in objects)
    reply = {"content_type": "text/event-stream", "body": body}
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(**reply))


async def test_skipping_to_the_content_stays_in_the_view(visit: Visit) -> None:
    page = await visit.open("chat")

    await page.focus(".skip")
    await page.keyboard.press("Enter")

    assert await page.evaluate(ACTIVE) == "main"
    assert await page.is_visible("#chat")
    await page.evaluate("location.hash = 'nowhere'")
    await page.wait_for_function("() => location.hash === '#nowhere'")
    assert await page.is_visible("#chat")


async def test_another_conversation_during_an_answer_can_be_sent(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at = 2
    page = await visit.open("chat")
    await begin(page, "One")
    await page.get_by_text("hello", exact=True).wait_for()

    await page.click("#new")
    await finished(page)

    assert await page.is_visible("#send")
    assert not await page.is_visible("#stop")
    assert await page.locator(".turn").count() == 0
    await page.locator("#talks").get_by_role("button", name="One").click()
    assert "stopped" in await page.inner_text(".assistant")


async def test_the_end_of_an_answer_leaves_what_is_read_in_place(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at, api_server.said = 2, saying(LONG, "\n\nThe end")
    page = await visit.open("chat")
    await begin(page, "Hi")
    await page.get_by_text("Paragraph 79").wait_for()
    assert await rest(page) < 2
    await page.evaluate(SCROLL_UP)

    api_server.go.set()
    await finished(page)

    assert await page.evaluate(f"{TURNS}.scrollTop") == 0
    assert "The end" in await page.inner_text(".assistant")


async def test_the_end_of_a_conversation_is_in_view(visit: Visit, api_server: FakeNode) -> None:
    api_server.said = saying(LONG)
    page = await visit.open("chat")
    await ask(page, "Hi")
    await page.wait_for_function(f"() => {REST}({TURNS}) < 2")

    await page.reload()
    await ready(page)
    await page.wait_for_function(f"() => {TURNS}.scrollTop > 0 && {REST}({TURNS}) < 2")

    await page.click("#to-mesh")
    await page.click("#to-chat")
    await page.wait_for_function(f"() => {TURNS}.scrollTop > 0 && {REST}({TURNS}) < 2")


async def test_what_is_open_or_marked_stays_while_an_answer_comes(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at = 3
    api_server.said = (Piece("", reasoning="because"), *saying("One\n\nTw", "o"))
    page = await visit.open("chat")
    await begin(page, "Hi")
    await page.get_by_text("Tw", exact=True).wait_for()
    await page.click(".assistant summary")
    await page.evaluate(
        "getSelection().selectAllChildren(document.querySelector('.assistant > p'))"
    )

    api_server.go.set()
    await finished(page)

    assert await page.locator(".assistant > p").all_inner_texts() == ["One", "Two"]
    assert await page.get_attribute(".assistant details", "open") is not None
    assert await page.evaluate("String(getSelection())") == "One"
    assert await page.evaluate(ACTIVE) == "Reasoning"


async def test_a_system_prompt_can_be_written_while_an_answer_comes(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at = 2
    page = await visit.open("chat")
    await begin(page, "Hi")
    await page.get_by_text("hello", exact=True).wait_for()
    await page.click("#conversation > details > summary")
    await page.locator("#system").press_sequentially("Be br")

    api_server.go.set()
    await finished(page)
    await page.locator("#system").press_sequentially("ief")
    api_server.waits_at = None
    await ask(page, "Again", answers=2)

    assert [each.turns[0]["content"] for each in api_server.requests] == ["Hi", "Be brief"]


async def test_the_keyboard_keeps_its_place(visit: Visit, api_server: FakeNode) -> None:
    api_server.waits_at = 2
    page = await visit.open("chat")
    await page.locator("#model option").first.wait_for(state="attached")
    await page.fill("#question", "One")
    await page.focus("#send")

    await page.keyboard.press("Enter")
    await page.get_by_text("hello", exact=True).wait_for()
    assert await page.evaluate(ACTIVE) == "stop"
    await page.keyboard.press("Enter")
    await finished(page)
    assert await page.evaluate(ACTIVE) == "question"
    await page.get_by_role("button", name="Edit").press("Enter")
    await page.keyboard.press("Escape")

    assert await page.evaluate(ACTIVE) == "Edit"
    assert await page.locator("form.edit").count() == 0
    assert len(api_server.requests) == 1


async def test_a_conversation_is_deleted_when_that_is_confirmed(
    visit: Visit, api_server: FakeNode
) -> None:
    page = await visit.open("chat")
    await ask(page, "One")
    page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.dismiss()))
    await page.click("#drop")
    assert await page.locator(".turn").count() == 2

    page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await page.click("#drop")

    assert await page.locator(".turn").count() == 0


async def test_another_tab_does_not_disturb_editing(visit: Visit, api_server: FakeNode) -> None:
    first = await visit.open("chat")
    await ask(first, "One")
    second = await first.context.new_page()
    visit.watch(second)
    await second.goto(f"{visit.url}#chat")
    await ready(second)
    await second.click("#new")
    await first.get_by_role("button", name="Edit").click()
    await first.get_by_label("Edit the message").fill("Changed")

    await ask(second, "Two")
    await first.locator("#talks").get_by_role("button", name="Two").wait_for()

    assert await first.get_by_label("Edit the message").input_value() == "Changed"


async def test_what_another_tab_wrote_during_an_answer_is_shown_after_it(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.waits_at = 2
    first = await visit.open("chat")
    second = await first.context.new_page()
    visit.watch(second)
    await second.goto(f"{visit.url}#chat")
    await ready(second)
    await begin(first, "One")
    await first.get_by_text("hello", exact=True).wait_for()
    await begin(second, "Two")
    await second.get_by_text("hello", exact=True).wait_for()

    await first.click("#stop")
    await finished(first)

    assert sorted(await first.locator("#talks li").all_inner_texts()) == ["One", "Two"]
    api_server.go.set()
    await finished(second)


async def test_each_paragraph_has_the_direction_of_its_script(
    visit: Visit, api_server: FakeNode
) -> None:
    api_server.said = saying("שלום עולם\n\nHello\n\n- مرحبا\n  ```\n  x = 1\n  ```\n")
    page = await visit.open("chat")

    await ask(page, "מה שלומך?")

    directions = {
        kind: await page.locator(kind).evaluate_all(
            "all => all.map(e => getComputedStyle(e).direction)"
        )
        for kind in (".user .text", ".assistant > p", ".assistant ul", ".assistant pre")
    }
    assert list(directions.values()) == [["rtl"], ["rtl", "ltr"], ["rtl"], ["ltr"]]
    await page.fill("#question", "שלום")
    assert await page.evaluate("getComputedStyle(question).direction") == "rtl"


async def test_code_within_a_list_and_between_longer_fences(
    visit: Visit, api_server: FakeNode
) -> None:
    text = "1. Install:\n   ```sh\n   pip install x\n     --y\n   ```\n2. Run `x`\n\n"
    text += "````md\n```py\n1\n```\n````\n\n```not a fence```\n\nrest"
    api_server.said = saying(text)
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert await page.locator(".assistant ol > li pre").all_inner_texts() == [
        "pip install x\n  --y"
    ]
    assert await page.locator(".assistant > .code pre").all_inner_texts() == ["```py\n1\n```"]
    assert await page.locator(".assistant ol > li").count() == 2
    assert await page.locator(".assistant > p").last.inner_text() == "rest"


@pytest.mark.parametrize("inset", ["  ", "   "])
async def test_lists_and_code_within_a_numbered_list(
    visit: Visit, api_server: FakeNode, inset: str
) -> None:
    inner = ("- b", "  - c", "- d", "```py", "def f():", "    x", "```")
    api_server.said = saying("1. a\n" + "\n".join(inset + each for each in inner))
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert await page.locator(".assistant ol > li > ul > li").count() == 2
    assert await page.locator(".assistant ul ul > li").all_inner_texts() == ["c"]
    assert await page.locator(".assistant pre").all_inner_texts() == ["def f():\n    x"]


async def test_blank_lines_in_code_within_a_list_end_nothing(
    visit: Visit, api_server: FakeNode
) -> None:
    code = "import os\n\n\ndef f():\n    pass"
    inner = "\n".join(f"   {line}" if line else "" for line in ["```py", *code.split("\n"), "```"])
    api_server.said = saying(f"1. Do:\n{inner}\n2. Next\n\nrest")
    page = await visit.open("chat")

    await ask(page, "Hi")

    assert await page.locator(".assistant pre").all_inner_texts() == [code]
    assert await page.locator(".assistant ol > li").count() == 2
    assert await page.inner_text(".assistant > p:not(.note)") == "rest"


async def beside_an_answer(visit: Visit, api_server: FakeNode) -> "tuple[Page, Page]":
    """Open a tab in which an answer has begun, and another one."""
    api_server.waits_at = 2
    first = await visit.open("chat")
    await begin(first, "One")
    await first.get_by_text("hello", exact=True).wait_for()
    second = await first.context.new_page()
    visit.watch(second)
    await second.goto(f"{visit.url}#chat")
    return first, second


async def test_a_conversation_that_another_tab_deletes_during_an_answer_stays_deleted(
    visit: Visit, api_server: FakeNode
) -> None:
    first, second = await beside_an_answer(visit, api_server)
    await second.evaluate("localStorage.clear()")
    await first.wait_for_function("() => !localStorage.length")  # another process: it takes a while

    api_server.go.set()
    await finished(first)

    assert await second.evaluate("localStorage.length") == 0


async def test_a_conversation_that_another_tab_continues_during_an_answer_is_kept_twice(
    visit: Visit, api_server: FakeNode
) -> None:
    first, second = await beside_an_answer(visit, api_server)
    await second.evaluate(
        """() => {
          const name = Object.keys(localStorage).find((each) => each.startsWith("meshllm-talk-"));
          const talk = JSON.parse(localStorage.getItem(name));
          talk.turns[0].content = "Two";
          talk.changed += 1;
          localStorage.setItem(name, JSON.stringify(talk));
        }"""
    )
    await first.wait_for_function("() => JSON.stringify(localStorage).includes('Two')")

    api_server.go.set()
    await finished(first)

    assert sorted(await first.locator("#talks li").all_inner_texts()) == ["One", "Two"]


async def test_a_wide_table_scrolls_before_its_words_break(
    visit: Visit, api_server: FakeNode
) -> None:
    words = ["Contiguous", "Predictions", "Acceptance", "Throughput"]
    rows = (f"| {' | '.join(each)} |" for each in (words, ["-"] * 4, words))
    api_server.said = saying("\n".join(rows))
    page = await visit.open("chat", width=360)

    await ask(page, "Hi")

    heights = "all => all.map(e => e.getBoundingClientRect().height)"
    for kind in ("th", "td"):
        cells = page.locator(f".assistant {kind}")
        assert max(await cells.evaluate_all(heights)) < 40, kind
    await page.focus(".assistant .scroll")
    await page.keyboard.press("ArrowRight")
    await page.wait_for_function(
        "() => document.querySelector('.assistant .scroll').scrollLeft > 0"
    )


async def test_a_lost_server_is_told_in_words(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await page.route("**/v1/chat/completions", lambda route: route.abort())

    async with page.expect_console_message(lambda said: "ERR_FAILED" in said.text):
        await ask(page, "Hi")
    visit.faults.clear()

    told = await page.inner_text(".assistant .error")
    assert told == "The connection to the server is lost, or it does not run"
    assert await page.get_by_role("button", name="Regenerate").is_visible()


async def test_an_answer_stays_if_there_is_no_other(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "Hi")
    before = await page.inner_text(".assistant > p")
    api_server.fails_at = 1

    async with page.expect_console_message(lambda said: "status of 500" in said.text):
        await page.get_by_role("button", name="Regenerate").click()
    await page.locator(".assistant .error").wait_for()
    await finished(page)
    visit.faults.clear()

    assert "It broke" in await page.inner_text(".assistant .error")
    assert await page.locator(".assistant > p").first.inner_text() == before
    api_server.fails_at = None
    await page.get_by_role("button", name="Regenerate").click()
    await page.locator(".assistant .error").wait_for(state="detached")
    await finished(page)
    assert await page.locator(".turn").count() == 2


async def test_an_answer_stays_if_the_page_is_left_before_another_one(
    visit: Visit, api_server: FakeNode
) -> None:
    page = await visit.open("chat")
    await ask(page, "Hi")
    before = await page.inner_text(".assistant > p")
    api_server.waits_at = 0
    await page.get_by_role("button", name="Regenerate").click()
    await page.locator("#stop").wait_for()

    await page.reload()

    assert await page.locator(".assistant > p").first.inner_text() == before


async def test_going_back_shows_the_first_view(visit: Visit) -> None:
    page = await visit.open("")
    await page.click("#to-chat")
    await page.locator("#chat").wait_for()

    await page.go_back()

    await page.locator("#mesh").wait_for()
    assert not await page.is_visible("#chat")


async def test_an_answer_that_just_ends_is_not_complete(visit: Visit) -> None:
    page = await visit.open("chat")
    await sent(page, {"choices": [{"delta": {"content": "Half of"}}]})

    await ask(page, "Hi")

    assert "Half of" in await page.inner_text(".assistant")
    told = await page.inner_text(".assistant .error")
    assert told == "The server ended before the answer did"


async def test_the_title_says_that_the_server_is_away(visit: Visit) -> None:
    page = await visit.open("chat")
    await page.wait_for_function("() => document.title === 'meshllm: serving'")
    await page.route("**/page/events", lambda route: route.abort())

    await page.evaluate("dispatchEvent(new Event('key'))")
    await page.wait_for_function("() => document.title === 'meshllm: disconnected'")
    await page.unroute("**/page/events")
    await page.wait_for_function("() => document.title === 'meshllm: serving'")

    visit.faults.clear()  # what the browser says itself of each failure


async def test_a_connection_that_fell_silent_is_made_again(visit: Visit) -> None:
    page = await visit.open("chat")
    await page.clock.install()
    await page.route("**/page/events", lambda _: None)  # never answered
    async with page.expect_request("**/page/events"):
        await page.evaluate("dispatchEvent(new Event('key'))")

    async with page.expect_request("**/page/events"):
        await page.clock.fast_forward(46_000)


async def test_a_browser_without_storage_can_chat(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    denied = "{ get() { throw new DOMException('denied', 'SecurityError'); } }"
    for name in ("localStorage", "sessionStorage"):
        await page.add_init_script(f"Object.defineProperty(window, '{name}', {denied})")
    await page.reload()
    await ready(page)

    await ask(page, "Hi")

    assert "hello" in await page.inner_text(".assistant")
    assert await page.is_visible("#storage")
    page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
    await page.click("#drop")
    assert await page.locator(".turn").count() == 0


async def test_copy_returns_to_its_name(visit: Visit, api_server: FakeNode) -> None:
    page = await visit.open("chat")
    await ask(page, "Copy me")
    await page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
    await page.evaluate(
        "addEventListener('copy', () => (window.copied = document.activeElement.value))"
    )
    button = page.locator(".user .actions button").first

    await button.click()
    await button.click()
    await page.locator(".user").get_by_text("Copied").wait_for()
    assert await page.evaluate("copied") == "Copy me"
    await page.locator(".user").get_by_text("Copied").wait_for(state="detached")
    assert await button.inner_text() == "Copy"
