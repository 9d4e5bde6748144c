"""The table of devices: names as drivers and clouds write them, and this machine as its kernel describes it."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import get_args

import pytest

from packtrain.errors import Mistake
from packtrain.fleet.prices import price_lists
from packtrain.plan.devices import GPUS, PUBLISHED, aws_hardware, device_named, gpu_named, ibm_hardware, this_machine
from packtrain.recipes.recipe import Family


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
        for family in get_args(Family):
            half, full = (device.reached_flops(precision, family) for precision in (True, False))
            assert half >= full or not device.half_flops


def test_a_published_run_reaches_a_part_of_the_peak_and_has_an_address() -> None:
    assert {run.family for run in PUBLISHED} == set(get_args(Family))
    for run in PUBLISHED:
        assert re.match(r"[a-z.]+\.(com|org)/", run.source)
        assert 0.03 < run.share < 0.65, (run.device.name, run.family, run.half)
    assert len({(run.device.name, run.family, run.half) for run in PUBLISHED}) == len(PUBLISHED)


def test_a_gpu_is_as_fast_as_its_published_run_and_says_whose_it_was() -> None:
    v100 = GPUS["v100"]
    assert v100.reached_flops(half=True, family="bottleneck") == pytest.approx(833 * 24.5e9)
    assert v100.basis(half=True, family="bottleneck").startswith("NVIDIA V100 at 16% of its peak (github.com/lambdal/")
    # Pascal has no fast 16 bits.
    assert GPUS["p100"].reached_flops(half=True, family="transformer") == GPUS["p100"].reached_flops(
        half=False, family="transformer"
    )


def test_a_gpu_without_a_published_run_is_like_similar_ones() -> None:
    t4, v100 = GPUS["t4"], GPUS["v100"]
    assert "NVIDIA T4" not in {run.device.name for run in PUBLISHED}
    assert (t4.has_tf32, v100.has_tf32, GPUS["a100"].has_tf32) == (False, False, True)
    assert t4.share(half=True, family="transformer") == v100.share(half=True, family="transformer")
    assert "as similar GPUs" in t4.basis(half=True, family="transformer")
    similar = [run.share for run in PUBLISHED if run.family == "transformer" and run.half and run.device.has_tf32]
    assert GPUS["l4"].share(half=True, family="transformer") == median(similar)


def test_a_family_that_nobody_published_in_a_precision_is_like_its_nearest() -> None:
    a100 = GPUS["a100"]
    assert a100.share(half=False, family="basic") == a100.share(half=False, family="bottleneck")


@pytest.mark.parametrize(
    ("flavor", "gpu", "gpus", "cores"),
    [
        ("AC1_8X60X100", "NVIDIA P100", 1, 8),
        ("AC1_16X120X25", "NVIDIA P100", 2, 16),
        ("AC2_8X60X100", "NVIDIA V100", 1, 8),
        ("AC2_16X120X100", "NVIDIA V100", 2, 16),
        ("B1_4X16X100", "core of an unknown CPU", 0, 4),
    ],
)
def test_a_flavor_of_ibm_has_its_devices(flavor: str, gpu: str, gpus: int, cores: int) -> None:
    machine = ibm_hardware(flavor, 1000)
    assert machine is not None
    assert (machine.device.name, machine.gpus, machine.cores) == (gpu, gpus, cores)
    assert machine.link.bytes_per_second == 1e9 / 8


def test_what_is_no_flavor_of_ibm_is_not_guessed() -> None:
    assert ibm_hardware("4 CPUs with 16 GB", None) is None
    assert ibm_hardware("g5.xlarge", None) is None
    unset = ibm_hardware("AC2_8X60X100", None)
    assert unset is not None
    assert "assumed; set network_mbps" in unset.link.source


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
    assert (
        plain.worker_flops(2, half=True, family="transformer")
        == plain.worker_flops(1, half=False, family="transformer") / 2
    )


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
    assert this_machine(tmp_path).worker_flops(1, half=False, family="transformer") > 0
