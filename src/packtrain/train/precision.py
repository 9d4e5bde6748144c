"""The precision of forward and backward passes; weights and sums stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from packtrain.job.job import TrainSettings

FIRST_LOSS_SCALE = 2.0**14
MIN_LOSS_SCALE = 2.0**-14  # gradients that still overflow here are not too large for fp16, they are wrong
CLEAN_STEPS_TO_DOUBLE = 2000


def resolve(settings: TrainSettings, device: torch.device, has_bf16: bool) -> str:
    """Resolve `auto` for these workers. On CPUs it is fp32: without native instructions, bf16 is very slow there."""
    if settings.precision != "auto":
        return settings.precision
    if device.type == "cpu":
        return "fp32"
    if has_bf16:
        return "bf16"
    # The loss scale is one number for all ranks, which ranks that update locally could not agree on.
    return "fp16" if settings.exchange.syncs_every_step else "fp32"


@dataclass(frozen=True)
class LossScaleState:
    """The part of the loss scale that a checkpoint keeps."""

    value: float
    clean_steps: int


class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing: as large as does not overflow."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_LOSS_SCALE if enabled else 1.0
        self.clean_steps = 0

    def overflowed(self) -> None:
        self.value, self.clean_steps = self.value / 2, 0

    def fitted(self) -> None:
        if not self.enabled:
            return
        self.clean_steps += 1
        if self.clean_steps == CLEAN_STEPS_TO_DOUBLE:
            self.value, self.clean_steps = 2 * self.value, 0

    @property
    def exhausted(self) -> bool:
        """True if halving the scale further would not help."""
        return not self.enabled or self.value < MIN_LOSS_SCALE

    def state(self) -> LossScaleState | None:
        return LossScaleState(self.value, self.clean_steps) if self.enabled else None

    def restore(self, state: LossScaleState | None) -> None:
        if state is not None and self.enabled:
            self.value, self.clean_steps = state.value, state.clean_steps


class Precision:
    """Autocast, and the loss scale that fp16 needs."""

    def __init__(self, settings: TrainSettings, device: torch.device, has_bf16: bool = True) -> None:
        self.name = resolve(settings, device, has_bf16)
        self._device = device
        self.scale = LossScale(enabled=self.name == "fp16")

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

    def compute(self) -> AbstractContextManager[object]:
        return nullcontext() if self.name == "fp32" else torch.autocast(self._device.type, self.dtype)
