"""Files that options of a model name, such as pretrained weights: a run carries them along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pack.pictures import photo, saved
from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.export.predict import load_predictor
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.recipes import Recipe, recipe_of
from packtrain.recipes.classify import SIZES
from packtrain.recipes.resnet import ResNet
from packtrain.run.run import Run
from packtrain.store import open_store
from packtrain.train.engine import Engine
from packtrain.train.world import World
from parts.models import commit_model

JOB = """
name: photos
recipe: classify
data: {train: {imagenet: photos}}
model: {size: tiny, weights: first.safetensors, words: words.txt}
train: {duration: 2 steps, batch: 4 samples, size: 32, schedule: {constant: {rate: 0.1}}}
"""

pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a job file and the files it names, away from the working directory."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for number in range(4):
        path = tmp_path / "job" / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(40, 40, seed=number), "JPEG"))
    torch.manual_seed(5)
    weights = {name: value.contiguous() for name, value in ResNet(SIZES["tiny"], 2).state_dict().items()}
    save_file(weights, tmp_path / "job" / "first.safetensors")
    (tmp_path / "job" / "words.txt").write_text("a ant, worker ant\nb bear\n")
    (tmp_path / "job" / "job.yaml").write_text(JOB)
    return tmp_path / "job"


def created(folder: Path) -> Run:
    return create(check(load(folder / "job.yaml"), PlainProgress(lambda _: None)))


def recipe_on(run: Run, cache: Path) -> Recipe:
    return recipe_of(run)(run.job, Pack(run.store, run.pack_name(), cache))


def started(recipe: Recipe) -> nn.Module:
    """Return the model at the start of a run."""
    engine = Engine(recipe, recipe.job.train, World())
    engine.load_initial_weights()
    return engine.model


def test_a_run_keeps_its_files_after_the_originals_are_deleted(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = ResNet(SIZES["tiny"], 2).state_dict()
    run = created(folder)
    for name in ("first.safetensors", "words.txt"):
        (folder / name).unlink()
    assert str(run.job.model.options["weights"]).startswith("store:files/")
    recipe = recipe_on(run, tmp_path / "worker")
    model = started(recipe)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    path = str(folder / "photos" / "a" / "0.jpg")
    [found] = recipe.predict(model.eval(), [path], recipe.decoding)
    assert {row["class"] for row in found.details["top5"]} == {"ant", "bear"}


def test_the_same_file_is_stored_once(folder: Path) -> None:
    first, second = created(folder), created(folder)
    assert first.job.model == second.job.model
    assert len(list(first.store.list("files/"))) == 2


def test_a_missing_file_is_an_error_with_its_line(folder: Path) -> None:
    (folder / "first.safetensors").unlink()
    with pytest.raises(Mistake, match=r"job\.yaml:5: model\.weights: there is no file .*/job/first\.safetensors$"):
        create(check(load(folder / "job.yaml"), PlainProgress(lambda _: None)))


def test_a_missing_object_is_an_error_with_its_field(folder: Path) -> None:
    loaded = load(folder / "job.yaml", ["model.weights=store:raw/none"])
    with pytest.raises(Mistake, match=r"model\.weights: store:raw/none: not found in "):
        create(check(loaded, PlainProgress(lambda _: None)))


def test_a_file_that_is_lost_or_changed_in_the_store_is_an_error(folder: Path, tmp_path: Path) -> None:
    run = created(folder)
    key = str(run.job.model.options["weights"]).removeprefix("store:")
    run.store.put(key, b"something else")
    with pytest.raises(PacktrainError, match=rf"^{key} in .* is damaged \(wrong hash\); start the job again$"):
        started(recipe_on(run, tmp_path / "one"))
    run.store.delete(key)
    with pytest.raises(NotFound, match=rf"^{key} not found in .*; the run needs it$"):
        started(recipe_on(run, tmp_path / "two"))


def test_a_model_from_a_checkpoint_needs_no_initial_weights(folder: Path, tmp_path: Path) -> None:
    run = created(folder)
    key = str(run.job.model.options["weights"]).removeprefix("store:")
    commit_model(run, tmp_path, step=3)
    run.store.delete(key)
    assert load_predictor(run).step == 3


def test_weights_of_another_size_are_refused_before_there_is_a_run(folder: Path) -> None:
    loaded = load(folder / "job.yaml", ["model.width=16"])
    named = r"a ResNet-10 \(1-1-1-1 basic blocks\) of width 32, but the model is a ResNet-10 .* of width 16; change"
    with pytest.raises(Mistake, match=rf"job\.yaml:5: model\.weights: the file has {named}"):
        create(check(loaded, PlainProgress(lambda _: None)))
    assert not list(open_store(loaded.job.store).list(""))


def test_what_is_taken_of_a_file_is_said_before_a_run_starts(folder: Path) -> None:
    path = folder / "photos" / "c" / "4.jpg"  # another class than the file's two
    path.parent.mkdir()
    path.write_bytes(saved(photo(40, 40, seed=4), "JPEG"))
    said: list[str] = []
    create(
        check(load(folder / "job.yaml"), PlainProgress(lambda _: None)),
        lambda label, line: said.append(f"{label}: {line}"),
    )
    assert said[-2:] == [
        "from: model.weights: a ResNet-10 (1-1-1-1 basic blocks) with torchvision's names",
        "from: 60 tensors; new: fc.weight, fc.bias",
    ]


def test_a_job_that_was_changed_in_the_store_cannot_have_files_of_a_machine_read(folder: Path, tmp_path: Path) -> None:
    run = created(folder)
    options = {**run.job.model.options, "weights": str(folder / "first.safetensors")}
    changed = run.job.model_copy(update={"model": run.job.model.model_copy(update={"options": options})})
    run.store.put(run.key("job.json"), changed.model_dump_json().encode())
    with pytest.raises(PacktrainError, match=r"the job names the file '/.*first\.safetensors', which is not in"):
        started(recipe_on(Run(run.store, run.name), tmp_path / "worker"))
