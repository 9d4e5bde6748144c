"""The table of devices: names as drivers and clouds write them, and this machine as its kernel describes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.fleet.prices import price_lists
from packtrain.plan.devices import GPUS, aws_hardware, device_named, gpu_named, this_machine


@pytest.mark.parametrize(
    ("driver", "key"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(driver: str, key: str) -> None:
    assert gpu_named(driver) == GPUS[key]


def test_a_gpu_that_is_not_in_the_table_is_not_guessed() -> None:
    assert gpu_named("NVIDIA X9000") is None
    with pytest.raises(Mistake, match="--device h1000: not in the table; did you mean 'h100'"):
        device_named("h1000")


def test_every_device_has_a_source_and_halves_are_at_least_as_fast() -> None:
    for device in GPUS.values():
        assert device.source
        assert device.memory_bytes >= 16e9
        assert device.half_flops == 0 or device.half_flops >= device.flops
        assert device.reached_flops(half=True) >= device.reached_flops(half=False) or not device.half_flops


def test_an_instance_of_aws_has_its_devices_and_its_network() -> None:
    machine = aws_hardware("g5.12xlarge")
    assert machine is not None
    assert (machine.device.name, machine.gpus, machine.cores, machine.workers) == ("NVIDIA A10G", 4, 48, 4)
    assert machine.link.bytes_per_second == 40e9 / 8
    assert machine.worker_memory_bytes(4) == 24 * 10**9
    plain = aws_hardware("c6i.4xlarge")
    assert plain is not None
    assert (plain.gpus, plain.cores, plain.workers) == (0, 16, 1)
    assert plain.worker_memory_bytes(2) == 16 * 2**30
    assert plain.worker_flops(2, half=True) == plain.worker_flops(1, half=False) / 2


def test_nearly_all_instances_with_a_price_are_in_the_table() -> None:
    priced = {name for one in price_lists() if one.provider == "aws" for name in one.dollars_per_hour}
    unknown = {name.partition(".")[0] for name in priced if aws_hardware(name) is None}
    assert unknown <= {"g7e", "p6-b300", "t3"}  # t3 below medium has too little memory to train
    assert aws_hardware("x1.large") is None
    assert aws_hardware("g5.3xlarge") is None


def test_this_machine_is_described_by_its_kernel(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Intel(R) Xeon(R)\ncpu MHz\t: 2500.0\nflags\t: fma avx2 avx512f\n")
    (tmp_path / "meminfo").write_text("MemTotal:       8000000 kB\n")
    machine = this_machine(tmp_path)
    assert (machine.device.name, machine.device.flops, machine.gpus) == ("Intel(R) Xeon(R)", 2.5e9 * 64, 0)
    assert machine.memory_bytes == 8_000_000 * 1024
    card = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t Tesla T4\nIRQ: 12\n")
    assert (this_machine(tmp_path).device.name, this_machine(tmp_path).gpus) == ("NVIDIA T4", 1)


def test_a_machine_without_a_description_still_has_a_speed(tmp_path: Path) -> None:
    assert this_machine(tmp_path).worker_flops(1, half=False) > 0
