"""`packtrain predict` with every recipe: inputs, options and invalid inputs."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from pack.corpus import GREETINGS, job_of, write_pairs
from pack.rawsets import picture, write, write_classes
from packtrain.cli.models import _inputs_of
from packtrain.errors import harmless
from packtrain.job import Job
from parts import command
from parts.command import Packtrain
from parts.models import commit_model, packed_run
from parts.terminal import FakeTerminal

TRAIN = {"duration": "10 steps", "schedule": {"constant": {"rate": 0.01}}}


def chat_job(folder: Path) -> Job:
    data = {"train": [{"dialogue": write_pairs(folder / "talk.tsv", GREETINGS)}], "vocabulary": 300}
    return job_of(folder, name="talk", recipe="chat", data=data)


def classify_job(folder: Path) -> Job:
    raw = write_classes(folder / "raw", {"cat": ["1.jpg", "2.jpg"], "dog": ["3.jpg", "4.jpg"]})
    return Job.model_validate(
        {
            "name": "pets",
            "recipe": "classify",
            "model": {"size": "tiny", "width": 8},
            "data": {"train": [{"imagenet": raw}]},
            "train": {**TRAIN, "batch": "4 samples", "size": 32},
        }
    )


def caption_job(folder: Path) -> Job:
    for shade in range(4):
        write(folder / "raw" / f"{shade}.jpg", picture(shade))
    rows = [{"image": f"{shade}.jpg", "caption": ["a small blue square"]} for shade in range(4)]
    listed = write(folder / "raw" / "all.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return Job.model_validate(
        {
            "name": "squares",
            "recipe": "caption",
            "model": "tiny",
            "data": {"train": [{"folder": listed}], "vocabulary": 300},
            "train": {**TRAIN, "batch": "64 tokens", "size": 32},
        }
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory whose store has a run of every recipe."""
    folder = tmp_path_factory.mktemp("models")
    for make in (job_of, chat_job, classify_job, caption_job):
        own = folder / make.__name__
        own.mkdir()
        run = packed_run(folder, make(own))
        commit_model(run, own, 10)
    write(folder / "cat.jpg", picture(7))
    write(folder / "notes.jpg", "not an image at all")
    (folder / "nothing").mkdir()
    write(folder / "words" / "a.txt", "a")
    write(folder / "words" / "b" / "b.txt", "b")
    for name in ("2.jpg", "10.jpg", "more/1.jpg", ".hidden.jpg", ".git/3.jpg"):
        write(folder / "mixed" / name, picture(len(name)))
    write(folder / "mixed" / "more" / "readme.md", "words")
    return folder


@pytest.fixture
def predict(packtrain: Packtrain, place: Path, monkeypatch: pytest.MonkeyPatch) -> Packtrain:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(place / "cache"))
    return partial(packtrain, "predict")


def assert_refused(done: CompletedProcess[str], *words: str) -> None:
    assert done.stdout == ""
    command.assert_refused(done, 2, *words)


# Texts.


def test_every_line_of_standard_input_gets_an_output_line(predict: Packtrain) -> None:
    done = predict("greetings", "--beam", "1", lines="good morning\n\nhello\r\n")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.split("\n")
    assert len(lines) == 4
    assert lines[1] == lines[3] == ""
    assert predict("greetings", "--beam", "1", "good morning", "hello").stdout == f"{lines[0]}\n{lines[2]}\n"


