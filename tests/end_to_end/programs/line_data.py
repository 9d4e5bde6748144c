"""Points on the line y = 3 x + 2. The last worker is killed by reading them, once, as if it had run out of memory."""

import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset

COUNT, KILLED_AT = 64, 50  # samples, and the one at whose reading by one worker it is killed


class LinePoints(Dataset):
    def __init__(self):
        self.x = torch.linspace(-1, 1, COUNT).unsqueeze(1)
        self.reads = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.reads += 1
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        is_last = rank == ranks - 1
        if self.reads == KILLED_AT // ranks and is_last and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], 3 * self.x[index] + 2
