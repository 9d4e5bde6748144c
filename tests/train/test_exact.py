from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from packtrain.store import open_store
from packtrain.train import worker
from packtrain.train.control import JOB_VARIABLE, RUN_VARIABLE, STORE_VARIABLE, Control, StopSignal
from packtrain.train.numerics import choose_kernels, exactness_mistake_of
from packtrain.train.worker import build_trainer, cause_of, in_one_line
from packtrain.train.world import World
from train.tiny import tiny_job, tiny_run

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
# As torch writes it.
NO_WORKSPACE = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or `at::Context::"
    "setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS and you have "
    "CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable"
)


@pytest.fixture(autouse=True)
def torch_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision(precision)


def kernels() -> dict[str, object]:
    return {
        "strict": torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "products": torch.get_float32_matmul_precision(),
    }


def test_a_gpu_is_strict_or_takes_the_fastest_kernels() -> None:
    choose_kernels(torch.device("cuda"), exact=True)
    assert kernels() == {
        "strict": True, "deterministic": True, "benchmark": False, "cudnn attention": False, "products": "highest",
    }  # fmt: skip
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    choose_kernels(torch.device("cuda"), exact=False)
    assert kernels() == {
        "strict": False, "deterministic": False, "benchmark": True, "cudnn attention": True, "products": "high",
    }  # fmt: skip


@pytest.mark.parametrize("exact", [True, False])
def test_on_a_cpu_nothing_changes(exact: bool) -> None:
    before = kernels()
    choose_kernels(torch.device("cpu"), exact)
    assert kernels() == before


class Joining(Exception):
    """Ends a worker where it would join the others, and so start CUDA's libraries."""


@pytest.mark.parametrize(
    ("exact", "given", "found"),
    [(True, {}, VARIABLES), (False, {}, {}),
     (True, {"NCCL_NVLS_ENABLE": "1"}, {**VARIABLES, "NCCL_NVLS_ENABLE": "1"})],
)  # fmt: skip
def test_what_cuda_reads_at_its_start_is_set_before_the_workers_join(
    exact: bool, given: dict[str, str], found: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(open_store(str(tmp_path / "store"), create=True), tiny_job(train={"exact": exact}))
    seen: dict[str, str] = {}

    def join(*_: object) -> World:
        seen.update({name: os.environ[name] for name in VARIABLES if name in os.environ})
        raise Joining

    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the worker sets is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for variable, value in (
        (STORE_VARIABLE, run.store.url), (RUN_VARIABLE, run.name), (JOB_VARIABLE, run.job_digest),
    ):  # fmt: skip
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(worker, "_pack_of", lambda _: None)
    monkeypatch.setattr(worker, "recipe_class", lambda *_: lambda *_: None)
    monkeypatch.setattr(World, "join", join)
    with pytest.raises(Joining):
        build_trainer(Control(tmp_path), StopSignal(), 0.0)
    assert seen == found


def test_an_operation_without_a_deterministic_kernel_is_a_mistake_in_one_line() -> None:
    choose_kernels(torch.device("cuda"), exact=True)
    with pytest.raises(RuntimeError) as refused:  # one of the few that are refused on a CPU too
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert cause_of(refused.value) == "mistake"
    line = "train.exact: put_ has no deterministic kernel; replace it, or set train.exact: false"
    assert in_one_line(refused.value) == line


def test_another_workspace_of_the_machine_is_named() -> None:
    line = "train.exact: CUBLAS_WORKSPACE_CONFIG is set otherwise here; unset it, or set train.exact: false"
    assert in_one_line(RuntimeError(NO_WORKSPACE)) == line
    assert exactness_mistake_of(RuntimeError("shapes cannot be multiplied")) is None
    assert exactness_mistake_of(ValueError("a does not have a deterministic implementation")) is None
