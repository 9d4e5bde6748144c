from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pack.corpus import GREETINGS, job_of, write_pairs
from packtrain.errors import Mistake, NotFinished, PacktrainError
from packtrain.export.predict import Predictor, Wishes, load_predictor
from packtrain.job.job import Job
from packtrain.recipes import Decoding
from packtrain.run.run import Run
from packtrain.train.state import MODEL_FILE
from parts.models import commit_model, packed_run
from parts.runs import new_run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def chat_job(folder: Path) -> Job:
    data = {"train": [{"dialogue": write_pairs(folder / "talk.tsv", GREETINGS)}], "vocabulary": 300}
    return job_of(folder, recipe="chat", data=data)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return packed_run(tmp_path, job_of(tmp_path))


def predicted(predictor: Predictor, *inputs: str, **wishes: Any) -> list[str]:
    return [made.text for made in predictor.predict(inputs, Wishes(**wishes))]


def test_the_last_checkpoint_is_used_or_the_best(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10, seed=1, score=3.0)
    commit_model(run, tmp_path, 20, seed=2, score=2.0)
    last, best = load_predictor(run, best=False), load_predictor(run, best=True)
    assert (last.step, best.step) == (20, 10)
    assert predicted(last, "hello") != predicted(best, "hello")


def test_what_is_not_wished_for_is_the_recipe_s_choice() -> None:
    own = Decoding(beam=5, repetition=1.2, no_repeat=3)
    assert Wishes().on(own) == own
    assert Wishes(beam=1, seed=7).on(own) == Decoding(beam=1, repetition=1.2, no_repeat=3, seed=7)
    assert Wishes(repetition=1.0).on(own).repetition == 1.0


def test_a_temperature_alone_draws_from_everything() -> None:
    assert Wishes(temperature=0.7).on(Decoding()) == Decoding(nucleus=1.0, temperature=0.7)
    assert Wishes(temperature=0.7, nucleus=0.9).on(Decoding()).nucleus == 0.9


def test_draws_are_repeated_by_their_seed(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    predictor = load_predictor(run, best=False)
    drawn = [predicted(predictor, "hello", nucleus=0.99, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize(
    ("wishes", "fault"),
    [
        ({"beam": 8, "nucleus": 0.9}, "^--beam: an output is drawn"),
        ({"beam": 8, "temperature": 0.9}, "^--beam: an output is drawn"),
        ({"seed": 3}, "^--seed: nothing is drawn; add --nucleus or --temperature"),
        ({"seed": 3, "beam": 2}, "^--seed: nothing is drawn"),
    ],
)
def test_wishes_that_would_do_nothing_are_refused_in_one_line(
    tmp_path: Path, wishes: dict[str, Any], fault: str
) -> None:
    run = packed_run(tmp_path, chat_job(tmp_path))
    commit_model(run, tmp_path, 10)
    predictor = load_predictor(run, best=False)
    with pytest.raises(Mistake, match=fault) as refused:
        predicted(predictor, "hello", **wishes)
    assert "\n" not in str(refused.value)
    with pytest.raises(Mistake, match=fault):
        predictor.check_conversation(Wishes(**wishes))


def test_the_model_is_on_a_gpu_where_there_is_one(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    devices = {weights.device.type for weights in load_predictor(run, best=False).model.parameters()}
    assert devices == {"cuda" if torch.cuda.is_available() else "cpu"}


def test_an_input_that_is_not_utf8_is_refused_with_its_number(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    with pytest.raises(Mistake, match=r"^input 2 is not valid UTF-8"):
        predicted(load_predictor(run, best=False), "hello", "b\udcffd")


def test_a_run_without_a_checkpoint_is_not_finished(run: Run) -> None:
    with pytest.raises(NotFinished, match="greetings-1 has no checkpoint yet"):
        load_predictor(run, best=False)


def test_a_program_has_no_model_that_we_know(run: Run) -> None:
    with pytest.raises(Mistake, match="runs a program"):
        load_predictor(new_run(run.store), best=False)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"recipe": "caption"}, r"has the recipe 'caption', and greetings-1 has 'translate'"),
        ({"model": {"size": "big"}}, r"has the model .*'big'.* and greetings-1 has .*'tiny'"),
        ({"pack": "greetings-0123"}, r"has the data 'greetings-0123', and greetings-1 has 'greetings-"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(run: Run, tmp_path: Path, of: dict[str, Any], words: str) -> None:
    commit_model(run, tmp_path, 10, **of)
    with pytest.raises(Mistake, match=words) as refused:
        load_predictor(run, best=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("best", [False, True])
def test_a_damaged_checkpoint_is_told_and_the_next_takes_its_place(run: Run, tmp_path: Path, best: bool) -> None:
    scores = {10: 1.0, 20: 3.0, 30: 2.0} if best else {10: 3.0, 20: 2.0, 30: 1.0}
    made = {step: commit_model(run, tmp_path, step, score=score) for step, score in scores.items()}
    told: list[str] = []
    damaged, next_one, last = (20, 30, 10) if best else (30, 20, 10)
    run.store.put(run.key(f"checkpoints/{made[damaged].name}/files/{MODEL_FILE}"), b"damaged")
    assert load_predictor(run, best, told.append).step == next_one
    assert len(told) == 1
    assert told[0].endswith("; passed over")
    for step in (next_one, last):
        run.store.put(run.key(f"checkpoints/{made[step].name}/files/{MODEL_FILE}"), b"damaged")
    with pytest.raises(PacktrainError, match="does not have the"):
        load_predictor(run, best, told.append)


def test_weights_that_do_not_fit_are_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    wide = {"size": "tiny", "width": 64, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
    stranger = packed_run(other, job_of(other, model=wide))
    model = {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
    found = commit_model(stranger, other, 10, pack=run.pack_name(), model=model)
    for file in found.files:
        data = stranger.store.get(stranger.key(f"checkpoints/{found.name}/files/{file.name}"))
        run.store.put(run.key(f"checkpoints/{found.name}/files/{file.name}"), data)
    manifest = stranger.store.get(stranger.key(f"checkpoints/{found.name}/manifest.json"))
    run.store.put(run.key(f"checkpoints/{found.name}/manifest.json"), manifest)
    with pytest.raises(PacktrainError, match="does not fit the model"):
        load_predictor(run, best=False)


# Conversations.


def test_every_turn_of_a_conversation_has_its_own_luck(tmp_path: Path) -> None:
    run = packed_run(tmp_path, chat_job(tmp_path))
    commit_model(run, tmp_path, 10)
    predictor, wishes = load_predictor(run, best=False), Wishes(nucleus=0.99)
    said = predictor.converse(["hello"], wishes)
    assert said == predictor.converse(["hello"], wishes)
    assert said != predictor.converse(["", "hello"], wishes)


def test_translation_does_not_converse(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    with pytest.raises(Mistake, match=r"^translate does not converse"):
        load_predictor(run, best=False).converse(["hello"], Wishes())
