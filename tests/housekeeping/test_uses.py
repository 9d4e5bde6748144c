"""What runs use, and deletions that a run which starts at the same moment does not suffer from."""

from __future__ import annotations

import hashlib

import pytest

from packtrain.errors import PacktrainError
from packtrain.housekeeping.uses import Uses, all_uses, announced, discarding, refuse_discarded, uses_of
from packtrain.run.code import archive
from packtrain.run.inputs import InputListing
from packtrain.run.run import Run, add_run
from packtrain.store import Store
from packtrain.store.records import DamagedRecord, encode
from parts.faulty import FaultyStore
from parts.runs import new_run, program_job, recipe_job

PACK = Uses(packs=frozenset({"pack-1"}))


def given(store: Store, data: bytes) -> str:
    key = f"files/{hashlib.sha256(data).hexdigest()}"
    store.put(key, data)
    return key


def a_run(store: Store) -> Run:
    """A run with a pack and weights."""
    weights = given(store, b"weights")
    job = recipe_job(model={"size": "tiny", "weights": f"store:{weights}"})
    return add_run(store, job, archive({"job.yaml": b""}), "pack-1")


def test_a_run_uses_its_pack_and_the_files_that_its_job_names(any_store: Store) -> None:
    run = a_run(any_store)
    listing = given(any_store, encode(InputListing("data", ())))
    other = new_run(any_store, program_job(inputs={"data": f"store:{listing}", "own": "/data"}))
    weights = run.job.model.options["weights"]
    files = frozenset({str(weights).removeprefix("store:")})
    assert uses_of(run) == PACK | Uses(files=files, runs=frozenset({run.name}))
    assert uses_of(other) == Uses(files=frozenset({listing}), runs=frozenset({other.name}))
    assert all_uses(any_store) == uses_of(run) | uses_of(other)


def test_a_folder_that_is_no_run_yet_uses_its_pack(directory_store: Store) -> None:
    directory_store.put("runs/copy-1/pack.txt", b"pack-1")
    assert all_uses(directory_store) == PACK


def test_nothing_is_known_to_be_unused_if_a_run_cannot_be_read(directory_store: Store) -> None:
    run = a_run(directory_store)
    directory_store.put(run.key("job.json"), b"{")
    with pytest.raises(DamagedRecord, match="repair it, or remove it with `packtrain rm job-1`"):
        all_uses(directory_store)
    directory_store.put(run.key("job.json"), run.job_data)
    listing = given(directory_store, encode(InputListing("data", ())))
    new_run(directory_store, program_job(inputs={"data": f"store:{listing}"}))
    directory_store.delete(listing)
    with pytest.raises(DamagedRecord, match=r"not found; what it uses .* remove it with `packtrain rm job-2`"):
        all_uses(directory_store)


def test_a_run_that_is_removed_while_it_is_looked_at_uses_no_files(directory_store: Store) -> None:
    store, run = FaultyStore(directory_store), a_run(directory_store)

    def remove(operation: str, key: str) -> None:
        if (operation, key) == ("find", run.key("job.json")):
            directory_store.delete(key)

    store.fault = remove
    assert all_uses(store) == PACK


def test_a_run_that_is_there_when_a_deletion_is_announced_keeps_what_it_uses(any_store: Store) -> None:
    with discarding(any_store, PACK | Uses(packs=frozenset({"pack-2"}))) as free:
        assert free() == PACK | Uses(packs=frozenset({"pack-2"}))
    a_run(any_store)
    with discarding(any_store, PACK | Uses(packs=frozenset({"pack-2"}))) as free:
        assert free() == Uses(packs=frozenset({"pack-2"}))
    assert announced(any_store) == []


def test_a_run_that_comes_later_is_refused_while_the_deletion_lasts(any_store: Store) -> None:
    with discarding(any_store, PACK):
        refuse_discarded(any_store, Uses(packs=frozenset({"pack-2"})))
        with pytest.raises(PacktrainError, match="`packtrain gc` is deleting pack-1, which the run needs"):
            refuse_discarded(any_store, uses_of(a_run(any_store)))
    refuse_discarded(any_store, PACK)
