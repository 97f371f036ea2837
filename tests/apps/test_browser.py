"""The app as people meet it: in Chromium, by mouse and by keyboard, on a desk and on a phone."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from debias_diffusion.sdxl.record import read_record

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: no browser tests")

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_PATIENCE = 120_000  # milliseconds; a loaded machine draws slowly


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of this machine, without a window."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium on this machine: no browser tests")
    with playwright.sync_playwright() as tools:
        opened = tools.chromium.launch(executable_path=executable, headless=True, args=_FLAGS)
        yield opened
        opened.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser, served) -> Iterator[Open]:
    """visit(width=1280, scheme="light"): the app's page in a browser session of its own, ready for clicks."""
    contexts = []

    def opened(width: int = 1280, scheme: str = "light", height: int = 900) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(_PATIENCE)
        page.outside, page.errors = [], []
        page.on(
            "request",
            lambda r: None if r.url.startswith((served.url, "data:", "blob:")) else page.outside.append(r.url),
        )
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.goto(served.url)
        page.get_by_role("button", name="Compare").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()


def ask(page: Any, prompt: str, steps: int = 2) -> None:
    """Fills the form in: two columns, so many steps."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="More settings").click()
    box = page.get_by_label("number input for Steps")
    box.fill(str(steps))
    box.press("Enter")
    page.get_by_role("button", name="More settings").click()


def draw(page: Any) -> list[str]:
    """Clicks and waits for a drawing of the seed in its field; the addresses of the pictures, column by column."""
    seed = page.get_by_label("Seed", exact=True).input_value()
    page.get_by_role("button", name="Compare").click()
    page.get_by_text(re.compile(rf"^Seed {seed}, .*drawn in")).wait_for()
    page.locator("#pictures0 img").first.wait_for()
    return [page.locator(f"#pictures{i} img").first.get_attribute("src") for i in range(3)]


def pixels(page: Any, address: str) -> bytes:
    response = page.request.get(address)
    assert response.headers["content-type"] == "image/png"
    return response.body()


def test_three_pictures_then_another_seed_then_back_to_the_first(visit, long_prompt, tmp_path):
    page = visit()
    ask(page, long_prompt)
    first = draw(page)
    assert len({pixels(page, address) for address in first}) == 3
    (tmp_path / "saved.png").write_bytes(pixels(page, first[2]))
    assert read_record(tmp_path / "saved.png")["prompt"] == long_prompt
    assert page.locator("#head0").inner_text().startswith("stock reads 77 of")
    assert "yellow kite" in page.locator("#sentences").inner_text()
    assert page.locator("#attention svg polyline").count() == 3
    page.get_by_role("button", name="New seed").click()
    playwright.expect(page.get_by_label("Seed", exact=True)).not_to_have_value("0")
    second = draw(page)
    assert pixels(page, second[0]) != pixels(page, first[0])
    page.locator("#history button.thumbnail-item").nth(1).click()
    playwright.expect(page.locator("#status")).to_contain_text("Seed 0,")
    playwright.expect(page.locator("#pictures0 img").first).to_have_attribute("src", first[0])
    with page.expect_download() as download:
        page.locator("#archive").click()
    assert download.value.suggested_filename == "comparison.zip"
    with page.expect_download() as download:
        page.locator("#sheet").click()
    assert download.value.suggested_filename == "contact-sheet.png"
    assert read_record(download.value.path())["request"]["prompt"] == long_prompt
    assert page.outside == []
    assert page.errors == []


def test_the_prompt_is_coloured_while_it_is_typed_and_never_run_as_markup(visit, long_prompt):
    page = visit()
    page.get_by_label("Prompt", exact=True).fill(
        long_prompt + " <img src=x onerror=\"document.title='hit'\"> ${1+1} {{2}}"
    )
    playwright.expect(page.locator("#reading .dd-stop")).to_contain_text("stock stops here")
    playwright.expect(page.locator("#reading .dd-prompt-text .dd-read-some")).to_contain_text("${1+1} {{2}}")
    assert page.locator("#reading img").count() == 0
    assert "hit" not in page.title()


def test_cancel_ends_a_drawing_and_the_next_one_works(visit):
    page = visit()
    ask(page, "a cat", steps=150)
    page.get_by_role("button", name="Compare").click()
    page.locator(".dd-preview").first.wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled.").wait_for()
    ask(page, "a cat")
    draw(page)


def test_a_step_that_ends_after_cancel_does_not_bring_the_drawing_back(visit, served, long_prompt):
    page = visit()
    ask(page, long_prompt, steps=150)

    def late(route: Any) -> None:
        time.sleep(0.7)  # as if a step took so long: the bar moves on after the click
        route.continue_()

    page.route("**/cancel", late)
    page.get_by_role("button", name="Compare").click()
    page.locator(".dd-preview").first.wait_for()
    with page.expect_response("**/cancel"):
        page.get_by_role("button", name="Cancel").click()
    playwright.expect(page.locator("#status")).to_have_text("Cancelled.")
    page.wait_for_timeout(500)
    playwright.expect(page.locator("#status")).to_have_text("Cancelled.")
    playwright.expect(page.locator(".dd-preview, .dd-waiting, #head0, #head1")).to_have_count(0)


def test_nothing_of_the_prompt_before_stays_beside_a_new_drawing_or_an_error(visit, served, long_prompt):
    page = visit()
    ask(page, long_prompt)
    draw(page)
    playwright.expect(page.locator("#sentences")).to_contain_text("yellow kite")
    page.get_by_label("Prompt", exact=True).fill("a cat")
    with held(served.studio.device):
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("Starting").wait_for()
        playwright.expect(page.locator("#head0")).to_have_text("stock")
        playwright.expect(page.locator("#sentences, #attention, #pictures0, #archive")).to_have_count(0)
    page.get_by_text(re.compile("drawn in")).wait_for()
    playwright.expect(page.locator("#sentences")).to_contain_text("a cat")
    page.get_by_label("Prompt", exact=True).fill(" ")
    page.get_by_role("button", name="Compare").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text("The prompt is empty")
    playwright.expect(page.locator("#head0, #sentences, #attention, #pictures0, #archive")).to_have_count(0)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_what_a_click_does_is_seen_without_scrolling(visit, served, width, height, long_prompt):
    page = visit(width, height=height)
    page.get_by_label("Prompt", exact=True).fill(long_prompt)
    button = page.get_by_role("button", name="Compare")
    with held(served.studio.device):
        button.click()
        page.get_by_text("Starting").wait_for()
        button.scroll_into_view_if_needed()
        playwright.expect(page.locator("#status")).to_be_in_viewport(ratio=1)
        playwright.expect(page.locator("#preview0")).to_be_in_viewport()
        page.get_by_role("button", name="Cancel").click()
    box = page.locator("#reading .dd-prompt-text")
    assert box.evaluate("e => e.scrollHeight - e.clientHeight") <= 1  # the whole text: where stock stops is the point


def test_two_visitors_at_once_wait_in_turn_and_keep_their_own(visit, served):
    one, two = visit(), visit()
    ask(one, "a cat", steps=3)
    ask(two, "a dog in a boat", steps=2)
    with held(served.studio.device):
        one.get_by_role("button", name="Compare").click()
        one.get_by_text("Starting").wait_for()
        two.get_by_role("button", name="Compare").click()
        playwright.expect(two.locator("#status")).to_contain_text("queue: 1/1")
    for page in (one, two):
        page.get_by_text(re.compile("drawn in")).wait_for()
    own, other = (pixels(page, page.locator("#pictures0 img").first.get_attribute("src")) for page in (one, two))
    assert own != other
    assert draw_alone(visit, "a dog in a boat") == other
    assert "a dog" not in one.content()


def test_who_cancels_while_waiting_is_not_drawn_for(visit, served):
    one, two = visit(), visit()
    ask(one, "a cat")
    ask(two, "a dog")
    with held(served.studio.device):
        one.get_by_role("button", name="Compare").click()
        one.get_by_text("Starting").wait_for()
        two.get_by_role("button", name="Compare").click()
        playwright.expect(two.locator("#status")).to_contain_text("queue: 1/1")
        two.get_by_role("button", name="Cancel").click()
        two.get_by_text("Cancelled.").wait_for()
    one.get_by_text(re.compile("drawn in")).wait_for()
    one.get_by_role("button", name="New seed").click()
    playwright.expect(one.get_by_label("Seed", exact=True)).not_to_have_value("0")
    draw(one)  # what waited before it would be done by now
    assert two.get_by_text("Cancelled.").is_visible()
    assert two.locator("#pictures0 img").count() == 0


def draw_alone(visit: Open, prompt: str) -> bytes:
    page = visit()
    ask(page, prompt)
    return pixels(page, draw(page)[0])


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Keeps the device busy, so that what waits for it waits as long as a test needs."""
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_scrolling_sideways(visit, scheme, long_prompt):
    page = visit(390, scheme)
    ask(page, long_prompt)
    draw(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#pictures0 img").first.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", background)[:3])) > 380 if scheme == "light" else True
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 380) == (scheme == "dark")


