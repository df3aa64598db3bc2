"""The chat page in headless Chromium: send, stream, stop, progress, the panel, a key."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.conftest import running
from tests.server.engines import ScriptedEngine

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
]


def answer(prompt):
    return (
        "First I look at it.</think>\n\n" + ("<b>not bold</b> " if "html" in prompt else "") + "The answer is 42. " * 12
    )


@contextmanager
def page_of(up, *, size=(1200, 800)):
    """A fresh browser page on the server; whatever it logs as an error fails the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        errors, hosts = [], set()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2] if "//" in request.url else ""))
        page.goto(up.base + "/")
        yield page
        browser.close()
    assert errors == []
    assert hosts <= {up.base.split("//")[1], ""}


@pytest.fixture(scope="module")
def up():
    with running(lambda progress: ScriptedEngine(answer, step_s=0.01, chunk=20), chat_template=TEMPLATE) as up:
        yield up


WATCH_READING = """() => {
    const reading = document.querySelector("#reading"), bar = document.querySelector("#bar");
    window.shown = [];
    new MutationObserver(() => {
        if (bar.offsetParent !== null) window.shown.push(document.querySelector("#reading-text").innerText);
    }).observe(reading, {subtree: true, attributes: true, childList: true, characterData: true});
}"""


def test_a_conversation(up):
    with page_of(up) as page:
        page.wait_for_selector("#state.ok")
        page.evaluate(WATCH_READING)  # a short prompt may be read while nobody looks
        page.fill("#input", "show me html")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant .speed", timeout=30_000)
        shown = page.evaluate("window.shown")
        assert shown
        assert all("tokens" in text for text in shown)
        assert page.inner_text(".message.assistant > .text") == answer("html").split("</think>\n\n")[1]
        assert page.text_content(".thought") == "First I look at it."
        assert page.is_hidden("#reading")
        assert page.is_visible("#send")
        page.fill("#input", "and again")
        page.click("#send")
        page.locator(".message.assistant .speed").nth(1).wait_for(timeout=30_000)
        assert "show me html" in up.server.loop._engine.prompts[-1]
        assert "not bold" in up.server.loop._engine.prompts[-1]
        page.locator("#panel dt", has_text="hit rate").wait_for()
        assert "50.0 %" in page.inner_text("#panel")
        page.click("aside summary")
        assert "steps" in page.inner_text("#all")
        page.click("#new")
        assert page.locator(".message").count() == 0


def test_stop_frees_the_place(up):
    engine = up.server.loop._engine
    n = len(engine.cancelled)
    with page_of(up) as page:
        page.fill("#input", "go on for long")
        page.click("#send")
        page.wait_for_selector(".message.assistant")
        page.click("#stop")
        page.wait_for_selector("#send", state="visible")
        for _ in range(200):
            if len(engine.cancelled) > n:
                break
            page.wait_for_timeout(10)
        assert len(engine.cancelled) == n + 1
        assert page.locator(".message.error").count() == 0


def test_errors_are_shown(up):
    with page_of(up) as page:
        page.fill("#input", "x" * 5000)
        page.click("#send")
        page.wait_for_selector(".message.error")
        assert "maximum context length" in page.inner_text(".message.error")


def test_a_key_is_asked_for_and_used():
    locked = running(lambda progress: ScriptedEngine(answer), chat_template=TEMPLATE, api_keys=("sesame",))
    with locked as up, page_of(up, size=(500, 700)) as page:
        page.locator("#state", has_text="API key needed").wait_for()
        page.click("#settings-open")
        page.fill("#key", "sesame")
        page.dispatch_event("#key", "change")
        page.wait_for_selector("#state.ok")
        page.fill("#input", "hi")
        page.click("#send")
        page.wait_for_selector(".message.assistant .speed", timeout=30_000)


def test_the_screenshot_in_the_documentation(up, request, tmp_path):
    """Not a comparison: makes the picture, so that it can be renewed (--basetemp shows where)."""
    target = Path(tmp_path) / "chat-page.png"
    with page_of(up, size=(1100, 700)) as page:
        page.fill("#input", "What is six times seven?")
        page.click("#send")
        page.wait_for_selector(".message.assistant .speed", timeout=30_000)
        page.wait_for_timeout(1200)
        page.screenshot(path=target)
    assert target.stat().st_size > 10_000
