"""Load on `packtrain serve`: many clients at once against one by one, on loopback.

    python benchmarks/serve_load.py MODEL [--texts FILE]

The load generator is in another process than the service, and speaks plain HTTP over kept connections, so that little
of the machine goes into it. Each request has one text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bench

TEXTS = ("The file is open.", "Good morning, everybody.", "How much does this cost?", "I have not seen him since May.")
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """The figures of one load; `errors` counts every answer but 200."""

    clients: int
    requests: int
    errors: int
    seconds: float
    p50_ms: float
    p99_ms: float
    mean_batch: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    """Run `packtrain serve` on a free port; yield its address when it is ready."""
    command = [sys.executable, "-m", "packtrain", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "packtrain serve did not start"
            _wait_until_ready(found[0])
            yield found[0]
        finally:
            process.terminate()


def _wait_until_ready(url: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/readyz"):  # noqa: S310 - on loopback
                return
        except urllib.error.HTTPError:
            time.sleep(0.05)
    raise AssertionError("the service did not become ready")


def load(url: str, texts: Sequence[str], clients: int, requests: int) -> Load:
    """Send `requests` from `clients` connections at once, each sending the next when it has its answer."""
    before = _batches(url)
    latencies, statuses, seconds = asyncio.run(_run(url, texts, clients, requests))
    inputs, batches = (now - then for now, then in zip(_batches(url), before, strict=True))
    ordered = sorted(latencies)
    return Load(
        clients,
        requests,
        sum(count for status, count in statuses.items() if status != 200),
        seconds,
        1000 * ordered[len(ordered) // 2],
        1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        inputs / max(1.0, batches),
    )


async def _run(url: str, texts: Sequence[str], clients: int, requests: int) -> tuple[list[float], Counter[int], float]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    numbers = iter(range(requests))
    latencies: list[float] = []
    statuses: Counter[int] = Counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in numbers:
            body = json.dumps({"inputs": [texts[number % len(texts)]]}).encode()
            head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            started = time.perf_counter()
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            assert size
            await reader.readexactly(int(size[1]))
            latencies.append(time.perf_counter() - started)
            statuses[int(answer.split(None, 2)[1])] += 1
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies, statuses, time.perf_counter() - started


def _batches(url: str) -> tuple[float, float]:
    """Return how many inputs and batches the service has computed."""
    with urllib.request.urlopen(f"{url}/metrics") as response:  # noqa: S310 - on loopback
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    return float(lines["packtrain_batch_inputs_sum"]), float(lines["packtrain_batch_inputs_count"])


def measure_serve(
    model: Path, texts: Sequence[str] = TEXTS, clients: int = 200, requests: int = 2000, options: Sequence[str] = ()
) -> tuple[Load, Load]:
    """Return the figures of one client and of many, on one service: one, many, one, to see a drift of the machine."""
    with served(model, *options) as url:
        load(url, texts, 8, 100)
        single = max(100, requests // 10)
        first = load(url, texts, 1, single)
        many = load(url, texts, clients, requests)
        last = load(url, texts, 1, single)
    return max((first, last), key=lambda one: one.per_second), many


def rows_of(loads: tuple[Load, Load]) -> list[dict[str, object]]:
    """Return a row for one client and one for many, with the throughput of each against that of one."""
    return [
        {
            "clients": figures.clients,
            "requests": figures.requests,
            "errors": figures.errors,
            "requests/s": round(figures.per_second, 1),
            "p50 ms": round(figures.p50_ms, 1),
            "p99 ms": round(figures.p99_ms, 1),
            "mean batch": round(figures.mean_batch, 1),
            "against one": round(figures.per_second / loads[0].per_second, 2),
        }
        for figures in loads
    ]


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("model", type=Path, help="folder of an exported model of texts")
    arguments.add_argument("--texts", type=Path, help="file with a text on each line")
    arguments.add_argument("--clients", type=int, default=200)
    arguments.add_argument("--requests", type=int, default=2000)
    return arguments


def measure(options: argparse.Namespace) -> tuple[Load, Load]:
    texts = options.texts.read_text().splitlines() if options.texts else TEXTS
    return measure_serve(options.model, texts, options.clients, options.requests)


def report(_: argparse.Namespace, loads: tuple[Load, Load]) -> bench.Report:
    return bench.Report("packtrain serve", rows_of(loads))


if __name__ == "__main__":
    bench.main(parser(), measure, report)
