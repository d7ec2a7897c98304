"""Pages in headless Chromium, that of the system: what it says on its console, what it asks for, what stands where."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WIDTHS = (1280, 400)
_SMALLEST_TEXT_PX = 10


@contextmanager
def chromium() -> Iterator[object]:
    """Yield a browser, for tests that are marked `needs("browser")`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, in a container, Chromium's own sandbox does not start.
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], timeout=60_000
        )
        try:
            yield browser
        finally:
            browser.close()


class Shown:
    """A page that is open; what it logged or asked for is collected."""

    def __init__(self, browser, path: Path, width: int) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.absolute().as_uri(), timeout=60_000)
        self.page.wait_for_load_state("load")
        self.url = path.absolute().as_uri()

    def require_sound(self) -> None:
        """It says nothing, asks for itself alone, fits the window; pictures are drawn, texts are legible."""
        assert self.said == []
        assert self.asked == [self.url]
        assert self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        drawn = "p => p.querySelector('.main-svg') && p.clientWidth >= 200"
        assert self.page.evaluate(f"[...document.querySelectorAll('.plot')].every({drawn})")
        smallest = """Math.min(...[...document.querySelectorAll('body *')]
            .filter(e => e.offsetParent && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
            .map(e => parseFloat(getComputedStyle(e).fontSize)))"""
        assert self.page.evaluate(smallest) >= _SMALLEST_TEXT_PX

    def texts(self, selector: str) -> list[str]:
        found = self.page.locator(selector)
        return [text or found.nth(place).text_content() for place, text in enumerate(found.all_inner_texts())]

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(label=value)
