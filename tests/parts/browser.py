"""Chromium, driven by playwright. Imports playwright only when a browser starts: `make test` does without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path("/usr/bin/chromium")
LONG_WAIT = 30_000  # milliseconds: nothing here depends on the speed of the machine
_OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@contextmanager
def browser_at(program: Path) -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=LONG_WAIT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(program), args=_OPTIONS)
        yield browser
        browser.close()


def expect(shown: Any) -> Any:
    """Return playwright's assertions about a part of a page."""
    from playwright.sync_api import expect

    return expect(shown)


def accessibility_faults(page: Page, options: Any = None) -> Any:
    from axe_playwright_python.sync_playwright import Axe

    return Axe().run(page, options=options).response["violations"]
