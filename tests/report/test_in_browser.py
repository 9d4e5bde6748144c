"""The report as people see it, in Chromium: wide and narrow, light and dark, opened and printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pytest

from packtrain.report import findings_of
from packtrain.report.render import render
from packtrain.run.records import Event, Point, Sample
from parts.browser import CHROMIUM, accessibility_faults, browser_at
from report.made import SPANS, evaluations_of, evidence_of, falling, spent_of, steps_of, telemetry_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LONG = "a-name-without-any-space-" * 8


@pytest.fixture(scope="module")
def browser(needs_chromium: None) -> Iterator[Browser]:
    with browser_at(CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a report with something in every part, and with names that do not wrap."""
    sample = Point("valid", 1, 400, 1040.0, {"loss": 2.0}, (Sample(LONG, LONG, LONG),))
    evidence = evidence_of(
        [*steps_of(), *evaluations_of(falling, 19), sample], workers=(1, 1), spent=spent_of({0: SPANS, 1: SPANS}),
        telemetry=telemetry_of(node="n" * 63, gpu=0.9), events=[Event(1.0, "warning", LONG)], versions={"torch": LONG},
        status={"run": "j" * 60, "description": LONG, "signatures": {"test.bleu": LONG}},
    )  # fmt: skip
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render(evidence, findings_of(evidence)))
    return file.as_uri()


def opened(browser: Browser, address: str, width: int, scheme: Literal["light", "dark"]) -> Page:
    # axe is a script, which the page's own policy would refuse.
    page = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce"
    ).new_page()
    page.goto(address)
    return page


@pytest.mark.parametrize(("width", "scheme"), [(1200, "dark"), (390, "light")])
def test_the_report_fits_and_has_no_accessibility_fault(
    browser: Browser, report: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = opened(browser, report, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    faults = accessibility_faults(page)
    assert [(one["id"], one["nodes"][0]["html"]) for one in faults] == []
    page.context.close()


def test_an_answer_opens_by_keyboard_and_everything_is_open_on_paper(browser: Browser, report: str) -> None:
    page = opened(browser, report, 800, "dark")
    closed = page.evaluate("document.querySelectorAll('details:not([open])').length")
    assert closed == page.locator("details").count() > 10
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") == closed - 1
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    heights = page.evaluate("[...document.querySelectorAll('.evidence')].map(one => one.offsetHeight)")
    assert min(heights) > 0
    page.context.close()


def test_the_report_asks_nobody_for_anything(browser: Browser, report: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(report)
    assert asked == [report]
    assert said == []
    context.close()
