"""The dashboard against TensorBoard, MLflow and Trackio, on the same series; Chromium drives each.

    python benchmarks/ui.py [--json] [--runs 100 1000] [--points 20000] [--overlay 50] [--watch 40] [--only NAME...]
    python benchmarks/ui.py --prepare    # make the series only, once: minutes

First paint is from the address to the name of a run on the page, with a server that has just started. Overlay is from
the address to the last change on a page with the losses of that many runs, again with a server that has just started;
the page is looked at every 0.2 s. Then the first run grows by ten points a second while its page is open, and the CPU
time of server and browser is counted. Every page is the one that its users get for the task:

    packtrain    the list; curves of a run with others over it; curves of a run. New points within 2 s
    tensorboard  time series; scalars with those runs selected. New points every 30 s, which has to be switched on
    mlflow       runs of an experiment; metric of compared runs; metrics of a run. New points every 30 s
    trackio      all runs of a project, which has only those to overlay, or to watch. New points every second or so

Peers are installed from PyPI in `~/.cache/packtrain-tests/ui-peers/NAME`, and series are kept in `ui-series` beside it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

import bench
from peers import ui_series

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
CACHE = Path(os.environ.get("PACKTRAIN_UI_CACHE", Path.home() / ".cache/packtrain-tests"))
PEERS, SERIES = CACHE / "ui-peers", CACHE / "ui-series"
_CHUNK = 200  # points of a chunk: a worker flushes every 1 to 10 s
_LIMIT_SECONDS = 180.0
_QUIET_SECONDS = 1.5
_LOOK_SECONDS = 0.2
# Texts of the page, also those in shadow trees, which TensorBoard is made of.
_HAS_RUN = """() => {
  const found = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return /^\\s*run-\\d+\\s*$/.test(node.data);
    if (node.shadowRoot && found(node.shadowRoot)) return true;
    return [...node.childNodes].some(found);
  };
  return Boolean(document.body) && found(document.body);
}"""


Serve = Callable[[Path, int], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Contender:
    """One dashboard: how its series are made and grow, how its server starts, and the addresses of its pages."""

    name: str
    make: Callable[[Path, argparse.Namespace, int], list[str]]
    grow: Callable[[Path, float], subprocess.Popen[bytes]]
    serve: Serve
    first: str
    overlay: Callable[[Sequence[str]], str]
    watch: Callable[[str], str]
    stored: Mapping[str, str] = field(default_factory=dict)
    """Settings that the page keeps in the browser."""
    is_read: Callable[[Any, Sequence[str], int], bool] = lambda *_: True
    """True if the page has all of the runs to overlay."""


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=3)
    arguments.add_argument("--runs", type=int, nargs="+", default=[100, 1000], help="numbers of runs")
    arguments.add_argument("--points", type=int, default=20_000, help="points of each run")
    arguments.add_argument("--overlay", type=int, default=50, help="runs to overlay")
    arguments.add_argument("--watch", type=float, default=40.0, help="seconds to watch a run that grows")
    arguments.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="contenders")
    arguments.add_argument("--prepare", action="store_true", help="only install peers and make the series")
    arguments.add_argument("--pictures", type=Path, help="directory for a screenshot of every page")
    return arguments


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    contenders = [CONTENDERS[name]() for name in options.only]
    prepared = {(one.name, runs): prepare(one, options, runs) for one in contenders for runs in options.runs}
    rows: list[dict[str, object]] = []
    for runs in [] if options.prepare else options.runs:
        for contender in contenders:
            folder = prepared[contender.name, runs]
            ids = json.loads((folder / "ids.json").read_text())
            rows.append({"contender": contender.name, "runs": runs, **measured(contender, folder, ids, options)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def report(options: argparse.Namespace, rows: list[dict[str, object]]) -> bench.Report:
    return bench.Report("Dashboards", rows, ["the series are ready"] if options.prepare else [])


def prepare(contender: Contender, options: argparse.Namespace, runs: int) -> Path:
    """Make the series, unless they are there; they grow a little each time that they are watched."""
    folder = SERIES / f"{contender.name}-{runs}x{options.points}"
    if not (folder / "ids.json").exists():  # written last
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.perf_counter()
        ids = contender.make(folder, options, runs)
        (folder / "points").write_text(str(options.points))
        (folder / "ids.json").write_text(json.dumps(ids))
        print(f"made {folder} in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return folder


def measured(
    contender: Contender, folder: Path, ids: Sequence[str], options: argparse.Namespace
) -> dict[str, float | None]:
    def picture(page: Any, what: str) -> None:
        if options.pictures:
            options.pictures.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=options.pictures / f"{contender.name}-{len(ids)}-{what}.png")

    shown: list[float] = []
    for _ in range(options.rounds):
        with served(contender, folder) as (url, _process), browsed(contender) as page:
            shown.append(seconds_until_shown(page, url + contender.first))
            picture(page, "first")
    with served(contender, folder) as (url, _process), browsed(contender) as page:
        page.goto(url + contender.first, wait_until="commit")
        chosen = ids[: options.overlay]
        overlaid = seconds_until_still(
            page, url + contender.overlay(chosen), lambda: contender.is_read(page, chosen, options.points)
        )
        picture(page, "overlay")
    with served(contender, folder) as (url, process), browsed(contender) as page:
        page.goto(url + contender.first, wait_until="commit")
        page.goto("about:blank")
        page.goto(url + contender.watch(ids[0]), wait_until="commit")
        page.wait_for_timeout(1000 * min(8.0, options.watch))  # not the start, which was measured above
        writer = contender.grow(folder, options.watch)
        before = cpu_seconds(process.pid), browser_seconds()
        page.wait_for_timeout(1000 * options.watch)
        spent = cpu_seconds(process.pid) - before[0], browser_seconds() - before[1]
        picture(page, "watch")
        writer.wait()
    minutes = options.watch / 60
    return {
        "first paint (s)": bench.median(shown),
        "overlay (s)": overlaid,
        "server CPU (s/min)": spent[0] / minutes,
        "page CPU (s/min)": spent[1] / minutes,
    }


def _origin(url: str) -> str:
    return "/".join(url.split("/")[:3])


@contextmanager
def served(contender: Contender, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server; yields the address of its first page once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, environment = contender.serve(folder, port)
    with (
        (folder / "server.log").open("w+") as log,
        subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
        ) as process,
    ):
        try:
            deadline = time.monotonic() + _LIMIT_SECONDS
            # Ours listens before it prints the address with its token.
            printed: str | None = None
            while not _answers(port) or (contender.name == "packtrain" and printed is None):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.05)
                found = re.search(rf"http://127.0.0.1:{port}/\S{32}/", (folder / "server.log").read_text())
                printed = found[0].rstrip("/") if found else None
            yield printed or f"http://127.0.0.1:{port}", process
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.terminate()
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=_LIMIT_SECONDS):
            return True
    except urllib.error.HTTPError:  # ours, without its token
        return True
    except OSError:
        return False


@contextmanager
def browsed(contender: Contender) -> Iterator[Any]:
    """Yield an empty page of a new browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(1000 * _LIMIT_SECONDS)
        for key, value in contender.stored.items():
            page.add_init_script(f"try {{ localStorage.setItem({json.dumps(key)}, {json.dumps(value)}) }} catch {{}}")
        try:
            yield page
        finally:
            browser.close()


