"""Speed, scores, memory and cold start of models at home: exported forms against the run in torch and plain runtimes.

    python benchmarks/home.py [translate|int8|classify|serve] [--json] [--rounds 3] [--inputs 800] [--store DIR]

Uses the run of examples/translate.yaml or examples/classify.yaml in that store, or else trains it first (`--set` as in
`packtrain run`). Each contender is a process of its own, and they take turns. CPU time counts after a first batch, with
the wall time beside it; start is the whole command for one input. The limits are CTranslate2 called by hand with
tokens, as its manual shows it and with our rule to stop, and ONNX Runtime with pixels that are decoded already. `serve`
puts 200 clients against one.

`int8` compares the exported translator in int8 with fp32: BLEU on all samples of both splits, and the CPU time of one
thread in alternating rounds, each with the interval that holds 95 % of resamples of samples or rounds. With
ONEDNN_MAX_CPU_ISA=AVX2 in the environment it shows a processor without VNNI.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
import serve_load
from packtrain.export.bootstrap import Difference, interval_of, resampled, widened
from packtrain.export.evaluate import EvaluateOptions, evaluate, folder_subject
from packtrain.export.evaluate import compare as compare_models
from packtrain.export.model import read_model
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.statistics import ratio
from packtrain.store import open_store

BEAM = 4
PRECISIONS = {"fp32": (), "int8": ("--int8",)}
RUNS = {"translate": "en-de", "classify": "photos"}
FORMS = {
    "translate": {
        "exported, CTranslate2 fp32": (),
        "exported, CTranslate2 int8": ("--int8",),
        "exported, ONNX Runtime fp32": ("--format", "onnx"),
    },
    "classify": {"exported, ONNX Runtime fp32": (), "exported, ONNX Runtime int8": ("--int8",)},
}
LIMITS = {
    "translate": {
        "CTranslate2 by hand, fp32, its own rule to stop": "tokens",
        "CTranslate2 by hand, fp32, our rule to stop": "tokens, patient",
    },
    "classify": {"ONNX Runtime by hand, fp32, no decoding": "pixels"},
}


@dataclass(frozen=True)
class Task:
    """Inputs for `packtrain predict`, and the references that its outputs are scored against."""

    recipe: str
    inputs: list[str]
    references: list[str]

    def score(self, outputs: list[str]) -> dict[str, float]:
        if self.recipe == "classify":
            right = sum(output == reference for output, reference in zip(outputs, self.references, strict=True))
            return {"top-1": 100 * right / len(outputs)}
        from sacrebleu.metrics.bleu import BLEU

        return {"BLEU": BLEU().corpus_score(outputs, [self.references]).score}


# What a contender does, in its own process.


def contend(kind: str, place: str, file: str) -> None:
    """Predict for the lines of a file; print what it took."""
    from packtrain.export.predict import DecodeOptions, load_predictor, open_model
    from packtrain.run.run import open_run
    from packtrain.store import open_store

    inputs = Path(file).read_text().splitlines()
    predictor = load_predictor(open_run(open_store(place), None)) if kind == "run" else open_model(Path(place))
    is_image = predictor.recipe.inputs == "images"
    options = DecodeOptions() if is_image else DecodeOptions(beam=BEAM)
    work: Callable[[Sequence[str]], list[str]]
    if kind == "pixels":
        work = pixels_by_hand(predictor, Path(place), inputs)
    elif kind.startswith("tokens"):
        work = tokens_by_hand(predictor, Path(place), is_patient=kind == "tokens, patient")
    else:
        work = lambda given: [output_of(made) for made in predictor.predict(given, options)]  # noqa: E731
    work(inputs[:32])
    processor, wall = time.process_time(), time.perf_counter()
    outputs = work(inputs)
    spent = {"cpu": time.process_time() - processor, "wall": time.perf_counter() - wall}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    tokens = 0 if is_image else sum(map(len, predictor.recipe.pack.vocabulary.encode(outputs)))
    print(json.dumps({**spent, "tokens": tokens, "megabytes": peak, "outputs": outputs}))


def output_of(made: Any) -> str:
    best = made.details.get("top5")
    return str(best[0]["class"]) if best else str(made.text)


def tokens_by_hand(predictor: Any, folder: Path, is_patient: bool) -> Callable[[Sequence[str]], list[str]]:
    """Return the least that a script with CTranslate2 does: tokens in, tokens out."""
    import ctranslate2

    from packtrain.recipes.translate.ctranslate2 import PATIENCE

    recipe = predictor.recipe
    threads = len(os.sched_getaffinity(0))
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), inter_threads=threads, intra_threads=1)

    def work(texts: Sequence[str]) -> list[str]:
        rows = [[str(token) for token in row] for row in recipe.encode(texts)]
        found = translator.translate_batch(
            rows,
            max_batch_size=4096,
            batch_type="tokens",
            beam_size=BEAM,
            patience=PATIENCE if is_patient else 1.0,
            length_penalty=0.6,
            max_decoding_length=max(map(len, rows)) + 50,
        )
        texts_found: list[str] = recipe.pack.vocabulary.decode(
            [[int(token) for token in one.hypotheses[0]] for one in found]
        )
        return texts_found

    return work


def pixels_by_hand(predictor: Any, folder: Path, inputs: Sequence[str]) -> Callable[[Sequence[str]], list[str]]:
    """Return what ONNX Runtime alone takes: the pixels are there before the clock starts."""
    import numpy as np
    import onnxruntime
    from PIL import Image

    size = predictor.recipe.final_settings.size
    pixels = {path: np.asarray(Image.open(path).convert("RGB").resize((size, size))) for path in inputs}
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "classifier.onnx"))
    labels = predictor.recipe.labels

    def work(given: Sequence[str]) -> list[str]:
        found: list[str] = []
        for start in range(0, len(given), 64):
            batch = np.stack([pixels[path] for path in given[start : start + 64]])
            [logits] = session.run(None, {session.get_inputs()[0].name: batch})
            found += [labels[best] for best in logits.argmax(1)]
        return found

    return work


# The exported translator in both precisions.


@dataclass(frozen=True)
class SplitScores:
    """BLEU of both precisions on the same samples; `loss` is how much lower it is in int8."""

    split: str
    samples: int
    fp32: float
    int8: float
    loss: Difference


@dataclass(frozen=True)
class Precisions:
    """Scores on each split, and the CPU seconds of both precisions, fp32 first, in each round."""

    scores: list[SplitScores]
    inputs: int
    seconds: list[tuple[float, float]]


def compare_precisions(store: Path, directory: Path, inputs: Sequence[str], turns: int) -> Precisions:
    fp32, int8 = (export("translate", store, directory / name, *options) for name, options in PRECISIONS.items())
    subjects = [folder_subject(folder, lambda: open_store(str(store))) for folder in (int8, fp32)]
    scores = []
    for split in ("valid", "test"):
        compared = compare_models(
            *evaluate(subjects, EvaluateOptions(split=split), PlainProgress(lambda _: None), InProcess())
        )
        before, after = (one.scores["bleu"].value for one in (compared.second, compared.first))
        scores.append(SplitScores(split, compared.first.samples, before, after, compared.differences["bleu"]))
    models = [read_model(folder) for folder in (fp32, int8)]
    networks = [model.network(threads=1) for model in models]

    def seconds(which: int) -> float:
        started = time.process_time()
        models[which].recipe.predict(networks[which], inputs, Decoding(beam=BEAM))
        return time.process_time() - started

    seconds(0), seconds(1)
    rounds = []
    for number in range(turns):
        # Each is first in every other round: what disturbs the machine for a while disturbs both.
        order = (0, 1) if number % 2 else (1, 0)
        spent = {which: seconds(which) for which in order}
        rounds.append((spent[0], spent[1]))
    return Precisions(scores, len(inputs), rounds)


def precision_rows(found: Precisions) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {
            "measured": f"BLEU, {one.samples} sentences of {one.split}", "fp32": one.fp32, "int8": one.int8,
            "loss": one.loss.value, "95 % from": one.loss.interval.low, "to": one.loss.interval.high,
        }
        for one in found.scores
    ]  # fmt: skip
    fp32, int8 = (list(seconds) for seconds in zip(*found.seconds, strict=True))
    speed = ratio(fp32, int8)
    interval = widened(Difference(speed.value, interval_of(resampled({"": speed})[""]), 1.0), len(fp32))
    speeds = [found.inputs / bench.median(seconds) for seconds in (fp32, int8)]
    rows.append(
        {
            "measured": "sentences/CPU s, one thread", "fp32": speeds[0], "int8": speeds[1],
            "times as fast": speed.value, "95 % from": interval.low, "to": interval.high,
        }
    )  # fmt: skip
    return rows


# The model, its inputs, and the turns.


def packtrain(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "packtrain", *arguments], check=True, capture_output=True)


def train(recipe: str, store: Path, settings: Sequence[str]) -> None:
    given = [word for setting in settings for word in ("--set", setting)]
    packtrain("run", str(bench.EXAMPLES / f"{recipe}.yaml"), "--set", f"store={store}", *given)


def export(recipe: str, store: Path, folder: Path, *options: str) -> Path:
    # Of a hardly trained model all outputs differ a little, so the tolerance is not what this measures.
    what = ["export", RUNS[recipe], "--store", str(store), "-o", str(folder), "--checkpoint", "last"]
    packtrain(*what, "--samples", "50", "--tolerance", "100", *options)
    return folder


def task_of(recipe: str, directory: Path, count: int) -> Task:
    data = bench.EXAMPLES / "data"
    if recipe == "translate":
        sides = [
            gzip.decompress((data / "en-de" / f"test.{side}.gz").read_bytes()).decode().splitlines()[:count]
            for side in ("en", "de")
        ]
        return Task(recipe, *sides)
    paths, labels = [], []
    with tarfile.open(data / "photos" / "valid.tar") as outer:
        for member in outer.getmembers():
            label, content = Path(member.name).stem, outer.extractfile(member)
            assert content is not None
            with tarfile.open(fileobj=io.BytesIO(content.read())) as inner:
                for image in inner.getmembers()[: max(1, count // 10)]:
                    path = directory / label / Path(image.name).name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    pixels = inner.extractfile(image)
                    assert pixels is not None
                    path.write_bytes(pixels.read())
                    paths.append(str(path))
                    labels.append(label)
    return Task(recipe, paths, labels)


def start_seconds(recipe: str, place: Path, one_input: str) -> float:
    what = [str(place)] if (place / "model.json").exists() else [RUNS[recipe], "--store", str(place)]
    started = time.perf_counter()
    packtrain("predict", *what, one_input)
    return time.perf_counter() - started


def measured(kind: str, place: Path, file: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--contender", kind, str(place), str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(name: str, task: Task, rounds: Sequence[dict[str, Any]], starts: Sequence[float]) -> dict[str, object]:
    def middle(of: str) -> float:
        return bench.median([float(one[of]) for one in rounds])

    count, noun = len(task.inputs), "images" if task.recipe == "classify" else "sentences"
    row: dict[str, object] = {
        "contender": name, f"{noun}/CPU s": count / middle("cpu"), f"{noun}/s": count / middle("wall"),
    }  # fmt: skip
    if middle("tokens"):
        row["tokens/s"] = middle("tokens") / middle("wall")
    start = bench.median(starts) if starts else ""
    return {**row, **task.score(rounds[0]["outputs"]), "start s": start, "MB": middle("megabytes")}


@dataclass(frozen=True)
class Comparison:
    """What each contender took for the task in each round, and the seconds of its starts."""

    task: Task
    rounds: dict[str, list[dict[str, Any]]]
    starts: dict[str, list[float]]


def compare(task: Task, store: Path, directory: Path, turns: int) -> Comparison:
    contenders: dict[str, tuple[str, Path]] = {}
    for number, (name, options) in enumerate(FORMS[task.recipe].items()):
        contenders[name] = ("model", export(task.recipe, store, directory / str(number), *options))
    contenders["the run, torch eager with a cache"] = ("run", store)
    for name, kind in LIMITS[task.recipe].items():
        contenders[name] = (kind, directory / "0")
    file = directory / "inputs.txt"
    file.write_text("".join(f"{text}\n" for text in task.inputs))
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    starts: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, (kind, place) in contenders.items():
            rounds[name].append(measured(kind, place, file))
            if kind in ("model", "run"):
                starts[name].append(start_seconds(task.recipe, place, task.inputs[0]))
    return Comparison(task, rounds, starts)


def parser() -> argparse.ArgumentParser:
    arguments = bench.parser(__doc__, rounds=3)
    arguments.add_argument("what", nargs="?", choices=["translate", "int8", "classify", "serve"], default="translate")
    arguments.add_argument("--inputs", type=int, default=800)
    arguments.add_argument("--store", type=Path, help="with the run of the example; without it one is trained")
    arguments.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for the training")
    return arguments


Figures = Comparison | Precisions | tuple[serve_load.Load, serve_load.Load]


def measure(options: argparse.Namespace) -> tuple[float, Figures]:
    """Return the load of the machine after the training, and the comparison or the load on the service."""
    recipe = "classify" if options.what == "classify" else "translate"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        os.environ.setdefault("PACKTRAIN_CACHE", str(directory / "cache"))
        store = options.store or directory / "store"
        if options.store is None:
            train(recipe, store, options.set)
        load = os.getloadavg()[0]
        task = task_of(recipe, directory, options.inputs)
        if options.what == "serve":
            model = export("translate", store, directory / "model", "--int8")
            return load, serve_load.measure_serve(model, task.inputs, requests=options.inputs)
        if options.what == "int8":
            return load, compare_precisions(store, directory, task.inputs, options.rounds)
        return load, compare(task, store, directory, options.rounds)


def report(options: argparse.Namespace, result: tuple[float, Figures]) -> bench.Report:
    load, figures = result
    note = f"load {load:.1f} before"
    if isinstance(figures, Precisions):
        note = f"beam {BEAM}; {len(figures.seconds)} rounds; {note}"
        return bench.Report("int8 at home, CTranslate2", precision_rows(figures), [note])
    if not isinstance(figures, Comparison):
        return bench.Report("packtrain serve, CTranslate2 int8", serve_load.rows_of(figures), [note])
    rows = [row_of(name, figures.task, rounds, figures.starts[name]) for name, rounds in figures.rounds.items()]
    return bench.Report(f"{options.what} at home", rows, [f"beam {BEAM}; {note}"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contender"]:  # a process of its own
        contend(*sys.argv[2:])
    else:
        bench.main(parser(), measure, report)
