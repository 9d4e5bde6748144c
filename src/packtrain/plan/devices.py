"""Speeds of devices and links of machines, each with its source, for a plan of machines that nobody has measured.

A peak is that of dense matrices without sparsity. Training reaches a part of it, which depends on the model, the
precision and the GPU: `PUBLISHED` has what others measured. A measurement replaces all of it (`packtrain plan` on this
machine, or with --probe). `benchmarks/published.py` compares plans with runs that are not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from packtrain.errors import Mistake, nearest
from packtrain.job.kinds import FleetKind
from packtrain.recipes.recipe import Family
from packtrain.system import text_or_nothing, usable_cores

_GB, _GIB, _T, _G = 10**9, 2**30, 1e12, 1e9

DeviceKind = Literal["gpu", "cpu"]
_CPU_SHARE = 0.3  # of the peak of a core: an assumption, and `packtrain plan` measures it where it can


@dataclass(frozen=True)
class Device:
    """A GPU, or one core of a CPU.

    `flops` is with 32-bit matrices as training computes them, which is in TF32 on a GPU that has it. `half_flops` is
    with 16-bit matrices; 0 if slow. `nvlink` are bytes per second to the other GPUs of a machine in each direction; 0
    if they are behind PCIe.
    """

    name: str
    kind: DeviceKind
    flops: float
    half_flops: float
    memory_bytes: int
    source: str
    nvlink: float = 0.0

    def computes_half(self, half: bool) -> bool:
        """True if training in this precision has 16-bit matrices here."""
        return half and self.half_flops > 0

    @property
    def has_tf32(self) -> bool:
        return 0 < self.half_flops < 4 * self.flops

    def share(self, half: bool, family: Family) -> float:
        """Return the part of the peak that training such a model reaches: as published, else as similar GPUs do."""
        if self.kind == "cpu":
            return _CPU_SHARE
        runs = self._published(half, family)
        measured = [run.share for run in runs if run.device.name == self.name]
        similar = [run.share for run in runs if run.device.has_tf32 == self.has_tf32]
        return median(measured or similar or [run.share for run in runs])

    def _published(self, half: bool, family: Family) -> list[PublishedRun]:
        """Return the runs of all GPUs in this precision; nobody has published all families in both."""
        runs = [run for run in PUBLISHED if run.half == self.computes_half(half)]
        return [run for run in runs if run.family == family] or [run for run in runs if run.family == "bottleneck"]

    def reached_flops(self, half: bool, family: Family) -> float:
        """Return the operations per second that training reaches."""
        return self.share(half, family) * (self.half_flops if self.computes_half(half) else self.flops)

    def basis(self, half: bool, family: Family) -> str:
        """Say in a few words where `reached_flops` comes from."""
        if self.kind == "cpu":
            return f"{self.name} at {_CPU_SHARE:.0%} of its peak, assumed"
        sources = [run.source for run in self._published(half, family) if run.device.name == self.name]
        where = sources[0] if sources else "as similar GPUs"
        return f"{self.name} at {self.share(half, family):.0%} of its peak ({where})"


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
# NVLink: https://www.nvidia.com/en-us/data-center/nvlink/, half of what both directions have together.
_GEFORCE = "NVIDIA's GA102 and Ada architecture white papers"

# In the order in which names are compared: `a100-80gb` before `a100`.
GPUS: Mapping[str, Device] = {
    "t4": Device("NVIDIA T4", "gpu", 8.1 * _T, 65 * _T, 16 * _GB, _NVIDIA + "tesla-t4/"),
    "v100-32gb": Device("NVIDIA V100 32 GB", "gpu", 15.7 * _T, 125 * _T, 32 * _GB, _NVIDIA + "v100/", 150 * _GB),
    "v100": Device("NVIDIA V100", "gpu", 15.7 * _T, 125 * _T, 16 * _GB, _NVIDIA + "v100/", 150 * _GB),
    "p100": Device("NVIDIA P100", "gpu", 9.3 * _T, 0, 16 * _GB, _NVIDIA + "tesla-p100/"),
    "a10g": Device("NVIDIA A10G", "gpu", 35 * _T, 70 * _T, 24 * _GB, "https://aws.amazon.com/ec2/instance-types/g5/"),
    "a10": Device("NVIDIA A10", "gpu", 62.5 * _T, 125 * _T, 24 * _GB, _NVIDIA + "products/a10-gpu/"),
    "l40s": Device("NVIDIA L40S", "gpu", 183 * _T, 362 * _T, 48 * _GB, _NVIDIA + "l40s/"),
    "l4": Device("NVIDIA L4", "gpu", 60 * _T, 121 * _T, 24 * _GB, _NVIDIA + "l4/"),
    "a40": Device("NVIDIA A40", "gpu", 74.8 * _T, 149.7 * _T, 48 * _GB, _NVIDIA + "a40/"),
    "a100-80gb": Device("NVIDIA A100 80 GB", "gpu", 156 * _T, 312 * _T, 80 * _GB, _NVIDIA + "a100/", 300 * _GB),
    "a100": Device("NVIDIA A100 40 GB", "gpu", 156 * _T, 312 * _T, 40 * _GB, _NVIDIA + "a100/", 300 * _GB),
    "h200": Device("NVIDIA H200", "gpu", 494 * _T, 989 * _T, 141 * _GB, _NVIDIA + "h200/", 450 * _GB),
    "h100-pcie": Device("NVIDIA H100 PCIe", "gpu", 378 * _T, 756 * _T, 80 * _GB, _NVIDIA + "h100/"),
    "h100-nvl": Device("NVIDIA H100 NVL", "gpu", 417 * _T, 835 * _T, 94 * _GB, _NVIDIA + "h100/"),
    "h100": Device("NVIDIA H100", "gpu", 494 * _T, 989 * _T, 80 * _GB, _NVIDIA + "h100/", 450 * _GB),
    "b200": Device("NVIDIA B200", "gpu", 1125 * _T, 2250 * _T, 180 * _GB, _NVIDIA + "dgx-b200/", 900 * _GB),
    "rtx-3090": Device("NVIDIA GeForce RTX 3090", "gpu", 35.6 * _T, 71 * _T, 24 * _GB, _GEFORCE),
    "rtx-4090": Device("NVIDIA GeForce RTX 4090", "gpu", 82.6 * _T, 165 * _T, 24 * _GB, _GEFORCE),
}


@dataclass(frozen=True)
class PublishedRun:
    """The speed of one GPU in a training run that others published.

    `flops` are those of a unit, forward and backward, as the recipes size their models.
    """

    device: Device
    family: Family
    half: bool
    units_per_second: float
    flops: float
    source: str

    @property
    def share(self) -> float:
        peak = self.device.half_flops if self.half else self.device.flops
        return self.units_per_second * self.flops / peak


_LAMBDA = "github.com/lambdal/deeplearning-benchmark"
_FFCV = "github.com/libffcv/ffcv-imagenet"
_RESNET18, _RESNET50 = 10.9 * _G, 24.5 * _G  # for an image of 224 x 224 pixels
_FFCV_PIXELS = (0.75 * 160**2 + 0.25 * 192**2) / 224**2  # of its images, on average over a run
_IMAGENET = 1_281_167
_BERT_LARGE = 739 * _G  # for a sequence of 384 tokens: 302 million weights in 24 layers, and attention
_TRANSFORMER_BIG = 1.26 * _G  # for a pair of a source and a target token


def _lambda(family: Family, flops: float, speeds: Mapping[str, tuple[float, float]]) -> list[PublishedRun]:
    """Return the runs of NVIDIA's PyTorch examples that Lambda made on one GPU each, in 16 and in 32 bits."""
    return [
        PublishedRun(GPUS[key], family, half, speed, flops, _LAMBDA)
        for key, both in speeds.items()
        for half, speed in zip((True, False), both, strict=True)
    ]


