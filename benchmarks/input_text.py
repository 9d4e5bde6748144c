"""Throughput of padded text batches, against other loaders with the same batches.

    python benchmarks/input_text.py [--json] [--rounds 5] [--pairs 500000] [--budget 8192]

The example's corpus, repeated up to the number of pairs. All contenders make the same batches, int64 tensors of
sources and targets, in this process and in turns, measured in CPU time. Tokens are those of both sides without padding.
The notes give the share of padding, and the time to find a step of a large set.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import bench
from packtrain.data.loader import Order
from packtrain.data.order import Ids, sort_keys
from packtrain.data.pack import SplitReader, pad
from packtrain.files import sha256_of
from packtrain.pack.bitext import BitextSource
from packtrain.pack.manifest import ShardFile
from packtrain.pack.shard import Columns, Ragged, encode_shard
from packtrain.pack.vocabulary import BOS, EOS, PAD, Vocabulary

DATA = bench.EXAMPLES / "data" / "en-de"
VOCABULARY = 4000
SHARD_PAIRS = 250_000  # as in packs
FAST_BATCHES, SLOW_BATCHES = 400, 20  # per round: ours, and those that take a hundred times as long
OURS = "packtrain"
CONTENDERS = (OURS, "torch DataLoader, lists", "Hugging Face datasets", "mosaicml-streaming")

Rows = list[list[int]]
Tensors = tuple[torch.Tensor, torch.Tensor]
Contender = Callable[[Sequence[Ids]], Iterator[Tensors]]


def corpus(pairs: int) -> tuple[Rows, Rows, int]:
    """Return so many sources and targets, and how many of them come before the first repetition."""
    source = BitextSource(paths=(str(DATA / "train.en.gz"), str(DATA / "train.de.gz")))
    read = list(islice(source.pairs(lambda *_: None), pairs))
    vocabulary = Vocabulary.fit((text for pair in read for text in (pair.source, pair.target)), VOCABULARY)
    sources = [[*row, EOS] for row in vocabulary.encode([pair.source for pair in read])]
    targets = [[BOS, *row, EOS] for row in vocabulary.encode([pair.target for pair in read])]
    times = -(-pairs // len(read))
    return (sources * times)[:pairs], (targets * times)[:pairs], len(read)


def packed(sources: Rows, targets: Rows, folder: Path) -> SplitReader:
    shards = []
    for number, start in enumerate(range(0, len(sources), SHARD_PAIRS)):
        part = slice(start, start + SHARD_PAIRS)
        sides = {"source": sources[part], "target": targets[part]}
        ragged = {name: Ragged.from_rows(rows, np.dtype("<u2")) for name, rows in sides.items()}
        path = folder / f"train-{number:05d}"
        path.write_bytes(encode_shard(Columns(ragged)))
        shards.append(ShardFile(path.name, path.stat().st_size, sha256_of(path), len(sources[part])))
    return SplitReader(shards, lambda shard: folder / shard.name)


def ours(split: SplitReader) -> Contender:
    source, target = split.column("source"), split.column("target")

    def batches(order: Sequence[Ids]) -> Iterator[Tensors]:
        for ids in order:
            yield torch.from_numpy(pad(source, ids, PAD)), torch.from_numpy(pad(target, ids, PAD))

    return batches


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def collated(samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensors:
    return padded([source for source, _ in samples]), padded([target for _, target in samples])


def lists(sources: Rows, targets: Rows) -> Contender:
    pairs = list(zip(sources, targets, strict=True))

    def batches(order: Sequence[Ids]) -> Iterator[Tensors]:
        return iter(DataLoader(pairs, batch_sampler=[ids.tolist() for ids in order], collate_fn=collated))  # type: ignore[arg-type]

    return batches


def hugging_face(sources: Rows, targets: Rows) -> Contender:
    from datasets import Dataset  # type: ignore[import-not-found]

    rows = Dataset.from_dict({"source": sources, "target": targets})

    def batches(order: Sequence[Ids]) -> Iterator[Tensors]:
        for ids in order:
            found = rows[ids.tolist()]
            yield padded(found["source"]), padded(found["target"])

    return batches


def mosaic(sources: Rows, targets: Rows, folder: Path) -> Contender:
    from streaming import MDSWriter, StreamingDataset

    columns = {"source": "ndarray:uint16", "target": "ndarray:uint16"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for source, target in zip(sources, targets, strict=True):
            writer.write({"source": np.array(source, np.uint16), "target": np.array(target, np.uint16)})
    rows = StreamingDataset(local=str(folder / "mds"), batch_size=1)

    def batches(order: Sequence[Ids]) -> Iterator[Tensors]:
        for ids in order:
            found = [rows[one] for one in ids.tolist()]
            yield collated([(one["source"].astype(np.int64), one["target"].astype(np.int64)) for one in found])

    return batches


def million_tokens_per_second(contender: Contender, order: Sequence[Ids], lengths: Ids) -> float:
    started = time.process_time()
    deque(contender(order), maxlen=0)
    seconds = time.process_time() - started
    return int(lengths[np.concatenate(order)].sum()) / seconds / 1e6


def same(one: Contender, other: Contender, order: Sequence[Ids]) -> bool:
    pairs = zip(one(order), other(order), strict=True)
    return all(torch.equal(mine, theirs) for batches in pairs for mine, theirs in zip(*batches, strict=True))


def padding(source: Ids, target: Ids, batches: Sequence[Ids]) -> float:
    sides = (source, target)
    positions = sum(len(ids) * int(side[ids].max()) for ids in batches for side in sides)
    return 1 - sum(int(side.sum()) for side in sides) / positions


def order_of(source: Ids, target: Ids, budget: int) -> Order:
    return Order(target - 1, sort_keys(source, target), lambda _: budget, 1, np.maximum(source, target))


def notes_on_order(source: Ids, target: Ids, once: int, large: int) -> Iterator[str]:
    """Padding on the corpus itself, not repeated; the time for an epoch's order, of which any step is an element."""
    own = source[:once], target[:once]
    shares = [f"{budget:,}: {padding(*own, order_of(*own, budget).batches(0)):.1%}" for budget in (640, 8192, 25000)]
    yield f"padding of both sides together, by budget: {', '.join(shares)}"
    resized = np.resize(source, large), np.resize(target, large)
    ones = np.ones(large, np.int64)
    orders = {
        "pairs, 640 tokens": order_of(*resized, 640),
        "pairs, 25,000 tokens": order_of(*resized, 25000),
        "images, 256": Order(ones, ones, lambda _: 256, 1),
        "images, 256, weights 2 and 0.5": Order(
            ones, ones, lambda _: 256, 1, None, (large // 2, large - large // 2), (2.0, 0.5)
        ),
    }
    for name, order in orders.items():
        started = time.perf_counter()
        order.batches(3)
        yield f"to find a step of {large:,} ({name}): {time.perf_counter() - started:.2f} s"


@dataclass(frozen=True)
class Measurements:
    """Million tokens per CPU second, by contender and round; and notes on the order of batches."""

    rates: dict[str, list[float]]
    notes_on_order: list[str]


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__)
    arguments.add_argument("--pairs", type=int, default=500_000)
    arguments.add_argument("--budget", type=int, default=8192)
    arguments.add_argument("--large", type=int, default=1_300_000, help="samples of the set to find a step of")
    return arguments


