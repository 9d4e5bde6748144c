"""`packtrain init`: a job for every recipe that runs unchanged, on toy data or on the user's own."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packtrain.cli import app
from packtrain.cli.template import TEMPLATES, InitRequest, write_job
from packtrain.errors import Mistake
from packtrain.fleet.wheels import own_wheel
from packtrain.launch.check import pack_data
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import InProcess
from packtrain.recipes import RECIPES
from packtrain.recipes.template import english, german
from packtrain.store import open_store
from parts.command import Packtrain, assert_refused
from parts.runs import write_files

TAR = tarfile.TarInfo("x").tobuf() + bytes(1024)


def test_there_is_a_template_for_every_recipe_an_own_one_and_a_program() -> None:
    assert TEMPLATES.keys() == {*RECIPES, "own", "program"}


def test_without_a_kind_init_lists_all_kinds_and_writes_nothing(packtrain: Packtrain, tmp_path: Path) -> None:
    done = packtrain("init")
    assert re.findall(r"^packtrain init (\w+) ", done.stdout, re.MULTILINE) == sorted(TEMPLATES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_job_loads_and_its_data_can_be_packed(kind: str, tmp_path: Path) -> None:
    written = write_job(InitRequest(kind, tmp_path / f"{kind}.yaml"))
    assert all((tmp_path / Path(file.split()[0]).name).exists() for file in written.files)
    loaded = load(tmp_path / f"{kind}.yaml", [f"store={tmp_path / 'store'}"])
    assert loaded.job.name == kind
    said: list[str] = []
    manifest = pack_data(loaded, open_store(loaded.job.store, create=True), PlainProgress(said.append), InProcess())
    assert not [line for line in said if "warning" in line]
    if manifest is not None:
        assert manifest.splits["train"].samples > manifest.splits["valid"].samples > 0
        for split in manifest.splits.values():
            assert not split.dropped
    for path in re.findall(r"\S+\.png", written.example):
        assert Path(path).is_file()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_comments_after_fields_are_aligned(kind: str, tmp_path: Path) -> None:
    write_job(InitRequest(kind, tmp_path / "job.yaml"))
    lines = (tmp_path / "job.yaml").read_text().splitlines()
    columns = [line.index("# ") for line in lines if "# " in line and not line.lstrip().startswith("#")]
    assert set(columns) == {36}


def test_a_job_on_own_data_trains_longer_than_one_on_toy_data(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    for name, data in (("toy", ()), ("own", (str(tmp_path / "pairs.tsv"),))):
        write_job(InitRequest("translate", tmp_path / f"{name}.yaml", train=data))
    toy, own = (load(tmp_path / f"{name}.yaml", []).job for name in ("toy", "own"))
    assert own.train.duration.value > 10 * toy.train.duration.value


def test_init_shows_the_next_commands(packtrain: Packtrain) -> None:
    done = packtrain("init", "classify", "shapes.yaml")
    assert done.stdout.splitlines() == [
        "Wrote shapes.yaml and shapes-data with toy data",
        "  train:   packtrain run shapes.yaml",
        "  predict: packtrain predict shapes shapes-data/valid/star/00.png",
    ]


def test_init_writes_the_same_files_every_time(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        write_job(InitRequest("caption", tmp_path / folder / "job.yaml"))
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 1000
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("kind", "names", "source"),
    [
        ("translate", ["a.en", "a.de"], "{bitext: [a.en, a.de]}"),
        ("chat", ["talk to me.tsv"], '{dialogue: "talk to me.tsv"}'),
        ("caption", ["c.json", "images"], "{coco: [c.json, images]}"),
        ("classify", ["lines.jsonl"], "{folder: lines.jsonl}"),
    ],
)
def test_own_data_is_named_in_the_job(kind: str, names: list[str], source: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.touch()
    written = write_job(InitRequest(kind, tmp_path / "job.yaml", train=list(map(str, paths))))
    assert f"  train: [{source}]\n" in (tmp_path / "job.yaml").read_text()
    assert written.files == [str(tmp_path / "job.yaml")]
    data = load(tmp_path / "job.yaml").job.data
    assert (data.train[0].paths, data.valid, data.held_out) == (tuple(map(str, paths)), (), 0.05)


LAYOUTS: dict[str, tuple[str, list[str], list[list[str]]]] = {
    "folders": ("classify", ["train/cat/1", "val/cat/1", "test/cat/1", "README.md"], [["train"], ["val"], ["test"]]),
    "archives": ("classify", ["set-train.tar", "set-test.tar"], [["set-train.tar"], ["set-test.tar"], []]),
    "texts": (
        "translate",
        ["train.de", "train.en", "dev.de", "dev.en", "dev.fr"],
        [["train.de", "train.en"], ["dev.de", "dev.en"], []],
    ),
    "table": ("translate", ["training.tsv.GZ"], [["training.tsv.GZ"], [], []]),
    "compressed texts": (
        "translate",
        ["train.de.xz", "train.en.xz", "dev.de.xz", "dev.en.xz"],
        [["train.de.xz", "train.en.xz"], ["dev.de.xz", "dev.en.xz"], []],
    ),
    "texts compressed in several ways": (
        "translate",
        ["train.de.xz", "train.en", "train.en.gz", "dev.de", "dev.en.ZST"],
        [["train.de.xz", "train.en"], ["dev.de", "dev.en.ZST"], []],
    ),
    "replies": ("chat", ["a_train.txt", "a_valid.txt"], [["a_train.txt"], ["a_valid.txt"], []]),
    "coco": (
        "caption",
        ["train2014/1", "val2014/1", "annotations/instances_train2014.json"]
        + [f"annotations/captions_{split}2014.json" for split in ("train", "val")],
        [["annotations/captions_train2014.json", "train2014"], ["annotations/captions_val2014.json", "val2014"], []],
    ),
    "one folder of images": (
        "caption",
        ["train.json", "valid.json", "images/1"],
        [["train.json", "images"], ["valid.json", "images"], []],
    ),
    "lines": ("classify", ["train.jsonl", "test.jsonl", "val.jsonl"], [["train.jsonl"], ["val.jsonl"], ["test.jsonl"]]),
    "classes": ("classify", ["train/1", "bus/1", "car/1"], [["."], [], []]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_splits_of_a_folder_are_found(layout: str, tmp_path: Path) -> None:
    kind, names, expected = LAYOUTS[layout]
    data = tmp_path / "data"
    write_files(data, {name: TAR if name.endswith(".tar") else b"" for name in names})
    written = write_job(InitRequest(kind, tmp_path / "job.yaml", train=[str(data)]))
    job = load(tmp_path / "job.yaml").job.data
    found = [[path for source in sources for path in source.paths] for sources in (job.train, job.valid, job.test)]
    assert found == [[str(data / path) for path in paths] for paths in expected]
    assert len(written.data) == (sum(map(bool, expected)) if layout != "classes" else 0)


AMBIGUOUS = {
    "direction": ("translate", ["train.de", "train.en"], ["en"], "[{bitext: [data/train.en, data/train.de]}]"),
    "languages": ("translate", ["train.de", "train.en", "train.fr"], ["fr", "de"], "data/train.fr, data/train.de"),
    "two candidates": ("classify", ["train/1", "val/1", "dev/1"], ["dev"], "valid: [{imagenet: data/dev}]"),
    "only a test set": ("classify", ["train/1", "test/1"], ["no"], "\n  test: [{imagenet: data/test}]\n"),
    "classes": ("classify", ["train/1", "valid/1", "bus/1"], ["yes"], "train: [{imagenet: data}]"),
    "splits": ("classify", ["train/1", "valid/1", "docs/1"], ["no"], "train: [{imagenet: data/train}]"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_person_decides_where_names_can_be_read_in_two_ways(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, names, answers, expected = AMBIGUOUS[case]
    write_files(Path("data"), dict.fromkeys(names, b""))
    left = list(answers)

    def ask(_question: str, choices: Sequence[str]) -> str:
        assert left[0] in choices
        return left.pop(0)

    written = write_job(InitRequest(kind, Path("job.yaml"), train=["data"]), ask)
    assert expected in Path("job.yaml").read_text()
    assert not left
    assert not written.notes


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("direction", "translates from de; swap the files in the job for the other way"),
        ("languages", "--data: holds de, en, fr; name the two files: --data train.en --data train.de"),
        ("two candidates", "left out dev"),
        ("only a test set", "there is no validation data, so the best checkpoint is chosen by test"),
        ("classes", "train and valid are beside bus, so they may be classes; name the data: --data data/train --valid"),
    ],
)
def test_without_a_person_init_says_what_it_took_or_what_to_name(
    case: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, names, _, _ = AMBIGUOUS[case]
    write_files(Path("data"), dict.fromkeys(names, b""))
    done = CliRunner().invoke(app, ["init", kind, "job.yaml", "--data", "data"])
    if "--data" in outcome:
        assert outcome in str(done.exception)
    else:
        assert f"  note:    {outcome}\n" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_folder_without_splits_is_refused_where_it_cannot_be_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(Mistake, match=r"holds neither train\.en and train\.de nor train\.tsv; name the files"):
        write_job(InitRequest("translate", tmp_path / "job.yaml", train=[str(tmp_path / "data")]))


def test_named_validation_data_is_taken_instead_of_what_is_found(tmp_path: Path) -> None:
    write_files(tmp_path, {"data/train/cat/1": b"", "data/valid/cat/1": b"", "other/cat/1": b""})
    write_job(InitRequest("classify", tmp_path / "job.yaml", None, [str(tmp_path / "data")], [str(tmp_path / "other")]))
    job = load(tmp_path / "job.yaml").job.data
    assert [source.paths for source in (*job.train, *job.valid)] == [
        (str(tmp_path / "data/train"),), (str(tmp_path / "other"),),
    ]  # fmt: skip


def test_init_overwrites_nothing(packtrain: Packtrain, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("mine")
    assert_refused(packtrain("init", "own", "job.yaml"), 2, "job.yaml exists", "init own my.yaml")
    (tmp_path / "chat-data").mkdir()
    assert_refused(packtrain("init", "chat"), 2, "chat-data exists")
    (tmp_path / "train.py").write_text("mine too")
    write_job(InitRequest("program", tmp_path / "program.yaml"))
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert (tmp_path / "train.py").read_text() == "mine too"
    kept = {"chat-data", "job.yaml", "train.py"}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "program.yaml", ".packtrain"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kind": "chatt"}, "init: unknown kind 'chatt'; did you mean 'chat'?"),
        ({"kind": "job.yaml"}, "known: caption, chat, classify, own, program, translate"),
        ({"train": ["none.tsv"]}, "--data: no such file: none.tsv"),
        ({"valid": ["x.tsv"]}, "--valid: needs --data; without it, init writes toy data"),
        ({"kind": "program", "train": ["x"]}, "--data: not for a program, which reads its data itself"),
        ({"name": "Ä"}, "--name: 'Ä' must be 1 to 63 of the characters"),
        ({"path": Path("nowhere/job.yaml")}, "nowhere/job.yaml: No such file or directory"),
    ],
)
def test_an_invalid_request_is_an_error_in_one_line(
    changes: dict[str, object], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake) as refused:
        write_job(InitRequest(**{"kind": "chat", "path": Path("job.yaml"), **changes}))  # type: ignore[arg-type]
    assert fault in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "module"), [("own", "languages.py"), ("program", "train.py")])
def test_a_job_with_a_module_brings_it_along(kind: str, module: str, tmp_path: Path) -> None:
    write_job(InitRequest(kind, tmp_path / "job.yaml"))
    shipped = files("packtrain.cli") / "templates" / module
    assert (tmp_path / module).read_bytes() == shipped.read_bytes()
    compile(shipped.read_text(), module, "exec")


def test_a_wheel_ships_the_templates() -> None:
    """An editable install reads them from the checkout; installs on other machines have only the wheel."""
    with zipfile.ZipFile(io.BytesIO(own_wheel()[1])) as wheel:
        shipped = {name.removeprefix("packtrain/") for name in wheel.namelist()}
    assert shipped >= {f"recipes/{name}/job.yaml" for name in RECIPES}
    assert shipped >= {f"cli/templates/{name}" for name in ("own.yaml", "languages.py", "program.yaml", "train.py")}


def test_numbers_are_spelled_right() -> None:
    assert [english(number) for number in (1, 20, 41, 300, 512)] == [
        "one", "twenty", "forty-one", "three hundred", "five hundred and twelve",
    ]  # fmt: skip
    assert [german(number) for number in (1, 21, 30, 101, 765)] == [
        "eins", "einundzwanzig", "dreißig", "einhunderteins", "siebenhundertfünfundsechzig",
    ]  # fmt: skip
