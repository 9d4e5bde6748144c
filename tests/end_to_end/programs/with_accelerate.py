"""A loop with Accelerate, which saves and loads its state."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from line_data import LinePoints
from torch.utils.data import DataLoader

CHECKPOINTS = Path(os.environ.get("PACKTRAIN_CHECKPOINTS", "checkpoints"))

accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="logs")
accelerator.init_trackers("line")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(LinePoints(), 4, shuffle=True))

step = 0
found = sorted(CHECKPOINTS.glob("step-*"))
if found:
    accelerator.load_state(str(found[-1]))
    step = int(found[-1].name.removeprefix("step-"))
while step < 24:
    for x, y in data:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.log({"train/loss": loss.item()}, step=step)
        if step % 5 == 0:
            accelerator.save_state(str(CHECKPOINTS / f"step-{step:06d}"))
        if step == 24:
            break
accelerator.end_training()
accelerator.print(f"finished at step {step}")