def seconds_until_shown(page: Any, url: str) -> float:
    """Return how long it takes from the address to the name of a run on the page."""
    started = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(_HAS_RUN, timeout=1000 * _LIMIT_SECONDS, polling=20)
    return time.perf_counter() - started


def seconds_until_still(page: Any, url: str, is_read: Callable[[], bool]) -> float | None:
    """Return how long it takes from the address to the last change that is seen; None if it takes too long."""
    from playwright.sync_api import Error

    open_requests: set[Any] = set()

    def begin(request: Any) -> None:
        # A stream of events is never finished, and what leaves the machine is not waited for.
        if request.resource_type != "eventsource" and request.url.startswith(_origin(url)):
            open_requests.add(request)

    def end(request: Any) -> None:
        open_requests.discard(request)

    page.on("request", begin)
    page.on("requestfinished", end)
    page.on("requestfailed", end)
    page.goto("about:blank")  # an address that differs after its # only would be the same page
    open_requests.clear()
    started = changed = time.perf_counter()
    page.goto(url, wait_until="commit")
    before = b""
    while (now := time.perf_counter()) < started + _LIMIT_SECONDS:
        try:
            seen = hashlib.sha256(page.screenshot()).digest()
        except Error:  # too busy with drawing to be looked at
            seen = b""
        if not seen or seen != before:
            before, changed = seen, time.perf_counter()
        # Some ask all the time, but the answer that counts takes as long as the picture stands still.
        elif now > changed + _QUIET_SECONDS and not open_requests and is_read():
            return changed - started
        page.wait_for_timeout(1000 * max(0.0, _LOOK_SECONDS - (time.perf_counter() - now)))
    return None


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and those that it has started."""
    parent = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in [parent, *parent.children(recursive=True)])


def browser_seconds() -> float:
    family = psutil.Process().children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in family if "chrom" in one.name())


# The contenders.


class _Unsynced:
    """As much of a store as a writer needs, which does not wait for the disk after every chunk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, key: str, data: bytes) -> None:
        (self._root / key).parent.mkdir(parents=True, exist_ok=True)
        (self._root / key).write_bytes(data)


