"""In which numbers the model computes; weights and sums stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from packtrain.errors import Mistake

FIRST_LOSS_SCALE = 2.0**14
CLEAN_STEPS_TO_DOUBLE = 2000


def resolve(precision: str, device: torch.device) -> str:
    """What `auto` means here. On a CPU it is fp32: bf16 crawls there without its own instructions."""
    if precision == "auto":
        if device.type == "cpu":
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    if precision == "fp16" and device.type == "cpu":
        raise Mistake("train.precision: fp16 needs a GPU; use fp32 or auto on a CPU")
    return precision


class Precision:
    """Autocast, and the scaling of the loss that fp16 needs."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.name = resolve(precision, device)
        self._device = device
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=FIRST_LOSS_SCALE,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=CLEAN_STEPS_TO_DOUBLE,
            enabled=self.name == "fp16",
        )

    def compute(self) -> AbstractContextManager[object]:
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self.name == "bf16" else torch.float16)

    def loss_scale(self) -> tuple[float | None, int]:
        """The scale and how many steps it has held; None where nothing is scaled."""
        if not self.scaler.is_enabled():
            return None, 0
        state = self.scaler.state_dict()
        return float(state["scale"]), int(state["_growth_tracker"])

    def restore(self, loss_scale: float | None, clean_steps: int) -> None:
        if self.scaler.is_enabled() and loss_scale is not None:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict({**state, "scale": loss_scale, "_growth_tracker": clean_steps})
