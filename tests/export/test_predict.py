from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pack.corpus import GREETINGS, job_of, write_pairs
from packtrain.errors import Mistake, NotFinished, NotFound, PacktrainError
from packtrain.export.predict import DecodeOptions, Predictor, load_predictor
from packtrain.job import Job
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


def predicted(predictor: Predictor, *inputs: str, **options: Any) -> list[str]:
    return [made.text for made in predictor.predict(inputs, DecodeOptions(**options))]


def test_the_last_checkpoint_is_used_or_the_best(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10, seed=1, score=3.0)
    commit_model(run, tmp_path, 20, seed=2, score=2.0)
    last, best = load_predictor(run), load_predictor(run, "best")
    assert (last.step, best.step) == (20, 10)
    assert predicted(last, "hello") != predicted(best, "hello")


def test_a_checkpoint_can_be_chosen_by_its_step(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10, seed=1, score=3.0)
    made = commit_model(run, tmp_path, 20, seed=2)
    assert load_predictor(run, 10).step == 10
    with pytest.raises(NotFound, match=r"^greetings-1 has no checkpoint of step 15; it has 10, 20$"):
        load_predictor(run, 15)
    run.store.put(run.key(f"checkpoints/{made.name}/files/{MODEL_FILE}"), b"damaged")
    with pytest.raises(PacktrainError, match="does not match its digest"):  # no other may stand in for it
        load_predictor(run, 20)


def test_the_recipe_chooses_options_that_are_not_given() -> None:
    own = Decoding(beam=5, repetition=1.2, no_repeat=3)
    assert DecodeOptions().applied_to(own) == own
    assert DecodeOptions(beam=1, seed=7).applied_to(own) == Decoding(beam=1, repetition=1.2, no_repeat=3, seed=7)
    assert DecodeOptions(repetition=1.0).applied_to(own).repetition == 1.0


def test_a_temperature_alone_samples_from_all_tokens() -> None:
    assert DecodeOptions(temperature=0.7).applied_to(Decoding()) == Decoding(nucleus=1.0, temperature=0.7)
    assert DecodeOptions(temperature=0.7, nucleus=0.9).applied_to(Decoding()).nucleus == 0.9


def test_a_seed_repeats_a_sample(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    predictor = load_predictor(run)
    sampled = [predicted(predictor, "hello", nucleus=0.99, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"beam": 8, "nucleus": 0.9}, "^--beam: beam search excludes sampling"),
        ({"beam": 8, "temperature": 0.9}, "^--beam: beam search excludes sampling"),
        ({"seed": 3}, "^--seed: only sampling uses it; add --nucleus or --temperature"),
        ({"seed": 3, "beam": 2}, "^--seed: only sampling uses it"),
    ],
)
def test_options_without_effect_are_refused_in_one_line(tmp_path: Path, options: dict[str, Any], fault: str) -> None:
    run = packed_run(tmp_path, chat_job(tmp_path))
    commit_model(run, tmp_path, 10)
    predictor = load_predictor(run)
    with pytest.raises(Mistake, match=fault) as refused:
        predicted(predictor, "hello", **options)
    assert "\n" not in str(refused.value)
    with pytest.raises(Mistake, match=fault):
        predictor.check_conversation(DecodeOptions(**options))


def test_the_model_is_on_a_gpu_if_there_is_one(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    model = load_predictor(run).model
    assert isinstance(model, torch.nn.Module)
    devices = {weights.device.type for weights in model.parameters()}
    assert devices == {"cuda" if torch.cuda.is_available() else "cpu"}


def test_an_input_that_is_not_utf8_is_refused_with_its_number(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    with pytest.raises(Mistake, match=r"^input 2 is not valid UTF-8"):
        predicted(load_predictor(run), "hello", "b\udcffd")


def test_a_run_without_a_checkpoint_is_not_finished(run: Run) -> None:
    with pytest.raises(NotFinished, match="greetings-1 has no checkpoint yet"):
        load_predictor(run)


def test_predict_refuses_the_run_of_a_program(run: Run) -> None:
    with pytest.raises(Mistake, match="runs a program"):
        load_predictor(new_run(run.store))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"recipe": "caption"}, r"its recipe is 'caption', that of greetings-1 is 'translate'"),
        ({"model": {"size": "big"}}, r"its model is .*'big'.* that of greetings-1 is .*'tiny'"),
        ({"pack": "greetings-0123"}, r"its data is 'greetings-0123', that of greetings-1 is 'greetings-"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(run: Run, tmp_path: Path, of: dict[str, Any], words: str) -> None:
    commit_model(run, tmp_path, 10, **of)
    with pytest.raises(Mistake, match=words) as refused:
        load_predictor(run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("choice", ["last", "best"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    run: Run, tmp_path: Path, choice: Literal["last", "best"]
) -> None:
    best = choice == "best"
    scores = {10: 1.0, 20: 3.0, 30: 2.0} if best else {10: 3.0, 20: 2.0, 30: 1.0}
    made = {step: commit_model(run, tmp_path, step, score=score) for step, score in scores.items()}
    warnings: list[str] = []
    damaged, next_one, last = (20, 30, 10) if best else (30, 20, 10)
    run.store.put(run.key(f"checkpoints/{made[damaged].name}/files/{MODEL_FILE}"), b"damaged")
    assert load_predictor(run, choice, warnings.append).step == next_one
    assert len(warnings) == 1
    assert warnings[0].endswith("; skipped")
    for step in (next_one, last):
        run.store.put(run.key(f"checkpoints/{made[step].name}/files/{MODEL_FILE}"), b"damaged")
    with pytest.raises(PacktrainError, match="does not match its digest"):
        load_predictor(run, choice, warnings.append)


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
        load_predictor(run)


# Conversations.


def test_every_turn_of_a_conversation_uses_another_seed(tmp_path: Path) -> None:
    run = packed_run(tmp_path, chat_job(tmp_path))
    commit_model(run, tmp_path, 10)
    predictor, options = load_predictor(run), DecodeOptions(nucleus=0.99)
    reply = predictor.converse(["hello"], options)
    assert reply == predictor.converse(["hello"], options)
    assert reply != predictor.converse(["", "hello"], options)


def test_translation_does_not_support_chat(run: Run, tmp_path: Path) -> None:
    commit_model(run, tmp_path, 10)
    with pytest.raises(Mistake, match=r"^--chat: translate does not support it"):
        load_predictor(run).converse(["hello"], DecodeOptions())
