"""Time and memory of packing images, against decoding and encoding alone on the same cores; or of packing pairs.

    python benchmarks/pack.py [--json] [--rounds 5] [--images 8000] [--gigabytes 0] [--pairs 0] [--changes FOLDER]

The images are synthetic: smooth noise of ImageNet's size, quality 92. With --gigabytes the set is that large (the same
files under many names), and only memory and rate are printed: memory should not grow with the set.

With --pairs, that many pairs of synthetic sentences are packed instead. As in real text, the more there are, the more
distinct words they have: about two new ones in three pairs.

With --changes, nothing is timed: the table says how far the pixels of the JPEGs in a folder are from those that the
pack stores, of 255.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from simplejpeg import decode_jpeg

import bench
from packtrain.job.job import DataSettings
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.picture import UnusableImage, to_tiled
from packtrain.pack.workers import Processes
from packtrain.store import open_store

WIDTH, HEIGHT, DISTINCT, CLASSES = 480, 427, 300, 10


def make_image(seed: int) -> bytes:
    """Return noise in octaves, about as many bytes as a photograph of this size."""
    numbers = np.random.default_rng(seed)
    canvas = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for octave in (4, 16, 64, 256):
        small = numbers.normal(size=(HEIGHT * octave // 512 + 2, WIDTH * octave // 512 + 2, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[:, :, channel]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            canvas[:, :, channel] += np.asarray(layer) * 110 / octave**0.6
    buffer = io.BytesIO()
    Image.fromarray(np.clip(canvas + 127, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


def make_set(folder: Path, count: int) -> int:
    """Write a set of images in classes, links to the first ones beyond some hundred; return its size in bytes."""
    total = 0
    for number in range(count):
        path = folder / f"class-{number % CLASSES}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number < DISTINCT:
            path.write_bytes(make_image(number))
        else:
            first = number % DISTINCT
            os.link(folder / f"class-{first % CLASSES}" / f"{first:08d}.jpg", path)
        total += path.stat().st_size
    return total


def recode(paths: list[Path]) -> int:
    """Decode and encode each image once, the least that packing has to do."""
    for path in paths:
        image = Image.open(path)
        image.load()
        image.save(io.BytesIO(), "JPEG", quality="keep", restart_marker_blocks=5)
    return len(paths)


def seconds_alone(folder: Path) -> float:
    paths = sorted(folder.rglob("*.jpg"))
    parts = [paths[start : start + 50] for start in range(0, len(paths), 50)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        list(pool.map(recode, parts[: os.cpu_count()]))  # starts the processes
        started = time.perf_counter()
        list(pool.map(recode, parts))
        return time.perf_counter() - started


class PeakMemory:
    """Peak memory of this process and its children together, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._over.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.bytes = max(self.bytes, total)


def make_pairs(path: Path, count: int) -> None:
    numbers = np.random.default_rng(1)
    syllables = np.array(["ka", "lo", "mer", "tin", "sch", "ab", "ver", "gol", "pa", "nid", "ru", "ez", "ton", "bel"])
    known = ["".join(numbers.choice(syllables, length)) for length in numbers.integers(1, 6, 50_000)]
    places = np.arange(1, len(known) + 1)
    with path.open("w") as file:
        for start in range(0, count, 10_000):
            # Frequencies of known words follow Zipf's law; new words are one in sixty.
            drawn = numbers.choice(len(known), (min(10_000, count - start), 2, 20), p=1 / places / (1 / places).sum())
            new = numbers.random(drawn.shape) < 1 / 60
            made = iter(numbers.choice(syllables, (int(new.sum()), 6)).tolist())
            for pair, is_new in zip(drawn.tolist(), new.tolist(), strict=True):
                sides = (
                    " ".join("".join(next(made)) if fresh else known[word] for word, fresh in zip(*side, strict=True))
                    for side in zip(pair, is_new, strict=True)
                )
                file.write("\t".join(sides) + "\n")


def seconds_packing(source: dict[str, str], store: Path) -> tuple[float, int]:
    data = DataSettings.model_validate({"train": [source], "vocabulary": 32768})
    with PeakMemory() as memory:
        started = time.perf_counter()
        pack("bench", data, open_store(str(store), create=True), Processes(), PlainProgress(lambda _: None))
        return time.perf_counter() - started, memory.bytes


@dataclass(frozen=True)
class Packing:
    """How long it took to pack a set, and to decode and encode its images alone."""

    count: int
    raw_bytes: int
    seconds: float
    peak_bytes: int
    alone_seconds: float | None = None


def changes_of(folder: Path) -> list[float]:
    """Return how far the pixels of each JPEG are from those in a pack, on average."""
    changes = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")):
        data = path.read_bytes()
        try:
            before, after = (decode_jpeg(jpeg).astype(np.int16) for jpeg in (data, to_tiled(data).jpeg))
        except (UnusableImage, ValueError):  # one of them cannot decode it
            continue
        if before.shape == after.shape:  # not rotated
            changes.append(float(np.abs(before - after).mean()))
    return changes


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--images", type=int, default=8000)
    arguments.add_argument("--gigabytes", type=float, default=0.0)
    arguments.add_argument("--pairs", type=int, default=0)
    arguments.add_argument("--changes", type=Path, metavar="FOLDER")
    return arguments


def measure(options: argparse.Namespace) -> list[Packing] | list[float]:
    if options.changes:
        return changes_of(options.changes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.pairs:
            path = folder / "pairs.tsv"
            make_pairs(path, options.pairs)
            seconds, peak = seconds_packing({"bitext": str(path)}, folder / "store")
            return [Packing(options.pairs, path.stat().st_size, seconds, peak)]
        count = options.images
        if options.gigabytes:
            count = int(options.gigabytes * 1e9 / (make_set(folder / "probe", 50) / 50))
        size = make_set(folder / "raw", count)
        rounds = []
        for number in range(1 if options.gigabytes else options.rounds):
            alone = None if options.gigabytes else seconds_alone(folder / "raw")
            seconds, peak = seconds_packing({"imagenet": str(folder / "raw")}, folder / f"store-{number}")
            rounds.append(Packing(count, size, seconds, peak, alone))
        return rounds


def report(options: argparse.Namespace, measured: list[Packing] | list[float]) -> bench.Report:
    rounds = [packing for packing in measured if isinstance(packing, Packing)]
    if options.changes:
        changes = [change for change in measured if not isinstance(change, Packing)]
        row: dict[str, object] = {"JPEGs": len(changes), "unchanged": changes.count(0.0)}
        if changes:
            row |= {"mean": float(np.mean(changes)), "median": bench.median(changes), "max": max(changes)}
        return bench.Report("Changes by packing, of 255", [row], [])
    noun = "pairs" if options.pairs else "images"
    rows: list[dict[str, object]] = [
        {
            noun: packing.count,
            "raw GB": packing.raw_bytes / 1e9,
            **({} if packing.alone_seconds is None else {"recode alone, s": packing.alone_seconds}),
            "pack, s": packing.seconds,
            f"{noun}/s": packing.count / packing.seconds,
            "peak memory, MB": packing.peak_bytes / 1e6,
        }
        for packing in rounds
    ]
    ratios = [packing.seconds / packing.alone_seconds for packing in rounds if packing.alone_seconds]
    notes = []
    if ratios:
        notes.append(f"packing takes {bench.median(ratios):.2f} times as long as decoding and encoding alone")
    return bench.Report(f"Packing {noun}", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
