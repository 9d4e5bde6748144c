"""The exchange `ddp`: gradients are averaged at every step, while they are computed."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from packtrain.job.kinds import ExchangeKind
from packtrain.train.gradient_sync import GradientSync, NoSync, SyncedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DdpSettings(ExchangeKind):
    """Gradients are averaged at every step; `compress` sends them in 16 bits."""

    harmless = frozenset({"compress"})

    compress: Literal["no", "fp16", "bf16"] = "no"

    @property
    def bytes_per_weight(self) -> float:
        return 4.0 if self.compress == "no" else 2.0

    @property
    def lighter(self) -> str:
        return "train.exchange.ddp.compress=bf16" if self.compress == "no" else ""

    def build(self, synced: SyncedModel) -> GradientSync:
        return NoSync(synced) if synced.world.num_ranks == 1 else DdpSync(self, synced)


class DdpSync(GradientSync):
    """torch's DistributedDataParallel, with spans of time for what it communicates."""

    span_after_backward = "communication"

    def __init__(self, settings: DdpSettings, synced: SyncedModel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(synced)
        device, clock = synced.world.device, synced.clock
        # PyTorch 2.13 gave the option another name and warns of the old one.
        options = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
        do_not_sync: dict[str, Any] = {name: False}
        self._parallel = DistributedDataParallel(
            synced.model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # else the order of summation would change after a process's first step
            **do_not_sync,  # `before_step` does it, where it is not counted as computing
        )
        self.module = self._parallel
        send = {
            "no": default_hooks.allreduce_hook,
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
        }[settings.compress]

        def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            clock.mark("backward")  # gradients were computed until here; after the last one there is only communication
            return send(state, bucket)  # type: ignore[arg-type]

        # To log times, the host would wait for the GPU at every hundredth step.
        self._parallel._set_ddp_runtime_logging_sample_rate(2**31 - 1)
        self._compresses = settings.compress != "no"
        hook.__annotations__.clear()  # torch compares them with types that it does not export
        self._parallel.register_comm_hook(None, hook)

    @property
    def message_bytes(self) -> int:
        return super().message_bytes // 2 if self._compresses else super().message_bytes  # 16 of 32 bits

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._parallel.no_sync()
