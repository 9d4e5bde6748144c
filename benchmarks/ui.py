"""The dashboard against TensorBoard, MLflow and Trackio, on the same series; Chromium drives each.

    python benchmarks/ui.py [--json] [--runs 100 1000] [--points 20000] [--overlay 50] [--watch 60] [--only NAME...]

First paint is from the address to the name of a run on the page, with a server that has just started and has not read
anything; overlay until nothing changes anymore on a page with the losses of that many runs, which is looked at every
0.2 s. Then one of the runs grows by ten points a second while its page is open, and the CPU time of server and
browser is counted. Peers are installed in `~/.cache/packtrain-tests/ui-peers/NAME` (or below $PACKTRAIN_UI_PEERS), a
virtual environment each; TensorBoard is also taken from this one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
PEERS = Path(os.environ.get("PACKTRAIN_UI_PEERS", Path.home() / ".cache/packtrain-tests/ui-peers"))
_CHUNK = 200  # points of a chunk: a worker flushes every 1 to 10 s
_LIMIT_SECONDS = 180.0
_QUIET_SECONDS = 1.5
_LOOK_SECONDS = 0.2
# Texts of the page, also those in shadow trees, which TensorBoard is made of.
_HAS_TEXT = """(wanted) => {
  const found = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data.includes(wanted);
    if (node.shadowRoot && found(node.shadowRoot)) return true;
    return [...node.childNodes].some(found);
  };
  return Boolean(document.body) && found(document.body);
}"""


@dataclass(frozen=True)
class Contender:
    """One dashboard: how its series are made and grow, how its server starts, and the addresses of its pages."""

    name: str
    python: str
    make: Callable[[str, Path, argparse.Namespace, int], list[str]]
    grow: Callable[[str, Path, float], subprocess.Popen[bytes]]
    serve: Callable[[str, Path, int], tuple[list[str], dict[str, str]]]
    overlay: Callable[[Sequence[str]], str]
    watch: Callable[[str], str]


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000], help="numbers of runs")
    parser.add_argument("--points", type=int, default=20_000, help="points of each run")
    parser.add_argument("--overlay", type=int, default=50, help="runs to overlay")
    parser.add_argument("--watch", type=float, default=60.0, help="seconds to watch a run that grows")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="contenders to measure")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    notes = []
    for name in options.only or CONTENDERS:
        contender = CONTENDERS[name]()
        if contender is None:
            notes.append(f"{name} is not installed in {PEERS / name}")
            continue
        for runs in options.runs:
            with tempfile.TemporaryDirectory(prefix="packtrain-ui-") as folder:
                ids = contender.make(contender.python, Path(folder), options, runs)
                rows.append({"contender": name, "runs": runs, **measured(contender, Path(folder), ids, options)})
    bench.show("dashboards", rows, notes, options.json)


def measured(
    contender: Contender, folder: Path, ids: Sequence[str], options: argparse.Namespace
) -> dict[str, float | None]:
    shown: list[float] = []
    for _ in range(options.rounds):
        with served(contender, folder) as (url, _process), browsed() as page:
            # The list is sorted by each its own way: any name will do that starts as all do.
            shown.append(seconds_until(page, url, re.sub(r"\d+$", "", ids[0]) if "run" in ids[0] else "run-"))
    with served(contender, folder) as (url, process), browsed() as page:
        page.goto(url, wait_until="commit")  # with the token, of those that have one
        overlaid = seconds_until_still(page, _origin(url) + contender.overlay(ids[: options.overlay]))
        page.goto(_origin(url) + contender.watch(ids[0]), wait_until="commit")
        page.wait_for_timeout(1000 * min(5.0, options.watch))  # not the start, which was measured above
        writer = contender.grow(contender.python, folder, options.watch)
        before = cpu_seconds(process.pid), browser_seconds()
        page.wait_for_timeout(1000 * options.watch)
        spent = cpu_seconds(process.pid) - before[0], browser_seconds() - before[1]
        writer.wait()
    minutes = options.watch / 60
    return {
        "first paint (s)": bench.median(shown),
        "overlay (s)": overlaid,
        "server CPU (s/min)": spent[0] / minutes,
        "page CPU (s/min)": spent[1] / minutes,
    }


def _origin(url: str) -> str:
    return url.partition("/?")[0].rstrip("/")


@contextmanager
def served(contender: Contender, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server; yields the address of its first page once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, environment = contender.serve(contender.python, folder, port)
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
                found = re.search(rf"http://127.0.0.1:{port}/\?token=\S+", (folder / "server.log").read_text())
                printed = found[0] if found else None
            yield printed or f"http://127.0.0.1:{port}/", process
        finally:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.terminate()
            process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def browsed() -> Iterator[Any]:
    """Yield an empty page of a new browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=OPTIONS)
        try:
            yield browser.new_page(viewport={"width": 1400, "height": 900})
        finally:
            browser.close()


