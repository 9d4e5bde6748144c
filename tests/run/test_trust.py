"""Code in the store that somebody else has put there, and the person who would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import packtrain as pt
from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.fleet import fleet_of
from packtrain.fleet.environment import FIND
from packtrain.fleet.local import LocalSettings
from packtrain.fleet.wheels import _pip
from packtrain.identity import identity
from packtrain.job import Job
from packtrain.job.job import CheckpointSettings, FleetSettings, ReportSettings
from packtrain.job.kinds import EXCHANGES, FLEETS, FORMATS, OPTIMIZERS, SCHEDULES, kind_class
from packtrain.job.part import Part
from packtrain.launch.check import check
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.node.mirror_process import MirrorProcess
from packtrain.pack.build import PlainProgress
from packtrain.pack.workers import Processes
from packtrain.run.code import archive
from packtrain.run.records import Result
from packtrain.run.run import Run
from packtrain.run.trust import CodeReview, refuse, remember, require_trust, risks
from packtrain.store import Store, open_store
from packtrain.system import state_directory
from parts.runs import new_run, program_job, recipe_job
from parts.terminal import in_terminal

GOOD = "print('good')"
EVIL = "import os, pathlib; pathlib.Path(os.environ['MARK']).touch()"
JOB = "name: mine\nprogram: [train.py]\nstore: {store}\n"
RECIPE_JOB = """
name: mine
recipe: mine:Mine
store: {store}
data: {{train: [{{bitext: [a.txt, a.txt]}}], vocabulary: 300}}
model: tiny
train: {{duration: 1 epochs, batch: 64 tokens}}
"""
RECIPE = "from packtrain.recipes.translate import Translate\n\nclass Mine(Translate):\n    pass\n"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return a file that only the evil code creates."""
    return tmp_path / "mark"


def started(folder: Path, job: str = JOB, **files: str) -> Run:
    """Create a run as its own person does, here."""
    code = folder / "code"
    code.mkdir()
    for name, text in {"train.py": GOOD, "job.yaml": job.format(store=folder / "store"), **files}.items():
        (code / name.replace("_py", ".py").replace("_txt", ".txt")).write_text(text)
    return create(check(load(code / "job.yaml"), PlainProgress(lambda _: None)))


def poison(run: Run, **files: str) -> None:
    changed = {name.replace("_py", ".py"): text.encode() for name, text in files.items()}
    run.store.put(run.key("code.tar.zst"), archive(changed))


def again(run: Run) -> Run:
    """Return the run as another process opens it."""
    return Run(run.store, run.name)


