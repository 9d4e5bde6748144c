"""Runs that are removed or renamed: whole or gone, whatever ends the command, and never under the hands of machines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packtrain.errors import Mistake, NotFound, PacktrainError
from packtrain.housekeeping.removal import clear_sweep, is_half_removed, remove_run, remove_sweep, rename_run
from packtrain.run.code import archive
from packtrain.run.records import FleetLaunch, Result
from packtrain.run.run import Run, add_run, next_run, open_run, run_names
from packtrain.run.sweeps import Sweep, SweepPlan, Trial, add_trial_run, sweep_names
from packtrain.run.trust import is_remembered, remember
from packtrain.store import Store
from packtrain.store.directory import DirectoryStore
from parts.faulty import CHANGES, FaultyStore, Killed
from parts.runs import a_generation, a_lease, new_run, program_job

LAUNCH = FleetLaunch(1.0, "me@here", {"local": {}})


def idle(_: Run) -> None:
    """Say that no machine works on a run."""


def a_run(store: Store, name: str = "job") -> Run:
    run = new_run(store, program_job(name))
    run.record_launch(LAUNCH)
    run.propose(a_generation(1))
    run.renew(a_lease("a"))
    store.put(run.key("checkpoints/000000001-000001-abc/files/model"), b"weights")
    store.put(run.key("checkpoints/000000001-000001-abc/manifest.json"), b"{}")
    run.finish(Result("stopped", "stopped by user", 1, 1.0))
    return run


def contents(store: Store, prefix: str) -> dict[str, bytes]:
    return {entry.key.removeprefix(prefix): store.get(entry.key) for entry in store.list(prefix)}


Work = Callable[[], object]


def killed_at_every_change(make: Callable[[], tuple[FaultyStore, Work]]) -> Iterator[int]:
    """Yield after the work was killed at its first change of the store, its second, and so on to the last."""
    for number in itertools.count():
        store, work = make()
        before = len(store.changes())

        def fault(operation: str, _: str, store: FaultyStore = store, most: int = before + number) -> Killed | None:
            return Killed() if operation in CHANGES and len(store.changes()) > most else None

        store.fault = fault
        try:
            work()
        except Killed:
            yield number
        else:
            return


def test_a_removed_run_is_gone_and_its_name_is_not_used_again(any_store: Store) -> None:
    run, other = a_run(any_store), a_run(any_store)
    remember(other)
    remove_run(other, idle)
    assert run_names(any_store) == [run.name]
    assert any_store.list(other.folder) == []
    assert not is_half_removed(any_store, other.name)
    assert next_run(any_store, run.job, b"").name == "job-3"
    with pytest.raises(NotFound, match=r"^job-2 was removed \(by .+@.+, .+\)$"):
        open_run(any_store, "job-2")


def test_a_removal_that_ends_anywhere_leaves_a_whole_run_or_none_and_is_finished_later(directory_store: Store) -> None:
    a_run(directory_store, "other")

    def make() -> tuple[FaultyStore, Work]:
        store = FaultyStore(directory_store)
        run = a_run(store)
        made.append((run, contents(store, run.key(""))))
        return store, lambda: remove_run(run, idle)

    made: list[tuple[Run, dict[str, bytes]]] = []
    for _ in killed_at_every_change(make):
        run, whole = made[-1]
        if run.name in run_names(directory_store):
            assert contents(directory_store, run.key("")) == whole
        else:
            assert is_half_removed(directory_store, run.name)
        remove_run(Run(directory_store, run.name), idle)
        assert directory_store.list(run.folder) == []
    assert len(made) > 5
    assert run_names(directory_store) == ["other-1"]


def test_a_run_that_machines_work_on_is_left_alone(directory_store: Store) -> None:
    run = a_run(directory_store)
    before = contents(directory_store, "runs/")

    def busy(_: Run) -> None:
        raise Mistake("it is running")

    for work in (lambda: remove_run(run, busy), lambda: rename_run(directory_store, run.name, "other", busy)):
        with pytest.raises(Mistake, match="it is running"):
            work()
    assert contents(directory_store, "runs/") == before
    assert directory_store.list("removed/") == directory_store.list("renamed/") == []


@pytest.mark.parametrize(("renames", "moment"), [(False, "delete"), (True, "delete"), (True, "copy")])
def test_a_run_that_is_resumed_at_the_same_moment_stays(directory_store: Store, renames: bool, moment: str) -> None:
    store = FaultyStore(directory_store)
    run = a_run(store)

    def resume(operation: str, key: str) -> None:
        if operation == moment and key.endswith("/job.json") and len(run.launches()) == 1:
            Run(directory_store, run.name).record_launch(LAUNCH)

    store.fault = resume
    with pytest.raises(Mistake, match="was resumed at this moment, and stays; stop it first"):
        rename_run(store, run.name, "other", idle) if renames else remove_run(run, idle)
    assert run_names(directory_store) == [run.name]
    assert len(open_run(directory_store, run.name).launches()) == 2
    assert (
        directory_store.list("runs/other") == directory_store.list("removed/") == directory_store.list("renamed/") == []
    )


@pytest.mark.parametrize("renames", [False, True])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_the_job_of_a_run_that_leaves_is_not_changed(directory_store: Store, renames: bool, moment: str) -> None:
    """Someone continues the run with another job, and has passed all checks."""
    store = FaultyStore(directory_store)
    run = a_run(store)
    changed = run.changed(program_job(budget={"hours": 1}))

    def leave() -> None:
        there = Run(directory_store, run.name)
        rename_run(directory_store, run.name, "other", idle) if renames else remove_run(there, idle)

    def leave_meanwhile(operation: str, key: str) -> None:
        if (operation, key) == ("put", run.key("job.json")):
            leave()

    if moment == "before":
        leave()
    else:
        store.fault = leave_meanwhile
    with pytest.raises(NotFound, match=f"job-1 is being {'renamed to other' if renames else 'removed'} by .*@"):
        changed.put_job()
    assert directory_store.list(run.folder) == []
    assert run_names(directory_store) == (["other"] if renames else [])


def test_a_run_that_was_changed_and_resumed_at_the_same_moment_stays_as_it_was_changed(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = a_run(store)
    changed = Run(directory_store, run.name).changed(program_job(budget={"hours": 1}))

    def resume(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("removed/"):
            changed.put_job()
            changed.record_launch(LAUNCH)

    def read(checked: Run) -> None:
        assert checked.job_data

    store.fault = resume
    with pytest.raises(Mistake, match="was resumed at this moment, and stays; stop it first"):
        remove_run(run, read)
    assert open_run(directory_store, run.name).job_data == changed.job_data


def test_two_who_remove_a_run_do_not_bring_it_back(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = a_run(store)

    def remove_too(operation: str, key: str) -> None:
        if (operation, key) == ("delete", run.key("job.json")):
            remove_run(Run(directory_store, run.name), idle)

    store.fault = remove_too
    remove_run(run, idle)
    assert directory_store.list(run.folder) == []


def test_a_removed_name_does_not_hide_a_job_of_that_name(directory_store: Store) -> None:
    rename_run(directory_store, a_run(directory_store).name, "later", idle)
    remove_run(Run(directory_store, "later"), idle)
    assert a_run(directory_store, "later").name == open_run(directory_store, "later").name == "later-1"


# Other names.


def test_a_renamed_run_has_all_that_it_had_and_keeps_its_place_in_the_list(any_store: Store) -> None:
    first, second = a_run(any_store), a_run(any_store)
    remember(first)
    before = contents(any_store, first.key(""))
    renamed = rename_run(any_store, first.name, "baseline", idle)
    after = contents(any_store, renamed.key(""))
    assert {key: data for key, data in after.items() if not key.startswith("nodes/")} == {
        key: data for key, data in before.items() if not key.startswith("nodes/")
    }
    assert [lease.left for lease in renamed.leases()] == [True], "a fresh copy must not look like a live machine"
    assert run_names(any_store) == ["baseline", second.name]
    assert is_remembered(renamed) and not is_remembered(second)
    assert any_store.list(first.folder) == []
    with pytest.raises(NotFound, match=r"^job-1 is called baseline now"):
        open_run(any_store, "job-1")
    again = rename_run(any_store, "baseline", "first", idle)
    assert run_names(any_store) == ["first", second.name]
    assert again.result() == Result("stopped", "stopped by user", 1, 1.0)


def test_what_somebody_else_puts_into_a_run_while_it_is_renamed_is_not_trusted(tmp_path: Path) -> None:
    class Shared(DirectoryStore):
        def copy(self, key: str, target: str) -> None:
            super().copy(key, target)
            if target == "runs/baseline/code.tar.zst":
                self.put(target, archive({"train.py": b"steal()"}))

    store = Shared(tmp_path / "shared")
    store.create()
    remember(run := a_run(store))
    assert not is_remembered(rename_run(store, run.name, "baseline", idle))


def test_a_rename_that_ends_anywhere_loses_nothing_and_is_continued(directory_store: Store) -> None:
    numbers = itertools.count(1)

    def make() -> tuple[FaultyStore, Work]:
        store = FaultyStore(directory_store)
        run, name = a_run(store), f"name-{next(numbers)}x"
        made.append((run, name, contents(store, run.key("launches"))))
        return store, lambda: rename_run(store, run.name, name, idle)

    made: list[tuple[Run, str, dict[str, bytes]]] = []
    for _ in killed_at_every_change(make):
        run, name, launches = made[-1]
        listed = {run.name, name} & set(run_names(directory_store))
        assert listed, "a run is there at every moment"
        for one in listed:
            assert contents(directory_store, f"runs/{one}/launches") == launches
            assert directory_store.exists(f"runs/{one}/checkpoints/000000001-000001-abc/files/model")
        rename_run(directory_store, run.name, name, idle)
        assert {run.name, name} & set(run_names(directory_store)) == {name}
        assert directory_store.list(run.folder) == []
    assert len(made) > 10


def test_who_renames_a_run_that_another_renames_gets_nothing(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = a_run(store)

    def rename_too(operation: str, key: str) -> None:
        if (operation, key) == ("put_if_absent", f"removed/{run.name}.json"):
            store.fault = lambda _operation, _key: None
            rename_run(directory_store, run.name, "theirs", idle)

    store.fault = rename_too
    with pytest.raises(Mistake, match=r"job-1 is being renamed to theirs by .*; let that finish, or repeat it"):
        rename_run(store, run.name, "mine", idle)
    assert run_names(directory_store) == ["theirs"]
    assert directory_store.list("runs/mine") == []


def test_two_halves_of_a_rename_that_both_went_on_are_not_mixed(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    run = a_run(store)
    store.fault = lambda operation, key: Killed() if key.startswith("removed/") and operation in CHANGES else None
    with pytest.raises(Killed):
        rename_run(store, run.name, "other", idle)
    assert sorted(run_names(directory_store)) == ["job-1", "other"]
    Run(directory_store, "other").record_launch(LAUNCH)
    with pytest.raises(Mistake, match="copies of one run that both exist; remove one with `packtrain rm`"):
        rename_run(directory_store, run.name, "other", idle)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("taken", "is the name of another run"),
        ("gone", "was the name of a run that was removed or renamed"),
        ("job", "is the name of a job, and stands for its newest run"),
        ("job-7", "would be taken for run 7 of the job job; choose a name that does not end in a hyphen and a number"),
        ("Ünfug", "is not a valid run name"),
        ("job-1", "would be taken for run 1"),
    ],
)
def test_a_name_that_means_something_else_is_refused(directory_store: Store, name: str, words: str) -> None:
    for taken in ("taken", "gone"):
        rename_run(directory_store, a_run(directory_store).name, taken, idle)
    remove_run(Run(directory_store, "gone"), idle)
    run = a_run(directory_store)
    with pytest.raises(PacktrainError, match=words):
        rename_run(directory_store, run.name, name, idle)
    assert run_names(directory_store) == ["taken", run.name]


# Sweeps.


def a_sweep(store: Store) -> Sweep:
    sweep = Sweep(store, "lr")
    trials = tuple(Trial(number, f"lr-{number}", {"rate": str(number)}) for number in (1, 2))
    sweep.put_plan(SweepPlan("lr", "job", "digest", ("rate",), trials, 1, {}))
    for trial in trials:
        add_trial_run(sweep, trial, program_job().model_dump_json().encode(), b"code", None)
    return sweep


def test_a_run_of_a_sweep_goes_only_with_the_sweep(directory_store: Store) -> None:
    sweep = a_sweep(directory_store)
    single = add_run(directory_store, program_job(), b"code", None)
    for work in (
        lambda: remove_run(Run(directory_store, "lr-1"), idle),
        lambda: rename_run(directory_store, "lr-1", "best", idle),
    ):
        with pytest.raises(Mistake, match="lr-1 belongs to the sweep lr; `packtrain rm lr` removes the sweep"):
            work()
    assert remove_sweep(sweep, idle) == ["lr-1", "lr-2"]
    clear_sweep(sweep)
    assert (run_names(directory_store), sweep_names(directory_store)) == ([single.name], [])
    assert directory_store.list("sweeps/") == []


def test_the_runs_of_a_sweep_that_was_removed_half_way_are_removed_one_by_one(directory_store: Store) -> None:
    store = FaultyStore(directory_store)
    sweep = a_sweep(store)
    store.fault = lambda operation, key: Killed() if (operation, key) == ("delete", "runs/lr-2/job.json") else None
    with pytest.raises(Killed):
        remove_sweep(sweep, idle)
    assert (run_names(directory_store), sweep_names(directory_store)) == (["lr-2"], [])
    remove_run(Run(directory_store, "lr-2"), idle)
    assert run_names(directory_store) == []


@pytest.mark.parametrize("is_whole", [True, False], ids=["removed", "removed half-way"])
def test_a_sweep_that_was_removed_and_is_made_again_has_new_runs(directory_store: Store, is_whole: bool) -> None:
    store = FaultyStore(directory_store)
    sweep = a_sweep(store)
    for trial in sweep.plan.trials:
        assert sweep.run(trial).finish(Result("finished", "reached 10 steps", 10, 1.0))
    if is_whole:
        remove_sweep(sweep, idle)
        clear_sweep(sweep)
    else:
        store.fault = lambda operation, key: Killed() if (operation, key[-11:]) == ("delete", "result.json") else None
        with pytest.raises(Killed):
            remove_sweep(sweep, idle)
        assert is_half_removed(directory_store, "lr-1")
    run = Run(directory_store, a_sweep(directory_store).plan.trials[0].run)
    assert run.result() is None
    changed = run.changed(program_job(fleet={"local": {}, "workers": 2}))
    changed.put_job()  # as for the part of a fleet that a run of a sweep gets
    assert Run(directory_store, "lr-1").job == changed.job