@pytest.mark.parametrize(
    ("inputs", "words"), [("texts", "Type one text per line"), ("images", "Type one path of an image per line")]
)
def test_a_person_at_a_terminal_is_told_what_to_type(
    inputs: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor: Any = SimpleNamespace(recipe=SimpleNamespace(inputs=inputs))
    _inputs_of(predictor, None, None)
    assert capsys.readouterr() == ("", ""), "a script is told nothing"
    told = FakeTerminal()
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    monkeypatch.setattr(sys, "stderr", told)
    _inputs_of(predictor, None, None)
    assert told.getvalue() == f"{words}; Ctrl-D ends the input.\n"


def test_json_has_the_input_and_the_output(predict: Packtrain) -> None:
    done = predict("talk", "hello", "--nucleus", "0.9", "--temperature", "1.5", "--seed", "3", "--json")
    [made] = json.loads(done.stdout)
    assert made["input"] == "hello"
    again = predict("talk", "hello", "--nucleus", "0.9", "--temperature", "1.5", "--seed", "3")
    assert again.stdout == harmless(made["output"]) + "\n"


@pytest.mark.parametrize("run", ["greetings", "talk"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "the input is empty"),
        ("  ", "the input is empty"),
        ("word " * 3_000, "tokens, more than 1,000; shorten it: 'word word"),
        ("word " * 10_000, "the input has more than 16,000 bytes; shorten it: 'word word"),
    ],
    ids=["empty", "blank", "3,000 words", "10,000 words"],
)
def test_an_empty_or_overlong_text_is_refused(predict: Packtrain, run: str, given: str, words: str) -> None:
    assert_refused(predict(run, given), words)


def test_a_line_of_megabytes_is_refused_with_its_number(predict: Packtrain) -> None:
    assert_refused(
        predict("talk", lines="hello\n" + "x" * 3_000_000), "input 2 has 1,000,000 characters or more; shorten"
    )


def test_a_line_that_is_not_utf8_is_refused_with_its_number(predict: Packtrain) -> None:
    assert_refused(predict("talk", lines=b"hello\n\xff\xfe\n"), "input 2 is not valid UTF-8")


def test_other_scripts_and_control_characters_are_valid_texts(predict: Packtrain) -> None:
    done = predict("talk", lines="доброе утро\nおはよう\na\x1b[31mb\x07\n")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 3
    assert not any(ord(one) < 32 for one in done.stdout.replace("\n", ""))


def test_control_characters_in_outputs_are_escaped() -> None:
    assert harmless("a\x1b[2Jb\nc") == r"a\x1b[2Jb\nc"
    assert harmless("Größe\u00a0😀 おはよう") == "Größe\u00a0😀 おはよう"


def test_a_truncated_input_is_noted(predict: Packtrain) -> None:
    done = predict("talk", "hi", "many words " * 30)
    assert (done.returncode, done.stdout.count("\n")) == (0, 2)
    assert re.fullmatch(r"input 2: its first \d+ tokens were cut off\n", done.stderr)
    assert "cut off" in json.loads(predict("talk", "many words " * 30, "--json").stdout)[0]["note"]


@pytest.mark.parametrize("option", [["--nucleus", "2"], ["--temperature", "0"], ["--beam", "0"], ["--seed", "-1"]])
def test_an_option_out_of_range_is_refused(predict: Packtrain, option: list[str]) -> None:
    done = predict("talk", "hello", *option)
    assert done.returncode == 2
    assert option[0] in done.stderr


@pytest.mark.parametrize(
    ("run", "option"), [("pets", ["--nucleus", "0.9"]), ("pets", ["--beam", "2"]), ("squares", ["--temperature", "2"])]
)
def test_an_option_that_the_recipe_does_not_support_is_refused(predict: Packtrain, run: str, option: list[str]) -> None:
    assert_refused(predict(run, "cat.jpg", *option), f"{option[0]}: ", "does not support it")


def test_characters_that_are_rare_in_the_training_data_are_noted(predict: Packtrain) -> None:
    done = predict("greetings", "hello", "你今天好吗", "schöne Grüße")
    assert (done.returncode, done.stdout.count("\n")) == (0, 3)
    assert done.stderr == "input 2: its characters are rare or absent in the training data\n"


def test_a_file_has_one_text_per_line(predict: Packtrain, place: Path) -> None:
    (place / "lines.txt").write_bytes(b"good morning\n\nhello\r\n")
    expected = predict("greetings", lines="good morning\n\nhello\n")
    done = predict("greetings", "--file", "lines.txt")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, "")
    assert_refused(predict("greetings", "--file", "none.txt"), "--file none.txt: cannot read: No such file")
    assert_refused(predict("greetings", "--file", "mixed"), "--file mixed: cannot read: Is a directory")
    assert_refused(predict("greetings", "hello", "--file", "lines.txt"), "--file: has the inputs; remove the others")
    assert_refused(predict("greetings", "lines.txt"), "lines.txt is a file, but translate takes texts", "use --file")