def packtrain(verb: str, run: Run, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", verb, run.name, "--store", run.store.url, *options]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def answered(answer: str, verb: str, run: Run) -> tuple[int, str]:
    return in_terminal([verb, run.name, "--store", run.store.url], answer)


@pytest.mark.usefixtures("processes")
def test_code_that_was_started_here_is_not_asked_about(tmp_path: Path) -> None:
    require_trust(again(started(tmp_path)), refuse)


@pytest.mark.usefixtures("processes")
def test_a_store_is_the_same_by_any_path_and_after_a_move(tmp_path: Path) -> None:
    run = started(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for path in (tmp_path / "link", tmp_path / "code" / ".." / "store", tmp_path / "moved"):
        if path.name == "moved":
            (tmp_path / "store").rename(path)
        require_trust(Run(open_store(str(path)), run.name), refuse)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("verb", ["resume", "node"])
def test_code_that_was_changed_in_the_store_is_not_run(tmp_path: Path, mark: Path, verb: str) -> None:
    run = started(tmp_path)
    poison(run, train_py=EVIL)
    done = packtrain(verb, run)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("packtrain: mine-1 is not what you ran before: code/train.py, code/job.yaml changed;")
    assert done.stderr.endswith("pass --trust-code\n")
    assert not mark.exists()


@pytest.mark.usefixtures("processes")
def test_a_recipe_that_was_changed_in_the_store_is_not_imported_by_predict(tmp_path: Path, mark: Path) -> None:
    run = started(tmp_path, RECIPE_JOB, mine_py=RECIPE, a_txt="a b c\n" * 50)
    poison(run, mine_py=EVIL + "\n" + RECIPE)
    done = packtrain("predict", run, "hello")
    assert (done.returncode, mark.exists()) == (2, False), done.stderr
    assert "code/mine.py" in done.stderr
    with pytest.raises(Mistake, match=r"not what you ran before: .*; look at it, then pass trust_code=True"):
        pt.open(run.name, run.store.url).predict(["hello"])
    assert not mark.exists()


@pytest.mark.usefixtures("processes")
def test_a_job_that_was_changed_in_the_store_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its machines nor the names of the variables that they are sent may change unseen."""
    monkeypatch.setenv("TOKEN", "canary")
    run = started(tmp_path)
    changed = program_job("mine", environment=["TOKEN"], fleet={"ssh": {"hosts": ["gpu-of-somebody-else"]}})
    run.store.put(run.key("job.json"), changed.model_dump_json().encode())
    done = packtrain("resume", run)
    assert (done.returncode, "job.json changed" in done.stderr) == (2, True), done.stderr
    with pytest.raises(Mistake, match=r"job\.json changed"):
        pt.open(run.name, run.store.url).resume()


RISKS: dict[str, dict[str, Any]] = {
    "environment": {"environment": ["TOKEN"]},
    "origin": {"origin": {"directory": "/", "inode": 1}},
    "inputs": {"inputs": {"secrets": "/root"}},
    "report.mlflow": {"report": {"mlflow": "https://mlflow.of-somebody-else.example"}},
    "fleet.public_address": {"fleet": {"public_address": True}},
    "fleet.cache": {"fleet": {"cache": {"directory": "/etc"}}},
    "fleet.local.power_off": {"fleet": {"local": {"power_off": True}}},
    "fleet.ssh": {"fleet": {"ssh": {"hosts": ["gpu-of-somebody-else"]}}},
    "fleet.mpi": {"fleet": {"mpi": {"hosts": ["gpu-of-somebody-else"]}}},
    "fleet.slurm": {"fleet": {"slurm": {}}},
    "fleet.kubernetes": {"fleet": {"kubernetes": {"image": "image"}}},
    "fleet.aws": {"fleet": {"aws": {"region": "us-east-1", "instances": ["g5.xlarge"], "role": "a"}}},
    "fleet.ibm": {"fleet": {"ibm": {"datacenter": "dal10", "flavor": "AC2_8X60X100", "image": "a"}}},
    "recipe": {"recipe": "mine:Mine"},
    "program": {"recipe": None, "program": ["train.py"]},
}
"""Every setting that needs trust, with a job of a recipe that has it."""


def job_with(field: str) -> Job:
    if field == "program":
        return program_job()
    return recipe_job(**RISKS[field])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("verb", "field"), [("resume", "environment"), ("resume", "fleet.ssh"), ("node", "report.mlflow")]
)
def test_a_job_of_somebody_else_that_needs_trust_is_not_run_unasked(
    directory_store: Store, verb: str, field: str
) -> None:
    done = packtrain(verb, new_run(directory_store, job_with(field)))
    assert done.returncode == 2
    assert f"job-1 was not started from here, and its job sets {field};" in done.stderr


@pytest.mark.usefixtures("processes")
def test_a_run_whose_job_was_given_another_mlflow_in_the_store_is_not_resumed(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first machine would send the token that it gets from this person's environment."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "canary")
    run = new_run(directory_store, recipe_job())
    remember(run)
    changed = job_with("report.mlflow")
    run.store.put(run.key("job.json"), changed.model_dump_json().encode())
    done = packtrain("resume", run)
    assert (done.returncode, "job.json changed" in done.stderr) == (2, True), done.stderr
    assert run.launches() == []


@pytest.mark.parametrize("field", RISKS)
def test_a_field_that_could_do_harm_needs_trust(field: str) -> None:
    assert risks(job_with(field)) == (field,)


def parts() -> list[type[Part]]:
    """Return the classes of everything that a job can have in it."""
    for family in (FLEETS, FORMATS, SCHEDULES, OPTIMIZERS, EXCHANGES):
        for word in family:
            kind_class(family, word)
    classes = [Part]
    for kind in classes:
        classes += [inner for inner in kind.__subclasses__() if inner.__module__.startswith("packtrain.")]
    return classes


def test_every_field_of_a_job_needs_trust_unless_it_is_called_harmless() -> None:
    """`RISKS` and the settings' own lists together are all fields: a new one is in neither until somebody decides."""
    words = {kind_class(FLEETS, word): word for word in FLEETS}
    places = {Job: "", FleetSettings: "fleet.", ReportSettings: "report.", LocalSettings: "fleet.local."}
    risky: set[str] = set()
    for part in parts():
        declared = [vars(base)["harmless"] for base in part.__mro__ if "harmless" in vars(base)]
        names = set().union(*declared)
        assert names <= set(part.model_fields), f"{part.__name__} calls fields harmless that it does not have"
        if declared:
            risky |= {places.get(part, f"{part.__name__}.") + name for name in set(part.model_fields) - names}
        elif part in words:
            risky.add(f"fleet.{words[part]}")
    assert risky | {"recipe"} == {*RISKS, "outputs", "directory"}, "a recipe's job has neither of these two"


def test_a_field_that_nobody_has_called_harmless_needs_trust() -> None:
    class Newer(CheckpointSettings):
        upload_to: str = ""

    job = recipe_job()
    assert risks(job) == ()
    assert risks(job.model_copy(update={"checkpoint": Newer()})) == (), "its default is ours"
    changed = job.model_copy(update={"checkpoint": Newer(upload_to="https://elsewhere.example")})
    assert risks(changed) == ("checkpoint.upload_to",)
    assert risks(changed, ["recipe", "model"]) == (), "whoever does not read the section"


@pytest.mark.usefixtures("processes")
def test_a_node_runs_only_the_code_that_its_client_has_seen(tmp_path: Path, mark: Path) -> None:
    run = started(tmp_path)
    digest = run.code_digest
    poison(run, train_py=EVIL)
    done = packtrain("node", run, "--code", digest, "--trust-code")
    assert (done.returncode, mark.exists()) == (100, False), done.stderr
    assert "are not those that its client started" in done.stderr
    assert [event.kind for event in run.events().read()] == ["failure"], "whoever follows the run sees it"


@pytest.mark.usefixtures("processes")
def test_code_of_somebody_else_runs_once_it_is_accepted_and_is_remembered(tmp_path: Path, mark: Path) -> None:
    run = started(tmp_path)
    poison(run, train_py=EVIL)
    done = packtrain("node", run, "--trust-code", "--address", "127.0.0.1")
    assert (done.returncode, mark.exists()) == (0, True), done.stderr
    require_trust(again(run), refuse)


@pytest.mark.usefixtures("processes")
def test_in_a_terminal_the_person_is_shown_what_changed_and_asked(tmp_path: Path, mark: Path) -> None:
    run = started(tmp_path)
    poison(run, train_py=EVIL, **{"more\x1b[2J_py": "1"})
    code, shown = answered("no", "node", run)
    assert (code, mark.exists()) == (2, False)
    for words in ("changed  code/train.py", "added    code/more\\x1b[2J.py", "removed  code/job.yaml", "Run it? [y/N]"):
        assert words in shown
    assert "\x1b" not in shown
    assert "mine-1: not run" in shown
    code, shown = answered("y", "node", run)
    assert (code, mark.exists()) == (0, True), shown


@pytest.mark.usefixtures("processes")
def test_an_empty_answer_is_a_no(tmp_path: Path, mark: Path) -> None:
    run = started(tmp_path)
    poison(run, train_py=EVIL)
    assert answered("", "node", run)[0] == 2
    assert not mark.exists()


@pytest.mark.usefixtures("processes")
def test_an_archive_cannot_add_modules_to_a_recipe_of_packtrain(directory_store: Store, mark: Path) -> None:
    """Python looks for modules in the directory of the code first, so an archive with a torch.py would be run."""
    run = new_run(directory_store, recipe_job(fleet={"local": {}, "failures": 0}))
    poison(run, torch_py=EVIL, numpy_py=EVIL)
    assert packtrain("node", run, "--address", "127.0.0.1").returncode == 100, "there is no pack"
    assert not mark.exists()


# Python files in the current directory, such as that of somebody else's job file.


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a directory with modules of names that everything imports. Any of them creates the mark."""
    (tmp_path / "trap").mkdir()
    for module in ("psutil", "pip", "signal", "socket", "typer", "pydantic", "torch", "mlflow", "tensorboard"):
        (tmp_path / "trap" / f"{module}.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path / "trap")


def start_a_node(run: Run) -> None:
    [plan] = fleet_of(run.job.fleet.kind).plan(run)
    assert subprocess.run(plan.arguments, stdin=subprocess.DEVNULL, timeout=120).returncode == 0, "the run has ended"


def mirror(run: Run) -> None:
    process = MirrorProcess(run, "a")
    process.start()
    process.finish()


def ask_pip(_: Run) -> None:
    _pip(["--version"])


def pack_in_a_process(_: Run) -> None:
    assert list(Processes(1).do(abs, [-1])) == [1]
    assert "PYTHONSAFEPATH" not in os.environ, "programs would not find their own modules"


def find_an_environment(_: Run) -> None:
    found = subprocess.run(["sh", "-c", FIND, "find", identity(), sys.executable], stdout=subprocess.PIPE, check=True)
    assert found.stdout.decode().strip() == sys.executable


@pytest.mark.usefixtures("processes", "trap")
@pytest.mark.parametrize("act", [start_a_node, mirror, ask_pip, pack_in_a_process, find_an_environment])
def test_python_files_in_the_current_directory_are_not_executed(
    directory_store: Store, mark: Path, act: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    run = new_run(directory_store, recipe_job(report={"mlflow": str(mark.with_name("mlflow"))}))
    run.finish(Result("stopped", "stopped by user", 0, 0.0))
    act(run)
    assert not mark.exists()


@pytest.mark.usefixtures("processes")
def test_a_program_imports_the_modules_beside_it_and_packtrain_does_not(tmp_path: Path, mark: Path) -> None:
    note = "import os, sys; print(os.path.basename(sys.argv[0]), file=open(os.environ['MARK'], 'a'))"
    run = started(tmp_path, train_py="import helper", helper_py="import psutil", psutil_py=note, pydantic_py=note)
    done = packtrain("node", run, "--address", "127.0.0.1")
    assert (done.returncode, mark.read_text()) == (0, "train.py\n"), done.stderr


# Machines and services that the store names.


@pytest.mark.usefixtures("processes")
def test_the_login_of_a_cluster_that_the_store_names_is_not_started_unasked(
    directory_store: Store, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": [str(mark)]}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "theirs", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "me", "user": {"exec": {**plugin, "interactiveMode": "Never"}}}],
        "contexts": [{"name": "theirs", "context": {"cluster": "theirs", "user": "me"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    run = new_run(directory_store, recipe_job(fleet={"kubernetes": {"image": "image", "context": "theirs"}}))
    where = ["--store", directory_store.url]
    for verb in ("attach", "ls", "stop"):
        done = CliRunner().invoke(app, [verb, *([] if verb == "ls" else [run.name]), *where])
        is_refused = isinstance(done.exception, Mistake)
        assert (verb, is_refused, mark.exists()) == (verb, verb == "attach", False), done.output
    run = new_run(directory_store, run.job)
    remember(run)
    assert CliRunner().invoke(app, ["ls", *where]).exit_code == 0
    assert mark.exists(), "of a run that was started from here, the cluster is asked"


def test_the_address_of_mlflow_has_no_secret_in_it() -> None:
    """It is stored, and an argument of a process."""
    for uri in ("https://hunter2@host", "https://me:hunter2@host/path", "http://hunter2@host:5000"):
        with pytest.raises(ValidationError, match="contains a secret; set MLFLOW_TRACKING_TOKEN instead") as refused:
            recipe_job(report={"mlflow": uri})
        assert "hunter2" not in str(refused.value)
    for uri in ("https://host/@path", "databricks", "databricks://me", "file:/a@b", "mlruns"):
        assert recipe_job(report={"mlflow": uri}).report.mlflow == uri


# What is remembered.


def reviews(run: Run) -> list[CodeReview]:
    found: list[CodeReview] = []
    require_trust(run, found.append)
    return found


def test_what_is_remembered_can_be_read_by_its_owner_only(directory_store: Store) -> None:
    remember(new_run(directory_store))
    folder = state_directory() / "code"
    [file] = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_another_run_and_another_store_are_asked_about_even_with_the_same_code(tmp_path: Path) -> None:
    first, other = open_store(str(tmp_path / "first"), create=True), open_store(str(tmp_path / "other"), create=True)
    remember(new_run(first))
    for run in (new_run(first), new_run(other)):
        [review] = reviews(run)
        assert not review.is_known
        assert reviews(run) == [], "accepted"


def test_a_file_that_becomes_executable_is_a_change(directory_store: Store) -> None:
    run = new_run(directory_store)
    remember(run)
    directory_store.put(run.key("code.tar.zst"), archive({"train.py": b""}, {"train.py": 0o755}))
    [review] = reviews(again(run))
    assert [(change.kind, change.name) for change in review.changes] == [("changed", "code/train.py")]


def test_a_damaged_memory_is_none(directory_store: Store) -> None:
    run = new_run(directory_store)
    remember(run)
    [file] = (state_directory() / "code").iterdir()
    for text in ("", "[]", '{"digests": 1}', '{"digests": ["a"], "files": 3}', "\0"):
        file.write_text(text)
        assert len(reviews(run)) == 1


def test_a_home_that_cannot_be_written_only_means_to_be_asked_again(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = new_run(directory_store)
    remember(run)
    assert len(reviews(run)) == 1
