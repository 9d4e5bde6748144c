from __future__ import annotations

import torch
from nursery import Nursery

from packtrain.train.world import World


def test_alone_a_worker_needs_no_others() -> None:
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


def test_two_workers_gather_bytes_of_any_length_and_agree_on_numbers(nursery: Nursery) -> None:
    first, second = nursery.succeed("talk", 2)
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
