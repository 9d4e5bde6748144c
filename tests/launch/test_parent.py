"""A run that starts from a checkpoint of another one: a fork goes on as that one would have, weights start anew."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.errors import Mistake, NotFinished
from packtrain.export.predict import load_model
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.launch.parent import ParentName, read_name
from packtrain.observe.evidence import gather
from packtrain.observe.history import read_points
from packtrain.pack.build import PlainProgress
from packtrain.recipes import recipe_class
from packtrain.report.markdown import markdown
from packtrain.report.render import render
from packtrain.run.checkpoint import CorruptCheckpoint, commit, committed, fetch, file_key, manifest_key, part_name
from packtrain.run.run import Run
from packtrain.store import Store, open_store
from packtrain.train.checkpointer import BackgroundCommitter
from packtrain.train.control import Control
from packtrain.train.state import Snapshot
from packtrain.train.tensors import save_tensors, shard_rows
from packtrain.train.trainer import Trainer
from packtrain.train.worker import _pack_of
from packtrain.train.world import World
from parts.runs import write_files

MODEL = {"size": "tiny", "width": 16, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 1}
WORDS = ("one", "two", "three", "four", "five", "six")

pytestmark = pytest.mark.usefixtures("processes")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("en-de-1", ParentName(None, "en-de-1")),
        ("en-de-1:300", ParentName(None, "en-de-1", 300)),
        ("en-de-1:best", ParentName(None, "en-de-1", "best")),
        ("../store/en-de-1:last", ParentName("../store", "en-de-1", "last")),
        ("s3://bucket/prefix/en-de-1", ParentName("s3://bucket/prefix", "en-de-1")),
        ("s3://bucket/en-de-1:7", ParentName("s3://bucket", "en-de-1", 7)),
    ],
)
def test_a_checkpoint_is_named_by_its_run_and_step(text: str, name: ParentName) -> None:
    assert read_name(text) == name


@pytest.mark.parametrize("text", ["", "a:", "a:x", "store/", "/a", "a:-1", ":5"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(Mistake):
        read_name(text)


@pytest.fixture(autouse=True)
def every_save_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a save that waits would be replaced by the next one."""
    add = BackgroundCommitter.add

    def add_and_wait(committer: BackgroundCommitter, snapshot: Snapshot, score: float | None) -> None:
        add(committer, snapshot, score)
        while committer._waiting:
            time.sleep(0.005)

    monkeypatch.setattr(BackgroundCommitter, "add", add_and_wait)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the data of two small jobs."""
    for name, pairs in {"train": 24, "valid": 4, "other": 20}.items():
        lines = [" ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 5)) for number in range(pairs)]
        (tmp_path / f"{name}.en").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / f"{name}.de").write_text("".join(f"{line.upper()} {name}\n" for line in lines))
    return tmp_path


def write_job(folder: Path, name: str = "small", split: str = "train", **sections: Any) -> Path:
    job = {
        "name": name,
        "recipe": "translate",
        "store": str(folder / "store"),
        "data": {
            "train": [{"bitext": [f"{split}.en", f"{split}.de"]}],
            "valid": [{"bitext": ["valid.en", "valid.de"]}],
            "vocabulary": 300,
        },
        "model": MODEL,
        "checkpoint": {"every": "2 steps", "keep_last": 10},
        "evaluate": {"every": "4 steps", "samples": 2, "beam": 1},
        **sections,
        "train": {
            "duration": "8 steps",
            "batch": "40 tokens",
            "schedule": {"constant": {"rate": 0.01}},
            "ema": None,
            **sections.get("train", {}),
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))
    return path


def made(path: Path, beginning: str | None = None, fresh: bool = False, overrides: tuple[str, ...] = ()) -> Run:
    parent = None if beginning is None else read_name(beginning, fresh=fresh)
    new = check(load(path, overrides), PlainProgress(lambda _: None), parent)
    return create(new, lambda _, line: notes.append(line))


notes: list[str] = []


def trained(run: Run, folder: Path) -> Run:
    run = Run(run.store, run.name)
    recipe = recipe_class("translate")(run.job, _pack_of(run))
    Trainer(run, recipe, World(), 1, Control(folder / f"control-{run.name}")).train()
    return run


def last_files(run: Run) -> dict[str, str]:
    return {file.name: file.sha256 for file in committed(run)[-1].files if file.name != "state.json"}


def tensors(run: Run, folder: Path, which: int, name: str) -> dict[str, torch.Tensor]:
    where = folder / f"fetched-{run.name}-{which}"
    where.mkdir()
    fetch(run, committed(run)[which], where)
    return load_file(where / name)


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(str(folder / "store"), create=True)


def test_a_fork_goes_on_as_the_run_would_have(folder: Path) -> None:
    notes.clear()
    old = trained(made(write_job(folder)), folder)
    fork = made(write_job(folder, "renamed"), "small-1:4", overrides=("evaluate.samples=3",))
    for entry in old.store.list(old.key("checkpoints")):
        old.store.delete(entry.key)  # the fork has its own copy
    trained(fork, folder)
    expected = {(point.kind, point.step): point.values.get("loss") for point in read_points(old) if point.step > 4}
    found = {(point.kind, point.step): point.values.get("loss") for point in read_points(fork) if point.step > 4}
    assert found == expected
    assert committed(fork)[0].step == 4
    parent = Run(fork.store, fork.name).job.parent
    assert parent is not None
    assert (parent.run, parent.step, parent.takes, parent.store) == ("small-1", 4, "everything", old.store.url)
    assert notes == [
        "small-1, step 4, as a fork: weights, optimizer, place in the data",
        "it continues exactly as small-1 would have",
    ]
    words = f"small-1 at step 4, as a fork (SHA-256 {parent.sha256[:12]})"
    shown = CliRunner().invoke(app, ["show", fork.name, "--store", fork.store.url])
    assert re.search(rf"^from +{re.escape(words)}", shown.output, re.MULTILINE)
    evidence = gather(fork)
    assert f"\nStarted from {words}.\n" in markdown(evidence, ())
    assert f"Started from {words}." in render(evidence, ())
    again = trained(made(write_job(folder, "again")), folder)
    assert last_files(fork) == last_files(again)


def test_another_job_starts_from_the_weights_with_everything_else_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes.clear()
    old = trained(made(write_job(folder, "averaged", train={"ema": 0.5})), folder)
    new = made(write_job(folder, "tuned", "other", train={"duration": "1 steps"}), "averaged-1:8")
    assert notes == [
        "averaged-1, step 8: the moving average of its weights",
        "optimizer, schedule and data order start anew (train.ema, data differ)",
    ]
    run = Run(new.store, new.name)
    recipe = recipe_class("translate")(run.job, _pack_of(run))
    trainer = Trainer(run, recipe, World(), 1, Control(folder / "control"))
    trainer._restore()
    begun = trainer._engine.model.state_dict()
    taken = tensors(old, folder, -1, "ema.safetensors")
    assert all(torch.equal(begun[name], taken[name]) for name in begun if name != "embedding.weight")
    old_pieces, new_pieces = (_pack_of(one).vocabulary.pieces for one in (old, run))
    assert old_pieces != new_pieces
    shared = [piece for piece in new_pieces if piece in old_pieces]
    assert 250 < len(shared) < len(new_pieces)
    for piece in shared:
        row = begun["embedding.weight"][new_pieces.index(piece)]
        assert torch.equal(row, taken["embedding.weight"][old_pieces.index(piece)])
    assert f"40 tensors, {len(shared)} of {len(new_pieces)} rows of embedding.weight" in capsys.readouterr().out


def put_in_parts(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    """Replace the last checkpoint by one that three workers with a sharded model would have saved; return its EMA."""
    old, where = committed(run)[-1], folder / "parts"
    whole = tensors(run, folder, -1, "ema.safetensors")
    where.mkdir()
    files = {"state.json": folder / f"fetched-{run.name}--1" / "state.json"}
    for path in (folder / f"fetched-{run.name}--1").glob("*.safetensors"):
        for rank in range(3):
            own, rows = {}, {}
            for name, tensor in load_file(path).items():
                first, after = shard_rows(len(tensor), 3, rank) if tensor.ndim else (0, int(rank == 0))
                if tensor.ndim and first < after:
                    own[name], rows[name] = tensor[first:after].clone(), (first, len(tensor))
                elif first < after:
                    own[name] = tensor
            part = part_name(path.name, rank, 3)
            save_tensors(where / part, own, rows)
            files[part] = where / part
    run.store.delete(manifest_key(run, old.name))
    commit(run, old.step, old.generation, old.score, files)
    return whole


def test_a_checkpoint_in_parts_is_used_like_a_whole_one(folder: Path) -> None:
    old = trained(made(write_job(folder, "averaged", train={"ema": 0.5})), folder)
    ema = put_in_parts(old, folder)
    predicting = load_model(old).model
    assert isinstance(predicting, torch.nn.Module)
    assert all(torch.equal(tensor, ema[name]) for name, tensor in predicting.state_dict().items())
    new = made(write_job(folder, "tuned", train={"duration": "1 steps"}), "averaged-1:8", fresh=True)
    run = Run(new.store, new.name)
    trainer = Trainer(run, recipe_class("translate")(run.job, _pack_of(run)), World(), 1, Control(folder / "control"))
    trainer._restore()
    assert all(torch.equal(tensor, ema[name]) for name, tensor in trainer._engine.model.state_dict().items())
    longer = write_job(folder, "longer", train={"ema": 0.5, "duration": "10 steps"})
    fork, straight = trained(made(longer, "averaged-1:8"), folder), trained(made(longer), folder)
    assert {file.name for file in committed(fork)[0].files} >= {"model-1-of-3.safetensors", "ema-3-of-3.safetensors"}
    assert last_files(fork) == last_files(straight)


def test_what_cannot_be_taken_is_refused_before_there_is_a_run(folder: Path, store: Store) -> None:
    trained(made(write_job(folder)), folder)
    same = write_job(folder)
    wider = write_job(folder, "wide", model={**MODEL, "width": 32})
    chat = folder / "chat.yaml"
    chat.write_text(same.read_text().replace('"translate"', '"chat"'))
    program = folder / "program.yaml"
    program.write_text(f"name: mine\nprogram: ['true']\nstore: {folder / 'store'}\n")
    for path, beginning, fault in [
        (same, "small-1", "small-1 has trained for 8 steps at step 8: nothing is left to do; name an earlier step"),
        (same, "small-1:3", "small-1 has no checkpoint of step 3; it has 2, 4, 6, 8"),
        (wider, "small-1", "another model: embedding.weight is 304 x 16, not 304 x 32"),
        (chat, "small-1", "small-1 trains translate, and this job chat; checkpoints fit the same recipe only"),
        (program, "small-1", "small-1 trains translate, and this job a program; checkpoints fit the same recipe only"),
    ]:
        with pytest.raises(Exception, match=fault):
            made(path, beginning)
    assert list(store.folders("runs/")) == ["small-1"]


def test_a_longer_duration_is_a_fork_that_says_what_the_rate_does(folder: Path) -> None:
    notes.clear()
    trained(made(write_job(folder)), folder)
    run = made(write_job(folder), "small-1", overrides=("train.duration=12 steps",))
    assert notes[1] == "train.duration: 8 steps -> 12 steps; the learning rate does not depend on it"
    assert run.job.parent is not None and run.job.parent.takes == "everything"
    fresh = made(write_job(folder), "small-1", fresh=True)
    assert fresh.job.parent is not None and fresh.job.parent.takes == "weights"


def test_a_deeper_model_takes_what_there_is_and_says_so(folder: Path) -> None:
    trained(made(write_job(folder)), folder)
    notes.clear()
    made(write_job(folder, "deep", model={**MODEL, "encoder_layers": 2}), "small-1")
    assert notes[1:] == [
        "optimizer, schedule and data order start anew (model.encoder_layers differs)",
        "41 tensors; new: encoder.1 (14 tensors)",
    ]


def test_the_job_itself_may_name_the_weights(folder: Path) -> None:
    trained(made(write_job(folder)), folder)
    named = made(write_job(folder, weights="run:small-1:4"))
    assert named.job.parent is not None
    assert (named.job.parent.takes, named.job.parent.step) == ("weights", 4)
    with pytest.raises(Mistake, match="weights: the command says --from; use one of them"):
        made(write_job(folder, weights="run:small-1"), "small-1")
    with pytest.raises(Mistake, match="parent: is written by"):
        load(write_job(folder, parent=named.job.parent.model_dump()))


def test_a_run_without_its_beginning_does_not_start_from_scratch(folder: Path) -> None:
    trained(made(write_job(folder)), folder)
    for fresh, missing in ((False, "checkpoints"), (True, "parent.json")):
        run = made(write_job(folder), "small-1:4", fresh)
        for entry in run.store.list(run.folder):
            if entry.key.startswith(run.key(missing)):
                run.store.delete(entry.key)
        with pytest.raises(Mistake, match="has no copy of"):
            trained(run, folder)


def test_a_client_that_fails_half_way_leaves_no_run(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(made(write_job(folder)), folder)
    new = check(load(write_job(folder)), PlainProgress(lambda _: None), read_name("small-1:4"))
    assert new.parent is not None and new.job.parent is not None
    state = file_key(new.parent, new.job.parent.checkpoint, "state.json")
    data = store.get(state)
    store.put(state, data.replace(b"4", b"5"))
    with pytest.raises(CorruptCheckpoint, match="does not match its digest"):
        create(new)
    store.put(state, data)
    manifest = manifest_key(new.parent, new.job.parent.checkpoint)
    data = store.get(manifest)
    store.delete(manifest)
    with pytest.raises(CorruptCheckpoint, match="of small-1 is gone; run the same command again"):
        create(new)
    store.put(manifest, data)
    assert list(store.folders("runs/")) == ["small-1"]
    monkeypatch.setattr("packtrain.launch.parent.commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        create(new)
    assert not store.exists("runs/small-2/job.json")


def test_a_program_finds_the_files_of_the_other_runs_checkpoint(folder: Path, store: Store) -> None:
    path = folder / "program.yaml"
    path.write_text(f"name: mine\nprogram: ['true', fast]\nstore: {folder / 'store'}\n")
    old = made(path)
    commit(old, 3, 1, None, write_files(folder / "saved", {"deep/state.bin": b"all of it"}))
    notes.clear()
    new = made(path, "mine-1", overrides=("program=['true', slow]",))
    assert notes == ["mine-1, commit 3: the program finds the files of that checkpoint"]
    [first] = committed(new)
    assert (first.step, first.generation, [file.name for file in first.files]) == (3, 0, ["deep/state.bin"])
    with pytest.raises(NotFinished, match="mine-3 has no checkpoint yet"):
        made(path, made(path).name)


def test_the_other_run_may_be_in_another_store(folder: Path) -> None:
    old = trained(made(write_job(folder)), folder)
    elsewhere = f"store={folder / 'elsewhere'}"
    fork = made(write_job(folder), f"{old.store.url}/small:4", overrides=(elsewhere,))
    weights = made(write_job(folder), f"{old.store.url}/small-1", fresh=True, overrides=(elsewhere,))
    assert fork.store.url == weights.store.url == str(folder / "elsewhere")
    assert fork.job.parent is not None and weights.job.parent is not None
    assert fork.job.parent.store == old.store.url
    assert (fork.job.parent.takes, weights.job.parent.takes) == ("everything", "weights")
    (folder / "store").rename(folder / "gone")
    trained(fork, folder)
    result = fork.result()
    assert result is not None and result.status == "finished"


def test_runs_in_a_bucket_fork_and_give_their_weights(
    folder: Path, s3_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    there = (f"store={s3_store.url}",)
    old = trained(made(write_job(folder), overrides=there), folder)
    fork = trained(made(write_job(folder), "small-1:4", overrides=there), folder)
    assert last_files(fork) == last_files(old)
    tuned = made(write_job(folder, "tuned", "other", train={"duration": "1 steps"}), "small-1", overrides=there)
    elsewhere = made(write_job(folder, weights=f"run:{s3_store.url}/small-1:4", train={"duration": "1 steps"}))
    for entry in s3_store.list(old.folder):
        s3_store.delete(entry.key)  # each has its own copy
    for run, takes in ((tuned, "weights"), (elsewhere, "weights"), (fork, "everything")):
        assert run.job.parent is not None
        assert (run.job.parent.store, run.job.parent.takes) == (s3_store.url, takes)
    for run in (tuned, elsewhere):
        result = trained(run, folder).result()
        assert result is not None and result.status == "finished"
    assert "started from the weights of small-1 at step 4: 41 tensors\n" in capsys.readouterr().out