def packtrain() -> Contender:
    def make(folder: Path, options: argparse.Namespace, runs: int) -> list[str]:
        from packtrain.job import Job
        from packtrain.run.code import archive
        from packtrain.run.records import Result
        from packtrain.run.run import Run, add_run, worker_writer
        from packtrain.store import open_store

        store = open_store(str(folder / "store"), create=True)
        train = {"duration": f"{options.points} steps", "batch": "640 tokens", "schedule": {"constant": {"rate": 0.1}}}
        data = {"train": [{"bitext": ["a", "b"]}]}
        job = Job.model_validate({"name": "run", "recipe": "translate", "model": "tiny", "data": data, "train": train})
        names: list[str] = []
        for number in range(runs):
            run = add_run(store, job, archive({}), None)
            if number < options.overlay:
                fast: Any = _Unsynced(Path(store.url))
                writer = Run(fast, run.name).point_writer(worker_writer(1, 0))
                for step in range(1, options.points + 1):
                    writer.append(packtrain_point(number, step))
                    if step % _CHUNK == 0:
                        writer.flush()
                writer.flush()
            else:
                origin = Run(store, names[number % options.overlay])
                shutil.copytree(Path(store.url) / origin.key("metrics"), Path(store.url) / run.key("metrics"))
            names.append(run.name)
            if number:  # the first one grows
                run.finish(Result("finished", f"reached {options.points} steps", options.points, 1.0))
        return names

    def grow(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, "--grow", str(folder), str(seconds)])

    def serve(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "packtrain", "ui", "--store", str(folder / "store"), "--port", str(port)]
        return [*command, "--no-open"], {}

    def overlay(ids: Sequence[str]) -> str:
        return f"/#/run/{ids[0]}/curves?with={','.join(ids[1:])}"

    def is_read(page: Any, _: Sequence[str], __: int) -> bool:
        found: bool = page.evaluate("!document.querySelector('.grid[aria-busy=true]')")
        return found

    return Contender("packtrain", make, grow, serve, "/", overlay, lambda one: f"/#/run/{one}/curves", is_read=is_read)


def packtrain_point(run: int, step: int) -> Any:
    """Return a point as a worker writes it, with all that it measures."""
    from packtrain.run.records import Point

    spans = {f"{span}_seconds": 0.01 for span in ("data", "forward", "backward", "communication", "wait", "optimizer")}
    given = {"rate": 0.001, "gradient_norm": 1.0, "tokens": 640.0, "step_seconds": 0.1, **spans}
    values = {"loss": ui_series.loss(run, step), "epoch": step / 1000, "elapsed_seconds": step / 10, **given}
    return Point("train", 1, step, 1.7e9 + step / 10, values)


