"""The `train` section: what it means in every epoch, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from packtrain.job.job import EpochSettings, TrainSettings
from packtrain.job.part import faults
from packtrain.train.ddp import DdpSettings
from packtrain.train.local_steps import LocalStepsSettings
from packtrain.train.progress import Progress
from packtrain.units import Amount, Duration

TRAIN: Mapping[str, Any] = {
    "duration": "50 epochs",
    "batch": "8192 samples",
    "schedule": {"constant": {"rate": 0.1}},
}

# The record of 16 machines: sizes, global batches and rates by epoch.
DAWNBENCH = [
    {"until": "6 epochs", "rate": [1.88, 3.76], "size": 128, "batch": "8192 samples"},
    {"until": "16 epochs", "rate": 3.76, "batch": "16384 samples"},
    {"until": "19 epochs", "rate": 1.88, "size": 224, "batch": "8192 samples", "min_scale": 0.087},
    {"until": "31 epochs", "rate": 0.564, "batch": "24576 samples"},
    {"until": "37 epochs", "rate": 0.0564},
    {"until": "38 epochs", "rate": 0.0376, "size": 288, "batch": "16384 samples", "rectangular": True},
    {"until": "50 epochs", "rate": 0.00376},
]


def settings(**fields: Any) -> TrainSettings:
    return TrainSettings.model_validate({**TRAIN, **fields})


def refusals(**fields: Any) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        settings(**fields)
    return [f"{'.'.join(map(str, location))}: {text}" for location, text, _ in faults(refused.value)]


# Phases.


@pytest.mark.parametrize(
    ("epoch", "rate", "size", "batch", "rectangular"),
    [
        (0, 1.88, 128, 8192, False),
        (3, 2.82, 128, 8192, False),
        (6, 3.76, 128, 16384, False),
        (15, 3.76, 128, 16384, False),
        (16, 1.88, 224, 8192, False),
        (18, 1.88, 224, 8192, False),
        (19, 0.564, 224, 24576, False),
        (30, 0.564, 224, 24576, False),
        (31, 0.0564, 224, 24576, False),
        (36, 0.0564, 224, 24576, False),
        (37, 0.0376, 288, 16384, True),
        (38, 0.00376, 288, 16384, True),
        (49, 0.00376, 288, 16384, True),
    ],
)
def test_phases_set_the_rate_size_and_batch_of_each_epoch(
    epoch: int, rate: float, size: int, batch: int, rectangular: bool
) -> None:
    train = settings(schedule={"phases": DAWNBENCH})
    assert train.schedule.build(1, train.duration)(Progress(10**6, epoch)) == pytest.approx(rate)
    scale = 0.08 if epoch < 16 else 0.087
    assert train.in_epoch(epoch) == EpochSettings(Amount(batch, "samples"), size, scale, rectangular)


def test_phases_change_the_rate_at_every_step_and_the_data_at_whole_epochs() -> None:
    train = settings(schedule={"phases": DAWNBENCH})
    rate = train.schedule.build(1, train.duration)
    assert rate(Progress(0, 5.5)) == pytest.approx(1.88 + (3.76 - 1.88) * 5.5 / 6)
    assert rate(Progress(0, 5.999999)) == pytest.approx(3.76, rel=1e-5)
    assert [rate(Progress(0, 37.999)), rate(Progress(0, 38.0))] == [0.0376, 0.00376]


def test_after_the_last_phase_nothing_changes() -> None:
    train = settings(duration="60 epochs", schedule={"phases": DAWNBENCH})
    assert train.schedule.build(1, train.duration)(Progress(0, 55.0)) == 0.00376
    assert train.in_epoch(55) == train.in_epoch(49)


def test_phases_can_be_in_steps_if_they_do_not_change_the_data() -> None:
    phases = [{"until": "10 steps", "rate": [0.0001, 1.0], "batch": "64 samples"}, {"until": "30 steps", "rate": 0.5}]
    train = settings(schedule={"phases": phases})
    rate = train.schedule.build(1, train.duration)
    assert [rate(Progress(step, 0.0)) for step in (5, 10, 29, 99)] == pytest.approx([0.50005, 0.5, 0.5, 0.5])
    assert train.in_epoch(40).batch == Amount(64, "samples")


def test_without_phases_every_epoch_has_the_settings_of_the_section() -> None:
    train = settings(size=160, min_scale=0.25, rectangular=True)
    assert train.in_epoch(0) == train.in_epoch(99) == EpochSettings(Amount(8192, "samples"), 160, 0.25, True)


def test_the_train_section_reads_back_what_it_writes() -> None:
    for fields in (
        {"schedule": {"phases": DAWNBENCH}},
        {"schedule": {"cosine": {"peak": 1.0, "warmup": "2 epochs"}}, "exchange": {"local": {"every": "20 steps"}}},
        {"scale_rate": {"sqrt": "256 samples"}, "augment": {"randaugment": {}, "mixup": 0.2}},
        {"optimizer": {"sgd": {"momentum": 0.9, "nesterov": True}}, "micro_batch": "32 samples", "precision": "fp16"},
    ):
        train = settings(**fields)
        assert TrainSettings.model_validate_json(train.model_dump_json()) == train


def test_omitted_settings_have_defaults() -> None:
    train = settings()
    assert train.exchange == DdpSettings(compress="no")
    assert (train.micro_batch, train.ema, train.compile, train.patience) == (None, None, False, Duration(60, "seconds"))
    assert LocalStepsSettings.model_validate({"every": "50 steps"}).rate == 0.7


# Refusals.


def phases(*changes: Mapping[str, Any]) -> dict[str, Any]:
    return {"phases": [{"rate": 0.1, **change} for change in changes]}


UNITS = "must be in steps or in epochs, the same in all phases"
WHOLE = "must be a whole number of epochs; the next phase changes the batch or the images"


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        (
            {"exchange": {"local": {"every": "20 steps", "fragments": 3}}},
            "exchange.local.fragments: must divide the 20 steps of every",
        ),
        (
            {"exchange": {"local": {"every": "20 steps", "fragments": 4, "overlap": "5 steps"}}},
            "exchange.local.overlap: must be shorter than the 5 steps from one exchange to the next",
        ),
        ({"schedule": phases()}, "schedule.phases: must have at least one phase"),
        ({"schedule": phases({"until": "3 epochs"}, {"until": "90 steps"})}, f"schedule.phases.1.until: {UNITS}"),
        ({"schedule": phases({"until": "3 min"})}, f"schedule.phases.0.until: {UNITS}"),
        ({"schedule": phases({"until": "3 epochs"}, {"until": "3 epochs"})},
         "schedule.phases.1.until: must be later than in the previous phase"),
        ({"schedule": phases({"until": "2.5 epochs"}, {"until": "9 epochs", "batch": "64 samples"})},
         f"schedule.phases.0.until: {WHOLE}"),
        ({"schedule": phases({"until": "2.5 epochs"}, {"until": "9 epochs", "size": 224})},
         f"schedule.phases.0.until: {WHOLE}"),
        ({"schedule": phases({"until": "20 steps"}, {"until": "90 steps", "batch": "64 samples"})},
         f"schedule.phases.0.until: {WHOLE}"),
        ({"schedule": phases({"until": "3 epochs", "batch": "9 tokens"})},
         "schedule.phases.0.batch: must be in samples, like the batch"),
        ({"schedule": phases({"until": "3 epochs", "rate": [0.1]})},
         "schedule.phases.0.rate: must be a rate, or a pair of rates such as [0.5, 2.0]"),
        ({"schedule": phases({"until": "3 epochs", "rate": [0.1, 0]})},
         "schedule.phases.0.rate: must be greater than 0"),
        ({"schedule": phases({"until": "3 epochs", "rate": True})},
         "schedule.phases.0.rate: must be a rate, or a pair of rates such as [0.5, 2.0]"),
        ({"schedule": phases({"until": "3 epochs", "size": 4})}, "schedule.phases.0.size: must be at least 8"),
        ({"duration": "1 hour", "schedule": {"cosine": {"peak": 1.0}}},
         "duration: must be in steps or epochs; the schedule depends on the length of the run"),
        ({"duration": "1 hour", "schedule": {"one_cycle": {"peak": 1.0}}},
         "duration: must be in steps or epochs; the schedule depends on the length of the run"),
        ({"schedule": {"cosine": {"peak": 1.0, "warmup": "100 steps"}}},
         "schedule.cosine.warmup: must be in epochs, like the duration"),
        ({"schedule": {"cosine": {"peak": 1.0, "warmup": "50 epochs"}}},
         "schedule.cosine.warmup: must be shorter than the run"),
        ({"schedule": {"noam": {"warmup": "4 steps"}}}, "schedule.noam: set exactly one of scale and peak"),
        ({"schedule": {"noam": {"warmup": "4 steps", "scale": 1.0, "peak": 1.0}}},
         "schedule.noam: set exactly one of scale and peak"),
        ({"schedule": {"step": {"rate": 1.0, "every": "1 hour"}}}, "schedule.step.every: must be in steps or epochs"),
        ({"schedule": {"step": {"rate": 1.0, "every": "1 epoch", "warmup": "1 min"}}},
         "schedule.step.warmup: must be in steps or epochs"),
        ({"micro_batch": "64 tokens"}, "micro_batch: must be in samples, like the batch"),
        ({"precision": "fp16", "exchange": {"local": {"every": "20 steps"}}},
         "precision: fp16 scales the loss of all workers together, not of local steps; use bf16 or fp32"),
        ({"exchange": {"local": {"every": "1 epoch"}}},
         "exchange.local.every: must be in steps, such as '500 steps'"),
        ({"exchange": {"local": {}}}, "exchange.local.every: is required"),
        ({"exchange": {"ddp": {"compress": "int8"}}},
         "exchange.ddp.compress: 'int8' is not one of no, fp16, bf16"),
        ({"exchange": {"horovod": {}}}, "exchange.horovod: unknown key; known: ddp, fsdp, local"),
        ({"optimizer": {"sgd": {"momentum": 0.0, "nesterov": True}}}, "optimizer.sgd.nesterov: requires a momentum"),
        ({"optimizer": {"lion": {}}}, "optimizer.lion: unknown key; known: adam, adamw, lamb, lars, sgd"),
        ({"scale_rate": {}}, "scale_rate: set exactly one of linear and sqrt, such as {linear: 256 samples}"),
        ({"scale_rate": {"linear": "8 samples", "sqrt": "8 samples"}},
         "scale_rate: set exactly one of linear and sqrt, such as {linear: 256 samples}"),
        ({"scale_rate": {"sqrt": "256 tokens"}}, "scale_rate.sqrt: must be in samples, like the batch"),
        ({"scale_rate": {"linear": 256}}, "scale_rate.linear: needs a unit, such as '4096 tokens'"),
        ({"scale_rate": "linear"}, "scale_rate: must be a mapping, not a string"),
        ({"scale_rate": {"cubic": "8 samples"}}, "scale_rate.cubic: unknown key; known: linear, sqrt"),
        ({"patience": "100 steps"}, "patience: must be in seconds, such as '1 min'"),
        ({"compile": "yes"}, "compile: must be true or false, not a string"),
    ],
)  # fmt: skip
def test_wrong_train_settings_are_refused_with_their_place(fields: dict[str, Any], refusal: str) -> None:
    assert refusals(**fields) == [refusal]


# The share of a GPU.


@pytest.mark.parametrize(
    ("batch", "gpus", "line"),
    [
        ("128 samples", 8, "train.batch: 128 samples are 16 for each of 8 GPUs, too few to keep them busy; set 512 or"
         " more and adapt the learning rate, or use fewer GPUs"),
        ("136 samples", 8, None),
        ("12 samples", 1, "train.batch: 12 samples are too few to keep a GPU busy; set 64 or more and adapt the"
         " learning rate"),
        ("4096 tokens", 4, "train.batch: 4,096 tokens are 1,024 for each of 4 GPUs, too few to keep them busy; set"
         " 16,384 or more and adapt the learning rate, or use fewer GPUs"),
        ("25000 tokens", 8, None),
    ],
)  # fmt: skip
def test_a_batch_that_is_small_for_its_gpus_is_told_with_what_to_set(batch: str, gpus: int, line: str | None) -> None:
    assert settings(batch=batch).small_share(gpus) == line