_A100 = ("a100", "a100-80gb")  # one chip, one speed: the mean of both
PUBLISHED: Sequence[PublishedRun] = (
    # 88 epochs on 8 GPUs in 77.2 min (ResNet-50), and on one in 187.3 min (ResNet-18), with all that belongs to a run.
    *(PublishedRun(GPUS[key], "bottleneck", True, 88 * _IMAGENET / 77.2 / 60 / 8, _RESNET50 * _FFCV_PIXELS, _FFCV)
      for key in _A100),
    *(PublishedRun(GPUS[key], "basic", True, 88 * _IMAGENET / 187.3 / 60, _RESNET18 * _FFCV_PIXELS, _FFCV)
      for key in _A100),
    *(PublishedRun(GPUS[key], "bottleneck", False, 997, _RESNET50, _LAMBDA) for key in _A100),
    *_lambda("bottleneck", _RESNET50, {
        "v100": (833, 369), "v100-32gb": (833, 369), "a10": (638, 349), "a40": (654, 391), "rtx-3090": (905, 513),
        "rtx-4090": (1301, 721), "h100-pcie": (1976, 1248), "h100": (2791, 1895), "h200": (3079, 2259),
        "b200": (3076, 2967)}),
    *_lambda("transformer", _BERT_LARGE, {
        "v100": (57, 12), "v100-32gb": (57, 12), "a10": (42, 19), "a40": (57.6, 20.1), "rtx-3090": (52, 24),
        "rtx-4090": (93, 44), **dict.fromkeys(_A100, (142.8, 67.2)), "h100-pcie": (204, 100), "h100": (311, 145),
        "h200": (350, 181), "b200": (523, 281)}),
    # ResNet-50, 90 epochs on 8 GPUs in 29 hours; the big Transformer, 25,000 tokens on 8 GPUs in a second.
    PublishedRun(
        GPUS["p100"], "bottleneck", False, 90 * _IMAGENET / 29 / 3600 / 8, _RESNET50, "arxiv.org/abs/1706.02677"),
    PublishedRun(GPUS["p100"], "transformer", False, 25_000 / 8, _TRANSFORMER_BIG, "arxiv.org/abs/1706.03762"),
)  # fmt: skip

