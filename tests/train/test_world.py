from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from packtrain.train.world import World
from parts.loopback import free_port


def test_alone_a_worker_needs_no_others() -> None:
    world = World()
    values = torch.tensor([1.0, 2.0])
    assert world.is_first
    assert world.begin_sum(values) is None
    assert values.tolist() == [1.0, 2.0]
    assert world.gather(b"mine") == [b"mine"]
    assert world.gather(b"") == [b""]
    world.leave()


TWO = """
import json, os, torch
from packtrain.train.world import World
world = World.join()
mine = [b"", b"short" if world.rank else b"a" * 1000, bytes([world.rank]), b"only mine" if world.is_first else b"",
        b"" if world.is_first else b"only the other"]
gathered = [[one.decode() for one in world.gather(data)] for data in mine]
values = torch.tensor([1.0, float(world.rank)], dtype=torch.float64)
work = world.begin_sum(values)
work.wait()
print(json.dumps({"rank": world.rank, "first": world.is_first, "gathered": gathered, "sums": values.tolist()}))
world.leave()
"""


def test_two_workers_gather_bytes_of_any_length_and_add_up_numbers() -> None:
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", TWO],
            env={
                **os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    said = [json.loads(worker.communicate(timeout=120)[0].splitlines()[-1]) for worker in workers]
    assert [one["rank"] for one in said] == [0, 1]
    assert [one["first"] for one in said] == [True, False]
    for one in said:
        assert one["gathered"] == [
            ["", ""],
            ["a" * 1000, "short"],
            ["\x00", "\x01"],
            ["only mine", ""],
            ["", "only the other"],
        ]
        assert one["sums"] == [2.0, 1.0]
