"""Means over all workers, in 32, 16 and 8 bits."""

from __future__ import annotations

import pytest
import torch

from packtrain.train.averaging import ENCODINGS
from packtrain.train.local_steps import INT8_BLOCK, LocalStepsSettings
from train.forking import WorkerForker


@pytest.mark.parametrize(("compress", "off"), [("no", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127)])
def test_a_message_is_off_by_at_most_half_a_level(compress: str, off: float) -> None:
    encoding = ENCODINGS[compress]
    rows = torch.linspace(-3, 3, 6 * INT8_BLOCK).view(2, -1)
    message = encoding.encode(rows)
    assert message.dtype == torch.uint8
    settings = LocalStepsSettings.model_validate({"every": "2 steps", "compress": compress})
    assert message.numel() == rows.numel() * settings.bytes_per_weight
    assert float((encoding.decode(message) - rows).abs().max()) <= 3 * off * 1.001


def test_zeros_and_numbers_that_are_not_finite_survive_8_bits() -> None:
    rows = torch.zeros(2, 2 * INT8_BLOCK)
    rows[1, 3] = float("inf")
    there = ENCODINGS["int8"].decode(ENCODINGS["int8"].encode(rows))
    assert torch.equal(there[0], rows[0])
    assert not torch.isfinite(there[1, :INT8_BLOCK]).any()
    assert torch.equal(there[1, INT8_BLOCK:], rows[1, INT8_BLOCK:])


@pytest.mark.parametrize(("compress", "off"), [("no", 1e-6), ("bf16", 1e-3), ("int8", 2e-3)])
def test_all_workers_get_the_same_mean_and_rounding_evens_out(forker: WorkerForker, compress: str, off: float) -> None:
    """The size is no multiple of anything. A single 8-bit mean is off by up to 0.02."""
    found = forker.succeed("average", 3, compress=compress, size=1001, rounds=20)
    assert found[0] == found[1] == found[2]
    wanted = (2 * torch.linspace(-1, 1, 1001) ** 3).tolist()
    assert found[0][0] == pytest.approx(wanted, abs=off)
    if compress == "int8":
        assert found[0][1] != pytest.approx(wanted, abs=off)