# One vCPU, which is half a core: sustained clock x 64 operations of AVX-512 per cycle and core / 2.
_INTEL = "https://aws.amazon.com/ec2/instance-types/, clock x 64 operations per cycle of AVX-512 / 2 threads"
_SKYLAKE = Device("vCPU of an Intel Xeon, Skylake", "cpu", 80 * _G, 0, 0, _INTEL)
_ICE_LAKE = Device("vCPU of an Intel Xeon, Ice Lake", "cpu", 93 * _G, 0, 0, _INTEL)
_SAPPHIRE = Device("vCPU of an Intel Xeon, Sapphire Rapids", "cpu", 102 * _G, 0, 0, _INTEL)
_UNKNOWN_CORE = Device("core of an unknown CPU", "cpu", 80 * _G, 0, 0, "assumed: 2.5 GHz x 32 operations per cycle")


@dataclass(frozen=True)
class Link:
    """The connection of a machine with the others, in each direction."""

    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """A type of machine: `gpus` of `device`, or `cores` of it if there are none."""

    device: Device
    gpus: int
    cores: int
    memory_bytes: int
    link: Link

    @property
    def workers(self) -> int:
        """The workers that it has by default: one per GPU, or one."""
        return max(1, self.gpus)

    def worker_memory_bytes(self, workers: int) -> int:
        """Return the memory for each of so many workers; 0 if it is not known."""
        return self.device.memory_bytes if self.gpus else self.memory_bytes // max(1, workers)

    def worker_flops(self, workers: int, half: bool, family: Family) -> float:
        """Return what each of so many workers reaches: they share GPUs, or cores."""
        units = self.gpus if self.gpus else self.cores
        return self.device.reached_flops(half, family) * units / max(1, workers)


