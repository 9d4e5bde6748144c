from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from packtrain.errors import PacktrainError
from packtrain.node.causes import is_consequence
from packtrain.train.world import (
    StopRequested,
    WorkerFacts,
    World,
    agree,
    backend_of,
    gpu_addresses,
    misfits,
    pass_data_barrier,
)
from train.forking import WorkerForker


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
    assert pass_data_barrier(World(), True, stop)
    assert pass_data_barrier(Others(lacks=False, stops=stop), True, False)


@pytest.mark.parametrize(("ready", "lacks"), [(False, False), (True, True), (False, True)])
def test_if_one_rank_lacks_data_all_wait_and_leave_together_for_a_stop(ready: bool, lacks: bool) -> None:
    assert not pass_data_barrier(Others(lacks, stops=False), ready, False)
    for here, there in ((True, False), (False, True)):
        with pytest.raises(StopRequested):
            pass_data_barrier(Others(lacks, stops=there), ready, here)


# What workers agree on before they connect.

GPU = WorkerFacts("a", "cuda", True, "2.13.0", "2.27", "0000:01:00.0")


@pytest.mark.parametrize(
    ("everyone", "wrong"),
    [
        ([GPU, GPU], {}),
        ([GPU, replace(GPU, has_bf16=False)], {}),
        ([replace(GPU, device="cpu", nccl_version=""), GPU, GPU], {0: "has no usable GPU"}),
        ([GPU, replace(GPU, torch_version="2.9.1"), GPU], {1: "has torch 2.9.1, and the other machines have 2.13.0"}),
        ([GPU, replace(GPU, torch_version="2.9.1")], {1: "has torch 2.9.1, and the other machines have 2.13.0"}),
        ([replace(GPU, nccl_version="2.21"), GPU, GPU], {0: "has nccl 2.21, and the other machines have 2.27"}),
        (
            [replace(GPU, device="cpu", torch_version="2.9.1", nccl_version="")] * 3 + [GPU],
            dict.fromkeys(range(3), "has no usable"),
        ),
    ],
)
def test_a_worker_that_does_not_fit_the_others_is_named(everyone: list[WorkerFacts], wrong: dict[int, str]) -> None:
    found = misfits(everyone)
    assert found.keys() == wrong.keys()
    assert all(found[rank].startswith(why) for rank, why in wrong.items())


def test_every_worker_learns_which_one_does_not_fit_and_only_that_one_is_to_blame(tmp_path: Path) -> None:
    facts = [GPU, replace(GPU, host="b", device="cpu", nccl_version=""), GPU]
    stores = [FileStore(str(tmp_path / "meeting"), 3) for _ in facts]

    def join(rank: int) -> str:
        with pytest.raises(PacktrainError) as raised:
            agree(stores[rank], rank, 3, facts[rank])
        return str(raised.value)

    with ThreadPoolExecutor(3) as threads:
        said = list(threads.map(join, range(3)))
    assert said[1].startswith("b has no usable GPU")
    assert said[0] == said[2] == f"another worker is gone: {said[1]}"
    assert [is_consequence(text) for text in said] == [True, False, True]


@pytest.mark.parametrize(
    ("everyone", "backend"),
    [
        ([GPU, replace(GPU, host="b")], "nccl"),
        ([GPU, replace(GPU, gpu="0000:02:00.0")], "nccl"),
        ([replace(GPU, gpu=""), replace(GPU, gpu="")], "nccl"),
        ([GPU, GPU], "gloo"),
        ([replace(GPU, device="cpu", gpu="")] * 2, "gloo"),
    ],
    ids=["two machines", "two GPUs", "addresses not known", "parts of one GPU", "CPUs"],
)
def test_nccl_connects_workers_unless_they_share_a_gpu(everyone: list[WorkerFacts], backend: str) -> None:
    assert backend_of(everyone) == backend


def test_more_workers_than_gpus_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(PacktrainError, match=r"has 1 usable GPU, and more workers; check nvidia-smi, or set fleet"):
        World.join()


def test_bf16_is_used_only_if_all_workers_have_it(tmp_path: Path) -> None:
    facts = [GPU, replace(GPU, has_bf16=False)]
    stores = [FileStore(str(tmp_path / "meeting"), 2) for _ in facts]
    with ThreadPoolExecutor(2) as threads:
        agreed = list(threads.map(lambda rank: agree(stores[rank], rank, 2, facts[rank]), range(2)))
    assert agreed == [facts, facts]


def test_a_worker_with_a_part_of_a_gpu_sees_that_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    World.join()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"


@pytest.mark.parametrize(
    ("seen", "workers", "found"),
    [
        (4, 2, ["0000:1a:00.0", "0000:1b:00.0"]),
        (1, 2, ["0000:1a:00.0", "0000:1a:00.0"]),  # parts of one GPU: each worker sees its own alone
    ],
)
def test_gpus_have_the_addresses_that_the_system_gives_them(
    seen: int, workers: int, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(number: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=26 + number, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert gpu_addresses(torch.device("cuda", 0), workers) == found
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert gpu_addresses(torch.device("cuda", 0), workers) == [""] * workers
    assert gpu_addresses(torch.device("cpu"), workers) == []


def test_a_worker_tells_the_address_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them see all GPUs of their machine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    where = {"pci_domain_id": 0, "pci_device_id": 0}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(pci_bus_id=number + 1, **where)
    )
    here = [WorkerFacts.of_this_worker(torch.device("cuda", number)) for number in range(2)]
    assert [facts.gpu for facts in here] == ["0000:01:00.0", "0000:02:00.0"]
    assert backend_of(here) == "nccl"
