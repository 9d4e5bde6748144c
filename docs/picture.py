"""Make the pictures of the README: docs/demo.svg, the demo in a terminal, and docs/report.png, the report of a run.

TTY_COMPATIBLE=1 TTY_INTERACTIVE=0 COLUMNS=110 make demo > demo.txt
python docs/picture.py demo demo.txt
python docs/picture.py report store [RUN]

The report needs Chromium.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import FloatRect, sync_playwright
from rich.console import Console
from rich.text import Text

from packtrain.report import report_page
from packtrain.run.run import open_run
from packtrain.store import open_store

DOCS = Path(__file__).parent
COLUMNS = 110
CHROMIUM = "/usr/bin/chromium"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
WIDTH = 1080  # pixels of the page
OPENED = "trained"  # the answer whose evidence is shown
LAST = "The run"  # the heading of the last section of the picture


def demo(file: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    shown = re.sub(r"\x1b\[\?25[hl]", "", Path(file).read_text())  # show and hide cursor
    shown = re.sub(r"\n{3,}", "\n\n", shown)  # where progress bars were
    shown = shown.replace(str(Path.home()), "~")
    console.print(Text.from_ansi(shown))
    console.save_svg(str(DOCS / "demo.svg"), title="make demo")


def report(store: str, run: str | None = None) -> None:
    html = report_page(open_run(open_store(store), run))
    with tempfile.NamedTemporaryFile("w", suffix=".html") as file, sync_playwright() as playwright:
        file.write(html)
        file.flush()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        page.goto(Path(file.name).as_uri())
        page.eval_on_selector(f"#{OPENED}", "answer => { answer.open = true; }")
        after = page.locator(f"h2:text-is('{LAST}') ~ h2").first.bounding_box()
        height = after["y"] - 12 if after else 2000
        part = FloatRect(x=0, y=0, width=WIDTH, height=height)
        page.screenshot(path=DOCS / "report.png", full_page=True, clip=part)
        browser.close()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "demo":
        demo(*arguments)
    else:
        report(*arguments)
