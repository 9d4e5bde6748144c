"""`packtrain init`: a job for each recipe that runs as it is, on data that it brings along or that a person has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.test_commands import EXAMPLES, assert_refused, packtrain
from packtrain.cli.samples import english, german
from packtrain.cli.template import STARTS, Wanted, write_start
from packtrain.errors import Mistake
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.recipes import RECIPES
from packtrain.start import load, pack_data
from packtrain.store import open_store


def test_there_is_a_start_for_every_recipe_an_own_one_and_a_program() -> None:
    assert STARTS.keys() == {*RECIPES, "own", "program"}


def test_without_a_kind_all_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    done = packtrain("init", cwd=tmp_path)
    assert re.findall(r"^packtrain init (\w+) ", done.stdout, re.MULTILINE) == sorted(STARTS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", STARTS)
def test_a_start_loads_and_its_data_can_be_packed(kind: str, tmp_path: Path) -> None:
    written = write_start(Wanted(kind, tmp_path / f"{kind}.yaml"))
    assert all((tmp_path / Path(file.split()[0]).name).exists() for file in written.files)
    loaded = load(tmp_path / f"{kind}.yaml", [f"store={tmp_path / 'store'}"])
    assert loaded.job.name == kind
    said: list[str] = []
    manifest = pack_data(loaded, open_store(loaded.job.store), PlainProgress(said.append), InProcess())
    assert not [line for line in said if "warning" in line]
    if manifest is not None:
        assert manifest.splits["train"].samples > manifest.splits["valid"].samples > 0
        for split in manifest.splits.values():
            assert not split.dropped
    for path in re.findall(r"\S+\.png", written.example):
        assert Path(path).is_file()


@pytest.mark.parametrize("kind", STARTS)
def test_comments_behind_fields_stand_below_each_other(kind: str, tmp_path: Path) -> None:
    write_start(Wanted(kind, tmp_path / "job.yaml"))
    lines = (tmp_path / "job.yaml").read_text().splitlines()
    columns = [line.index(" # ") for line in lines if " # " in line and not line.lstrip().startswith("#")]
    assert set(columns) == {35}


def test_a_language_of_ones_own_has_longer_to_learn_than_a_few_made_up_words(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    for name, data in (("made-up", ()), ("own", (str(tmp_path / "pairs.tsv"),))):
        write_start(Wanted("translate", tmp_path / f"{name}.yaml", train=data))
    made_up, own = (load(tmp_path / f"{name}.yaml", []).job for name in ("made-up", "own"))
    assert own.train.duration.value > 10 * made_up.train.duration.value


def test_the_command_says_what_comes_next(tmp_path: Path) -> None:
    done = packtrain("init", "classify", "shapes.yaml", cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "wrote shapes.yaml and shapes-data with made-up data",
        "next: packtrain run shapes.yaml",
        "then: packtrain predict shapes shapes-data/valid/star/00.png",
    ]


def test_a_start_is_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        write_start(Wanted("caption", tmp_path / folder / "job.yaml"))
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 1000
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("kind", "names", "source"),
    [
        ("translate", ["a.en", "a.de"], "{bitext: [a.en, a.de]}"),
        ("chat", ["talk to me.tsv"], '{dialogue: "talk to me.tsv"}'),
        ("caption", ["c.json", "pictures"], "{coco: [c.json, pictures]}"),
        ("classify", ["lines.jsonl"], "{folder: lines.jsonl}"),
    ],
)
def test_data_of_ones_own_stands_in_the_job(kind: str, names: list[str], source: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.touch()
    written = write_start(Wanted(kind, tmp_path / "job.yaml", train=list(map(str, paths))))
    assert f"  train: [{source}]\n" in (tmp_path / "job.yaml").read_text()
    assert written.files == [str(tmp_path / "job.yaml")]
    data = load(tmp_path / "job.yaml").job.data
    assert (data.train[0].paths, data.valid) == (tuple(map(str, paths)), ())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    assert_refused(
        packtrain("init", "own", "job.yaml", cwd=tmp_path), 2, "job.yaml is there already", "init own my.yaml"
    )
    (tmp_path / "chat-data").mkdir()
    assert_refused(packtrain("init", "chat", cwd=tmp_path), 2, "chat-data is there already")
    (tmp_path / "train.py").write_text("mine too")
    write_start(Wanted("program", tmp_path / "program.yaml"))
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert (tmp_path / "train.py").read_text() == "mine too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat-data", "job.yaml", "program.yaml", "train.py"]


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ({"kind": "chatt"}, "init: there is no 'chatt' to start from; did you mean 'chat'?"),
        ({"kind": "job.yaml"}, "known: caption, chat, classify, own, program, translate"),
        ({"train": ["none.tsv"]}, "--data: there is no none.tsv"),
        ({"valid": ["x.tsv"]}, "--valid: is for data of your own; give --data as well"),
        ({"kind": "program", "train": ["x"]}, "--data: a program reads its data by itself"),
        ({"name": "Ä"}, "--name: 'Ä' must be 1 to 63 of the characters"),
        ({"path": Path("nowhere/job.yaml")}, "nowhere/job.yaml: No such file or directory"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    wanted: dict[str, object], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake) as refused:
        write_start(Wanted(**{"kind": "chat", "path": Path("job.yaml"), **wanted}))  # type: ignore[arg-type]
    assert fault in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["own_recipe/languages.py", "program/train.py"])
def test_modules_are_those_of_the_examples(module: str, tmp_path: Path) -> None:
    write_start(Wanted(module.partition("_")[0].partition("/")[0], tmp_path / "job.yaml"))
    assert (tmp_path / Path(module).name).read_text() == (EXAMPLES / module).read_text()


def test_numbers_are_spelled_right() -> None:
    assert [english(number) for number in (1, 20, 41, 300, 512)] == [
        "one", "twenty", "forty-one", "three hundred", "five hundred and twelve",
    ]  # fmt: skip
    assert [german(number) for number in (1, 21, 30, 101, 765)] == [
        "eins", "einundzwanzig", "dreißig", "einhunderteins", "siebenhundertfünfundsechzig",
    ]  # fmt: skip
