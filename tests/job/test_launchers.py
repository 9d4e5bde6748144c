from __future__ import annotations

import pytest

from packtrain.errors import Mistake
from packtrain.job.launchers import LaunchedProgram, asks_for_rank, command_of, without_launcher


@pytest.mark.parametrize(
    ("written", "program", "workers", "total"),
    [
        ("train.py --lr 0.1", "train.py --lr 0.1", None, None),
        ("python -m foo --x 1", "python -m foo --x 1", None, None),
        ("./train.sh -x", "./train.sh -x", None, None),
        ("torchrun --standalone --nproc_per_node=2 train.py --nnodes 3", "torchrun train.py --nnodes 3", 2, None),
        ("torchrun --nnodes 1:4 --nproc-per-node gpu --rdzv_backend c10d train.py", "torchrun train.py", None, None),
        ("torchrun --nproc-per-node 2 -m foo.train a", "torchrun python -m foo.train a", 2, None),
        ("torchrun --no-python ./train.sh a", "torchrun ./train.sh a", None, None),
        ("python -m torch.distributed.run --nproc_per_node 4 train.py", "torchrun train.py", 4, None),
        ("python3 -m torch.distributed.launch --use_env train.py", "torchrun train.py", None, None),
        ("accelerate launch --num_processes 8 --multi_gpu train.py a", "train.py a", None, 8),
        ("accelerate launch --mixed_precision=bf16 --cpu train.py",
         "env ACCELERATE_MIXED_PRECISION=bf16 ACCELERATE_USE_CPU=true python train.py", None, None),
        ("accelerate launch --dynamo_backend inductor -m foo",
         "env ACCELERATE_DYNAMO_BACKEND=INDUCTOR python -m foo", None, None),
        ("accelerate-launch --num_processes 2 train.py", "train.py", None, 2),
        ("python -m accelerate.commands.launch --num_processes 2 train.py", "train.py", None, 2),
        ("env A=b torchrun --nproc_per_node 2 train.py", "torchrun env A=b python train.py", 2, None),
        ("env A=b accelerate launch --cpu -m foo", "env A=b ACCELERATE_USE_CPU=true python -m foo", None, None),
        ("env torchrun ./train.sh", "torchrun ./train.sh", None, None),
        ("env A=b python train.py", "env A=b python train.py", None, None),
        ("accelerate config", "accelerate config", None, None),
        ("deepspeed --num_gpus 4 --master_port 29501 train.py --deepspeed ds.json",
         "torchrun train.py --deepspeed ds.json", 4, None),
    ],
)  # fmt: skip
def test_a_launcher_is_read_and_left_out(written: str, program: str, workers: int | None, total: int | None) -> None:
    found = without_launcher(written.split())
    assert (" ".join(found.program), found.workers, found.total) == (program, workers, total)


def test_a_program_without_a_launcher_stays_as_it_is() -> None:
    assert without_launcher(["train.py", "torchrun"]) == LaunchedProgram(("train.py", "torchrun"))


@pytest.mark.parametrize(
    ("program", "command", "asks"),
    [("train.py a", 0, False), ("env A=b python a.py", 2, False), ("torchrun train.py", 1, True),
     ("torchrun env A=b python a.py", 3, True), ("env torchrun", 1, False)],
)  # fmt: skip
def test_the_command_comes_after_what_says_how_to_start_it(program: str, command: int, asks: bool) -> None:
    assert (command_of(program.split()), asks_for_rank(program.split())) == (command, asks)


def test_a_program_that_was_read_once_is_read_again_as_it_is() -> None:
    once = without_launcher(["torchrun", "--nproc-per-node", "2", "-m", "foo", "a"])
    assert without_launcher(once.program).program == once.program


@pytest.mark.parametrize(
    ("written", "refusal"),
    [
        ("torchrun", "torchrun has no program; write the program alone"),
        ("torchrun --nproc_per_node", "torchrun: --nproc_per_node has no value"),
        ("torchrun --nproc_per_node two train.py", "torchrun: 'two' is not a number of workers"),
        ("torchrun --fast train.py", "torchrun: unknown option '--fast'; write the program alone"),
        ("accelerate launch --config_file a.yaml train.py", "accelerate launch: Packtrain does not do --config_file; "),
        ("accelerate launch --use_fsdp train.py", "accelerate launch: Packtrain does not do --use_fsdp; pass it to"),
        ("deepspeed --include localhost:0 train.py", "deepspeed: Packtrain does not do --include; limit GPUs with"),
    ],
)
def test_what_a_launcher_would_do_and_packtrain_does_not_is_refused(written: str, refusal: str) -> None:
    with pytest.raises(Mistake) as refused:
        without_launcher(written.split())
    assert str(refused.value).startswith(refusal)
