"""Cost of image batches, against other loaders.

    python benchmarks/input.py [--json] [--rounds 5] [--images 384] [--workers 2] [--photos FOLDER]

Random resized crops of 224 pixels, mirrored at random, uint8 batches of 128. All contenders read the same JPEGs, each
in its own recommended format, and take turns in one run, in random order. The JPEGs are those below FOLDER, or parts of
them if they are larger than ImageNet's, again and again if they are fewer; or else made-up ones. CPU time counts all
processes and threads. Peers that are not installed are listed (`pip install '.[bench]'` in the checkout installs those
on PyPI).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import bench
from packtrain.data.images import ImageBatches, random_crop_box, random_crops, resize_into
from packtrain.data.order import permutation
from packtrain.data.pack import SplitReader
from packtrain.pack.manifest import ShardFile
from packtrain.pack.picture import to_tiled
from packtrain.pack.shard import Columns, Ragged, encode_shard
from packtrain.pack.tiles import Box, splice

SIZE, BATCH, MIN_SCALE = 224, 128, 0.08
SETTLED_SECONDS = 0.1
SCRATCH_BYTES = 6 << 20
# Approximate sizes of ImageNet's photographs: width, height, weight.
SHAPES = [
    (500, 375, 50), (375, 500, 14), (500, 333, 9), (333, 500, 5),
    (500, 500, 6), (640, 480, 6), (400, 300, 4), (600, 600, 6),
]  # fmt: skip

Epoch = Callable[[int], int]
"""Makes all batches of an epoch and returns their number of images."""


def photograph(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return noise of every scale, finer scales fainter and grayer as in photographs, with some sharp edges."""
    light = np.zeros((height, width, 3), np.float32)
    decay = rng.uniform(0.70, 0.90)
    for octave in range(1, 10):
        cells = 2**octave
        noise = rng.standard_normal((min(height, cells), min(width, cells), 4)).astype(np.float32)
        planes = [
            np.asarray(Image.fromarray(noise[:, :, plane]).resize((width, height), Image.Resampling.BICUBIC))
            for plane in range(4)
        ]
        for channel in range(3):
            light[:, :, channel] += 70 * decay**octave * (0.9 * planes[3] + 0.9 * 0.6**octave * planes[channel])
    shapes = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(shapes)
    for _ in range(6):
        left, right = sorted(rng.integers(0, width, 2).tolist())
        top, bottom = sorted(rng.integers(0, height, 2).tolist())
        draw.ellipse((left, top, right, bottom), fill=tuple(rng.integers(0, 64, 3).tolist()))
    return Image.fromarray(np.clip(light + 112 + np.asarray(shapes), 0, 255).astype(np.uint8))


def photographs(count: int) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [encoded(rng, photograph(rng, *shape)) for shape in shapes(rng, count)]


