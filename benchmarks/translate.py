"""Speed of training translation, and scores after the same time: Packtrain, a bare PyTorch loop, and JoeyNMT.

    python benchmarks/translate.py [--json] [--rounds 1] [--seconds 120] [--sentences 800] [--joeynmt PYTHON]

Same data, vocabulary, dimensions (the tiny size), batches in target tokens, learning rate and label smoothing; one
thread each, one after the other, with another seed in each round. Time is CPU time, which repeats better than wall time
on a shared machine. Tokens are target tokens without padding. Scores are SacreBLEU and chrF of a greedy search on the
test sentences. PYTHON is an interpreter with JoeyNMT 2.3; default: this one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import bench
import example
from packtrain.data.order import Ids, epoch_batches
from packtrain.export.predict import DecodeOptions, load_predictor
from packtrain.observe.history import read_points
from packtrain.pack.vocabulary import BOS, EOS, UNKNOWN
from packtrain.recipes import Decoding, Recipe
from packtrain.recipes.pairs import PairRecipe
from packtrain.store import Store
from packtrain.train.progress import Progress

HERE = Path(__file__).parent
BARE, OURS, PEER = "bare PyTorch loop", "packtrain", "JoeyNMT 2.3"


@dataclass(frozen=True)
class Learned:
    """Steps, tokens and CPU seconds of a contender, and its translations of the test sentences."""

    steps: int
    tokens: int
    seconds: float
    outputs: list[str]


def endless(recipe: Recipe, budget: int, seed: int) -> Iterator[Ids]:
    for epoch in itertools.count():
        yield from epoch_batches(recipe.costs, recipe.sort_keys, budget, seed, epoch, None, recipe.lengths)


def bare(recipe: PairRecipe, seconds: float, seed: int, inputs: list[str]) -> Learned:
    """Train as any script does: make the batch, forward, backward, clip, Adam, EMA."""
    settings = recipe.job.train
    torch.manual_seed(seed)
    model = recipe.build_model()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    rate = settings.schedule.build(recipe.width, settings.duration)
    started, steps, tokens = time.process_time(), 0, 0
    for ids in endless(recipe, int(settings.batch.value), seed):
        if time.process_time() - started >= seconds:
            break
        batch = {name: torch.from_numpy(rows) for name, rows in recipe.batch(ids, 0).items()}
        cost = int(recipe.costs[ids].sum())
        for group in optimizer.param_groups:
            group["lr"] = rate(Progress(steps, 0.0))
        (recipe.loss(model, batch) / cost).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), max(0.01, 1 / (steps + 2)))
        steps, tokens = steps + 1, tokens + cost
    spent = time.process_time() - started
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), average, strict=True):
            parameter.copy_(mean)
    outputs = [made.text for made in recipe.predict(model.eval(), inputs, Decoding(beam=1))]
    return Learned(steps, tokens, spent, outputs)


def ours(directory: Path, steps: int, seed: int, inputs: list[str]) -> Learned:
    """Run the whole Trainer for as many steps as the bare loop made, without evaluations."""
    settings = [f"train.duration={max(1, steps)} steps", f"train.seed={seed}", "data.valid=[]", "data.test=[]"]
    recipe, store = packed(directory, *settings)
    timer = example.Timer()
    started = time.process_time()
    _, run = example.train(recipe, store, timer.tick)
    points = [point.values for point in read_points(run) if point.kind == "train"]
    predictor = load_predictor(run)
    outputs = [made.text for made in predictor.predict(inputs, DecodeOptions(beam=1))]
    tokens = sum(int(values["tokens"]) for values in points)
    return Learned(len(points), tokens, timer.processor[-1] - started, outputs)


def packed(directory: Path, *settings: str) -> tuple[PairRecipe, Store]:
    recipe, store = example.packed(example.load("translate", "checkpoint.every=1 h", *settings), directory)
    assert isinstance(recipe, PairRecipe)
    return recipe, store


def texts_of(recipe: PairRecipe, side: str, count: int) -> list[str]:
    column = recipe.pack.split("test").column(side)
    return recipe.pack.vocabulary.decode([column[sample].tolist() for sample in range(min(count, len(column)))])


# JoeyNMT.


def joey(recipe: PairRecipe, seconds: float, count: int, python: str, folder: Path) -> Learned:
    """Train JoeyNMT on token numbers as words, so that it has the same vocabulary."""
    for split in ("train", "valid", "test"):
        pairs = recipe.pairs[split]
        for side, column in (("source", pairs.source), ("target", pairs.target)):
            rows = (column[sample].tolist() for sample in range(len(column))[: count if split == "test" else None])
            lines = (" ".join(str(token) for token in row if token not in (BOS, EOS)) for row in rows)
            (folder / f"{split}.{side}").write_text("".join(f"{line or UNKNOWN}\n" for line in lines))
    words = range(UNKNOWN + 1, len(recipe.pack.vocabulary))  # JoeyNMT has its own special tokens
    (folder / "vocabulary.txt").write_text("".join(f"{word}\n" for word in words))
    (folder / "model").mkdir()
    (folder / "config.json").write_text(json.dumps(joey_config(recipe, folder)))
    command = [python, str(HERE / "peers" / "joey.py"), str(folder / "config.json"), str(seconds)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(f"JoeyNMT failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    outputs = [[int(word) for word in line.split() if word.isdigit()] for line in found["outputs"]]
    return Learned(found["steps"], found["tokens"], found["seconds"], recipe.pack.vocabulary.decode(outputs))


def joey_config(recipe: PairRecipe, folder: Path) -> dict[str, Any]:
    shape, train = recipe.shape_of(recipe.job), recipe.job.train
    language = {"level": "word", "lowercase": False, "voc_file": str(folder / "vocabulary.txt"), "max_length": 1000}
    stack = {
        "type": "transformer",
        "num_heads": shape.heads,
        "embeddings": {"embedding_dim": shape.width, "scale": True, "dropout": shape.dropout},
        "hidden_size": shape.width,
        "ff_size": shape.feedforward,
        "dropout": shape.dropout,
        "layer_norm": "pre",
    }
    return {
        "name": "peer",
        "joeynmt_version": "2.3.0",
        "model_dir": str(folder / "model"),
        "use_cuda": False,
        "random_seed": 1,
        "data": {
            **{name: str(folder / split) for name, split in (("train", "train"), ("dev", "valid"), ("test", "test"))},
            "dataset_type": "plain",
            "src": {"lang": "source", **language},
            "trg": {"lang": "target", **language},
        },
        "training": {
            "optimizer": "adam",
            "adam_betas": [0.9, 0.98],
            "scheduling": "warmupinversesquareroot",
            "learning_rate": 0.003,
            "learning_rate_min": 1e-9,
            "learning_rate_warmup": 400,
            "label_smoothing": train.label_smoothing,
            "clip_grad_norm": 1.0,
            "normalization": "tokens",
            "batch_size": int(train.batch.value),
            "batch_type": "token",
            "epochs": 1000,
            "validation_freq": 1_000_000_000,
            "logging_freq": 1_000_000,
        },
        "testing": {"batch_size": 64, "batch_type": "sentence", "beam_size": 1, "max_output_length": 100},
        "model": {
            "initializer": "xavier_uniform",
            "embed_initializer": "normal",
            "embed_init_weight": shape.width**-0.5,
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": {**stack, "num_layers": shape.encoder_layers},
            "decoder": {**stack, "num_layers": shape.decoder_layers},
        },
    }


def has_joey(python: str) -> bool:
    try:
        return subprocess.run([python, "-c", "import joeynmt"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


# The table.


def row_of(name: str, rounds: Sequence[Learned], references: list[str]) -> dict[str, object]:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    scores = [
        (BLEU().corpus_score(one.outputs, [references]), CHRF().corpus_score(one.outputs, [references]))
        for one in rounds
    ]
    return {
        "contender": name,
        "tokens/s": bench.median([one.tokens / one.seconds for one in rounds]),
        "steps": int(bench.median([float(one.steps) for one in rounds])),
        "seconds": bench.median([one.seconds for one in rounds]),
        "BLEU": bench.median([bleu.score for bleu, _ in scores]),
        "of each seed": " ".join(f"{bleu.score:.1f}" for bleu, _ in scores),
        "chrF": bench.median([chrf.score for _, chrf in scores]),
    }


@dataclass(frozen=True)
class Measurements:
    """What each contender learned, with a seed for each round, and the references of the test sentences."""

    contenders: dict[str, list[Learned]]
    references: list[str]


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=1)
    arguments.add_argument("--seconds", type=float, default=120.0)
    arguments.add_argument("--sentences", type=int, default=800, help="test sentences to translate")
    arguments.add_argument("--joeynmt", metavar="PYTHON", default=sys.executable)
    return arguments


def measure(options: argparse.Namespace) -> Measurements:
    torch.set_num_threads(1)
    contenders: dict[str, list[Learned]] = {BARE: [], OURS: []}
    if has_joey(options.joeynmt):
        contenders[PEER] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        recipe, _ = packed(directory)
        inputs, references = (texts_of(recipe, side, options.sentences) for side in ("source", "target"))
        for seed in range(1, options.rounds + 1):
            contenders[BARE].append(bare(recipe, options.seconds, seed, inputs))
            contenders[OURS].append(ours(directory, contenders[BARE][-1].steps, seed, inputs))
            if PEER in contenders:
                folder = directory / f"joey-{seed}"
                folder.mkdir()
                contenders[PEER].append(joey(recipe, options.seconds, options.sentences, options.joeynmt, folder))
    return Measurements(contenders, references)


def report(_: argparse.Namespace, measured: Measurements) -> bench.Report:
    rows = [row_of(name, rounds, measured.references) for name, rounds in measured.contenders.items()]
    return bench.Report("Translation", rows, bench.not_installed((BARE, OURS, PEER), measured.contenders))


if __name__ == "__main__":
    bench.main(parser(), measure, report)
