"""Exact or fast: which kernels compute on a GPU. On CPUs the recipes' results are always the same.

Every operation of the four recipes has a deterministic kernel, so none is exempt from torch's strict mode;
`tests/recipes/test_all_recipes.py` looks for those that torch refuses. Where strict mode alone is not enough:

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

import torch

from packtrain.errors import FieldMistake

_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
_NO_WORKSPACE = "not deterministic because it uses CuBLAS"
_REMEDY = "set train.exact: false"


def set_variables(exact: bool) -> None:
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


def mistake_of(error: BaseException) -> FieldMistake | None:
    """Return the mistake behind an error of torch's strict mode: an operation of a person's own recipe; else None."""
    if not isinstance(error, RuntimeError):
        return None
    if found := _NO_KERNEL.search(str(error)):
        return FieldMistake("train.exact", f"{found[1]} has no deterministic kernel; replace it, or {_REMEDY}")
    if _NO_WORKSPACE in str(error):
        return FieldMistake("train.exact", f"CUBLAS_WORKSPACE_CONFIG is set otherwise here; unset it, or {_REMEDY}")
    return None
