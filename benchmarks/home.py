"""Speed, scores, memory and cold start of models at home: exported forms against the run in torch and plain runtimes.

    python benchmarks/home.py [--json] [--rounds 3] [--seconds 120] [--sentences 800]

Trains the example of translation for some seconds of CPU time, exports it, and translates test sentences with a beam of
4. Each contender is a process of its own; they take turns. Time is CPU time after a first batch, with the wall time
beside it; start is the whole command for one sentence. The limit is CTranslate2 called by hand with tokens.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import bench

HERE = Path(__file__).parent
BEAM = 4


# What a contender does, in its own process.


def contend(kind: str, place: str, file: str) -> None:
    """Translate the lines of a file; print what it took."""
    from packtrain.export.predict import DecodeOptions, Predictor, load_predictor, open_model
    from packtrain.run.run import open_run
    from packtrain.store import open_store

    texts = Path(file).read_text().splitlines()
    predictor = load_predictor(open_run(open_store(place), None)) if kind == "run" else open_model(Path(place))
    work: Callable[[Sequence[str]], list[str]]
    if kind == "by hand":
        work = by_hand(predictor, Path(place))
    else:
        work = lambda given: [made.text for made in predictor.predict(given, DecodeOptions(beam=BEAM))]  # noqa: E731
    assert isinstance(predictor, Predictor)
    work(texts[:32])
    processor, wall = time.process_time(), time.perf_counter()
    outputs = work(texts)
    spent = {"cpu": time.process_time() - processor, "wall": time.perf_counter() - wall}
    tokens = sum(len(row) for row in predictor.recipe.pack.vocabulary.encode(outputs))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps({**spent, "tokens": tokens, "megabytes": peak, "outputs": outputs}))


def by_hand(predictor: object, folder: Path) -> Callable[[Sequence[str]], list[str]]:
    """Return the least that a script with CTranslate2 does: tokens in, tokens out."""
    import ctranslate2

    from packtrain.export.predict import Predictor
    from packtrain.recipes.pairs import PairRecipe

    assert isinstance(predictor, Predictor)
    recipe = predictor.recipe
    assert isinstance(recipe, PairRecipe)
    threads = len(os.sched_getaffinity(0))
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), inter_threads=threads, intra_threads=1)

    def work(texts: Sequence[str]) -> list[str]:
        rows = [[str(token) for token in row] for row in recipe.encode(texts)]
        found = translator.translate_batch(
            rows,
            max_batch_size=4096,
            batch_type="tokens",
            beam_size=BEAM,
            length_penalty=0.6,
            max_decoding_length=max(map(len, rows)) + 50,
        )
        return recipe.pack.vocabulary.decode([[int(token) for token in one.hypotheses[0]] for one in found])

    return work


# The model, and the turns.


def train(directory: Path, seconds: float) -> None:
    """Train the example for about that long."""
    steps = max(5, int(seconds * 8))
    command = [sys.executable, "-m", "packtrain", "run", str(HERE.parent / "examples" / "translate.yaml")]
    settings = [
        f"store={directory / 'store'}", f"train.duration={steps} steps", "fleet.workers=1", "evaluate.every=null",
        "evaluate.samples=20",
    ]  # fmt: skip
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, capture_output=True)


def export(directory: Path, name: str, *options: str) -> Path:
    folder = directory / name
    command = [sys.executable, "-m", "packtrain", "export", "en-de", "--store", str(directory / "store")]
    # Of an untrained model all outputs differ a little, so the tolerance is not what this measures.
    command += ["-o", str(folder), "--checkpoint", "last", "--samples", "50", "--tolerance", "100", *options]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def start_seconds(place: Path) -> float:
    command = [sys.executable, "-m", "packtrain", "predict"]
    command += ["en-de", "--store", str(place)] if place.name == "store" else [str(place)]
    started = time.perf_counter()
    subprocess.run([*command, "The file is open."], check=True, capture_output=True)
    return time.perf_counter() - started


def measured(kind: str, place: Path, file: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, __file__, "--contender", kind, str(place), str(file)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(
    name: str, rounds: Sequence[dict[str, object]], starts: Sequence[float], references: list[str]
) -> dict[str, object]:
    from sacrebleu.metrics.bleu import BLEU

    def middle(of: str) -> float:
        return bench.median([float(str(one[of])) for one in rounds])

    outputs = rounds[0]["outputs"]
    assert isinstance(outputs, list)
    return {
        "contender": name,
        "sentences/CPU s": len(outputs) / middle("cpu"),
        "sentences/s": len(outputs) / middle("wall"),
        "tokens/s": middle("tokens") / middle("wall"),
        "BLEU": BLEU().corpus_score(outputs, [references]).score,
        "start s": bench.median(starts) if starts else "",
        "MB": middle("megabytes"),
    }


def main() -> None:
    arguments = bench.parser(__doc__)
    arguments.set_defaults(rounds=3)
    arguments.add_argument("--seconds", type=float, default=120.0, help="of training")
    arguments.add_argument("--sentences", type=int, default=800)
    arguments.add_argument("--contender", nargs=3, metavar=("KIND", "PLACE", "FILE"), help="only this, for itself")
    options = arguments.parse_args()
    if options.contender:
        contend(*options.contender)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        os.environ.setdefault("PACKTRAIN_CACHE", str(directory / "cache"))
        train(directory, options.seconds)
        folders = {
            "exported, CTranslate2 fp32": export(directory, "fp32"),
            "exported, CTranslate2 int8": export(directory, "int8", "--int8"),
            "exported, ONNX Runtime fp32": export(directory, "onnx", "--format", "onnx"),
        }
        contenders = {name: ("model", folder) for name, folder in folders.items()}
        contenders["the run, torch"] = ("run", directory / "store")
        contenders["CTranslate2 by hand, fp32"] = ("by hand", directory / "fp32")
        file, references = lines(directory, options.sentences)
        rounds: dict[str, list[dict[str, object]]] = {name: [] for name in contenders}
        starts: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, (kind, place) in contenders.items():
                rounds[name].append(measured(kind, place, file))
                if kind != "by hand":
                    starts[name].append(start_seconds(place))
    rows = [row_of(name, rounds[name], starts[name], references) for name in contenders]
    bench.show("Translation at home", rows, [f"beam {BEAM}; load {os.getloadavg()[0]:.1f}"], options.json)


def lines(directory: Path, count: int) -> tuple[Path, list[str]]:
    """Return a file of the first test sentences, and their references."""
    import gzip

    data = HERE.parent / "examples" / "data" / "en-de"
    sides = [gzip.decompress((data / f"test.{side}.gz").read_bytes()).decode().splitlines() for side in ("en", "de")]
    file = directory / "test.en"
    file.write_text("".join(f"{line}\n" for line in sides[0][:count]))
    return file, sides[1][:count]


if __name__ == "__main__":
    main()
