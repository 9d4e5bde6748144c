"""A Trainer of Hugging Face, with its own checkpoints and TensorBoard."""

import os
from pathlib import Path

import torch
from line_data import LinePoints
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

CHECKPOINTS = os.environ.get("PACKTRAIN_CHECKPOINTS", "checkpoints")


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, y):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), y)}


def collated(samples):
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


arguments = TrainingArguments(
    CHECKPOINTS,
    max_steps=24,
    per_device_train_batch_size=4,
    learning_rate=0.1,
    save_steps=5,
    logging_steps=1,
    report_to="tensorboard",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(Line(), arguments, collated, LinePoints())
trainer.train(resume_from_checkpoint=get_last_checkpoint(CHECKPOINTS) if Path(CHECKPOINTS).exists() else None)
print(f"finished at step {trainer.state.global_step}")
