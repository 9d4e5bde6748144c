from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packtrain.errors import NotFound, PacktrainError
from packtrain.run.records import Generation, Result, Sample
from packtrain.run.run import Run, add_run, open_run, run_names
from packtrain.store import ObjectNotFound, Store
from packtrain.store.records import DamagedRecord, encode
from parts.clock import wait_for_tick
from parts.runs import a_generation, a_lease, new_run, program_job

# Names.


def test_runs_of_a_job_are_numbered_from_one(any_store: Store) -> None:
    assert [new_run(any_store).name for _ in range(3)] == ["job-1", "job-2", "job-3"]


def test_the_numbers_of_a_job_do_not_depend_on_a_job_with_a_similar_name(any_store: Store) -> None:
    for name in ("en", "en-de", "en-de-2"):
        new_run(any_store, program_job(name))
    assert new_run(any_store, program_job("en")).name == "en-2"
    assert new_run(any_store, program_job("en-de")).name == "en-de-2"


def test_runs_created_at_the_same_time_get_different_numbers(any_store: Store) -> None:
    together = threading.Barrier(8)

    def create() -> str:
        together.wait()
        return new_run(any_store).name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: create(), range(8)))
    assert sorted(names) == [f"job-{number}" for number in range(1, 9)]


def test_a_run_carries_its_job_its_code_and_its_pack(any_store: Store) -> None:
    created = add_run(any_store, program_job(), b"code", "pack-123")
    found = Run(any_store, created.name)
    assert found.job == program_job()
    assert found.pack_name() == "pack-123"
    assert any_store.get(found.key("code.tar.zst")) == b"code"


@pytest.mark.parametrize("name", ["code.tar.zst", "pack.txt"])
def test_a_run_whose_client_was_killed_while_it_created_it_says_what_to_do(directory_store: Store, name: str) -> None:
    run = new_run(directory_store)
    directory_store.delete(run.key(name))
    killed = open_run(directory_store, run.name)
    with pytest.raises(
        ObjectNotFound, match=rf"{run.name} has no {name}: .* run `packtrain rm {run.name} .*start the job"
    ):
        _ = killed.code if name == "code.tar.zst" else killed.pack_name()


def test_a_long_name_leaves_room_for_the_number_and_still_finds_its_runs(directory_store: Store) -> None:
    job = program_job("x" * 63)
    names = [new_run(directory_store, job).name for _ in range(2)]
    assert names == ["x" * 56 + "-1", "x" * 56 + "-2"]
    assert open_run(directory_store, job.name).name == names[-1]


def test_a_run_is_found_by_its_name(any_store: Store) -> None:
    new_run(any_store)
    new_run(any_store)
    assert open_run(any_store, "job-1").name == "job-1"


def test_without_a_name_the_newest_run_is_opened(directory_store: Store) -> None:
    for name in ("beta", "alpha", "beta"):
        new_run(directory_store, program_job(name))
    assert open_run(directory_store, None).name == "beta-2"
    wait_for_tick(Path(directory_store.url))  # of equal times the name decides
    new_run(directory_store, program_job("alpha"))
    assert open_run(directory_store, None).name == "alpha-2"


def test_a_jobs_name_opens_its_newest_run(any_store: Store) -> None:
    for _ in range(11):
        new_run(any_store)
    new_run(any_store, program_job("other"))
    assert open_run(any_store, "job").name == "job-11"


def test_runs_are_listed_from_the_oldest_to_the_newest_even_within_a_second(any_store: Store) -> None:
    names = [new_run(any_store).name for _ in range(11)]
    assert run_names(any_store) == names
    assert open_run(any_store, None).name == "job-11"


def test_folders_that_are_not_runs_are_not_listed(any_store: Store) -> None:
    new_run(any_store)
    any_store.put("runs/half-1/code.tar.zst", b"its job.json was never written")
    any_store.put("runs/Not a Name-²/job.json", b"{}")
    assert run_names(any_store) == ["job-1"]
    assert new_run(any_store).name == "job-2"


