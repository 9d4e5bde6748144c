"""Blocks that cannot be compiled, in one line each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from packtrain.job.job import TrainSettings
from packtrain.train import model_blocks
from packtrain.train.model_blocks import CompileError, replace_forwards

pytestmark = pytest.mark.usefixtures("compiler")


class Block(nn.Module):
    varying_sizes = ()

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers.sin().sum(1)


def compiled(block: nn.Module, backend: str) -> nn.Module:
    settings = TrainSettings.model_validate(
        {
            "duration": "1 steps",
            "batch": "1 samples",
            "schedule": {"constant": {"rate": 1.0}},
            "compile": True,
            "compile_backend": backend,
        }
    )
    replace_forwards(block, [block], settings)
    return block


@pytest.mark.usefixtures("processes")
def test_a_machine_without_a_compiler_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nowhere/c++",))
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    with pytest.raises(
        CompileError, match=r"^train\.compile: there is no C\+\+ compiler; install one \(Debian: g\+\+\) or"
    ):
        compiled(Block(), "inductor")(torch.ones(4, 3))


def test_what_the_compiler_cannot_do_is_one_line() -> None:
    class Wrong(Block):
        def forward(self, numbers: Tensor) -> Tensor:
            return numbers @ torch.ones(7)

    with pytest.raises(CompileError) as raised:
        compiled(Wrong(), "eager")(torch.ones(4, 3))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("train.compile: cannot compile Wrong: ")
    assert str(raised.value).endswith("; set train.compile to false")


def test_too_many_sizes_are_an_error_and_not_a_block_that_is_silently_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Block):
        def forward(self, numbers: Tensor) -> Tensor:
            return numbers.cos().sum(1)

    monkeypatch.setattr(model_blocks, "_MOST_GRAPHS", 3)
    model = compiled(Sized(), "eager")
    for rows in range(4, 7):
        model(torch.ones(rows, 3))
    with pytest.raises(CompileError, match=r"Sized was compiled 3 times, for inputs of different sizes; set"):
        model(torch.ones(7, 3))


def test_a_block_without_samples_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_blocks, "_MOST_GRAPHS", 0)
    assert compiled(Block(), "eager")(torch.ones(0, 3)).shape == (0,)