def measure(options: argparse.Namespace) -> Measurements:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        sources, targets, once = corpus(options.pairs)
        split = packed(sources, targets, folder)
        contenders = {OURS: ours(split), "torch DataLoader, lists": lists(sources, targets)}
        if importlib.util.find_spec("datasets"):
            contenders["Hugging Face datasets"] = hugging_face(sources, targets)
        if importlib.util.find_spec("streaming"):
            contenders["mosaicml-streaming"] = mosaic(sources, targets, folder)

        lengths = split.lengths("source"), split.lengths("target")
        batches = order_of(*lengths, options.budget).batches(0)
        for name, contender in contenders.items():
            assert same(contenders[OURS], contender, batches[:3]), f"{name} makes different batches"
        gc.collect()
        gc.freeze()  # one contender's lists must not slow down the others
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.rounds):
            for name, contender in contenders.items():
                count = FAST_BATCHES if name == OURS else SLOW_BATCHES
                first = turn * count % max(1, len(batches) - count)
                part = batches[first : first + count]
                rates[name].append(million_tokens_per_second(contender, part, lengths[0] + lengths[1]))
        return Measurements(rates, list(notes_on_order(*lengths, once, options.large)))


def report(options: argparse.Namespace, measured: Measurements) -> bench.Report:
    mine = bench.median(measured.rates[OURS])
    rows = [
        {
            "batches from": name,
            "M tokens/CPU s": bench.median(rates),
            "speedup of packtrain": mine / bench.median(rates),
        }
        for name, rates in measured.rates.items()
    ]
    notes = [*bench.not_installed(CONTENDERS, measured.rates), *measured.notes_on_order]
    return bench.Report(f"Padded batches of text, {options.budget:,} tokens", rows, notes)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