def shapes(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    weights = np.array([weight for _, _, weight in SHAPES], float)
    return [SHAPES[shape][:2] for shape in rng.choice(len(SHAPES), count, p=weights / weights.sum())]


def encoded(rng: np.random.Generator, image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=int(rng.integers(90, 96)), subsampling="4:2:0")
    return out.getvalue()


def photographs_in(folder: Path, count: int) -> list[bytes]:
    """Return the JPEGs below a folder, in turn. Of those larger than ImageNet's, parts of its sizes."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    if not found:
        raise SystemExit(f"{folder}: no JPEGs")
    rng = np.random.default_rng(1)
    return [part_of(found[number % len(found)], rng, shape) for number, shape in enumerate(shapes(rng, count))]


def part_of(jpeg: bytes, rng: np.random.Generator, shape: tuple[int, int]) -> bytes:
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    largest = min(side // wanted for side, wanted in zip(image.size, shape, strict=True))
    if largest < 2:
        return jpeg
    scale = int(rng.integers(max(2, largest // 2), largest + 1))  # at least 2: its own compression is not seen anymore
    width, height = (scale * wanted for wanted in shape)
    left, top = int(rng.integers(0, image.width - width + 1)), int(rng.integers(0, image.height - height + 1))
    box = (left, top, left + width, top + height)
    return encoded(rng, image.resize(shape, Image.Resampling.LANCZOS, box))


def crop_with_pillow(data: bytes | Image.Image) -> torch.Tensor:
    """Decode a JPEG and resize a random crop, as scripts with Pillow do."""
    image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data))
    if image.mode != "RGB":
        image = image.convert("RGB")
    words = [random.getrandbits(64) for _ in range(40)]
    left, top, width, height = random_crop_box(image.width, image.height, MIN_SCALE, words)
    seen = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    if random.getrandbits(1):
        seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(seen))


def counted(batches: Iterable[Any]) -> int:
    return sum(len(batch) for batch in batches)


def packtrain(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    tiled = [to_tiled(jpeg) for jpeg in jpegs]
    columns = Columns(
        {
            "jpeg": ragged([np.frombuffer(one.jpeg, np.uint8) for one in tiled]),
            "segments": ragged([one.segments for one in tiled]),
        },
        {
            "width": np.array([one.width for one in tiled], np.int32),
            "height": np.array([one.height for one in tiled], np.int32),
        },
    )
    (folder / "shard").write_bytes(encode_shard(columns))
    shard = ShardFile("shard", 0, "", len(columns))
    batches = ImageBatches(SplitReader([shard], lambda _: folder / "shard"), workers)

    def epoch(number: int) -> int:
        ids = permutation(len(jpegs), 1, number)
        parts = (ids[start : start + BATCH] for start in range(0, len(ids), BATCH))
        return counted(torch.from_numpy(batches.random(part, 1, number, SIZE, MIN_SCALE)) for part in parts)

    return epoch


def ragged(rows: Sequence[NDArray[Any]]) -> Ragged:
    return Ragged(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))


def loader_epoch(dataset: Any, workers: int, **options: Any) -> Epoch:
    from torch.utils.data import DataLoader

    def epoch(_: int) -> int:
        return counted(DataLoader(dataset, BATCH, num_workers=workers, **options))

    return epoch


class Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: int) -> torch.Tensor:
        return crop_with_pillow(self.paths[at].read_bytes())


def torch_and_pillow(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    paths = [folder / f"{number}.jpg" for number in range(len(jpegs))]
    for path, jpeg in zip(paths, jpegs, strict=True):
        path.write_bytes(jpeg)
    return loader_epoch(Files(paths), workers, shuffle=True)


def webdataset(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    import webdataset as wds

    shards: list[str] = []
    for shard, rows in enumerate(np.array_split(np.arange(len(jpegs)), workers)):
        shards.append(str(folder / f"{shard}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for row in rows.tolist():
                member = tarfile.TarInfo(f"{row:06d}.jpg")
                member.size = len(jpegs[row])
                tar.addfile(member, io.BytesIO(jpegs[row]))
    dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False).shuffle(100).map(webdataset_sample)
    return loader_epoch(dataset, workers)


def webdataset_sample(sample: dict[str, bytes]) -> torch.Tensor:
    return crop_with_pillow(sample["jpg"])


def litdata(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="32MB")
    for row, jpeg in enumerate(jpegs):
        writer[row] = jpeg
    writer.done()
    writer.merge()

    class Seen(StreamingDataset):
        def __getitem__(self, at: Any) -> torch.Tensor:
            return crop_with_pillow(super().__getitem__(at))

    dataset = Seen(str(folder), shuffle=True)
    return lambda _: counted(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers))


def mosaicml_streaming(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=str(folder), columns={"image": "bytes"}) as writer:
        for jpeg in jpegs:
            writer.write({"image": jpeg})

    class Seen(StreamingDataset):
        def __getitem__(self, at: Any) -> torch.Tensor:
            return crop_with_pillow(super().__getitem__(at)["image"])

    return loader_epoch(Seen(local=str(folder), shuffle=True, batch_size=BATCH), workers)


def dali(jpegs: Sequence[bytes], folder: Path, workers: int) -> Epoch:
    from nvidia.dali import fn, pipeline_def, types

    paths = [folder / f"{number}.jpg" for number in range(len(jpegs))]
    for path, jpeg in zip(paths, jpegs, strict=True):
        path.write_bytes(jpeg)

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)
    def pipeline() -> Any:
        files, _ = fn.readers.file(files=[str(path) for path in paths], random_shuffle=True, name="files")
        seen = fn.decoders.image_random_crop(
            files, device="cpu", random_area=[MIN_SCALE, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=10
        )
        seen = fn.resize(seen, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(seen, horizontal=fn.random.coin_flip())

    made = pipeline()
    made.build()

    return lambda _: counted(made.run()[0].as_array() for _ in range(len(jpegs) // BATCH))


Contender = Callable[[Sequence[bytes], Path, int], Epoch]
OURS = "packtrain"
CONTENDERS: dict[str, tuple[str, Contender]] = {
    OURS: ("packtrain", packtrain),
    "torch DataLoader + Pillow": ("torch", torch_and_pillow),
    "webdataset": ("webdataset", webdataset),
    "mosaicml-streaming": ("streaming", mosaicml_streaming),
    "litdata": ("litdata", litdata),
    "DALI (CPU)": ("nvidia.dali", dali),
}


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def cpu_seconds() -> float:
    """Return the CPU time of this process, its threads, and its finished children."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def settle() -> None:
    """Wait until no batch is prepared ahead: that work counts for this turn, since the last turn did some for it."""
    before, now = -1.0, cpu_seconds()
    while now - before > SETTLED_SECONDS / 20:
        time.sleep(SETTLED_SECONDS)
        before, now = now, cpu_seconds()


def take_turns(name: str, jpegs: Sequence[bytes], workers: int, parent: Connection) -> None:
    """Run a contender in its own process: one epoch per request, answered with its figures."""
    multiprocessing.set_start_method("fork", force=True)  # for its own workers: the fastest start method
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
        epoch = CONTENDERS[name][1](jpegs, Path(folder), workers)
        epoch(0)
        settle()
        parent.send("ready")
        while True:
            number = parent.recv()
            cpu, wall = cpu_seconds(), time.perf_counter()
            images = epoch(number)
            wall = time.perf_counter() - wall
            settle()
            parent.send((1000 * (cpu_seconds() - cpu) / images, 1000 * wall / images))


def compare_images(jpegs: Sequence[bytes], rounds: int, workers: int) -> dict[str, list[tuple[float, float]]]:
    """Return CPU and wall milliseconds per image for each contender and round; none if it does not run here."""
    spawn = multiprocessing.get_context("spawn")
    figures: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as open_pipes:
        pipes: dict[str, Connection] = {}
        for name, (module, _) in CONTENDERS.items():
            if not installed(module):
                continue
            figures[name] = []
            pipe, theirs = spawn.Pipe()
            spawn.Process(target=take_turns, args=(name, jpegs, workers, theirs)).start()
            theirs.close()
            open_pipes.enter_context(pipe)  # closing it ends the process
            with contextlib.suppress(EOFError):
                assert pipe.recv() == "ready"
                pipes[name] = pipe
        numbers = np.random.default_rng(1)
        for number in range(1, rounds + 1):
            for name in numbers.permutation(list(pipes)).tolist():
                pipes[name].send(number)
                figures[name].append(pipes[name].recv())
    return figures


def parts_of_time(jpegs: Sequence[bytes]) -> str:
    """Return what our loader's threads spend their time on, by doing it here in one thread."""
    tiled = [to_tiled(jpeg) for jpeg in jpegs]
    crop_of = random_crops(np.arange(len(tiled)), MIN_SCALE, 1, 0, None)
    decoded, closed = (np.empty(SCRATCH_BYTES, np.uint8) for _ in range(2))
    out = np.empty((SIZE, SIZE, 3), np.uint8)
    times = []
    for at, one in enumerate(tiled):
        marks = [time.thread_time()]
        (left, top, width, height), flip = crop_of(at, one.width, one.height)
        marks.append(time.thread_time())
        small, x, y = splice(memoryview(one.jpeg), one.segments, one.width, one.height, Box(left, top, width, height))
        marks.append(time.thread_time())
        pixels = simplejpeg.decode_jpeg(small, buffer=decoded)[y : y + height, x : x + width]
        marks.append(time.thread_time())
        resize_into(out, pixels, flip, closed)
        marks.append(time.thread_time())
        times.append(np.diff(marks))
    names = ("choosing the crop", "joining tiles", "decoding", "resizing")
    means = zip(names, 1000 * np.mean(times, axis=0), strict=True)
    return "of packtrain, in ms: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means)


@dataclass(frozen=True)
class Measurements:
    """CPU and wall milliseconds per image, by loader and round; of a loader that fails here there are none."""

    loaders: dict[str, list[tuple[float, float]]]
    about_images: str
    parts_of_time: str


def about(jpegs: Sequence[bytes], photos: Path | None) -> str:
    width, height = np.mean([Image.open(io.BytesIO(jpeg)).size for jpeg in jpegs], axis=0)
    return (
        f"{len(jpegs)} images, {len(set(jpegs))} of them different,"
        f" {f'from {photos}' if photos else 'made up: noise of all scales and some shapes, 4:2:0'};"
        f" {width:.0f} x {height:.0f} pixels and {np.mean([*map(len, jpegs)]) / 1000:.0f} kB on average"
    )


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--images", type=int, default=384, help="JPEGs per epoch")
    arguments.add_argument("--workers", type=int, default=2, help="threads or worker processes per contender")
    arguments.add_argument("--photos", type=Path, help="a folder of JPEGs")
    return arguments


def measure(options: argparse.Namespace) -> Measurements:
    jpegs = photographs_in(options.photos, options.images) if options.photos else photographs(options.images)
    loaders = compare_images(jpegs, options.rounds, options.workers)
    return Measurements(loaders, about(jpegs, options.photos), parts_of_time(jpegs))


def report(options: argparse.Namespace, measured: Measurements) -> bench.Report:
    loaders = measured.loaders
    rows: list[dict[str, Any]] = [
        {
            "loader": name,
            "CPU ms/image": bench.median([cpu for cpu, _ in turns]),
            "min": min(cpu for cpu, _ in turns),
            "max": max(cpu for cpu, _ in turns),
            "wall ms/image": bench.median([wall for _, wall in turns]),
        }
        for name, turns in loaders.items()
        if turns
    ]
    notes = [
        f"{measured.about_images}; {options.workers} threads or worker processes each",
        measured.parts_of_time,
        "wall times favor loaders that prepare batches between their turns (DALI): compare CPU times",
    ]
    if failed := [name for name, turns in loaders.items() if not turns]:
        notes.append(f"installed, but fail here: {', '.join(failed)}")
    notes += bench.not_installed([*CONTENDERS, "ffcv (source only on PyPI; needs OpenCV to build)"], loaders)
    if peers := [row for row in rows if row["loader"] != OURS]:
        best = min(peers, key=lambda row: float(row["CPU ms/image"]))
        ratios = [theirs / mine for (theirs, _), (mine, _) in zip(loaders[best["loader"]], loaders[OURS], strict=True)]
        notes.append(
            f"the best peer, {best['loader']}, takes {bench.median(ratios):.2f} x the CPU time of packtrain"
            f" (median of {options.rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f})"
        )
    return bench.Report(f"Random crops of {SIZE} pixels from JPEGs", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