def test_everything_needed_is_reached_by_keyboard(visit):
    page = visit()
    page.get_by_label("Prompt", exact=True).focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.innerText || e.getAttribute('aria-label') || e.id)(document.activeElement)"))
    assert {"Compare", "Cancel"} <= {text.strip() for text in reached if text}
    page.get_by_role("button", name="Analyse the prompt without drawing").focus()
    page.keyboard.press("Enter")
    page.get_by_text("Analysed; nothing was drawn.").wait_for()
    ask(page, "a cat")
    page.get_by_label("Prompt", exact=True).press("Shift+Enter")
    page.get_by_text(re.compile("drawn in")).wait_for()


def test_three_thousand_words_are_drawn_and_the_cut_is_said(visit):
    page = visit()
    ask(page, "word " * 3000)
    draw(page)
    assert "2,925 words cut" in page.locator("#head0").inner_text()
    assert "in 4 pieces" in page.locator("#head1").inner_text()


def test_an_empty_prompt_is_an_error_in_words(visit):
    page = visit()
    page.get_by_label("Prompt", exact=True).fill("   ")
    page.get_by_role("button", name="Compare").click()
    playwright.expect(page.get_by_role("alert")).to_contain_text(
        "The prompt is empty; write what the picture should show"
    )


def test_a_wrong_folder_is_an_error_in_words_and_a_right_one_a_column(visit, folders):
    page = visit()
    page.get_by_role("button", name="Another pair of encoders").click()
    page.get_by_label("Name", exact=True).fill("mine")
    page.get_by_label("Folder", exact=True).fill("/no/such/folder")
    page.get_by_role("button", name="Add", exact=True).click()
    playwright.expect(page.locator("#added")).to_contain_text("/no/such/folder holds none of text_encoder")
