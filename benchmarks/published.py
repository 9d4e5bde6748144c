"""Plans against training runs that others published: time by `packtrain plan` and as measured there.

    python benchmarks/published.py [--json]

Nothing is measured here. Each run is a job as its authors describe it, planned without data for their GPUs. Runs that
the table of devices is made of are marked; all others were not used for it, and should come out within 30 %. Left out
are frameworks with kernels of their own (MLPerf's MXNet entries train up to 1.7 times as fast as PyTorch on the same
GPUs), and runs whose batch or epochs are not published.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
from packtrain.launch.load import load
from packtrain.plan.plan import PlanRequest, make_plan

WITHIN = 0.3
_DAWN = "dawn.cs.stanford.edu/benchmark, github.com/cybertronai/imagenet18_old"
_NVIDIA = "github.com/NVIDIA/DeepLearningExamples"
_RESNET = f"{_NVIDIA}, PyTorch/Classification/ConvNets/resnet50v1.5"
_TRANSFORMER = f"{_NVIDIA}, PyTorch/Translation/Transformer"
_LAMBDA = "github.com/lambdal/deeplearning-benchmark"
_FFCV = "github.com/libffcv/ffcv-imagenet"
# What EC2 gives one TCP connection between machines of a placement group, assumed instead of their 25 Gbit/s.
_FLOW = 10e9 / 8


@dataclass(frozen=True)
class Published:
    """A run with its whole time in minutes, or its speed in images or tokens per second of all GPUs."""

    what: str
    source: str
    gpu: str
    gpus: int
    job: Mapping[str, Any]
    samples: str
    minutes: float | None = None
    units_per_second: float | None = None
    machines: int = 1
    link: float | None = None
    used: bool = False
    length: float | None = None


def _phases(*phases: tuple[int, int, int]) -> dict[str, Any]:
    """Return a schedule of (until epoch, pixels, batch of all GPUs)."""
    steps = [{"until": f"{end} epochs", "rate": 0.1, "size": size, "batch": f"{batch} samples"}
             for end, size, batch in phases]  # fmt: skip
    return {"phases": steps}


def _imagenet(
    phases: Sequence[tuple[int, int, int]],
    model: str = "resnet50",
    precision: str = "fp16",
    train: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "recipe": "classify",
        "data": {"train": {"imagenet": "train"}, "valid": {"imagenet": "val"}},
        "model": model,
        "train": {
            "duration": f"{phases[-1][0]} epochs", "batch": f"{phases[0][2]} samples", "precision": precision,
            "optimizer": {"sgd": {}}, "schedule": _phases(*phases), **(train or {}),
        },
        "evaluate": {"every": "1 epochs"},
    }  # fmt: skip


def _translation(
    model: str, tokens: int, steps: int, precision: str, train: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "recipe": "translate",
        "data": {"train": {"bitext": ["a", "b"]}, "vocabulary": 33708},
        "model": model,
        "train": {
            "duration": f"{steps} steps", "batch": f"{tokens} tokens", "precision": precision,
            "schedule": {"noam": {"warmup": "4000 steps", "scale": 1.0}}, **(train or {}),
        },
    }  # fmt: skip


_HALF = {"exchange": {"ddp": {"compress": "fp16"}}}  # gradients of 16 bits, as those runs sent them
_FFCV_88 = [(66, 160, 1024), (88, 192, 1024)]

RUNS: Sequence[Published] = (
    Published("DAWNBench, 35 epochs, 128 to 288 pixels", _DAWN, "v100", 8, _imagenet(
        [(14, 128, 4096), (32, 224, 1792), (35, 288, 1024)], train=_HALF), "imagenet", minutes=109.2),
    Published("DAWNBench, 30 epochs", _DAWN, "v100", 8, _imagenet(
        [(6, 128, 4096), (13, 128, 8192), (28, 224, 3584), (30, 288, 2048)], train=_HALF), "imagenet", minutes=54.0,
        machines=2, link=_FLOW),
    Published("DAWNBench, 30 epochs", _DAWN, "v100", 8, _imagenet(
        [(6, 128, 8192), (13, 128, 16384), (28, 224, 7168), (30, 288, 4096)], train=_HALF), "imagenet", minutes=29.73,
        machines=4, link=_FLOW),
    Published("DAWNBench, 35 epochs", _DAWN, "v100", 8, _imagenet(
        [(6, 128, 8192), (14, 128, 16384), (17, 224, 8192), (29, 224, 14336), (35, 288, 8192)], train=_HALF),
        "imagenet", minutes=19.07, machines=8, link=_FLOW),
    Published("DAWNBench, 50 epochs", _DAWN, "v100", 8, _imagenet(
        [(6, 128, 8192), (16, 128, 16384), (19, 224, 8192), (37, 224, 24576), (50, 288, 16384)], train=_HALF),
        "imagenet", minutes=16.13, machines=16, link=_FLOW),
    Published("ResNet-50, 20.06, mixed", _RESNET, "v100", 8, _imagenet([(90, 224, 2048)]), "imagenet",
              units_per_second=6635.9),
    Published("ResNet-50, 21.03, mixed", _RESNET, "v100", 8, _imagenet([(90, 224, 2048)]), "imagenet",
              units_per_second=8322),
    Published("ResNet-50, 21.03, fp32", _RESNET, "v100", 8, _imagenet([(90, 224, 1024)], precision="fp32"), "imagenet",
              units_per_second=2855),
    Published("ResNet-50, 21.03, mixed", _RESNET, "a100-80gb", 8, _imagenet([(90, 224, 2048)]), "imagenet",
              units_per_second=16621),
    Published("ResNet-50, 21.03, TF32", _RESNET, "a100-80gb", 8, _imagenet([(90, 224, 2048)], precision="fp32"),
              "imagenet", units_per_second=7248),
    Published("ResNet-50, fp16", _LAMBDA, "a100-80gb", 8, _imagenet([(90, 224, 2048)]), "imagenet",
              units_per_second=11439),
    Published("FFCV, ResNet-50, 88 epochs, 160 to 192 pixels", _FFCV, "a100", 8, _imagenet(_FFCV_88), "imagenet",
              minutes=77.2, used=True),
    Published("FFCV, ResNet-18, 88 epochs", _FFCV, "a100", 1, _imagenet(_FFCV_88, "resnet18"), "imagenet",
              minutes=187.3, used=True),
    Published("ImageNet in 1 hour, 90 epochs, 8 GPUs", "arxiv.org/abs/1706.02677", "p100", 8, _imagenet(
        [(90, 224, 256)], precision="fp32"), "imagenet", minutes=29 * 60, used=True),
    Published("ImageNet in 1 hour, 90 epochs", "arxiv.org/abs/1706.02677", "p100", 8, _imagenet(
        [(90, 224, 8192)], precision="fp32"), "imagenet", minutes=65.0, machines=32, link=50e9 / 8),
    Published("Transformer big, mixed, 5,120 tokens each", _TRANSFORMER, "v100", 8, _translation(
        "big", 40960, 1000, "fp16", train=_HALF), "wmt14-en-de", units_per_second=214656),
    Published("Transformer big, fp32, 2,560 tokens each", _TRANSFORMER, "v100", 8, _translation(
        "big", 20480, 1000, "fp32"), "wmt14-en-de", units_per_second=59316),
    Published("Transformer big, mixed, 10,240 tokens each", _TRANSFORMER, "v100-32gb", 16, _translation(
        "big", 163840, 1000, "fp16", train=_HALF), "wmt14-en-de", units_per_second=517227),
    Published("Transformer big, mixed, 10,240 tokens each", _TRANSFORMER, "a100", 8, _translation(
        "big", 81920, 1000, "fp16", train=_HALF), "wmt14-en-de", units_per_second=551599),
    Published("Transformer big, TF32, 10,240 tokens each", _TRANSFORMER, "a100", 8, _translation(
        "big", 81920, 1000, "fp32"), "wmt14-en-de", units_per_second=347936),
    Published("Attention is all you need, big", "arxiv.org/abs/1706.03762", "p100", 8, _translation(
        "big", 25000, 300_000, "fp32"), "wmt14-en-de", units_per_second=25000 / 1.0, used=True),
    Published("Attention is all you need, base", "arxiv.org/abs/1706.03762", "p100", 8, _translation(
        "base", 25000, 100_000, "fp32"), "wmt14-en-de", units_per_second=25000 / 0.4),
)  # fmt: skip


def planned(run: Published, folder: Path) -> tuple[float, float]:
    """Return minutes and units per second of a run as `packtrain plan` predicts them."""
    job = {"name": "published", "store": str(folder / "store"), "fleet": {"local": {}, "workers": run.gpus}, **run.job}
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    request = PlanRequest((run.machines,), run.samples, run.length, device=run.gpu, link=run.link)
    [one] = make_plan(load(path), request, lambda _: None).estimates
    return one.seconds / 60, one.units_per_second


def parser() -> argparse.ArgumentParser:
    return bench.parser(__doc__, rounds=1)


def measure(_: argparse.Namespace) -> list[tuple[Published, float, float]]:
    with tempfile.TemporaryDirectory(prefix="published-") as folder:
        return [(run, *planned(run, Path(folder))) for run in RUNS]


def report(_: argparse.Namespace, plans: list[tuple[Published, float, float]]) -> bench.Report:
    rows: list[dict[str, object]] = []
    faults = []
    for run, minutes, speed in plans:
        # As the time for the same work: 10 % is a tenth longer than it took.
        off = minutes / run.minutes if run.minutes is not None else (run.units_per_second or 0.0) / speed
        shown = ("minutes", f"{run.minutes:g}", f"{minutes:.1f}") if run.minutes is not None else (
            "units/s", f"{run.units_per_second:,.0f}", f"{speed:,.0f}")  # fmt: skip
        gpus = f"{run.machines} x " if run.machines > 1 else ""
        rows.append({
            "run": run.what, "GPUs": f"{gpus}{run.gpus} {run.gpu}", "unit": shown[0], "published": shown[1],
            "planned": shown[2], "time off (%)": round(100 * (off - 1)), "in the table": "yes" if run.used else "",
            "source": run.source,
        })  # fmt: skip
        if not run.used and abs(off - 1) > WITHIN:
            faults.append(f"{run.what}, {gpus}{run.gpus} {run.gpu}: planned time is off by {off - 1:+.0%}")
    held = [row for run, row in zip((run for run, _, _ in plans), rows, strict=True) if not run.used]
    note = f"{len(held) - len(faults)} of {len(held)} runs that are not in the table of devices are within {WITHIN:.0%}"
    return bench.Report("Plans against published runs", rows, [note], faults)


if __name__ == "__main__":
    bench.main(parser(), measure, report)
