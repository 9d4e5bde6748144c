"""What would make the host wait for a GPU: every read of a number, and every result whose size depends on data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READING = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
_SIZED_BY_DATA = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount"})


class HostReads(TorchDispatchMode):
    """The names of waiting calls within a `with` block, in `found`; tensors that are `on_host` may be read.

    On a CPU nothing waits, but the calls are the same: also those of torch's own optimizers and losses.
    """

    def __init__(self, on_host: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._on_host = list(on_host)
        self._patches = [patch.object(Tensor, name, self._counted(name)) for name in ("tolist", "cpu", "numpy")]

    def _counted(self, name: str) -> Any:
        original = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, **named: Any) -> Any:
            if not any(tensor is one for one in self._on_host):
                self.found.append(name)
            return original(tensor, *args, **named)

        return counted

    def __enter__(self) -> HostReads:
        for one in self._patches:
            one.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for one in self._patches:
            one.stop()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in _READING or name in _SIZED_BY_DATA or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))
