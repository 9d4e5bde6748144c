"""`packtrain rm`, `mv`, `tag`, `du` and `gc`, as a person types them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from housekeeping.test_removal import a_run, a_sweep
from packtrain.cli import app
from packtrain.errors import Mistake, PacktrainError
from packtrain.run.records import Notes
from packtrain.run.run import Run, add_run, run_names
from packtrain.run.sweeps import Sweep, sweep_names
from packtrain.store import Store
from parts.runs import new_run, recipe_job
from parts.terminal import in_terminal


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert isinstance(done.exception, PacktrainError), done.output
    return str(done.exception)


# rm


def test_rm_names_and_removes_runs(any_store: Store) -> None:
    for _ in range(3):
        a_run(any_store)
    where = ("--store", any_store.url)
    assert refused("rm", "job-1", "job-3", *where).startswith("2 runs (")
    assert "no run 'job' in" in (text := refused("rm", "job", "--yes", *where))
    assert text.endswith("its newest run is job-3, and rm needs the full name")
    assert run_names(any_store) == ["job-1", "job-2", "job-3"]
    lines = run("rm", "job-1", "job-3", "--yes", *where).output.splitlines()
    assert [line.split(" (")[0] for line in lines] == ["Removed job-1", "Removed job-3"]
    assert run_names(any_store) == ["job-2"]
    assert refused("rm", "job-1", *where).startswith("job-1 was removed (by ")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, []), ("", 2, ["job-1"])])
def test_rm_asks_on_a_terminal(directory_store: Store, answer: str, code: int, left: list[str]) -> None:
    a_run(directory_store)
    ended, shown = in_terminal(["rm", "job-1", "--store", directory_store.url], answer)
    assert "Remove 1 run (" in shown
    assert (ended, run_names(directory_store)) == (code, left)


def test_rm_of_a_sweep_removes_its_runs_and_its_records(directory_store: Store) -> None:
    a_sweep(directory_store)
    done = run("rm", "lr", "--yes", "--store", directory_store.url)
    assert done.output.startswith("Removed lr with 2 runs (")
    assert (run_names(directory_store), sweep_names(directory_store)) == ([], [])
    assert directory_store.list("sweeps/") == []
    assert Sweep(directory_store, "lr").find_plan() is None


# mv


def test_mv_renames_a_run_and_the_old_name_leads_to_the_new_one(any_store: Store) -> None:
    a_run(any_store)
    where = ("--store", any_store.url)
    assert run("mv", "job-1", "baseline", *where).output == "job-1 is called baseline now\n"
    assert run("tag", "baseline", *where).output == "baseline: no tags\n"
    assert refused("show", "job-1", *where).startswith("job-1 is called baseline now (by ")


# tag


def tag(store: Store, *arguments: str) -> Result:
    return run("tag", "--store", store.url, "job-1", *arguments)


def test_tags_and_a_note_are_kept_with_the_run(any_store: Store) -> None:
    tagged = new_run(any_store)
    assert tag(any_store).output == "job-1: no tags\n"
    assert tag(any_store, "good", "paper", "good").output == "job-1: good paper\n"
    assert tag(any_store, "--note", "the  one\nto keep").output == "job-1: good paper (the one to keep)\n"
    assert tag(any_store, "final", "--remove", "good", "--remove", "other").output.startswith("job-1: paper final (")
    assert Run(any_store, tagged.name).notes() == Notes(("paper", "final"), "the one to keep")
    tag(any_store, "--note", "")
    assert Run(any_store, tagged.name).notes().text == ""


@pytest.mark.parametrize("word", ["", "two words", "x" * 61, "\x1b[31m", "a\nb"])
def test_a_tag_is_one_word(word: str, directory_store: Store) -> None:
    tagged = new_run(directory_store)
    assert isinstance(tag(directory_store, word).exception, Mistake)
    assert isinstance(tag(directory_store, *map(str, range(51))).exception, Mistake)
    assert isinstance(tag(directory_store, "--note", "x" * 2001).exception, Mistake)
    assert tagged.notes() == Notes()


# du


def test_du_shows_what_takes_how_much(any_store: Store) -> None:
    made = add_run(any_store, recipe_job(), b"c" * 2000, "pack-abc")
    any_store.put("packs/pack-abc/manifest.json", b"m" * 500)
    any_store.put(made.key("checkpoints/1/files/model"), b"w" * 7000)
    any_store.put(made.key("logs/a/00000000.jsonl"), b"l" * 3000)
    any_store.put(made.key("time/a/00000000.jsonl"), b"t" * 1000)
    where = ("--store", any_store.url)
    found = json.loads(run("du", "--json", *where).output)
    parts = found["runs"][0]["parts"]
    assert {part: parts[part] for part in ("checkpoints", "logs", "metrics", "code", "outputs")} == {
        "checkpoints": 7000, "logs": 3000, "metrics": 1000, "code": 2000, "outputs": 0,
    }  # fmt: skip
    assert found["packs"] == {"pack-abc": 500}
    assert found["bytes"] == sum(entry.size for entry in any_store.list("")) == sum(parts.values()) + 500
    lines = run("du", *where).output.splitlines()
    assert lines[0].split() == ["run", "total", "checkpoints", "logs", "metrics", "other"]
    assert lines[1].split()[0] == "job-1" and "7.0 kB" in lines[1] and lines[2] == "    500 B  pack pack-abc"
    single = run("du", "job", *where).output
    assert "   7.0 kB  checkpoints\n" in single and "    500 B  pack pack-abc, which other runs may share\n" in single


# gc


def test_gc_lists_by_default_and_deletes_on_demand(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    directory_store.put("packs/old-abc/manifest.json", b"m" * 500)
    old = time.time() - 8 * 24 * 3600
    os.utime(Path(directory_store.url) / "packs/old-abc/manifest.json", (old, old))
    where = ("--store", directory_store.url)
    listed = run("gc", *where).output
    assert f"Unused for 7d: 500 B in {directory_store.url}\n    500 B  pack packs/old-abc, 8 d 00 h old\n" in listed
    assert "Unused for 7d: nothing in the cache of this machine\n" in listed
    assert "To delete it: packtrain gc --store" in listed and directory_store.exists("packs/old-abc/manifest.json")
    assert "nothing in" in run("gc", "--older", "9d", *where).output
    assert json.loads(run("gc", "--delete", "--json", *where).output)["bytes"] == 500
    assert directory_store.list("") == []
    assert "--older: at least 1 h" in refused("gc", "--older", "10 min", *where)
