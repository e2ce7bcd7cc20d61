"""The page in a real browser: headless Chromium, of `EPITORCH_CHROMIUM` or on the path."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report_page import evil as _evil_page

from epitorch.report import report

evil = _evil_page
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("EPITORCH_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser") / "report.html"
    report([runs], out, progress=False)
    return out


class Opened:
    """A page, with what it said and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def background(self) -> str:
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 24, 29)"


def test_it_opens_silently_and_asks_for_nothing(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        opened.page.wait_for_selector("figure.drawn .main-svg")
        opened.page.evaluate("document.querySelectorAll('details').forEach(box => box.open = true)")
        opened.page.wait_for_function("document.querySelectorAll('figure:not(.drawn)').length === 0")
        assert opened.said == []
        assert opened.asked == [page_file.as_uri()]


def test_the_check_above_can_fail(browser: Any, page_file: Path, tmp_path: Path) -> None:
    text = page_file.read_text(encoding="utf-8")
    (tmp_path / "r.html").write_text(text.replace("</body>", "<img src='x.png'><script>nothing()</script></body>"))
    with Opened(browser, tmp_path / "r.html") as opened:
        opened.page.wait_for_timeout(300)
        assert any("nothing is not defined" in said for said in opened.said)
        assert any("Content Security Policy" in said for said in opened.said)  # it keeps the picture from being fetched


def test_a_pointer_over_a_point_tells_what_it_is(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        point = opened.page.locator("#accuracy-madds .points path").first
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        opened.page.wait_for_selector("#accuracy-madds .hovertext")
        assert "tiny/dense" in opened.page.locator("#accuracy-madds .hovertext").text_content()


def test_a_legend_entry_hides_and_shows_by_keyboard(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        button = opened.page.locator("#accuracy-madds .legend button", has_text="tiny/narrow")
        shown = opened.page.locator("#accuracy-madds .scatterlayer .trace")
        assert shown.count() == 3
        button.focus()
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_function("document.querySelectorAll('#accuracy-madds .scatterlayer .trace').length === 2")
        assert button.get_attribute("aria-pressed") == "false"
        opened.page.keyboard.press("Space")
        opened.page.wait_for_function("document.querySelectorAll('#accuracy-madds .scatterlayer .trace').length === 3")
        assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(("scheme", "before", "after"), [("light", LIGHT, DARK), ("dark", DARK, LIGHT)])
def test_colours_follow_the_system_and_the_toggle(
    browser: Any, page_file: Path, scheme: str, before: str, after: str
) -> None:
    with Opened(browser, page_file, color_scheme=scheme) as opened:
        assert opened.background() == before
        text = opened.page.locator("#accuracy-madds .xtick text").first
        ink = text.evaluate("node => getComputedStyle(node).fill")
        opened.page.click("#theme")
        assert opened.background() == after
        assert text.evaluate("node => getComputedStyle(node).fill") != ink
        opened.page.click("#theme")
        assert opened.background() == before


def test_the_first_tab_leads_past_the_head_and_focus_is_seen(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file) as opened:
        opened.page.keyboard.press("Tab")
        active = "document.activeElement"
        assert opened.page.evaluate(f"{active}.textContent") == "To the content"
        assert opened.page.evaluate(f"getComputedStyle({active}).outlineStyle") == "solid"
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate(f"{active}.id") == "main"


@pytest.mark.parametrize("scripts", [True, False])
def test_a_narrow_screen_scrolls_only_downwards(browser: Any, page_file: Path, scripts: bool) -> None:
    with Opened(browser, page_file, java_script_enabled=scripts) as opened:
        opened.page.set_viewport_size({"width": 400, "height": 800})
        opened.page.wait_for_timeout(300)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_without_scripts_the_pictures_are_shown(browser: Any, page_file: Path) -> None:
    with Opened(browser, page_file, java_script_enabled=False) as opened:
        assert opened.page.locator("#accuracy-madds .static svg").is_visible()
        assert not opened.page.locator("#accuracy-madds .plot").is_visible()
        assert not opened.page.locator("#theme").is_visible()
    with Opened(browser, page_file) as opened:
        assert not opened.page.locator("#accuracy-madds .static svg").is_visible()
        assert opened.page.locator("#accuracy-madds .plot").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Any, page_file: Path, scheme: str) -> None:
    with Opened(browser, page_file, color_scheme=scheme) as opened:
        ratios = opened.page.evaluate(_CONTRAST)
        assert len(ratios) > 100
        low = [entry for entry in ratios if entry["ratio"] < 4.5]
        assert low == []


def test_names_from_files_run_nothing(browser: Any, evil: Path) -> None:
    with Opened(browser, evil) as opened:
        opened.page.wait_for_selector("figure.drawn .main-svg")
        opened.page.evaluate("document.querySelectorAll('details').forEach(box => box.open = true)")
        opened.page.wait_for_function("document.querySelectorAll('figure:not(.drawn)').length === 0")
        assert opened.said == []
        assert opened.page.locator("img").count() == 0
        assert "</script><script>alert(1)" in opened.page.locator("#loss .legend button").first.inner_text()


_CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) { return colour; }
    }
  };
  return [...document.querySelectorAll("body *")].filter(node => !node.closest("svg, script, [hidden]") &&
      [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())).map(node => {
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    return { text: node.textContent.slice(0, 30), ratio: (Math.max(a, b) + .05) / (Math.min(a, b) + .05) };
  });
}"""