def seconds_until(page: Any, url: str, text: str) -> float:
    """Return how long it takes from the address to a text on the page."""
    started = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(_HAS_TEXT, arg=text, timeout=1000 * _LIMIT_SECONDS, polling=20)
    return time.perf_counter() - started


def seconds_until_still(page: Any, url: str) -> float:
    """Return how long it takes from the address to the last change that is seen on the page."""
    open_requests: set[Any] = set()

    def begin(request: Any) -> None:
        if request.resource_type != "eventsource":  # which is never finished
            open_requests.add(request)

    def end(request: Any) -> None:
        open_requests.discard(request)

    page.on("request", begin)
    page.on("requestfinished", end)
    page.on("requestfailed", end)
    started = changed = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.reload(wait_until="commit")  # an address that differs after its # only is the same page
    before = b""
    while (now := time.perf_counter()) < min(changed + _QUIET_SECONDS, started + _LIMIT_SECONDS):
        seen = hashlib.sha256(page.screenshot()).digest()
        if seen != before or open_requests:
            before, changed = seen, time.perf_counter()
        page.wait_for_timeout(1000 * max(0.0, _LOOK_SECONDS - (time.perf_counter() - now)))
    return changed - started


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and those that it has started."""
    parent = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in [parent, *parent.children(recursive=True)])


def browser_seconds() -> float:
    family = psutil.Process().children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in family if "chrom" in one.name())


# The contenders.


def packtrain() -> Contender:
    def make(_: str, folder: Path, options: argparse.Namespace, runs: int) -> list[str]:
        from packtrain.job import Job
        from packtrain.run.code import archive
        from packtrain.run.records import Result
        from packtrain.run.run import create_run
        from packtrain.store import open_store

        store = open_store(str(folder / "store"), create=True)
        train = {"duration": f"{options.points} steps", "batch": "640 tokens", "schedule": {"constant": {"rate": 0.1}}}
        data = {"train": [{"bitext": ["a", "b"]}]}
        job = Job.model_validate({"name": "run", "recipe": "translate", "model": "tiny", "data": data, "train": train})
        names = []
        for number in range(runs):
            run = create_run(store, job, archive({}), None)
            names.append(run.name)
            metrics = Path(store.url) / run.key("metrics/000001-rank-0")
            metrics.mkdir(parents=True)
            for chunk, start in enumerate(range(1, options.points + 1, _CHUNK)):
                lines = packtrain_lines(number, range(start, min(start + _CHUNK, options.points + 1)))
                (metrics / f"{chunk:08d}.jsonl").write_text(lines)
            if number:  # the first one grows
                run.finish(Result("finished", f"reached {options.points} steps", options.points, 1.0))
        return names

    def grow(python: str, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([python, __file__, "--grow", str(folder / "store"), str(seconds)])

    def serve(python: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [python, "-m", "packtrain", "ui", "--store", str(folder / "store"), "--port", str(port), "--no-open"]
        return command, {}

    def overlay(ids: Sequence[str]) -> str:
        return f"/#/run/{ids[0]}/curves?with={','.join(ids[1:])}"

    return Contender("packtrain", sys.executable, make, grow, serve, overlay, lambda one: f"/#/run/{one}/curves")


def packtrain_lines(run: int, steps: range) -> str:
    """Return points as a worker writes them, with all that it measures."""
    spans = {f"{span}_seconds": 0.01 for span in ("data", "forward", "backward", "communication", "wait", "optimizer")}
    given = {"rate": 0.001, "gradient_norm": 1.0, "tokens": 640.0, "step_seconds": 0.1, **spans}
    lines = []
    for step in steps:
        values = {"loss": ui_series.loss(run, step), "epoch": step / 1000, "elapsed_seconds": step / 10, **given}
        point = {"kind": "train", "generation": 1, "step": step, "time": 1.7e9 + step / 10, "values": values}
        lines.append(json.dumps({**point, "samples": []}) + "\n")
    return "".join(lines)


def grow_packtrain(location: str, seconds: float) -> None:
    """Add ten points a second to the first run, as a worker does."""
    from packtrain.run.run import Run
    from packtrain.store import open_store

    store = open_store(location)
    run = Run(store, "run-1")
    chunks = store.list(run.key("metrics/"))
    step = run.recent_points(1, evaluated=False)[-1].step + 1
    end = time.monotonic() + seconds
    for chunk in range(len(chunks), len(chunks) + 10**6):
        if time.monotonic() > end:
            return
        data = packtrain_lines(0, range(step, step + 10)).encode()
        store.put(run.key(f"metrics/000001-rank-0/{chunk:08d}.jsonl"), data)
        step += 10
        time.sleep(1.0)


def peer(
    name: str,
    serve: Callable[[str, Path, int], tuple[list[str], dict[str, str]]],
    overlay: Callable[[Sequence[str]], str],
    watch: Callable[[str], str],
) -> Contender | None:
    """Return a peer, if it is installed."""
    python = PEERS / name / "bin" / "python"
    found = str(python) if python.exists() else sys.executable if name == "tensorboard" else None
    if found is None:
        return None
    script = str(Path(__file__).parent / "peers" / "ui_series.py")

    def make(python: str, folder: Path, options: argparse.Namespace, runs: int) -> list[str]:
        numbers = map(str, (runs, options.points, options.overlay))
        done = subprocess.run(
            [python, script, name, str(folder), "make", *numbers],
            stdout=subprocess.PIPE, check=True, env={**os.environ, "TRACKIO_DIR": str(folder)},
        )  # fmt: skip
        ids: list[str] = json.loads(done.stdout.splitlines()[-1])
        return ids

    def grow(python: str, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TRACKIO_DIR": str(folder)}
        return subprocess.Popen([python, script, name, str(folder), "grow", str(seconds)], env=environment)

    return Contender(name, found, make, grow, serve, overlay, watch)


def tensorboard() -> Contender | None:
    def serve(python: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [python, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
        return [*command, "--port", str(port), "--reload_interval", "2", "--load_fast", "false"], {}

    def overlay(ids: Sequence[str]) -> str:
        return f"/?runFilter={quote('^(' + '|'.join(ids) + ')$')}#timeseries"

    return peer("tensorboard", serve, overlay, lambda one: overlay([one]))


def mlflow() -> Contender | None:
    def serve(python: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        command = [python, "-m", "mlflow", "ui", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        return [*command, "--host", "127.0.0.1", "--port", str(port)], {}

    def overlay(ids: Sequence[str]) -> str:
        runs = quote(json.dumps(list(ids)))
        return f'/#/metric?runs={runs}&metric="loss"&experiments=["0"]&plot_metric_keys=["loss"]'

    return peer("mlflow", serve, overlay, lambda one: overlay([one]))


def trackio() -> Contender | None:
    def serve(python: str, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
        code = "import trackio, time; trackio.show(project='bench', open_browser=False); time.sleep(1e6)"
        environment = {"TRACKIO_DIR": str(folder), "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
        return [python, "-c", code], environment

    def overlay(_: Sequence[str]) -> str:
        return f"/?project={ui_series.FEW}&metrics=loss"

    return peer("trackio", serve, overlay, lambda _: overlay([]))


CONTENDERS: dict[str, Callable[[], Contender | None]] = {
    "packtrain": packtrain,
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "trackio": trackio,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--grow"]:
        grow_packtrain(sys.argv[2], float(sys.argv[3]))
    else:
        main()