# AWS. The network is what a machine gets all the time, in Gbit/s; small ones may burst above it for a while.
_AWS = "https://docs.aws.amazon.com/ec2/latest/instancetypes/"
_AWS_LATENCY = 0.0001  # of a message between two machines of one zone
_NETWORKS: Mapping[str, Mapping[str, float]] = {
    "old": {"large": 0.75, "xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "8xlarge": 10, "9xlarge": 12, "12xlarge": 12,
            "16xlarge": 20, "18xlarge": 25, "24xlarge": 25},
    "new": {"large": 0.78, "xlarge": 1.56, "2xlarge": 3.12, "4xlarge": 6.25, "8xlarge": 12.5, "12xlarge": 18.75,
            "16xlarge": 25, "24xlarge": 37.5, "32xlarge": 50, "48xlarge": 50},
    "t3": {"medium": 0.256, "large": 0.512, "xlarge": 1.024, "2xlarge": 2.048},
}  # fmt: skip
_CPU_FAMILIES: Mapping[str, tuple[Device, int, str]] = {  # device of a vCPU, GiB for each vCPU, network
    "c5": (_SKYLAKE, 2, "old"),
    "m5": (_SKYLAKE, 4, "old"),
    "c6i": (_ICE_LAKE, 2, "new"),
    "m6i": (_ICE_LAKE, 4, "new"),
    "c7i": (_SAPPHIRE, 2, "new"),
    "m7i": (_SAPPHIRE, 4, "new"),
    "t3": (_SKYLAKE, 4, "t3"),
}
_GPU_FAMILIES: Mapping[str, tuple[str, Mapping[str, tuple[int, int, int, float]]]] = {
    # By size: GPUs, vCPUs, GiB of main memory, Gbit/s.
    "g4dn": ("t4", {
        "xlarge": (1, 4, 16, 5), "2xlarge": (1, 8, 32, 10), "4xlarge": (1, 16, 64, 20), "8xlarge": (1, 32, 128, 50),
        "12xlarge": (4, 48, 192, 50), "16xlarge": (1, 64, 256, 50)}),
    "g5": ("a10g", {
        "xlarge": (1, 4, 16, 2.5), "2xlarge": (1, 8, 32, 5), "4xlarge": (1, 16, 64, 10), "8xlarge": (1, 32, 128, 25),
        "12xlarge": (4, 48, 192, 40), "16xlarge": (1, 64, 256, 25), "24xlarge": (4, 96, 384, 50),
        "48xlarge": (8, 192, 768, 100)}),
    "g6": ("l4", {
        "xlarge": (1, 4, 16, 2.5), "2xlarge": (1, 8, 32, 5), "4xlarge": (1, 16, 64, 10), "8xlarge": (1, 32, 128, 25),
        "12xlarge": (4, 48, 192, 40), "16xlarge": (1, 64, 256, 25), "24xlarge": (4, 96, 384, 50),
        "48xlarge": (8, 192, 768, 100)}),
    "gr6": ("l4", {"4xlarge": (1, 16, 128, 10), "8xlarge": (1, 32, 256, 25)}),
    "g6e": ("l40s", {
        "xlarge": (1, 4, 32, 2.5), "2xlarge": (1, 8, 64, 5), "4xlarge": (1, 16, 128, 8), "8xlarge": (1, 32, 256, 25),
        "12xlarge": (4, 48, 384, 100), "16xlarge": (1, 64, 512, 35), "24xlarge": (4, 96, 768, 200),
        "48xlarge": (8, 192, 1536, 400)}),
    "p3": ("v100", {
        "2xlarge": (1, 8, 61, 2.5), "8xlarge": (4, 32, 244, 10), "16xlarge": (8, 64, 488, 25)}),
    "p3dn": ("v100-32gb", {"24xlarge": (8, 96, 768, 100)}),
    "p4d": ("a100", {"24xlarge": (8, 96, 1152, 400)}),
    "p4de": ("a100-80gb", {"24xlarge": (8, 96, 1152, 400)}),
    "p5": ("h100", {"4xlarge": (1, 16, 256, 100), "48xlarge": (8, 192, 2048, 3200)}),
    "p5en": ("h200", {"48xlarge": (8, 192, 2048, 3200)}),
    "p6-b200": ("b200", {"48xlarge": (8, 192, 2048, 3200)}),
}  # fmt: skip


def aws_hardware(instance: str) -> Hardware | None:
    """Return an instance type of AWS, such as g5.xlarge; None if the table does not have it."""
    family, _, size = instance.partition(".")
    gpu, sizes = _GPU_FAMILIES.get(family, ("", {}))
    core, core_gib, network = _CPU_FAMILIES.get(family, (_UNKNOWN_CORE, 0, ""))
    if size in sizes:
        device, (gpus, cores, gib, gbits) = GPUS[gpu], sizes[size]
    elif size in _NETWORKS.get(network, ()):
        device, gpus, gbits = core, 0, _NETWORKS[network][size]
        cores = 2 if size in ("medium", "large") else 4 * int(size.removesuffix("xlarge") or "1")
        gib = cores * core_gib
    else:
        return None
    link = Link(gbits * 1e9 / 8, _AWS_LATENCY, f"{gbits:g} Gbit/s of {instance}, {_AWS}")
    return Hardware(device, gpus, cores, gib * _GIB, link)


