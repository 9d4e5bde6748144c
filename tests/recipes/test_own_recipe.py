"""Recipes of people's own: found beside the job file, taken along with the run, found again where the file is not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.pack.build import PlainProgress
from packtrain.recipes import own, recipe_class, recipe_of
from packtrain.recipes.own import unpacked_code
from packtrain.report.summary import summarize
from packtrain.run.run import Run, open_run
from packtrain.start import create, load
from packtrain.store import open_store

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_recipe"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test with a cache and a working directory of its own, and none with another's modules."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, module in list(sys.modules.items()):  # of a job that another test has loaded
        if own._searched is not None and own._lies_in(module, own._searched):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(own, "_searched", None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder


def refusal(name: str, code: Path) -> str:
    with pytest.raises(Mistake) as refused:
        recipe_class(name, code)
    return str(refused.value)


# Finding the class.


def test_a_recipe_is_found_in_the_code_of_the_job(example: Path) -> None:
    found = recipe_class("languages:Languages", example)
    assert found.__name__ == "Languages"
    assert recipe_class("languages:Languages", example) is found


def test_two_jobs_may_have_modules_of_the_same_name(tmp_path: Path) -> None:
    for folder, unit in (("one", "tokens"), ("two", "samples")):
        text = f"from languages import Languages\nclass Mine(Languages):\n    unit = {unit!r}\n"
        write(tmp_path / folder, "mine", text)
        shutil.copy(EXAMPLE / "languages.py", tmp_path / folder)
    assert recipe_class("mine:Mine", tmp_path / "one").unit == "tokens"
    assert recipe_class("mine:Mine", tmp_path / "two").unit == "samples"
    assert recipe_class("mine:Mine", tmp_path / "one").unit == "tokens"


def test_a_module_that_is_not_there_is_told(tmp_path: Path) -> None:
    expected = f"there is no module 'nowhere' in {tmp_path}; it lies in the directory that `code` names"
    assert refusal("nowhere:Mine", tmp_path) == expected
    assert refusal("nowhere.deep:Mine", tmp_path).startswith("there is no module 'nowhere.deep'")


def test_a_module_that_a_recipe_needs_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "code", "needy", "import no_such_thing\n")
    assert refusal("needy:Mine", folder) == "needy needs no_such_thing, which is not installed here"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1 / 0\n", "broken cannot be imported: ZeroDivisionError: division by zero (broken.py:1)"),
        ("\nclass Mine(:\n", "broken cannot be imported: SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    found = refusal("broken:Mine", write(tmp_path / "code", "broken", text))
    assert found.startswith(told)
    assert "(broken.py:" in found


def test_a_class_that_is_not_there_is_told_with_the_nearest(example: Path) -> None:
    assert refusal("languages:Language", example) == "languages has no Language; did you mean 'Languages'?"


@pytest.mark.parametrize("text", ["class Mine: pass\n", "Mine = 3\n", "def Mine(): pass\n"])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    expected = "other:Mine is not a recipe: make it a class that derives from packtrain.recipes.Recipe"
    assert refusal("other:Mine", write(tmp_path / "code", "other", text)) == expected


def test_what_a_recipe_lacks_is_listed(tmp_path: Path) -> None:
    text = "from packtrain.recipes import Recipe\nclass Mine(Recipe):\n    unit = 'samples'\n"
    found = refusal("bare:Mine", write(tmp_path / "code", "bare", text))
    assert found.startswith("bare:Mine lacks defaults, contents, kind, measure_of_best, batch, build_model, ")
    assert found.endswith("; docs/recipes.md says what a recipe has")


def test_a_job_names_the_line_of_its_recipe(example: Path) -> None:
    job = example / "job.yaml"
    job.write_text(job.read_text().replace("languages:Languages", "languages:Nothing"))
    with pytest.raises(Mistake, match=r"job\.yaml:\d+: recipe: languages has no Nothing; "):
        load(job)


def test_defaults_and_checks_of_an_own_recipe_hold(example: Path) -> None:
    loaded = load(example / "job.yaml")
    assert str(loaded.job.train.batch) == "64 samples"
    assert loaded.job.data.vocabulary == 400
    with pytest.raises(
        Mistake, match=r"^--set model: no size 'huge'; there are small, large$|model\.size: no size 'huge'"
    ):
        load(example / "job.yaml", ["model=huge"])


# With the run.


def created(example: Path) -> Run:
    return create(load(example / "job.yaml"), PlainProgress(lambda _: None))


def test_a_run_takes_the_recipe_along(example: Path) -> None:
    run = created(example)
    shutil.rmtree(example)
    code = unpacked_code(run)
    assert {path.name for path in code.iterdir()} >= {"languages.py", "job.yaml"}
    assert unpacked_code(run) == code
    found = recipe_of(run)
    assert Path(str(sys.modules[found.__module__].__file__)).parent == code.resolve()


def test_a_run_is_shown_where_its_recipe_cannot_be_imported(example: Path) -> None:
    (example / "languages.py").write_text((example / "languages.py").read_text() + "\n# of another run\n")
    run = created(example)
    run.store.put(run.key("code.tar.zst"), b"")
    summary = summarize(run, "interrupted")
    assert summary.measure == "accuracy"
    assert summary.what.startswith("languages:Languages small")


PREDICT = [sys.executable, "-m", "packtrain", "predict", "languages", "zweihundertelf", "two hundred and eleven"]


def test_the_worked_example_trains_and_predicts_on_a_machine_without_it(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packtrain", "run", str(example / "job.yaml"), "--set", "train.duration=3 epochs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = open_run(open_store("./store"), "languages").result()
    assert result is not None
    assert result.scores["valid.accuracy"] > 90  # a third, by chance

    shutil.rmtree(example)
    found = subprocess.run(PREDICT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["German", "English"]


def test_the_example_s_data_is_what_its_script_makes(example: Path) -> None:
    before = {name: (example / name).read_bytes() for name in ("train.jsonl", "valid.jsonl")}
    subprocess.run([sys.executable, str(example / "make.py")], check=True)
    assert {name: (example / name).read_bytes() for name in before} == before
    rows = [json.loads(line) for line in before["valid.jsonl"].decode().splitlines()]
    assert {row["target"] for row in rows} == {"English", "German", "Dutch"}
