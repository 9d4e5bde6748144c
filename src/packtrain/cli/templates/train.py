"""A plain torchrun script without Packtrain: fits a line with DistributedDataParallel.

It saves its checkpoint in the directory that PACKTRAIN_CHECKPOINTS names, so that a run can resume.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(1, 1)
checkpoint = Path(os.environ.get("PACKTRAIN_CHECKPOINTS", ".")) / "model.safetensors"
first = 0
if checkpoint.exists():
    state = load_file(checkpoint)
    first = int(state.pop("step"))
    model.load_state_dict(state)
    print(f"rank {rank} resumes at step {first}")

parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=options.lr)
for step in range(first, options.steps):
    torch.manual_seed(1000 * step + rank)
    x = torch.rand(64, 1)
    loss = nn.functional.mse_loss(parallel(x), 3 * x + 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 50 == 0 and rank == 0:
        print(f"step {step + 1} loss {loss.item():.6f}")
        unfinished = checkpoint.with_suffix(".part")
        save_file({**model.state_dict(), "step": torch.tensor(step + 1)}, unfinished)
        unfinished.rename(checkpoint)

if rank == 0:
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
dist.destroy_process_group()