# IBM Cloud, classic virtual servers: AC2_8X60X100 has 8 vCPUs, 60 GB and a disk of 100 GB.
# https://cloud.ibm.com/docs/virtual-servers?topic=virtual-servers-about-virtual-server-profiles
_FLAVOR = re.compile(r"([A-Z]+[0-9])_([0-9]+)X([0-9]+)X[0-9]+")
_FLAVOR_GPUS = {"AC1": "p100", "AC2": "v100", "ACL1": "p100", "ACL2": "v100"}
_VCPUS_PER_GPU = 8


def ibm_hardware(flavor: str, mbps: int | None) -> Hardware | None:
    """Return a flavor of IBM Cloud, with the speed of its network port if the job sets one; None if unknown."""
    match = _FLAVOR.fullmatch(flavor)
    if match is None:
        return None
    cores, gib, gpu = int(match[2]), int(match[3]), _FLAVOR_GPUS.get(match[1])
    source = f"{mbps} Mbit/s of network_mbps" if mbps else "100 Mbit/s, assumed; set network_mbps"
    link = Link((mbps or 100) * 1e6 / 8, 0.0003, source)
    if gpu is None:
        return Hardware(_UNKNOWN_CORE, 0, cores, gib * _GIB, link)
    return Hardware(replace(GPUS[gpu], nvlink=0.0), max(1, cores // _VCPUS_PER_GPU), cores, gib * _GIB, link)


def rented_hardware(kind: FleetKind) -> Hardware | None:
    """Return the first type of machine that a fleet may rent and that the tables have; None if there is none."""
    candidates = (aws_hardware(name) or ibm_hardware(name, kind.port_mbps) for name in kind.rented_types)
    return next(filter(None, candidates), None)


# Devices by name, and this machine.


def gpu_named(text: str) -> Device | None:
    """Return the GPU that a driver calls by this name, as in `NVIDIA A100-SXM4-80GB`; None if it is not known."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    joined = f" {' '.join(words)} "
    for key, device in GPUS.items():
        if all(f" {word} " in joined for word in key.split("-")):
            return device
    return None


def device_named(word: str) -> Device:
    """Return the device that a person names; raise Mistake if it is not in the table."""
    if word.lower() in GPUS:
        return GPUS[word.lower()]
    raise Mistake(f"--device {word}: not in the table; {nearest(word.lower(), GPUS)}")


def this_machine(root: Path = Path("/proc")) -> Hardware:
    """Return this machine as the kernel describes it: its GPUs if it has any, else its cores."""
    info = text_or_nothing(root / "cpuinfo")
    memory = re.search(r"MemTotal:\s+(\d+) kB", text_or_nothing(root / "meminfo"))
    memory_bytes = int(memory[1]) * 1024 if memory else 0
    # Collectives of one machine go through loopback; measured here, gloo moves 1 to 2 GB/s.
    link = Link(1.5e9, 0.0001, "loopback, assumed")
    names = [text_or_nothing(path / "information") for path in sorted((root / "driver/nvidia/gpus").glob("*"))]
    gpus = [gpu_named(name) for name in names]
    if gpus and gpus[0] is not None:
        return Hardware(gpus[0], len(gpus), usable_cores(), memory_bytes, link)
    return Hardware(_core(info), 0, usable_cores(), memory_bytes, link)


def _core(info: str) -> Device:
    """Return a core by its clock and the width of its vectors."""
    name = re.search(r"model name\s*:\s*(.+)", info)
    clock = re.search(r"cpu MHz\s*:\s*([0-9.]+)", info)
    if name is None or clock is None:
        return _UNKNOWN_CORE
    flags = info.partition("flags")[2].partition("\n")[0].split()
    # Two units for fused multiply-add of 512 bits (Intel), of 256 bits (AVX2, AMD), or of 128 bits.
    wide = "avx512f" in flags and "AMD" not in name[1]
    per_cycle = 64 if wide else 32 if "avx2" in flags else 16
    flops = float(clock[1]) * 1e6 * per_cycle
    return Device(name[1].strip(), "cpu", flops, 0, 0, f"{float(clock[1]):.0f} MHz x {per_cycle} operations per cycle")