def grow_packtrain(folder: Path, seconds: float) -> None:
    """Add ten points a second to the first run, as a worker does."""
    from packtrain.run.chunks import chunk_keys
    from packtrain.run.run import Run, worker_writer
    from packtrain.store import open_store

    run = Run(open_store(str(folder / "store")), "run-1")
    writer = run.point_writer(worker_writer(1, 0))
    writer._chunk = len(chunk_keys(run.store, run.key("metrics")))

    def append(steps: range) -> None:
        for step in steps:
            writer.append(packtrain_point(0, step))
        writer.flush()

    ui_series.keep_growing(append, folder, seconds)


def peer_python(name: str) -> str:
    """Return the Python of a peer; install it at first."""
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
        try:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", name], check=True)
        except BaseException:
            shutil.rmtree(PEERS / name)
            raise
    return str(python)


def peer(name: str, serve: Serve, first: str, overlay: Callable[[Sequence[str]], str], **more: Any) -> Contender:
    command = [peer_python(name), str(Path(__file__).parent / "peers" / "ui_series.py"), name]

    def make(folder: Path, options: argparse.Namespace, runs: int) -> list[str]:
        numbers = map(str, (runs, options.points, options.overlay))
        environment = {**os.environ, "TRACKIO_DIR": str(folder)}
        done = subprocess.run(
            [*command, str(folder), "make", *numbers], stdout=subprocess.PIPE, check=True, env=environment
        )
        ids: list[str] = json.loads(done.stdout.splitlines()[-1])
        return ids

    def grow(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TRACKIO_DIR": str(folder)}
        return subprocess.Popen([*command, str(folder), "grow", str(seconds)], env=environment)

    return Contender(name, make, grow, serve, first, overlay, **more)


def tensorboard() -> Contender:
    def serve(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [peer_python("tensorboard"), "-m", "tensorboard.main", "--logdir", str(folder)]
        return [*command, "--host", "127.0.0.1", "--port", str(port)], {}

    def overlay(ids: Sequence[str]) -> str:
        chosen = base64.b64encode(json.dumps(dict.fromkeys(ids, True)).encode()).decode()
        return f"/#scalars&runSelectionState={quote(chosen)}"

    def is_read(page: Any, ids: Sequence[str], points: int) -> bool:
        # It reads all runs in the background, and a page shows what was there when it was loaded.
        ask = "(run) => fetch(`/data/plugin/scalars/scalars?run=${run}&tag=loss`).then((one) => one.ok && one.json())"
        answers = [page.evaluate(ask, one) for one in ids]
        if not (found := all(one and one[-1][1] >= points for one in answers)):
            page.reload(wait_until="commit")
        return found

    stored = {"_tb_global_settings": json.dumps({"autoReload": True, "autoReloadPeriodInMs": 30000})}
    return peer(
        "tensorboard", serve, "/", overlay, watch=lambda one: overlay([one]), stored=stored, is_read=is_read
    )  # fmt: skip


def mlflow() -> Contender:
    def serve(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [peer_python("mlflow"), "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        # Neither what it tells its makers nor its queue of jobs is part of looking at runs.
        spared = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        return [*command, "--host", "127.0.0.1", "--port", str(port)], spared

    def overlay(ids: Sequence[str]) -> str:
        few = {"runs": list(ids), "metric": "loss", "experiments": ["0"], "plot_metric_keys": ["loss"]}
        return "/#/metric?" + "&".join(f"{key}={quote(json.dumps(value))}" for key, value in few.items())

    def watch(one: str) -> str:
        return f"/#/experiments/0/runs/{one}/model-metrics"

    return peer("mlflow", serve, "/#/experiments/0/runs", overlay, watch=watch)


def trackio() -> Contender:
    def serve(folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        code = "import trackio; trackio.show(open_browser=False, block_thread=True)"
        environment = {"TRACKIO_DIR": str(folder), "GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
        return [peer_python("trackio"), "-c", code], environment

    def shown(project: str) -> str:
        return f"/?project={project}"

    return peer(
        "trackio", serve, shown(ui_series.PROJECT), lambda _: shown(ui_series.FEW), watch=lambda _: shown(ui_series.ONE)
    )


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "packtrain": packtrain,
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "trackio": trackio,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--grow"]:
        grow_packtrain(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        bench.main(parser(), measure, report)
