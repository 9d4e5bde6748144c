"""How numbers are computed: the precision of forward and backward passes, and exact or fast kernels on a GPU.

Weights and sums stay in fp32. On CPUs the recipes' results are always the same. On GPUs, every operation of the four
recipes has a deterministic kernel, so none is exempt from torch's strict mode; `tests/recipes/test_all_recipes.py`
looks for those that torch refuses. Where strict mode alone is not enough:

| what | is not exact because | so under `train.exact` |
| --- | --- | --- |
| matrix products (cuBLAS) | several workspaces change the order of a sum | one workspace of a fixed size |
| all-reduce through NVLink switches (NVLS) | the switch sums in the order of arrival | rings and trees of NCCL's own |
| convolutions (cuDNN) | the fastest algorithm, measured, may be another one next time | chosen without measuring |
| flash attention, backward | blocks add to one sum in any order | a sum for each, unless strict mode only warns |
| memory-efficient attention, backward | keys are split among blocks | not split, unless strict mode only warns |
| cuDNN attention, backward | as flash attention, without a deterministic form | not used |

Max pooling and embeddings need nothing: one thread sums each gradient, or a stable sort comes before. TF32 rounds more,
but always in the same way: it stays as torch has it, and is allowed for all products if the run need not be exact.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from packtrain.errors import FieldMistake
from packtrain.job.job import TrainSettings

FIRST_LOSS_SCALE = 2.0**14
MIN_LOSS_SCALE = 2.0**-14  # gradients that still overflow here are not too large for fp16, they are wrong
CLEAN_STEPS_TO_DOUBLE = 2000
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
_NO_WORKSPACE = "not deterministic because it uses CuBLAS"
_REMEDY = "set train.exact: false"


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


def set_exact_variables(exact: bool) -> None:
    """Set what CUDA's libraries read when they start; what the machine or the job says takes precedence."""
    if exact:
        for name, value in _VARIABLES.items():
            os.environ.setdefault(name, value)


def choose_kernels(device: torch.device, exact: bool) -> None:
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cuda.enable_cudnn_sdp(not exact)
    if exact:
        # A debugging aid that deterministic mode turns on, and that costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    else:
        torch.set_float32_matmul_precision("high")


def exactness_mistake_of(error: BaseException) -> FieldMistake | None:
    """Return the mistake behind an error of torch's strict mode: an operation of a person's own recipe; else None."""
    if not isinstance(error, RuntimeError):
        return None
    if match := _NO_KERNEL.search(str(error)):
        return FieldMistake("train.exact", f"{match[1]} has no deterministic kernel; replace it, or {_REMEDY}")
    if _NO_WORKSPACE in str(error):
        return FieldMistake("train.exact", f"CUBLAS_WORKSPACE_CONFIG is set otherwise here; unset it, or {_REMEDY}")
    return None
