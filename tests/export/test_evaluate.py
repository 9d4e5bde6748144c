"""Evaluations of runs and of exported models, in this process and through the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pack.corpus import GREETINGS, QUESTIONS, job_of, write_pairs
from pack.pictures import photo, saved
from pack.rawsets import write
from packtrain.errors import Mistake, NotFinished, NotFound
from packtrain.export.bootstrap import Difference, Interval
from packtrain.export.evaluate import (
    EvaluateOptions,
    ModelScores,
    SampledScore,
    Subject,
    compare,
    evaluate,
    folder_subject,
    run_subject,
)
from packtrain.export.export import ExportOptions, export_run
from packtrain.job import Job
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.recipes import RECIPES
from packtrain.run.run import Run
from parts.command import Packtrain
from parts.models import commit_model, packed_run, recipe_on
from recipes.captioned import THINGS, write_set
from recipes.learn import learn

TEXT = {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
CONSTANT: dict[str, Any] = {"duration": "10 steps", "schedule": {"constant": {"rate": 0.003}}}
TOKENS, IMAGES = {**CONSTANT, "batch": "64 tokens"}, {**CONSTANT, "batch": "8 samples", "size": 32}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def photos(folder: Path, *classes: str) -> str:
    for number in range(4 * len(classes)):
        data = saved(photo(40 + number, 60 - number, seed=number), "JPEG")
        write(folder / classes[number % len(classes)] / f"{number}.jpg", data)
    return str(folder)


def small_job(recipe: str, folder: Path) -> tuple[Job, list[str]]:
    """Return a job whose validation data is also what `--data` gets, without its format."""
    if recipe == "translate":
        return job_of(folder, model=TEXT, train=TOKENS), [str(folder / "valid.tsv")]
    if recipe == "chat":
        paths = [write_pairs(folder / "talk.tsv", [*GREETINGS, *QUESTIONS])]
        source, model, train = {"dialogue": paths}, TEXT, TOKENS
    elif recipe == "classify":
        paths = [photos(folder / "photos", "cat", "dog", "elk")]
        source, model, train = {"imagenet": paths}, {"size": "tiny", "width": 8}, IMAGES
    else:
        paths = write_set(folder, THINGS, "things")
        source, model, train = {"coco": paths}, {"size": "tiny", "width": 16, "attention": 12}, IMAGES
    sections = {"name": recipe, "recipe": recipe, "model": model, "train": train}
    vocabulary = {} if recipe == "classify" else {"vocabulary": 300}
    return Job.model_validate({**sections, "data": {"train": [source], "valid": [source], **vocabulary}}), paths


def evaluated(*subjects: Subject, **options: Any) -> list[ModelScores]:
    return evaluate(subjects, EvaluateOptions(**options), PlainProgress(lambda _: None), InProcess())


def values(found: ModelScores) -> dict[str, float]:
    return {name: score.value for name, score in found.scores.items()}


@pytest.fixture(scope="module", params=RECIPES)
def any_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    folder = tmp_path_factory.mktemp(request.param)
    job, paths = small_job(request.param, folder)
    run = packed_run(folder, job)
    commit_model(run, folder, 10)
    return run, paths


def test_later_data_is_scored_as_the_same_data_of_the_run(any_run: tuple[Run, list[str]]) -> None:
    run, paths = any_run
    subject = run_subject(run)
    [own], [later] = evaluated(subject), evaluated(subject, data=paths)
    assert own.split == "valid"
    assert own.samples == later.samples == subject.recipe.count("valid")
    assert values(later) == pytest.approx(values(own))
    assert later.shown
    best = own.scores[subject.recipe.best_metric]
    assert best.interval is not None
    assert best.interval.low <= best.value <= best.interval.high
    assert [name for name, score in own.scores.items() if score.interval is None] == [
        name for name in own.scores if name.startswith("distinct")
    ]


def test_predictions_name_each_sample_and_have_its_own_scores(any_run: tuple[Run, list[str]]) -> None:
    run, paths = any_run
    [found] = evaluated(run_subject(run), data=paths, predictions=True)
    assert [row["sample"] for row in found.predictions] == list(range(found.samples))
    places = [(row["source"], row["file"], row.get("line")) for row in found.predictions]
    name = Path(paths[0]).name
    if run.job.recipe in ("translate", "chat"):
        assert places == [(0, name, line) for line in range(1, found.samples + 1)]
        assert all({"input", "reference", "prediction"} < row.keys() for row in found.predictions)
    elif run.job.recipe == "classify":
        classes = ("cat", "dog", "elk")
        assert set(places) == {(0, f"{classes[number % 3]}/{number}.jpg", None) for number in range(12)}
        assert all(row["file"].startswith(f"{row['reference']}/") for row in found.predictions)
        right = [100.0 * (row["prediction"] == row["reference"]) for row in found.predictions]
        assert [row["scores"]["top1"] for row in found.predictions] == right
        assert all(0 < row["confidence"] <= 1 for row in found.predictions)
    else:
        assert {file for _, file, _ in places} == {file.name for file in Path(paths[1]).iterdir()}
        assert all(row["references"] for row in found.predictions)
    for score in {"top1", "cider"} & found.scores.keys():  # means over samples
        mean = np.mean([row["scores"][score] for row in found.predictions])
        assert mean == pytest.approx(found.scores[score].value)
    assert all("loss" in row["scores"] for row in found.predictions)


def test_a_line_is_that_of_the_file_also_after_lines_that_are_dropped(tmp_path: Path) -> None:
    pairs = [*GREETINGS[:2], ("", "leer"), ("word " * 20_000, "viele"), *GREETINGS[2:]]
    job = job_of(tmp_path, model=TEXT, train=TOKENS)
    run = packed_run(tmp_path, job)
    commit_model(run, tmp_path, 1)
    new = write_pairs(tmp_path / "long.tsv", pairs)
    [found] = evaluated(run_subject(run), data=[new], predictions=True, allow_drops=True)
    lines = [row["line"] for row in found.predictions]
    assert lines == [number for number in range(1, len(pairs) + 1) if number != 4]
    assert [row["reference"] for row in found.predictions] == [pairs[line - 1][1] for line in lines]


def test_a_line_of_held_out_data_is_that_of_the_training_file(tmp_path: Path) -> None:
    pairs = [(f"{source} {number}", f"{target} {number}") for number in range(20) for source, target in GREETINGS]
    train = [{"bitext": write_pairs(tmp_path / "all.tsv", pairs)}]
    job = job_of(tmp_path, model=TEXT, train=TOKENS, data={"train": train, "valid": "10 %", "vocabulary": 300})
    run = packed_run(tmp_path, job)
    commit_model(run, tmp_path, 1)
    [found] = evaluated(run_subject(run), samples=4, predictions=True)
    assert len(found.predictions) == 4
    for row in found.predictions:
        assert row["file"] == "all.tsv"
        assert (row["input"], row["reference"]) == pairs[row["line"] - 1]


def test_an_evaluation_is_that_of_training(any_run: tuple[Run, list[str]], tmp_path: Path) -> None:
    from packtrain.train.engine import Engine
    from packtrain.train.evaluator import evaluate as evaluate_in_training
    from packtrain.train.world import World

    run, _ = any_run
    [found] = evaluated(run_subject(run))
    recipe = recipe_on(run, tmp_path)
    engine = Engine(recipe, run.job.train, World())
    engine.evaluation_model().load_state_dict(run_subject(run).load()[0].state_dict())
    scores = evaluate_in_training(engine, recipe, World(), "valid", None, run.job.evaluate.beam)
    assert scores is not None
    assert values(found) == pytest.approx(scores.values, rel=1e-4)
    assert {name: found.scores[name].signature for name in scores.signatures} == scores.signatures


# Choices of data, checkpoints and samples.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a store: greetings-1 is trained at step 300, and greetings-2 has one step."""
    folder = tmp_path_factory.mktemp("place")
    train = {"duration": "300 steps", "batch": "64 tokens", "schedule": {"constant": {"rate": 0.003}}}
    # Sentences with n-grams of every length: without them, BLEU of a resample would be 0.
    valid = write_pairs(folder / "seen.tsv", GREETINGS[-2:] * 4)
    data = {
        "train": [{"bitext": write_pairs(folder / "train.tsv", GREETINGS)}],
        "valid": [{"bitext": valid}],
        "vocabulary": 300,
    }
    run = packed_run(folder, job_of(folder, model=TEXT, train=train, data=data))
    commit_model(run, folder, 1)
    commit_model(run, folder, 300, trained=learn(recipe_on(run, folder), 300))
    # Another vocabulary, so that its pack is another one of the same validation data.
    more = {**data, "vocabulary": 310}
    other = packed_run(folder, job_of(folder, model=TEXT, train=train, data=more))
    commit_model(other, folder, 7, seed=3)
    without = {name: value for name, value in data.items() if name != "valid"}
    commit_model(packed_run(folder, job_of(folder, name="bare", model=TEXT, train=train, data=without)), folder, 2)
    packed_run(folder, job_of(folder, name="young", model=TEXT, train=train, data=data))
    write_pairs(folder / "new.tsv", [*QUESTIONS, *GREETINGS])
    write_pairs(folder / "known.tsv", GREETINGS)
    write(folder / "new.en", "".join(f"{source}\n" for source, _ in GREETINGS))
    write(folder / "new.de", "".join(f"{target}\n" for _, target in GREETINGS))
    write(folder / "short.de", "hallo\n")
    write(folder / "empty.tsv", "")
    job, _ = small_job("classify", folder)
    commit_model(packed_run(folder, job), folder, 4)
    photos(folder / "others", "cat", "dog")
    photos(folder / "strange", "cat", "dog", "yak")
    run = packed_run(folder, small_job("chat", folder)[0])
    commit_model(run, folder, 5)
    return folder


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(packtrain: Packtrain, place: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `packtrain evaluate` in this process, which has already imported torch."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("packtrain.cli.reports.Processes", InProcess)

    def call(*arguments: str) -> tuple[int, str, str]:
        done = packtrain("evaluate", *arguments)
        return done.returncode, done.stdout, done.stderr

    return call


def test_a_trained_run_is_evaluated_with_intervals_signatures_and_samples(command: Call) -> None:
    code, out, err = command("greetings-1")
    assert (code, err) == (0, "")
    assert "greetings-1 (step 300): 8 samples of valid in " in out
    assert "95 % interval" in out
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in out
    assert "  reference   wie geht es dir heute\n  prediction  wie geht es dir heute\n" in out


def test_everything_is_in_the_json(command: Call) -> None:
    code, out, _ = command("greetings-1", "--data", "new.tsv", "--samples", "6", "--beam", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["model"], found["recipe"], found["step"]) == ("greetings-1", "translate", 300)
    assert (found["data"], found["split"]) == (["new.tsv"], None)
    assert (found["samples"], found["available"], found["beam"]) == (6, 13, 2)
    assert found["bootstrap"] == {"resamples": 1000, "seed": 12345}
    low, high = found["scores"]["bleu"]["interval"]
    assert low <= found["scores"]["bleu"]["value"] <= high
    assert low < high
    assert found["scores"]["bleu"]["signature"].startswith("nrefs:1")
    assert found["examples"][0]["input"] == "is it cold"


def test_predictions_of_both_models_are_lines_of_json(command: Call, place: Path) -> None:
    code, out, _ = command(
        "greetings-1", "--data", "new.tsv", "--against", "greetings-2", "--predictions", "found.jsonl"
    )
    assert code == 0
    assert out.endswith("Predictions: found.jsonl\n")
    rows = [json.loads(line) for line in (place / "found.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == ["greetings-1"] * 13 + ["greetings-2"] * 13
    assert rows[0].keys() == {"model", "sample", "source", "file", "line", "input", "reference", "prediction", "scores"}
    assert (rows[0]["file"], rows[0]["line"], rows[0]["input"]) == ("new.tsv", 1, QUESTIONS[0][0])
    assert rows[0]["scores"].keys() == {"loss", "bleu", "chrf"}


def test_two_files_are_aligned_text(command: Call) -> None:
    one = json.loads(command("greetings-1", "--data", "new.en", "--data", "new.de", "--json")[1])
    two = json.loads(command("greetings-1", "--data", "{bitext: [new.en, new.de]}", "--json")[1])
    assert one["samples"] == 8
    assert one["scores"] == two["scores"]


def test_a_checkpoint_is_chosen_by_its_step(command: Call) -> None:
    assert json.loads(command("greetings-1", "--checkpoint", "1", "--json")[1])["step"] == 1
    code, out, err = command("greetings-1", "--checkpoint", "2")
    assert (code, out) == (NotFound.exit_code, "")
    assert "greetings-1 has no checkpoint of step 2; it has 1, 300" in err


# Comparisons.


def test_a_trained_model_is_better_than_an_untrained_one_on_the_same_samples(command: Call) -> None:
    code, out, _ = command("greetings-2", "--against", "greetings-1")
    assert code == 0
    verdict = out.splitlines()[-1]
    assert verdict.startswith("greetings-1 is better by ")
    assert " bleu (95 % interval " in verdict
    assert verdict.endswith("p = 0.001)")
    found = json.loads(command("greetings-1", "--against", "greetings-2", "--data", "seen.tsv", "--json")[1])
    assert found["verdict"].startswith("greetings-1 is better by ")
    assert found["differences"]["bleu"]["value"] < 0
    assert found["differences"]["bleu"]["significant"]
    assert "loss" not in found["differences"], "it is per token, and their tokens differ"
    assert found["against"]["samples"] == found["samples"] == 8


def test_a_model_does_not_differ_from_itself(command: Call) -> None:
    _, out, _ = command("greetings-1", "--against", "greetings-1")
    assert out.splitlines()[-1].startswith("no difference beyond noise: 0.00 bleu")


def made(name: str, recipe: Any, metric: str, scores: list[float]) -> ModelScores:
    subject = Subject(name, recipe, lambda: None)  # type: ignore[arg-type,return-value]
    given = np.array(scores)
    score = SampledScore(float(given.mean()), Interval(0.0, 0.0))
    return ModelScores(subject, 1, "test", 3, 3, 1, 0.0, {metric: score}, (), resamples={metric: given})


@pytest.mark.parametrize(
    ("metric", "recipe", "own", "winner"),
    [("bleu", "greetings", 30.0, "b"), ("perplexity", "chat", 30.0, "a"), ("perplexity", "chat", 40.0, "b")],
)
def test_a_verdict_names_the_better_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, metric: str, recipe: str, own: float, winner: str
) -> None:
    from packtrain.run.run import open_run
    from packtrain.store import open_store

    known = recipe_on(open_run(open_store(str(place / "store")), recipe), place)
    noise = np.linspace(-1, 1, 1000)
    pair = made("a", known, metric, list(own + noise)), made("b", known, metric, list(35.0 + 0.5 * noise))
    assert compare(*pair).verdict.startswith(f"{winner} is better by 5.00 {metric} (95 % interval 4.5")


def test_noise_is_said_to_be_noise(place: Path) -> None:
    from packtrain.run.run import open_run
    from packtrain.store import open_store

    known = recipe_on(open_run(open_store(str(place / "store")), "greetings"), place)
    noise = np.linspace(-2, 2, 1000)
    found = compare(made("a", known, "bleu", [30.0] * 1000), made("b", known, "bleu", list(30.5 + noise)))
    assert isinstance(found.differences["bleu"], Difference)
    assert found.verdict.startswith("no difference beyond noise: 0.5 bleu (95 % interval -1.")


# Exported models.


@pytest.fixture(scope="module")
def exported(place: Path) -> Path:
    from packtrain.run.run import open_run
    from packtrain.store import open_store

    run = open_run(open_store(str(place / "store")), "greetings-1")
    export_run(run, place / "model", ExportOptions(choice="last"), lambda _: None)
    return place / "model"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["packtrain", "evaluate", *sys.argv[1:]]
from packtrain.cli import main
main()
"""


@pytest.mark.usefixtures("processes")
def test_an_exported_model_is_evaluated_without_torch_as_the_run_is(
    exported: Path, command: Call, tmp_path: Path
) -> None:
    # What it has not learned it translates almost at random: there the last bits decide, which differ.
    data = ["--data", str(exported.parent / "known.tsv"), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(exported), *data], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, trained = json.loads(done.stdout), json.loads(command("greetings-1", *data)[1])
    assert (found["model"], found["step"]) == (str(exported), 300)
    for name, score in trained["scores"].items():
        assert found["scores"][name]["value"] == pytest.approx(score["value"], abs=0.01)
        assert found["scores"][name]["interval"] == pytest.approx(score["interval"], abs=0.01)
    assert found["examples"] == trained["examples"]


def test_predictions_of_an_exported_model_are_those_of_its_run(exported: Path, command: Call, tmp_path: Path) -> None:
    found = {}
    for name in (str(exported), "greetings-1"):
        assert command(name, "--predictions", str(tmp_path / "found.jsonl"))[0] == 0
        rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
        found[name] = [{key: row[key] for key in ("file", "line", "input", "prediction")} for row in rows]
    assert found[str(exported)] == found["greetings-1"]
    assert found["greetings-1"][0]["file"] == "seen.tsv"


def test_an_exported_model_finds_its_splits_in_the_store_of_its_run(exported: Path, command: Call) -> None:
    code, out, _ = command(str(exported), "--against", "greetings-1")
    assert code == 0
    assert f"{exported} (step 300): 8 samples of valid" in out
    assert out.splitlines()[-1].startswith("no difference beyond noise")


def test_a_checkpoint_of_an_exported_model_cannot_be_chosen(exported: Path, command: Call) -> None:
    code, out, err = command(str(exported), "--data", "new.tsv", "--checkpoint", "best")
    assert (code, out) == (2, "")
    assert "--checkpoint: chooses one of a run; an exported model has only one" in err


def test_without_that_store_an_exported_model_needs_data(exported: Path, tmp_path: Path) -> None:
    from packtrain.store import open_store

    subject = folder_subject(exported, lambda: open_store(str(tmp_path / "none")))
    with pytest.raises(Mistake, match=r"the splits of greetings-1 are not in this store; pass --data, or --store"):
        evaluated(subject)


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["greetings-1", "--split", "test"], "--split test: greetings-1 has no such split; pass --split valid, or"),
        (["greetings-1", "--split", "train"], "--split: must be test or valid, not 'train'"),
        (["greetings-1", "--split", "valid", "--data", "new.tsv"], "--split: chooses among the model's own data"),
        (["bare-1"], "bare-1 has neither a test nor a valid split; pass --data"),
        (["greetings-1", "--data", "photos"], "--data photos: looks like imagenet data, but translate needs bitext"),
        (["greetings-1", "--data", "{folder: listed.jsonl}"], "listed.jsonl has labels, but translate needs pairs"),
        (["greetings-1", "--data", "empty.tsv"], "--data: no usable samples: the source is empty"),
        (["greetings-1", "--data", "new.en", "--data", "short.de"], "new.en has 8 lines and "),
        (["greetings-1", "--data", "{bitext: nothing.tsv}"], "nothing.tsv: No such file or directory"),
        (["greetings-1", "--data", "{bitext: 'store:x'}"], "--data: store: names no store here"),
        (["greetings-1", "--against", "classify-1"], "--against: classify-1 is a model of classify and greetings-1 on"),
        (["greetings-1", "--against", "other-1"], "the valid splits of greetings-1 and other-1 have different data"),
        (["classify-1", "--beam", "3"], "--beam: classify does not support it"),
        (["classify-1", "--data", "strange"], "class 'yak' is not among the 3 classes of the training data"),
        (["greetings-1", "--predictions", "photos"], "--predictions photos: is a directory"),
        (["greetings-1", "--predictions", "none/x"], "--predictions none/x: there is no directory none"),
        (["greetings-1", "--checkpoint", "newest"], "--checkpoint: must be best, last or the number of a step"),
    ],
)
def test_bad_requests_are_refused_in_one_line(place: Path, command: Call, arguments: list[str], words: str) -> None:
    write(place / "listed.jsonl", json.dumps({"image": "photos/cat/0.jpg", "label": "cat"}))
    if "other-1" in arguments and not (place / "store/runs/other-1").exists():
        own = place / "other"
        own.mkdir()
        commit_model(packed_run(place, job_of(own, name="other", model=TEXT, train=TOKENS)), own, 1)
    code, out, err = command(*arguments)
    assert (code, out) == (2, ""), err
    assert words in err
    assert err.count("\n") == 1


def test_a_run_without_a_checkpoint_is_not_finished(command: Call) -> None:
    code, out, err = command("young-1", "--data", "nothing.tsv")
    assert (code, out) == (NotFinished.exit_code, "")
    assert err == "packtrain: young-1 has no checkpoint yet; see `packtrain show young-1`\n"


def test_classes_that_the_data_lacks_are_noted(command: Call) -> None:
    code, out, _ = command("classify-1", "--data", "others")
    assert code == 0
    assert "the data has 2 of the 3 classes of the model" in out


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    code, out, err = command("greetings-1")
    assert (code, out) == (2, "")
    assert err.startswith(
        "packtrain: evaluate needs sacrebleu for the scores of translate; run `pip install 'sacrebleu"
    )
    assert "torch" not in err
    assert command("classify-1")[0] == 0
