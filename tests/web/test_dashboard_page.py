"""Chromium drives the real page on a real server, over a store with a finished run, others beside it and hostile texts.

Every test fails if the page writes an error to the console (a violation of its content security policy is one), or asks
anything that is not this server. Screenshots are in a directory of pytest's.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from packtrain.run.records import (
    Event,
    Generation,
    JobSource,
    LogLine,
    Member,
    Notes,
    Point,
    Result,
    Sample,
    Telemetry,
    TelemetrySample,
)
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.store.records import encode
from packtrain.web.server import DashboardServer
from parts.browser import CHROMIUM, accessibility_faults, browser_at, expect
from parts.quiet_network import QuietNetwork, quiet_network
from parts.runs import a_generation, new_run, recipe_job
from parts.sandbox import make_sandbox, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

TOKEN = "a-token-of-this-test"
STARTED = 1_790_000_000.0
STEPS = 3000
SCRIPT = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
HOSTILE = f"{SCRIPT} \x1b[31mred\x1b[0m \x1b]0;owned\x07 \u202egnp.exe\u202c \x00\x08\x7f javascript:alert(1)"
LOST = "node-b is lost: no lease for 12 s"
TABS = ("curves", "answers", "machines", "samples", "logs", "checkpoints", "job")
AXE = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}


# A store with something of everything.


def values_of(step: int, slower: float) -> dict[str, float]:
    loss = slower + 6 * math.exp(-step / 600) + 0.2 * math.sin(step * 7.7)
    spans = {"data": 0.01, "forward": 0.03, "backward": 0.05, "communication": 0.02, "optimizer": 0.01}
    return {
        "loss": loss, "rate": 1e-3, "epoch": step / 1000, "elapsed_seconds": step / 8, "step_seconds": 0.12,
        "gradient_norm": 1 + loss / 10, "samples": 32.0,
        **{f"{span}_seconds": seconds for span, seconds in spans.items()},
    }  # fmt: skip


def a_run(store: Store, name: str, steps: int = STEPS, slower: float = 1.0, status: Any = "finished") -> Run:
    run = new_run(store, recipe_job(name, train={"duration": f"{steps} steps"}, model="tiny"))
    points = run.point_writer("000001-rank-0")
    points.append(Point("start", 1, 0, STARTED, {}))
    for step in range(1, steps + 1):
        points.append(Point("train", 1, step, STARTED + step / 8, values_of(step, slower)))
        if step % 500 == 0:
            samples = (
                Sample("good morning", "guten Morgen", "guten Abend" if step < 2000 else "guten Morgen"),
                Sample(HOSTILE, f"reference {SCRIPT}", f"prediction {HOSTILE}"),
            )
            scores = {"loss": slower + 0.1, "bleu": step / 100 / slower}
            points.append(Point("valid", 1, step, STARTED + step / 8, scores, samples))
    points.flush()
    if status:
        result = Result(status, f"reached {steps} steps", steps, steps / 8)
        store.put(run.key("result.json"), encode(result))
    return run


def machines_and_words(run: Run) -> None:
    """A run of two machines of which one was lost, and lines that somebody wrote to do harm."""
    member = Member("node-a", "127.0.0.1", 1)
    second = Generation(2, (member,), 29500, LOST, 1500, "machine", culprit="node-b")
    for generation in (a_generation(1, "node-a", "node-b"), second):
        run.store.put(run.key(f"generations/{generation.number:06d}.json"), encode(generation))
    events = run.event_writer("node-a")
    events.append(Event(STARTED, "generation", "1: started 2 workers", 1))
    events.append(Event(STARTED + 200, "lost", LOST, 1))
    events.append(Event(STARTED + 205, "generation", f"2: started 1 worker {SCRIPT}", 2))
    events.flush()
    logs = run.log_writer("node-a")
    for number in range(600):
        logs.append(LogLine(STARTED + number, 1, "node-a", number % 2, "out", f"step {number}: loss 1.5"))
    logs.append(LogLine(STARTED + 700, 1, "node-a", 1, "err", f"needle {HOSTILE}"))
    logs.append(LogLine(STARTED + 701, 1, "node-a", None, "err", "A" * 10_000_000))
    logs.flush()
    for node in ("node-a", "node-b"):
        writer = run.telemetry_writer(node)
        for number in range(60):
            use = Telemetry(0.5, 0.25, 1 << 34, 1 << 40, 1e6, 2e6)
            writer.append(TelemetrySample(STARTED + 2 * number, node, use))
        writer.flush()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = open_store(str(tmp_path_factory.mktemp("dashboard") / "store"), create=True)
    first = a_run(made, "alpha")
    machines_and_words(first)
    first.put_notes(Notes(("baseline", SCRIPT[:60]), f"the first one {SCRIPT}"))
    huge = a_run(made, "beta", 1000, 2.0).point_writer("000001-rank-1")
    huge.append(Point("test", 1, 1000, STARTED + 125, {"l" * 200: 1.0}, (Sample("I", "R", "P" * 10_000_000),)))
    huge.flush()
    a_run(made, "gamma", 500, 3.0, status="failed")
    new_run(made, recipe_job("delta"))
    return made


@dataclass
class Dashboard:
    url: str
    server: DashboardServer
    log: list[str] = field(default_factory=list)


@contextmanager
def served(store: Store, network: QuietNetwork, port: int = 0, token: str = TOKEN) -> Iterator[Dashboard]:
    listener = network.listener(port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    log: list[str] = []
    server = DashboardServer(store, listener, token, log.append)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server has started")
        yield Dashboard(url, server, log)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)
        listener.close()


@pytest.fixture(scope="module")
def network() -> Iterator[QuietNetwork]:
    with quiet_network() as made:
        yield made


@pytest.fixture(scope="module")
def dashboard(store: Store, network: QuietNetwork) -> Iterator[Dashboard]:
    with served(store, network) as made:
        yield made


# The browser.


@pytest.fixture(scope="module")
def browser(needs_chromium: None, network: QuietNetwork, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_at(network.program(CHROMIUM, tmp_path_factory.mktemp("browser"))) as browser:
        yield browser


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("screenshots")


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser, dashboard: Dashboard) -> Iterator[OpenPage]:
    """Return a function that opens a view in a window of its own; `bears` are errors that the test is about."""
    contexts = []
    faults: list[str] = []

    def open_(view: str = "#/", url: str = dashboard.url, bears: str = "", token: str = TOKEN, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()

        def asked(request: Request) -> None:
            if not request.url.startswith((url, "data:")):
                faults.append(f"asked {request.url}")

        def said(kind: str, text: str) -> None:
            if kind in ("error", "warning") and not (bears and re.search(bears, text)):
                faults.append(f"{kind}: {text}")

        page.on("request", asked)
        page.on("console", lambda message: said(message.type, message.text))
        page.on("pageerror", lambda error: said("error", str(error)))
        page.goto(f"{url}/{token}/{view}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert faults == []


def names(page: Page) -> list[str]:
    """The runs of the table, from top to bottom."""
    return sorted(
        page.locator(".rows .open").all_inner_texts(),
        key=lambda name: page.locator(".rows .row", has_text=name).first.bounding_box()["y"],
    )


def drawn(page: Page, title: str) -> Any:
    """The chart of that title."""
    return page.locator("figure.chart", has=page.get_by_role("heading", name=title, exact=True))


def test_runs_are_listed_filtered_and_sorted_and_the_address_says_how(open_page: OpenPage, pictures: Path) -> None:
    page = open_page()
    expect(page.locator(".rows .row")).to_have_count(4)
    expect(page.locator(".rows .row", has_text="alpha-1")).to_contain_text("finished")
    expect(page.locator(".rows .row", has_text="alpha-1")).to_contain_text("baseline")
    page.screenshot(path=pictures / "runs.png")
    page.get_by_role("button", name="Score").click()
    expect(page.locator("[aria-sort=descending]")).to_contain_text("Score")
    assert names(page)[:2] == ["alpha-1", "beta-1"]
    page.get_by_role("button", name="Score").click()
    assert names(page)[-1] == "delta-1"  # without a score in both directions
    page.get_by_label("Filter runs").fill("state:failed")
    expect(page.locator(".rows .row")).to_have_count(1)
    page.reload()
    expect(page.locator(".rows .open")).to_have_text(["gamma-1"])
    page.get_by_label("Filter runs").fill("no such run")
    expect(page.locator(".quiet")).to_contain_text("No run matches")


def test_runs_are_overlaid_and_zoom_and_cursor_are_shared(open_page: OpenPage, pictures: Path) -> None:
    page = open_page()
    page.get_by_label("Select alpha-1").check()
    page.get_by_label("Select beta-1").check()
    page.get_by_role("button", name="Overlay").click()
    expect(page.locator(".run-chip")).to_have_text([re.compile("alpha-1"), re.compile("beta-1")])
    readout = drawn(page, "BLEU").locator(".readout")
    expect(readout).to_have_text("alpha-130beta-15")
    box = drawn(page, "Loss").locator(".u-over").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 50)
    expect(readout).to_have_text("alpha-15beta-12.500")  # at the cursor, which is in the other chart
    expect(drawn(page, "Loss").locator(".tip")).to_contain_text("beta-1 train")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"from=.*to="))
    page.screenshot(path=pictures / "overlay.png")
    query = dict(part.split("=") for part in page.url.split("?")[-1].split("&"))
    assert float(query["from"]) == pytest.approx(600, abs=30)
    assert float(query["to"]) == pytest.approx(1200, abs=30)
    page.reload()  # as the one who got the link sees it
    page.get_by_role("button", name="Show everything").click()
    expect(page).not_to_have_url(re.compile("from="))
    page.get_by_role("button", name="Time", exact=True).click()
    expect(page).to_have_url(re.compile("x=time"))
    page.get_by_role("button", name="Remove beta-1").click()
    expect(page.locator(".run-chip")).to_have_count(0)


def test_new_steps_are_asked_for_alone_and_appended(open_page: OpenPage, store: Store) -> None:
    run = a_run(store, "grows", 200, status=None)
    page = open_page(f"#/run/{run.name}")
    expect(drawn(page, "Throughput").locator("b")).to_have_text(re.compile(r"\d"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    points = run.point_writer("000001-rank-0-later")
    for step in range(201, 260):
        points.append(Point("train", 1, step, STARTED + step / 8, {**values_of(step, 1.0), "loss": 0.5}))
    points.flush()
    expect(page.locator(".facts")).to_contain_text("step 259")
    while not any("/api/series" in url and "since=" in url for url in asked):
        page.wait_for_timeout(50)  # events of the browser arrive only in calls like this one
    series = [url for url in asked if "/api/series" in url and "train.loss" in url]
    assert all("since=" in url for url in series)
    latest = drawn(page, "Loss").locator(".readout b").first
    expect(latest).to_have_text(re.compile(r"^0\.5"))  # drawn: End goes to the last step of this moment
    drawn(page, "Loss").locator(".plot").focus()
    page.keyboard.press("Home")
    expect(latest).to_have_text(re.compile(r"^[67]\."))
    page.keyboard.press("End")
    expect(latest).to_have_text(re.compile(r"^0\.5"))


def test_a_run_is_watched_while_it_trains(
    open_page: OpenPage, network: QuietNetwork, tmp_path: Path, pictures: Path
) -> None:
    sandbox = make_sandbox(tmp_path)
    sandbox.pace(0.1)
    try:
        with served(open_store(sandbox.store, create=True), network) as own:
            page = open_page(url=own.url)
            expect(page.locator(".quiet")).to_contain_text("There are no runs in this store yet")
            options = ("fleet.local.machines=1", "train.duration=40 steps")
            sandbox.detach(*(part for option in options for part in ("--set", option)))
            page.get_by_role("link", name="faults-1").click(timeout=120_000)
            expect(page.locator(".run-head .badge")).to_have_text("running", timeout=120_000)
            expect(page.locator(".facts")).to_contain_text(re.compile(r"step ([5-9]|\d\d) of 40"), timeout=120_000)
            expect(drawn(page, "Loss").locator(".readout b").first).to_have_text(re.compile(r"\d"), timeout=120_000)
            page.screenshot(path=pictures / "running.png")
            sandbox.pace(0)
            expect(page.locator(".run-head .badge")).to_have_text("finished", timeout=120_000)
            expect(page.locator(".facts")).to_contain_text("step 40 of 40")
            page.get_by_role("link", name="Machines").click()
            expect(page.locator("table.machines tbody tr")).to_have_count(1)
            page.close()
    finally:
        sandbox.close()


def test_faults_and_machines_are_seen(open_page: OpenPage, pictures: Path) -> None:
    page = open_page("#/run/alpha-1")
    expect(page.locator(".timeline .fault")).to_have_count(1)
    expect(page.locator(".timeline .generation")).to_have_count(2)
    expect(page.locator(".events")).to_contain_text(LOST)
    page.locator(".event", has_text=LOST).click()
    expect(page.locator(".timeline .cursor")).to_have_attribute("visibility", "visible")
    page.screenshot(path=pictures / "run.png", full_page=True)
    page.keyboard.press("3")
    expect(page.locator("table.machines tbody tr")).to_have_count(2)
    expect(drawn(page, "CPU").locator(".readout")).to_contain_text("50%")
    page.screenshot(path=pictures / "machines.png")


def test_logs_are_searched_by_rank_and_hostile_lines_stay_text(open_page: OpenPage, pictures: Path) -> None:
    page = open_page("#/run/alpha-1/logs")
    expect(page.locator(".lines li").last).to_contain_text("AAAA")
    page.get_by_label("Rank").select_option("0")
    expect(page.locator(".lines li").last).to_contain_text("step 598")
    page.get_by_label("Rank").select_option("")
    page.get_by_label("Search the logs").fill("needle")
    line = page.locator(".lines li .text")
    expect(line).to_have_count(1)
    expect(page.locator("mark")).to_have_text("needle")
    expect(line).to_contain_text("<script>document.title")
    text = line.inner_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "^@^H^?" in text
    assert "\x1b" not in text and "[31m" not in text
    page.screenshot(path=pictures / "logs.png")
    assert page.title() == "alpha-1 · Packtrain"
    page.get_by_label("Search the logs").fill("not written anywhere")
    expect(page.locator(".quiet")).to_have_text("No line matches.")


def test_samples_show_what_differs_over_time(open_page: OpenPage, pictures: Path) -> None:
    page = open_page("#/run/alpha-1/samples")
    expect(page.locator(".sample")).to_have_count(2)
    expect(page.locator(".sample").first.locator("del")).to_have_count(0)
    for _ in range(4):
        page.keyboard.press("[")
    expect(page.locator(".sample").first.locator("del")).to_have_text("Abend")
    expect(page.locator(".sample").first.locator("ins")).to_have_text("Morgen")
    expect(page).to_have_url(re.compile("step=1000"))
    page.locator(".sample").first.get_by_role("button", name="Over time").click()
    expect(page.locator(".history li")).to_have_count(6)
    expect(page.locator(".sample").last).to_contain_text("<img src=x")
    assert page.locator(".sample script, .sample img").count() == 0
    assert page.title() == "alpha-1 · Packtrain"
    page.screenshot(path=pictures / "samples.png")


def test_a_sample_of_10_megabytes_is_cut(open_page: OpenPage) -> None:
    page = open_page("#/run/beta-1/samples")
    expect(page.locator(".sample .prediction")).to_contain_text("PPPP")
    assert len(page.locator(".sample").inner_text()) < 100_000


def test_where_a_model_looked_is_drawn_over_the_picture(
    open_page: OpenPage, network: QuietNetwork, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    run = a_run(store, "caption", 10)
    image = io.BytesIO()
    Image.new("RGB", (64, 48), "white").save(image, "JPEG")
    run.put_picture(image.getvalue())
    picture = hashlib.sha256(image.getvalue()).hexdigest()
    grids = tuple(base64.b64encode(bytes(cells)).decode() for cells in ((255, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 255)))
    points = run.point_writer("000001-rank-1")
    sample = Sample("image 1", "a dog", "a cat", picture, ("a", "cat"), grids, (2, 3))
    points.append(Point("valid", 1, 10, STARTED, {"loss": 1.0}, (sample,)))
    points.flush()
    with served(store, network) as shown:
        page = open_page("#/run/caption-1/samples", shown.url)
        page.get_by_role("button", name="cat").hover()
        expect(page.locator(".stage.looking")).to_have_count(1)
        look = "one => [...one.getContext('2d').getImageData(0, 0, one.width, one.height).data]"
        pixels = page.locator(".stage canvas").evaluate(look)
        assert sum(pixels[-4:-1]) > sum(pixels[:3]), "bright where the model looked"
        page.keyboard.press("Tab")
        page.get_by_role("button", name="a", exact=True).focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".words .now")).to_have_text("cat")
        page.close()


def test_jobs_are_compared_and_checkpoints_and_answers_have_their_places(open_page: OpenPage) -> None:
    page = open_page("#/run/alpha-1/job")
    page.get_by_label("Compare with").select_option("beta-1")
    expect(page.locator("table.listing")).to_contain_text("train.duration")
    expect(page.locator("table.listing")).to_contain_text("1000 steps")
    expect(page.get_by_label("Job file")).to_contain_text("name: alpha")
    expect(page.get_by_label("Command")).to_contain_text("packtrain run job.yaml")
    page.keyboard.press("6")
    expect(page.locator(".quiet")).to_contain_text("No checkpoint")
    page.keyboard.press("2")
    expect(page.locator(".tab-content")).to_contain_text("Where the time went")
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page.locator("h1")).to_have_text("Sweeps")


def test_everything_can_be_reached_by_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator(".rows .row", has_text="alpha-1")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("alpha")
    expect(page.locator(".rows .row")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(page.locator(".open:focus")).to_have_text("alpha-1")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("x")
    expect(page.locator(".picked")).to_contain_text("1 selected")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("alpha-1")
    expect(drawn(page, "Loss")).to_be_visible()
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("from="))
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))
    page.keyboard.press("/")
    page.keyboard.type("beta-1")
    page.keyboard.press("Enter")
    expect(page.locator(".run-chip")).to_have_count(2)
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Runs")


def test_a_phone_shows_everything_without_scrolling_sideways(open_page: OpenPage, pictures: Path) -> None:
    page = open_page("#/", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    for view in ("", *(f"run/alpha-1/{tab}" for tab in TABS)):
        page.evaluate(f"location.hash = '#/{view}'")
        expect(page.locator("h1")).to_have_text("alpha-1" if view else "Runs")
        expect(page.locator(".skeleton")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        page.screenshot(path=pictures / f"phone-{view.replace('/', '-') or 'runs'}.png")


def test_light_and_dark_follow_the_system_until_somebody_chooses(open_page: OpenPage, pictures: Path) -> None:
    page = open_page("#/run/alpha-1", color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    expect(drawn(page, "Loss").locator("canvas")).to_be_visible()
    page.screenshot(path=pictures / "dark.png")
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert dark != light
    page.keyboard.press("t")  # from automatic to light
    page.keyboard.press("t")
    assert page.evaluate(background) == dark
    page.reload()
    expect(page.get_by_role("button", name="Color theme: dark")).to_be_visible()
    assert page.evaluate(background) == dark


def test_axe_finds_no_serious_fault(open_page: OpenPage) -> None:
    page = open_page("#/")
    views = ["", "sweeps", *(f"run/alpha-1/{tab}?with=beta-1&search=needle" for tab in TABS)]
    # Texts and surfaces have the same colors in all views: some of them in the dark are enough.
    for scheme, view in [("light", view) for view in views] + [("dark", ""), ("dark", "run/alpha-1/curves")]:
        page.emulate_media(color_scheme=scheme)
        page.evaluate(f"location.hash = '#/{view}'")
        expect(page.locator("h1")).to_have_text("alpha-1" if "alpha" in view else "Sweeps" if view else "Runs")
        expect(page.locator(".skeleton")).to_have_count(0)
        found = accessibility_faults(page, options=AXE)
        grave = [one for one in found if one["impact"] in ("serious", "critical")]
        assert [(one["id"], one["nodes"][0]["html"][:300]) for one in grave] == [], view


def test_a_run_that_is_not_there_is_said_to_be_missing(open_page: OpenPage) -> None:
    page = open_page("#/run/not-there", bears="40[14]")
    expect(page.locator(".quiet").first).to_contain_text("There is no run not-there")
    page.evaluate("name => { location.hash = '#/run/' + encodeURIComponent(name); }", SCRIPT)
    expect(page.locator(".quiet").first).to_contain_text("There is no run <script>")


def test_a_page_whose_server_was_started_again_says_that_it_needs_the_new_address(
    open_page: OpenPage, network: QuietNetwork, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    a_run(store, "alpha", 20)
    with served(store, network) as first:
        page = open_page("#/", url=first.url, bears="Failed to load resource|ERR_|401|EventSource")
        expect(page.locator(".rows .row")).to_have_count(1)
    with served(store, network, int(first.url.rpartition(":")[2]), "another-token"):
        page.evaluate("location.hash = '#/run/alpha-1'")
        expect(page.locator(".quiet").first).to_contain_text("This dashboard needs its token")
        page.close()


def test_a_private_file_leads_to_the_page_which_sends_nothing_to_other_ports(
    browser: Browser, dashboard: Dashboard, network: QuietNetwork, tmp_path: Path
) -> None:
    """Cookies go to every port of a host, so the page has none; what it stores is that of its own port."""
    heads: list[str] = []
    listener = network.listener(0)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            heads.append(connection.recv(10_000).decode())
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nelse")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    file = tmp_path / "dashboard.html"
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={dashboard.url}/{TOKEN}/">')
    context = browser.new_context()
    page = context.new_page()
    page.goto(file.as_uri())
    page.wait_for_url(f"{dashboard.url}/{TOKEN}/**")
    expect(page.locator(".rows .row", has_text="alpha-1")).to_be_visible()
    expect(page.locator("#link")).to_have_text("live")
    page.reload()
    expect(page.locator(".rows .row", has_text="alpha-1")).to_be_visible()
    assert context.cookies() == []
    page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    thread.join(30)
    listener.close()
    context.close()
    assert len(heads) == 1 and TOKEN not in heads[0] and "cookie" not in heads[0].lower()


def test_what_is_copied_is_what_is_shown(open_page: OpenPage, store: Store) -> None:
    """A terminal runs what is pasted: a control character would end the command and start another."""
    text = "name: alpha\n\x1b[201~\rtouch owned\r\x03"
    Run(store, "beta-1").put_source(JobSource("job.yaml\r", text, ("a='\x1b[201~\rtouch owned\n",)))
    page = open_page("#/run/beta-1/job")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    expect(page.get_by_role("region", name="Command")).to_contain_text("packtrain run")
    for number, listing in enumerate(("Job file", "Command")):
        page.get_by_role("button", name="Copy").nth(number).click()
        expect(page.get_by_role("button", name="Copied")).to_have_count(1)
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == page.get_by_role("region", name=listing).text_content()
        assert "touch owned" in copied and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", copied)
        expect(page.get_by_role("button", name="Copied")).to_have_count(0)
    assert shlex.split(copied)[:2] == ["packtrain", "run"] and copied.count("--set") == 1


def test_the_page_waits_for_a_server_or_a_store_that_went_away(
    open_page: OpenPage, network: QuietNetwork, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    a_run(store, "alpha", 20)
    with served(store, network) as first:
        port = int(first.url.rpartition(":")[2])
        page = open_page("#/", url=first.url, bears="Failed to load resource|ERR_|503|EventSource")
        expect(page.locator(".rows .row")).to_have_count(1)
        (tmp_path / "store").rename(tmp_path / "away")
        expect(page.get_by_role("alert")).to_contain_text("store")
        expect(page.locator(".rows .row")).to_have_count(1)  # what is known stays
        (tmp_path / "away").rename(tmp_path / "store")
        expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#link")).to_have_text("reconnecting")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    a_run(store, "beta", 20)
    with served(store, network, port):
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator(".rows .row")).to_have_count(2)
        page.close()


def test_many_runs_need_few_elements(open_page: OpenPage, network: QuietNetwork, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    first = new_run(store, recipe_job("many"))
    for number in range(2, 201):
        store.put(f"runs/many-{number}/job.json", first.job_data)
    with served(store, network) as own:
        page = open_page(url=own.url)
        expect(page.locator("#main")).to_contain_text("200 runs")
        assert page.locator(".rows .row").count() < 60
        page.mouse.wheel(0, 6_000)
        expect(page.locator(".rows .row[aria-rowindex='101']")).to_be_attached()
        assert page.locator(".rows .row").count() < 60
        page.close()