def test_an_empty_store_says_how_to_start_a_run(any_store: Store) -> None:
    with pytest.raises(NotFound, match="packtrain run JOB"):
        open_run(any_store, None)


def test_an_unknown_name_is_answered_with_the_newest_runs(directory_store: Store) -> None:
    for _ in range(4):
        new_run(directory_store)
    with pytest.raises(NotFound, match=r"job-4, job-3, job-2$"):
        open_run(directory_store, "nothing")


def test_the_times_of_a_copied_store_do_not_change_which_run_of_a_job_is_the_newest(directory_store: Store) -> None:
    for _ in range(3):
        new_run(directory_store)
    for number, seconds in ((3, 100), (1, 200), (2, 300)):
        os.utime(Path(directory_store.url) / f"runs/job-{number}/job.json", (seconds, seconds))
    assert run_names(directory_store) == ["job-1", "job-2", "job-3"]
    assert open_run(directory_store, "job").name == "job-3"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "x" * 64, "-a", "--help"])
def test_an_invalid_name_is_refused_before_the_store_is_asked(directory_store: Store, name: str) -> None:
    with pytest.raises(NotFound, match="is not a valid run name"):
        Run(directory_store, name)


def test_a_run_that_does_not_exist_is_an_error(any_store: Store) -> None:
    with pytest.raises(NotFound, match="no run 'job-1'"):
        _ = Run(any_store, "job-1").job


@pytest.mark.parametrize("stray", ["job-999999", "job-999999999999", "-job-1", "Job-7", "x" * 100])
def test_a_stray_folder_does_not_keep_runs_from_being_created(directory_store: Store, stray: str) -> None:
    first = new_run(directory_store)
    directory_store.put(f"runs/{stray}/notes.txt", b"mine")
    assert [first.name, new_run(directory_store).name, new_run(directory_store).name] == ["job-1", "job-2", "job-3"]
    assert run_names(directory_store) == ["job-1", "job-2", "job-3"]
    assert open_run(directory_store, "job").name == "job-3"


# Objects.

DAMAGED: dict[str, Callable[[Run], object]] = {
    "job.json": lambda run: run.job,
    "result.json": lambda run: run.result(),
    "stop.json": lambda run: run.stop_request(),
    "generations/000001.json": lambda run: run.latest_generation(),
    "nodes/a.json": lambda run: run.leases(),
}


@pytest.mark.parametrize("data", [b"", b"\xff{", b'{"status": "splendid"}', b"[" * 100_000])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_object_is_named_in_one_line(directory_store: Store, name: str, data: bytes) -> None:
    run = Run(directory_store, "job-1")
    directory_store.put(run.key(name), data)
    with pytest.raises(PacktrainError) as caught:
        DAMAGED[name](run)
    line = f"{name} of run job-1 in {directory_store.url} is damaged, or from another version"
    assert str(caught.value).partition(" (field ")[0] == line


@pytest.mark.parametrize(
    ("name", "record"),
    [("nodes/b.json", a_lease("a")), ("generations/000002.json", a_generation(3))],
    ids=["lease", "generation"],
)
def test_a_record_under_the_name_of_another_is_damaged(directory_store: Store, name: str, record: object) -> None:
    run = new_run(directory_store)
    directory_store.put(run.key(name), encode(record))
    with pytest.raises(DamagedRecord, match=f"^{name} of run job-1 in .* is damaged: it is"):
        DAMAGED[{"nodes/b.json": "nodes/a.json"}.get(name, "generations/000001.json")](run)


