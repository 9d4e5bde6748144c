from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forking import WorkerForker

from packtrain.train.world import DataBarrier, StopRequested, World


def test_a_single_worker_needs_no_process_group() -> None:
    world = World()
    values = torch.tensor([1.0, 2.0])
    assert world.is_first
    assert world.begin_sum(values) is None
    assert values.tolist() == [1.0, 2.0]
    assert world.gather(b"mine") == [b"mine"]
    assert world.gather(b"") == [b""]
    world.average_all([values])
    world.broadcast_all([values])
    assert values.tolist() == [1.0, 2.0]
    assert (world.any(True), world.any(False)) == (True, False)
    assert world.count(True, False) == [1, 0]
    assert world.share(b"mine") == b"mine"
    assert [row.tolist() for row in world.gather_tensor(values)] == [[1.0, 2.0]]
    world.leave()


def test_two_workers_gather_bytes_of_any_length_and_agree_on_numbers(forker: WorkerForker) -> None:
    first, second = forker.succeed("communicate", 2)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert (first["first"], second["first"]) == (True, False)
    for one in (first, second):
        assert one["gathered"] == [
            ["", ""],
            ["a" * 1000, "short"],
            ["\x00", "\x01"],
            ["only mine", ""],
            ["", "only the other"],
        ]
        assert one["sums"] == [2.0, 1.0]
        assert one["means"] == [[0.5], [1.0], [[0.5, 0.5], [0.5, 0.5]]]
        assert one["any"] == [False, True, True]
        assert one["counts"] == [0, 1, 2]
        assert one["shared"] == "of rank 0"
        assert one["broadcast"] == [[0.0, 0.0], [7]]
    assert first["rows"] == [[0.0], [1.0]]
    assert second["rows"] == []


def test_all_ranks_measure_the_same_capacity_of_their_links_and_a_single_worker_has_none(forker: WorkerForker) -> None:
    first, second = forker.succeed("measure_link", 2)
    assert first == second > 0
    assert World().measure_link() is None
    assert World(num_ranks=4).ring_bytes(1000) == 1500


def test_workers_of_one_machine_meet_in_a_file_and_a_single_one_meets_nobody(
    forker: WorkerForker, tmp_path: Path
) -> None:
    """Without the launcher's store: its port would be open to every user of the machine."""
    for ranks in (2, 1):
        listening = forker.succeed("join_on_one_machine", ranks, control=str(tmp_path))
        # gloo itself listens for the other workers.
        assert listening == [["127.0.0.1"]] * 2 if ranks == 2 else [[]]
        assert (tmp_path / "rendezvous").exists() == (ranks == 2)
        (tmp_path / "rendezvous").unlink(missing_ok=True)


class Others(World):
    """Two ranks: the other one votes as it is told to."""

    def __init__(self, lacks: bool, stops: bool) -> None:
        super().__init__(num_ranks=2)
        self._votes = (lacks, stops)

    def count(self, *here: bool) -> list[int]:
        return [own + other for own, other in zip(here, self._votes, strict=True)]


@pytest.mark.parametrize("stop", [False, True])
def test_ranks_that_all_have_data_pass_the_barrier_even_during_a_stop(stop: bool) -> None:
    assert DataBarrier(World(), lambda: stop).all_ready(ready=True)
    assert DataBarrier(Others(lacks=False, stops=stop), lambda: False).all_ready(ready=True)


@pytest.mark.parametrize(("ready", "lacks"), [(False, False), (True, True), (False, True)])
def test_if_one_rank_lacks_data_all_wait_and_leave_together_for_a_stop(ready: bool, lacks: bool) -> None:
    assert not DataBarrier(Others(lacks, stops=False), lambda: False).all_ready(ready)
    for here, there in ((True, False), (False, True)):
        with pytest.raises(StopRequested):
            DataBarrier(Others(lacks, stops=there), lambda here=here: here).all_ready(ready)  # type: ignore[misc]
