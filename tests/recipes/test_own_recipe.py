"""Own recipes: found beside the job file, archived with the run, and found on machines without the file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtrain.cli.template import InitRequest, write_job
from packtrain.errors import Mistake
from packtrain.export.model import read_model
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.observe.status import read_status
from packtrain.pack.build import PlainProgress
from packtrain.recipes import recipe_class, recipe_of, use_code
from packtrain.run.code import archive, unpacked
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from parts.command import Packtrain, assert_refused, in_a_process


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own cache and working directory, and none of the modules of another test."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    use_code(None)
    yield
    use_code(None)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return a directory with the example that `packtrain init own` writes."""
    folder = tmp_path / "example"
    folder.mkdir()
    write_job(InitRequest("own", folder / "job.yaml", name="languages"))
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


def test_two_jobs_may_have_modules_of_the_same_name(example: Path, tmp_path: Path) -> None:
    for folder, unit in (("one", "tokens"), ("two", "samples")):
        text = f"from languages import Languages\nclass Mine(Languages):\n    unit = {unit!r}\n"
        write(tmp_path / folder, "mine", text)
        shutil.copy(example / "languages.py", tmp_path / folder)
    assert recipe_class("mine:Mine", tmp_path / "one").unit == "tokens"
    assert recipe_class("mine:Mine", tmp_path / "two").unit == "samples"
    assert recipe_class("mine:Mine", tmp_path / "one").unit == "tokens"


def test_a_missing_module_is_an_error(tmp_path: Path) -> None:
    expected = f"no module 'nowhere' in {tmp_path}; put it in the directory that `code` names"
    assert refusal("nowhere:Mine", tmp_path) == expected
    assert refusal("nowhere.deep:Mine", tmp_path).startswith("no module 'nowhere.deep'")


def test_a_missing_import_of_the_module_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "code", "needy", "import no_such_thing\n")
    assert refusal("needy:Mine", folder) == "needy imports no_such_thing, which is not installed here"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1 / 0\n", "cannot import broken: ZeroDivisionError: division by zero (broken.py:1)"),
        ("\nclass Mine(:\n", "cannot import broken: SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    found = refusal("broken:Mine", write(tmp_path / "code", "broken", text))
    assert found.startswith(expected)
    assert "(broken.py:" in found


def test_a_missing_class_is_an_error_with_the_nearest_name(example: Path) -> None:
    assert refusal("languages:Language", example) == "languages has no Language; did you mean 'Languages'?"


@pytest.mark.parametrize("text", ["class Mine: pass\n", "Mine = 3\n", "def Mine(): pass\n"])
def test_a_class_that_is_not_a_recipe_is_refused(tmp_path: Path, text: str) -> None:
    expected = "other:Mine is not a recipe; derive the class from packtrain.recipes.Recipe"
    assert refusal("other:Mine", write(tmp_path / "code", "other", text)) == expected


def test_missing_methods_and_attributes_are_listed(tmp_path: Path) -> None:
    text = "from packtrain.recipes import Recipe\nclass Mine(Recipe):\n    unit = 'samples'\n"
    found = refusal("bare:Mine", write(tmp_path / "code", "bare", text))
    assert found.startswith("bare:Mine lacks defaults, contents, kind, best_metric, batch, build_model, ")
    assert found.endswith("; docs/recipes.md lists what a recipe needs")


def test_the_error_names_the_line_of_the_recipe_in_the_job(example: Path) -> None:
    job = example / "job.yaml"
    job.write_text(job.read_text().replace("languages:Languages", "languages:Nothing"))
    with pytest.raises(Mistake, match=r"job\.yaml:\d+: recipe: languages has no Nothing; "):
        load(job)


def test_defaults_and_checks_of_an_own_recipe_apply(example: Path) -> None:
    loaded = load(example / "job.yaml")
    assert str(loaded.job.train.batch) == "64 samples"
    assert loaded.job.data.vocabulary == 400
    with pytest.raises(Mistake, match=r"^--set model: no size 'huge'; use small, large$|model\.size: no size 'huge'"):
        load(example / "job.yaml", ["model=huge"])


# With the run.


def created(example: Path) -> Run:
    return create(check(load(example / "job.yaml"), PlainProgress(lambda _: None)))


@pytest.mark.usefixtures("processes")
def test_a_run_archives_its_recipe(example: Path) -> None:
    run = created(example)
    shutil.rmtree(example)
    code = unpacked(run.code)
    assert {path.name for path in code.iterdir()} >= {"languages.py", "job.yaml"}
    assert unpacked(run.code) == code
    found = recipe_of(run)
    assert Path(str(sys.modules[found.__module__].__file__)).parent == code.resolve()


@pytest.mark.usefixtures("processes")
def test_a_run_is_shown_if_its_recipe_cannot_be_imported(example: Path) -> None:
    (example / "languages.py").write_text((example / "languages.py").read_text() + "\n# of another run\n")
    run = created(example)
    run.store.put(run.key("code.tar.zst"), b"")
    summary = read_status(run, "interrupted")
    assert summary.measure == "accuracy"
    assert summary.description.startswith("languages:Languages small")


PREDICT = ["predict", "languages", "zweihundertelf", "two hundred and eleven"]


@pytest.mark.usefixtures("processes", "training")
def test_the_worked_example_trains_and_predicts_on_a_machine_without_it(
    example: Path, tmp_path: Path, packtrain: Packtrain
) -> None:
    done = in_a_process("run", example / "job.yaml", "--set", "train.duration=3 epochs", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = open_run(open_store("./store"), "languages").result()
    assert result is not None
    assert result.scores["valid.accuracy"] > 90  # 50 by chance

    shutil.rmtree(example)
    done = packtrain(*PREDICT)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["German", "English"]

    done = packtrain("export", "languages")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "  inputs and outputs of model.onnx: model/README.md"
    assert "packtrain" not in done.stdout  # predict and serve refuse it
    assert "| input | `" in Path("model/README.md").read_text()
    with pytest.raises(Mistake, match="is a recipe of your own; use its files with their own runtime"):
        read_model(Path("model"))
    assert_refused(packtrain("export", "languages", "--int8"), 2, "--int8: not supported for languages:Languages")

    run = open_run(open_store("./store"), "languages")
    evil = {"languages.py": b"import pathlib; pathlib.Path('mark').touch()"}
    run.store.put(run.key("code.tar.zst"), archive(evil))
    done = packtrain(*PREDICT)
    assert (done.returncode, done.stdout, Path("mark").exists()) == (2, "", False)
    assert done.stderr.startswith(f"packtrain: {run.name} is not what you ran before: code/languages.py,")