def test_objects_with_other_names_are_no_records(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a"))
    run.propose(a_generation(1))
    for name in ("nodes/.DS_Store", "nodes/old/b.json", "generations/zzz.json", "generations/000002.json~"):
        directory_store.put(run.key(name), b"not ours")
    assert (run.leases(), run.generations()) == ([a_lease("a")], [a_generation(1)])
    assert run.latest_generation() == a_generation(1)


def test_half_a_character_in_a_record_loses_only_that_character(directory_store: Store) -> None:
    run = new_run(directory_store)
    run.finish(Result("failed", "worker said \udcff", 1, 1.0))
    assert run.result() == Result("failed", "worker said ?", 1, 1.0)


def test_the_first_proposal_of_a_number_wins(any_store: Store) -> None:
    run = new_run(any_store)
    assert run.latest_generation() is None
    assert run.propose(a_generation(1, "a", "b"))
    assert not run.propose(a_generation(1, "c"))
    assert run.propose(a_generation(2, "c"))
    assert run.generations() == [a_generation(1, "a", "b"), a_generation(2, "c")]
    assert run.latest_generation() == a_generation(2, "c")


def test_a_known_generation_is_not_read_again(any_store: Store) -> None:
    run = new_run(any_store)
    run.propose(a_generation(1))
    known = run.latest_generation()
    assert run.latest_generation(known) is known
    run.propose(a_generation(2, "b"))
    assert run.latest_generation(known) == a_generation(2, "b")


def test_in_each_turn_one_node_proposes_the_next_generation(any_store: Store) -> None:
    run = new_run(any_store)
    assert [run.proposer(1, 0, node) for node in ("a", "b", "a")] == ["a", "a", "a"]
    assert run.proposer(1, 1, "b") == "b"
    assert run.proposer(2, 0, "b") == "b"


def test_many_leases_are_read_in_order(any_store: Store) -> None:
    run = new_run(any_store)
    nodes = [a_lease(f"n{number:02d}", renewal=number) for number in range(30)]
    for node in nodes:
        run.renew(node)
    assert run.leases() == nodes
    assert run.lease("n07") == nodes[7]
    assert run.lease("nobody") is None


def test_only_members_have_a_rank() -> None:
    generation: Generation = a_generation(1, "a", "b")
    assert [generation.rank_of(node) for node in ("a", "b", "c")] == [0, 1, None]


def test_a_lease_is_replaced_when_it_is_renewed(any_store: Store) -> None:
    run = new_run(any_store)
    run.renew(a_lease("a", renewal=1))
    run.renew(a_lease("a", renewal=2))
    run.renew(a_lease("b", renewal=7))
    assert run.leases() == [a_lease("a", renewal=2), a_lease("b", renewal=7)]


def test_only_the_first_result_counts(any_store: Store) -> None:
    run = new_run(any_store)
    first = Result("finished", "done", 10, 1.5, {"test.bleu": 20.0}, {"test.bleu": "x"}, (Sample("a", "b", "c"),))
    assert run.result() is None
    assert run.finish(first)
    assert not run.finish(Result("stopped", "too late", 10, 1.5))
    assert run.result() == first


def test_only_the_first_stop_request_counts(any_store: Store) -> None:
    run = new_run(any_store)
    run.request_stop("enough")
    run.request_stop("more than enough")
    stop = run.stop_request()
    assert stop is not None
    assert stop.reason == "enough"


def test_a_reopened_run_has_no_result_and_no_stop_request(any_store: Store) -> None:
    run = new_run(any_store)
    run.request_stop("enough")
    run.finish(Result("stopped", "enough", 1, 1.0))
    run.clear_end()
    assert (run.stop_request(), run.result()) == (None, None)
    run.clear_end()


def test_many_runs_are_listed_in_order(any_store: Store) -> None:
    names = [new_run(any_store, program_job(name)).name for name in ("b", "c", "a", "e", "d", "f") for _ in range(3)]
    listed = run_names(any_store)
    assert sorted(listed) == sorted(names)
    assert [name for name in listed if name.startswith("a")] == ["a-1", "a-2", "a-3"]


@pytest.mark.parametrize("workers", [0, 1025, 10**12])
def test_a_record_with_an_impossible_number_of_workers_is_damaged(directory_store: Store, workers: int) -> None:
    run = new_run(directory_store)
    run.renew(a_lease("a", workers=workers))
    run.propose(a_generation(1, "a", workers=workers))
    for read in (run.leases, run.latest_generation):
        with pytest.raises(PacktrainError, match="is damaged, or from another version"):
            read()
