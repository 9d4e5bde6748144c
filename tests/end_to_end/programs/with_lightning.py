"""A Trainer of Lightning, with its own checkpoints and its own logger."""

import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from line_data import LinePoints
from torch.utils.data import DataLoader

CHECKPOINTS = Path(os.environ.get("PACKTRAIN_CHECKPOINTS", "checkpoints"))


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


newest = CHECKPOINTS / "last.ckpt"
trainer = Trainer(
    max_steps=24,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    log_every_n_steps=1,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(CHECKPOINTS, every_n_train_steps=5, save_last=True)],
)
trainer.fit(Line(), DataLoader(LinePoints(), 4, shuffle=True), ckpt_path=newest if newest.exists() else None)
print(f"finished at step {trainer.global_step}")