def test_a_bad_line_of_a_file_is_refused_before_anything_is_printed(
    predict: Packtrain, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.export.predict._TEXTS_AT_ONCE", 2)
    (place / "bad.txt").write_bytes(b"a\nb\nc\nd\n\xff\n")
    assert_refused(predict("greetings", "--file", "bad.txt"), "input 5 is not valid UTF-8")


@pytest.mark.parametrize("options", [[], ["--json"], ["--n-best", "2"], ["--nucleus", "0.9", "--seed", "4"]])
def test_inputs_that_are_not_predicted_at_once_keep_their_order(
    predict: Packtrain, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    texts = [f"{word} {'well ' * (7 * number % 5)}" for number, word in enumerate(["one", "two", "three", "four"] * 3)]
    lines = "".join(f"{text}\n" for text in texts)
    at_once = predict("greetings", *options, lines=lines)
    monkeypatch.setattr("packtrain.export.predict._TEXTS_AT_ONCE", 5)
    in_parts = predict("greetings", *options, lines=lines)
    assert (at_once.returncode, in_parts.returncode) == (0, 0)
    if "--nucleus" in options:  # later parts have seeds of their own
        assert in_parts.stdout.split("\n")[:5] == at_once.stdout.split("\n")[:5]
        assert in_parts.stdout.count("\n") == len(texts)
    else:
        assert in_parts.stdout == at_once.stdout
    if "--json" in options:
        assert [row["input"] for row in json.loads(in_parts.stdout)] == [text.rstrip("\n") for text in texts]


def test_an_overlong_line_is_named_by_its_number_among_all(predict: Packtrain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.export.predict._TEXTS_AT_ONCE", 2)
    done = predict("greetings", lines="a\nb\nc\n" + "word " * 3000)
    assert done.returncode == 2
    assert done.stdout.count("\n") == 2  # what was complete before it
    assert re.fullmatch(r"packtrain: input 4 has [\d,]+ tokens, more than 1,000; shorten it: .*\n", done.stderr)


def test_no_inputs_give_no_outputs(predict: Packtrain) -> None:
    done = predict("greetings", lines="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert predict("greetings", "--json", lines="").stdout == "[]\n"


def test_the_n_best_outputs_come_with_their_scores(predict: Packtrain) -> None:
    done = predict("greetings", "hello", "good morning", "--n-best", "3")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == {"1", "2"}
    first = [(float(score), text) for number, score, text in rows if number == "1"]
    assert first == sorted(first, key=lambda row: -row[0])
    assert 1 < len(first) <= 3
    [made] = json.loads(predict("greetings", "hello", "--n-best", "3", "--json").stdout)
    assert [(one["score"], harmless(one["output"], keep="\t")) for one in made["n_best"]] == first
    assert made["output"] == made["n_best"][0]["output"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n-best", "5"], "--n-best: 5 is more than there are; add --beam 5 or more"),
        (["--n-best", "2", "--nucleus", "0.5"], "--n-best: 2 is more than there are; sampling has one output"),
    ],
)
def test_more_outputs_than_the_beam_has_are_refused(predict: Packtrain, options: list[str], words: str) -> None:
    assert_refused(predict("greetings", "hello", *options), words)


def test_a_checkpoint_is_chosen_by_step(predict: Packtrain) -> None:
    assert predict("greetings", "hello", "--checkpoint", "10").returncode == 0
    assert predict("greetings", "hello", "--checkpoint", "11").returncode == 102
    assert_refused(predict("greetings", "hello", "--checkpoint", "first"), "--checkpoint: must be best, last or")


# Chat.


def test_chat_replies_to_every_line(predict: Packtrain) -> None:
    done = predict("talk", "--chat", lines="hello\nhow are you today\n\nthank you\n")
    assert (done.returncode, done.stderr) == (0, "")
    replies = done.stdout.split("\n")
    assert len(replies) == 5
    assert replies[2] == ""
    assert predict("talk", "--chat", lines="hello\n").stdout == f"{replies[0]}\n"


def test_a_line_that_cannot_be_answered_does_not_end_the_chat(predict: Packtrain) -> None:
    long = "word " * 10_000
    done = predict("talk", "--chat", lines=f"hello\n{long}\nthank you\n{'some words ' * 30}\n")
    assert done.returncode == 0
    replies = done.stdout.split("\n")
    assert (len(replies), replies[1]) == (5, "")
    assert re.fullmatch(
        r"the input has more than 16,000 bytes; .*\n\(its first \d+ tokens were cut off\)\n", done.stderr
    )
    assert predict("talk", "--chat", lines="hello\nthank you\n").stdout.split("\n")[1] == replies[2]


def test_chat_is_refused_if_the_recipe_does_not_support_it(predict: Packtrain) -> None:
    assert_refused(predict("pets", "--chat", lines=""), "--chat: classify does not support it")
    assert_refused(predict("greetings", "--chat", lines="hello\n"), "--chat: translate does not support it")
    assert_refused(predict("talk", "hello", "--chat"), "--chat: reads standard input; remove the inputs")


# Images.


def test_an_image_gets_its_classes(predict: Packtrain) -> None:
    done = predict("pets", "cat.jpg", "--json")
    assert done.returncode == 0, done.stderr
    [made] = json.loads(done.stdout)
    assert {one["class"] for one in made["top5"]} == {"cat", "dog"}


@pytest.mark.parametrize("run", ["pets", "squares"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nobody.jpg", "nobody.jpg: no such file"),
        ("nothing", "nothing: no files in this folder"),
        ("words", "there are no images among 2 files; the first is words/a.txt: not an image"),
        ("notes.jpg", "notes.jpg: "),
        ("", "the input is empty"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused(predict: Packtrain, run: str, given: str, words: str) -> None:
    assert_refused(predict(run, given), words)


@pytest.mark.parametrize("run", ["pets", "squares"])
def test_an_empty_path_is_refused_with_its_number(predict: Packtrain, run: str) -> None:
    assert_refused(predict(run, "cat.jpg", ""), "input 2 is empty; give the path of an image")


@pytest.mark.parametrize("run", ["pets", "squares"])
def test_a_folder_stands_for_its_images_in_order(predict: Packtrain, run: str) -> None:
    done = predict(run, "mixed", "cat.jpg")
    assert done.returncode == 0, done.stderr
    paths = ["mixed/10.jpg", "mixed/2.jpg", "mixed/more/1.jpg", "cat.jpg"]
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == paths
    assert done.stderr.startswith("skipped mixed/more/readme.md: not an image")
    alone = predict(run, *paths)
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == alone.stdout.splitlines()
    assert [row["input"] for row in json.loads(predict(run, "mixed", "--json").stdout)] == paths[:3]


def test_a_missing_file_beside_a_folder_is_refused(predict: Packtrain) -> None:
    assert_refused(predict("pets", "mixed", "gone.jpg"), "gone.jpg: no such file")


def test_attention_maps_of_a_folder_have_numbers_and_names(predict: Packtrain, place: Path) -> None:
    done = predict("squares", "mixed", "--attention-maps", "many")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (place / "many").iterdir()) == ["1-10.png", "2-2.png", "3-1.png"]


def test_attention_maps_are_written_to_the_directory(predict: Packtrain, place: Path) -> None:
    done = predict("squares", "cat.jpg", "--attention-maps", "maps")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "wrote maps/1-cat.png\n"
    assert (place / "maps" / "1-cat.png").read_bytes().startswith(b"\x89PNG")
    [made] = json.loads(predict("squares", "cat.jpg", "--attention-maps", "maps", "--json").stdout)
    assert made["attention_map"] == "maps/1-cat.png"


def test_attention_maps_are_refused_if_the_recipe_has_none(predict: Packtrain) -> None:
    assert_refused(predict("talk", "hello", "--attention-maps", "maps"), "--attention-maps: the model draws none")
    assert_refused(
        predict("squares", "cat.jpg", "--attention-maps", "cat.jpg"), "--attention-maps cat.jpg: cannot write"
    )
