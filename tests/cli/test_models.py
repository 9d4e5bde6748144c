"""`packtrain predict` with every recipe: inputs, options and invalid inputs."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pack.corpus import GREETINGS, job_of, write_pairs
from pack.rawsets import picture, write, write_classes
from packtrain.cli import main
from packtrain.errors import harmless
from packtrain.job import Job
from parts.models import commit_model, packed_run

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
    return folder


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Predict = Callable[..., Done]


@pytest.fixture
def predict(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Predict:
    """Call `packtrain predict` in this process, which has already imported torch."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(place / "cache"))

    def call(*arguments: str, lines: str | bytes = "") -> Done:
        given = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "argv", ["packtrain", "predict", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Done(code, *capsys.readouterr())

    return call


def assert_refused(done: Done, *words: str) -> None:
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err


# Texts.


def test_every_line_of_standard_input_gets_an_output_line(predict: Predict) -> None:
    done = predict("greetings", "--beam", "1", lines="good morning\n\nhello\r\n")
    assert (done.code, done.err) == (0, "")
    lines = done.out.split("\n")
    assert len(lines) == 4
    assert lines[1] == lines[3] == ""
    assert predict("greetings", "--beam", "1", "good morning", "hello").out == f"{lines[0]}\n{lines[2]}\n"


def test_json_has_the_input_and_the_output(predict: Predict) -> None:
    done = predict("talk", "hello", "--nucleus", "0.9", "--temperature", "1.5", "--seed", "3", "--json")
    [made] = json.loads(done.out)
    assert made["input"] == "hello"
    again = predict("talk", "hello", "--nucleus", "0.9", "--temperature", "1.5", "--seed", "3")
    assert again.out == harmless(made["output"]) + "\n"


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
def test_an_empty_or_overlong_text_is_refused(predict: Predict, run: str, given: str, words: str) -> None:
    assert_refused(predict(run, given), words)


def test_a_line_of_megabytes_is_refused_with_its_number(predict: Predict) -> None:
    assert_refused(
        predict("talk", lines="hello\n" + "x" * 3_000_000), "input 2 has 1,000,000 characters or more; shorten"
    )


def test_a_line_that_is_not_utf8_is_refused_with_its_number(predict: Predict) -> None:
    assert_refused(predict("talk", lines=b"hello\n\xff\xfe\n"), "input 2 is not valid UTF-8")


def test_other_scripts_and_control_characters_are_valid_texts(predict: Predict) -> None:
    done = predict("talk", lines="доброе утро\nおはよう\na\x1b[31mb\x07\n")
    assert done.code == 0
    assert done.out.count("\n") == 3
    assert not any(ord(one) < 32 for one in done.out.replace("\n", ""))


def test_control_characters_in_outputs_are_escaped() -> None:
    assert harmless("a\x1b[2Jb\nc") == r"a\x1b[2Jb\nc"
    assert harmless("Größe\u00a0😀 おはよう") == "Größe\u00a0😀 おはよう"


def test_a_truncated_input_is_noted(predict: Predict) -> None:
    done = predict("talk", "hi", "many words " * 30)
    assert (done.code, done.out.count("\n")) == (0, 2)
    assert re.fullmatch(r"input 2: its first \d+ tokens were cut off\n", done.err)
    assert "cut off" in json.loads(predict("talk", "many words " * 30, "--json").out)[0]["note"]


@pytest.mark.parametrize("option", [["--nucleus", "2"], ["--temperature", "0"], ["--beam", "0"], ["--seed", "-1"]])
def test_an_option_out_of_range_is_refused(predict: Predict, option: list[str]) -> None:
    done = predict("talk", "hello", *option)
    assert done.code == 2
    assert option[0] in done.err


@pytest.mark.parametrize(
    ("run", "option"), [("pets", ["--nucleus", "0.9"]), ("pets", ["--beam", "2"]), ("squares", ["--temperature", "2"])]
)
def test_an_option_that_the_recipe_does_not_support_is_refused(predict: Predict, run: str, option: list[str]) -> None:
    assert_refused(predict(run, "cat.jpg", *option), f"{option[0]}: ", "does not support it")


def test_characters_that_are_rare_in_the_training_data_are_noted(predict: Predict) -> None:
    done = predict("greetings", "hello", "你今天好吗", "schöne Grüße")
    assert (done.code, done.out.count("\n")) == (0, 3)
    assert done.err == "input 2: its characters are rare or absent in the training data\n"


# Chat.


def test_chat_replies_to_every_line(predict: Predict) -> None:
    done = predict("talk", "--chat", lines="hello\nhow are you today\n\nthank you\n")
    assert (done.code, done.err) == (0, "")
    replies = done.out.split("\n")
    assert len(replies) == 5
    assert replies[2] == ""
    assert predict("talk", "--chat", lines="hello\n").out == f"{replies[0]}\n"


def test_a_line_that_cannot_be_answered_does_not_end_the_chat(predict: Predict) -> None:
    long = "word " * 10_000
    done = predict("talk", "--chat", lines=f"hello\n{long}\nthank you\n{'some words ' * 30}\n")
    assert done.code == 0
    replies = done.out.split("\n")
    assert (len(replies), replies[1]) == (5, "")
    assert re.fullmatch(r"the input has more than 16,000 bytes; .*\n\(its first \d+ tokens were cut off\)\n", done.err)
    assert predict("talk", "--chat", lines="hello\nthank you\n").out.split("\n")[1] == replies[2]


def test_chat_is_refused_if_the_recipe_does_not_support_it(predict: Predict) -> None:
    assert_refused(predict("pets", "--chat", lines=""), "--chat: classify does not support it")
    assert_refused(predict("greetings", "--chat", lines="hello\n"), "--chat: translate does not support it")
    assert_refused(predict("talk", "hello", "--chat"), "--chat: reads standard input; remove the inputs")


# Images.


def test_an_image_gets_its_classes(predict: Predict) -> None:
    done = predict("pets", "cat.jpg", "--json")
    assert done.code == 0, done.err
    [made] = json.loads(done.out)
    assert {one["class"] for one in made["top5"]} == {"cat", "dog"}


@pytest.mark.parametrize("run", ["pets", "squares"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nobody.jpg", "nobody.jpg: no such file"),
        (".", ".: not a file"),
        ("notes.jpg", "notes.jpg: "),
        ("", "the input is empty"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused(predict: Predict, run: str, given: str, words: str) -> None:
    assert_refused(predict(run, given), words)


@pytest.mark.parametrize("run", ["pets", "squares"])
def test_an_empty_path_is_refused_with_its_number(predict: Predict, run: str) -> None:
    assert_refused(predict(run, "cat.jpg", ""), "input 2 is empty; give the path of an image")


def test_attention_maps_are_written_to_the_directory(predict: Predict, place: Path) -> None:
    done = predict("squares", "cat.jpg", "--attention-maps", "maps")
    assert done.code == 0, done.err
    assert done.err == "wrote maps/1-cat.png\n"
    assert (place / "maps" / "1-cat.png").read_bytes().startswith(b"\x89PNG")
    [made] = json.loads(predict("squares", "cat.jpg", "--attention-maps", "maps", "--json").out)
    assert made["attention_map"] == "maps/1-cat.png"


def test_attention_maps_are_refused_if_the_recipe_has_none(predict: Predict) -> None:
    assert_refused(predict("talk", "hello", "--attention-maps", "maps"), "--attention-maps: only caption has them")
    assert_refused(
        predict("squares", "cat.jpg", "--attention-maps", "cat.jpg"), "--attention-maps cat.jpg: cannot write"
    )
