"""The command line: output, exit codes, and one line for each error."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import packtrain as pt
from packtrain.cli import FIRST, HIDDEN, PANELS, Commands, app
from packtrain.cli.common import hints
from packtrain.errors import NotFound
from packtrain.launch.load import load
from packtrain.run import liveness
from packtrain.run.checkpoint import commit
from packtrain.run.liveness import node_directory, watch_states
from packtrain.run.records import LogLine, Result
from packtrain.run.sweeps import Sweep, SweepPlan, Trial
from packtrain.store import Store
from parts.command import Packtrain, assert_refused
from parts.runs import a_generation, a_lease, new_run, recipe_job, write_files
from parts.s3 import S3Server, fresh_location

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_show_and_ls_give_dollars_where_a_price_is_known(directory_store: Store) -> None:
    where = ["--store", directory_store.url]
    priced = new_run(directory_store, recipe_job("rented", fleet={"local": {}, "price": 2.0}, budget={"dollars": 8}))
    priced.renew(a_lease("a", machine_seconds=3600.0, dollars_per_hour=2.0, left=True))
    priced.finish(Result("stopped", "stopped by user", 1, 3600.0))
    assert "cost     $2.00, 25% of the budget of $8.00" in CliRunner().invoke(app, ["show", priced.name, *where]).output
    free = new_run(directory_store, recipe_job("free"))
    listing = CliRunner().invoke(app, ["ls", *where])
    assert "cost" in listing.output.splitlines()[0]
    rows = json.loads(CliRunner().invoke(app, ["ls", "--json", *where]).stdout)
    costs = {row["run"]: row["cost"] for row in rows}
    assert costs == {priced.name: {"so_far": 2.0, "per_hour": 0.0, "expected": None, "budget": 8.0}, free.name: None}


@pytest.mark.parametrize("job", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_job_loads(job: Path) -> None:
    assert load(job).job.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.duraton=5 steps", ("--set train.duraton", "did you mean 'duration'?")),
        ("train.batch=64 samples", ("--set train.batch", "counts batches in tokens")),
        ("recipe=translat", ("--set recipe", "did you mean 'translate'?")),
        ("model=tny", ("--set model", "did you mean 'tiny'?")),
        ("model.dropuot=0.1", ("--set model.dropuot", "did you mean 'dropout'?")),
        ("model.width=100", ("width", "multiple of twice model.heads")),
        ("environment=[NO_SUCH_VARIABLE]", ("NO_SUCH_VARIABLE is not set here",)),
        ("data.train=[{bitext: [a.en, b.de]}]", ("a.en", "No such file")),
    ],
)
def test_a_wrong_job_is_refused_in_one_line_and_nothing_is_started(
    change: str, words: tuple[str, ...], packtrain: Packtrain, tmp_path: Path
) -> None:
    done = packtrain("run", str(EXAMPLES / "translate.yaml"), "--set", change)
    assert_refused(done, 2, *words)
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [(["rnu"], "Did you mean 'run'?"), (["run", "--detahc"], "--detach"), (["--verson"], "--version")],
)
def test_a_misspelled_word_is_answered_with_the_right_one(typed: list[str], suggestion: str) -> None:
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 2
    assert suggestion in done.output.splitlines()[-1]


def test_packtrain_alone_shows_what_a_newcomer_needs() -> None:
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 0
    assert re.findall(r"^  (\w+) ", done.stdout, re.MULTILINE) == list(FIRST)
    assert done.stdout.endswith("`packtrain --help` lists all commands.\n")


def test_help_has_every_command_in_one_panel() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    internal = {name for name, command in commands.items() if command.hidden}
    assert internal == {"node", "mirror"}
    assert sorted(name for names in PANELS.values() for name in names) == sorted(commands.keys() - internal)
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    for title, names in PANELS.items():
        panel = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\w+) ", panel, re.MULTILINE) == list(names)


def test_help_fits_80_columns_and_breaks_and_cuts_no_word() -> None:
    for words in ([], *([name] for name in get_command(app).commands), ["volume", "snapshot"]):  # type: ignore[attr-defined]
        for line in CliRunner().invoke(app, [*words, "--help"]).stdout.splitlines():
            assert len(line) <= 80 or line.startswith("Usage:")
            assert not line.endswith("-"), line
            assert "─" not in line, "the help of all commands is plain text"
            assert not re.match(r"  \w+  .*\.\.\.$", line), f"a command's help is cut: {line}"


def test_the_package_lists_its_interface_and_nothing_else() -> None:
    assert dir(pt) == sorted(pt.__all__)
    assert all(hasattr(pt, name) for name in pt.__all__)


def test_a_missing_script_is_refused(packtrain: Packtrain, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\nprogram: [trian.py]\n")
    assert_refused(packtrain("run", "job.yaml"), 2, "job.yaml:2: program: ", "there is no file")
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.usefixtures("processes")
def test_a_dry_run_lists_the_code_and_the_commands_and_writes_nothing(packtrain: Packtrain, tmp_path: Path) -> None:
    job = b"name: mine\nprogram: {command: [train.py, --lr, '1'], resume: [--resume]}\n"
    write_files(tmp_path, {"train.py": b"print(1)", ".env": b"KEY=1", "job.yaml": job})
    done = packtrain("run", "job.yaml", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    *listed, command = done.stdout.splitlines()
    assert listed == [
        "code that the run stores (81 B)", "  job.yaml  73 B", "  train.py  8 B",
        "left out", "  .env      may hold keys",
        "program", "  train.py --lr 1 (after a restore: --resume)", "start on this machine",
    ]  # fmt: skip
    assert f"-P -m packtrain node mine-1 --store {tmp_path}/store --code " in command
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("processes")
def test_code_with_a_secret_is_refused_before_anything_is_written(packtrain: Packtrain, tmp_path: Path) -> None:
    key = "AKIA" + "Q7" * 8
    write_files(tmp_path, {"train.py": f"key = '{key}'".encode(), "job.yaml": b"name: mine\nprogram: [train.py]\n"})
    done = packtrain("run", "job.yaml")
    assert_refused(done, 2, "train.py: contains an AWS access key", ".packtrainignore")
    assert not (tmp_path / "store").exists()


def test_a_store_that_ignores_put_if_absent_is_refused_for_two_machines(
    packtrain: Packtrain, tmp_path: Path, rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    rclone_server.enter(monkeypatch)
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "job.yaml").write_text(
        f"name: mine\nprogram: [train.py]\nstore: {fresh_location()}\nfleet: {{local: {{machines: 2}}}}\n"
    )
    assert_refused(packtrain("run", "job.yaml"), 2, "store", "ignores put-if-absent")


@pytest.mark.parametrize("verb", ["show", "logs", "stop", "resume", "report"])
def test_verbs_exit_with_102_where_there_is_no_run(verb: str, directory_store: Store, packtrain: Packtrain) -> None:
    assert_refused(packtrain(verb, "nobody", "--store", directory_store.url), 102, "no runs in")


def test_stopping_a_run_without_machines_keeps_its_last_committed_step(
    directory_store: Store, packtrain: Packtrain, tmp_path: Path
) -> None:
    run = new_run(directory_store, recipe_job())
    run.propose(a_generation(1, "a"))
    run.renew(replace(a_lease("a", 3), left=True, used_seconds=90.0))
    commit(run, 5000, 1, None, write_files(tmp_path, {"weights": b"w"}))
    done = packtrain("stop", run.name, "--store", directory_store.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stopped at step 5,000" in done.stdout
    result = run.result()
    assert result is not None
    assert (result.step, result.seconds) == (5000, 90.0)


def test_stopping_a_run_without_machines_from_python_ends_it(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "watch_states", partial(watch_states, seconds=0.1))
    run = new_run(directory_store, recipe_job())
    run.propose(a_generation(1, "a"))
    run.renew(replace(a_lease("a", 3), left=True))
    handle = pt.open(run.name, store=directory_store.url)
    assert handle.state() == "interrupted"
    handle.stop()
    assert handle.state() == "stopped"
    result = handle.result()
    handle.stop()
    assert handle.result() == result
    assert run.stop_request() is not None


@pytest.mark.parametrize("command", ["run", "resume"])
def test_foreground_and_detach_exclude_each_other(command: str, packtrain: Packtrain) -> None:
    done = packtrain(command, "job", "--foreground", "--detach")
    assert_refused(done, 2, "--foreground", "--detach", "use one of them")


def test_a_slurm_job_in_the_foreground_is_refused_before_anything_is_created(
    packtrain: Packtrain, tmp_path: Path
) -> None:
    change = ("--set", "fleet={slurm: {machines: 1}}", "--foreground")
    done = packtrain("run", str(EXAMPLES / "translate.yaml"), *change)
    assert_refused(done, 2, "omit --foreground")
    assert not (tmp_path / "store").exists()


def test_listing_an_empty_store_says_how_to_start_a_run(directory_store: Store, packtrain: Packtrain) -> None:
    where = ("--store", directory_store.url)
    done = packtrain("ls", *where)
    assert (done.returncode, done.stderr) == (0, "")
    assert "packtrain run JOB" in done.stdout
    assert packtrain("ls", "--json", *where).stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["ls", "show", "logs", "stop", "resume", "report"])
def test_a_directory_that_is_not_a_store_is_not_taken_for_an_empty_one(
    verb: str, packtrain: Packtrain, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()  # as a mount point without its mount
    assert_refused(packtrain(verb), 102, "no store here", "check the path and its mount")
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_a_node_says_that_it_waits_for_its_store(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packtrain", "node", "a-1", "--store", "typo"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    assert line.startswith(f"waiting up to 60 s for the store: {tmp_path / 'typo'}: no store here; ")


@pytest.mark.parametrize(
    "name",
    ["job.json", "result.json", "nodes/a.json", "metrics/000001-rank-0/00000000.jsonl", "nodes/large.json"],
)
def test_a_damaged_run_does_not_hide_the_others(directory_store: Store, name: str) -> None:
    bad, good = new_run(directory_store, recipe_job("bad")), new_run(directory_store, recipe_job("good"))
    good.finish(Result("finished", "reached 10 steps", 10, 1.0))
    directory_store.put(bad.key(name), b"[" * (17 << 20 if "large" in name else 1))
    listed = CliRunner().invoke(app, ["ls", "--store", directory_store.url])
    assert (listed.exit_code, listed.stderr) == (100, "")
    first, second = sorted(line.split() for line in listed.stdout.splitlines()[1:])
    assert first[:2] == ["bad-1", "?"]
    assert second[:2] == ["good-1", "finished"]
    assert name in " ".join(first)
    assert "damaged" in listed.stdout
    rows = json.loads(CliRunner().invoke(app, ["ls", "--json", "--store", directory_store.url]).stdout)
    assert sorted((row["run"], row["state"]) for row in rows) == [("bad-1", "?"), ("good-1", "finished")]
    assert name in next(row["reason"] for row in rows if row["state"] == "?")


@pytest.mark.parametrize("verb", ["show", "logs", "stop", "report"])
def test_a_verb_on_a_damaged_run_says_so_in_one_line(directory_store: Store, verb: str, packtrain: Packtrain) -> None:
    run = new_run(directory_store)
    directory_store.put(run.key("result.json"), b'{"status": "finished", "reason": "", "step": 1e99, "seconds": 1}')
    done = packtrain(verb, run.name, "--store", directory_store.url)
    assert_refused(done, 100, "result.json of run job-1", "is damaged, or from another version (field step)")


def test_a_number_that_json_cannot_write_is_null(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.finish(Result("finished", "done", 1, 1.0, {"test.loss": math.nan, "test.bleu": math.inf}))
    (row,) = json.loads(CliRunner().invoke(app, ["ls", "--json", "--store", directory_store.url]).stdout)
    assert row["scores"] == {"test.loss": None, "test.bleu": None}


def test_a_report_is_a_page_markdown_or_json_in_the_store_in_a_file_or_on_the_screen(
    directory_store: Store, tmp_path: Path
) -> None:
    run = new_run(directory_store)
    place = ["report", run.name, "--store", directory_store.url]
    assert CliRunner().invoke(app, place).stdout == f"{directory_store.url}/{run.key('report.html')}\n"
    assert CliRunner().invoke(app, [*place, "--markdown"]).stdout.startswith("# job-1\n")
    answers = json.loads(CliRunner().invoke(app, [*place, "--json"]).stdout)
    assert {"key", "topic", "question", "answer", "verdict", "evidence", "numbers", "tables", "texts"} == set(
        answers["findings"][0]
    )
    for options, start in (([], "<!doctype html>"), (["--markdown"], "# job-1"), (["--json"], "{")):
        file = tmp_path / "report"
        assert CliRunner().invoke(app, [*place, *options, "-o", str(file)]).stdout == f"{file}\n"
        assert file.read_text().startswith(start)


def test_a_sweep_has_a_report_in_the_same_forms(directory_store: Store, tmp_path: Path) -> None:
    plan = SweepPlan("s", "job", "d", ("train.seed",), (Trial(1, "s-1", {"train.seed": "1"}),), 1, {})
    Sweep(directory_store, "s").put_plan(plan)
    place = ["report", "s", "--store", directory_store.url]
    assert CliRunner().invoke(app, place).stdout == f"{directory_store.url}/sweeps/s/report.html\n"
    assert "| s-1 | not started | 1 | 0 |" in CliRunner().invoke(app, [*place, "--markdown"]).stdout
    assert json.loads(CliRunner().invoke(app, [*place, "--json"]).stdout)["rows"][0]["run"] == "s-1"
    assert CliRunner().invoke(app, [*place, "-o", str(tmp_path / "s.html")]).stdout == f"{tmp_path / 's.html'}\n"
    assert (tmp_path / "s.html").read_text().startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_is_refused_in_one_line(
    directory_store: Store, packtrain: Packtrain, tmp_path: Path
) -> None:
    place = ("report", new_run(directory_store).name, "--store", directory_store.url)
    missing = str(tmp_path / "nowhere" / "report.html")
    assert_refused(packtrain(*place, "-o", missing), 2, "nowhere/report.html: cannot write it: No such file")
    assert_refused(packtrain(*place, "--markdown", "--json"), 2, "pass one of them")


def test_logs_say_why_they_are_empty(directory_store: Store) -> None:
    run = new_run(directory_store)
    place = ["logs", run.name, "--store", directory_store.url]
    empty = CliRunner().invoke(app, place)
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert empty.stderr == "packtrain: job-1: no output from the workers yet; use -f to wait for it\n"
    writer = run.log_writer("a")
    for rank in (None, 1, 0):
        writer.append(LogLine(0.0, 1, "a", rank, "out", "hello"))
    writer.flush()
    assert CliRunner().invoke(app, place).output == "[launcher] hello\n[rank 1] hello\n[rank 0] hello\n"
    run.finish(Result("finished", "done", 1, 1.0))
    wrong = CliRunner().invoke(app, [*place, "--rank", "7"])
    assert isinstance(wrong.exception, NotFound)
    assert (wrong.stdout, str(wrong.exception)) == ("", "job-1 has no rank 7; it has ranks 0 to 1")


def test_a_rank_that_has_printed_nothing_is_no_mistake(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.propose(a_generation(1, "a", "b"))
    run.finish(Result("finished", "done", 1, 1.0))
    silent = CliRunner().invoke(app, ["logs", run.name, "--store", directory_store.url, "--rank", "1"])
    assert (silent.exit_code, silent.stderr) == (0, "packtrain: job-1: no output from rank 1\n")


@pytest.mark.parametrize("workers", ["0", "-3"])
def test_a_node_needs_at_least_one_worker(workers: str, directory_store: Store) -> None:
    run = new_run(directory_store)
    done = CliRunner().invoke(app, ["node", run.name, "--store", directory_store.url, "--workers", workers])
    assert (done.exit_code, run.leases()) == (2, [])


def test_attaching_to_a_machine_that_is_not_in_the_run_is_refused(directory_store: Store, packtrain: Packtrain) -> None:
    run = new_run(directory_store)
    done = packtrain("attach", run.name, "gpu-a", "--store", directory_store.url)
    assert_refused(done, 2, "job-1: no machine 'gpu-a'", "omit the name")


def test_attaching_to_a_run_that_has_ended_is_refused(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.finish(Result("finished", "done", 1, 1.0))
    done = CliRunner().invoke(app, ["attach", run.name, "--store", directory_store.url])
    assert str(done.exception) == "job-1 has already finished; it has no machines to attach to"


@pytest.mark.usefixtures("processes")
def test_attaching_says_where_one_is(directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHELL", "/bin/pwd")
    run = new_run(directory_store)
    run.renew(a_lease("a"))
    node_directory(run, "a").mkdir(parents=True)
    command = [sys.executable, "-m", "packtrain", "attach", run.name, "--store", directory_store.url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{node_directory(run, 'a')}\n"
    assert "Attaching to job-1 on " in done.stderr
    assert f"in {node_directory(run, 'a')}." in done.stderr


def test_an_unknown_verb_exits_with_2(packtrain: Packtrain) -> None:
    done = packtrain("trian")
    assert done.returncode == 2
    assert "trian" in done.stderr


def test_the_version_option_prints_the_version_of_the_package(packtrain: Packtrain) -> None:
    assert packtrain("--version").stdout == f"packtrain {version('packtrain')}\n"


def test_stopping_a_run_that_has_ended_says_so(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.finish(Result("finished", "reached 1 step", 1, 1.0))
    for verb, text in (("stop", "job-1 has already finished\n"), ("resume", "job-1 is already complete\n")):
        done = CliRunner().invoke(app, [verb, run.name, "--store", directory_store.url])
        assert (done.exit_code, done.stdout) == (0, text)


def test_resuming_a_running_run_detached_does_not_follow_it(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    monkeypatch.setattr("packtrain.cli.jobs.state_of", lambda _: "running")
    done = CliRunner().invoke(app, ["resume", run.name, "--detach", "--store", directory_store.url])
    assert done.exit_code == 0
    assert done.stdout.startswith("job-1 is already running\n  follow:  packtrain follow job-1")


def test_hints_name_the_store_only_where_it_is_not_the_default(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(directory_store)
    monkeypatch.chdir("/")  # with no other store nearby
    monkeypatch.delenv("PACKTRAIN_STORE", raising=False)
    assert hints(run, "resume") == [f"  resume:  packtrain resume job-1 --store {directory_store.url}"]
    monkeypatch.setenv("PACKTRAIN_STORE", f"{directory_store.url}/")
    assert hints(run, "follow", "stop") == ["  follow:  packtrain follow job-1", "  stop:    packtrain stop job-1"]


def test_the_help_of_every_verb_has_a_first_sentence_that_fits_80_columns(
    packtrain: Packtrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in packtrain("--help").stdout.partition("Commands:")[2]


def test_the_list_of_commands_has_the_first_sentence_of_each_help() -> None:
    tree = get_command(app)
    assert isinstance(tree, Commands)
    for names in (*PANELS.values(), HIDDEN):
        for name, (_, summary) in names.items():
            text = tree.get_command(None, name).help.partition("\n\n")[0]
            assert f"{text} ".startswith(f"{summary} "), name


@pytest.mark.usefixtures("processes")
def test_only_the_module_of_the_command_that_runs_is_imported() -> None:
    code = "import sys, packtrain.cli as cli; cli.app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    for words, modules in (
        (["--help"], set()),
        (["unit", "--help"], {"servers"}),
        (["completion", "zsh"], {"completion"}),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        imported = {name.removeprefix("packtrain.cli.") for name in done.stdout.split() if "packtrain.cli." in name}
        assert imported - {"output", "common", "screen"} == modules
