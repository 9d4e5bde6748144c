"""Train JoeyNMT for some seconds of CPU time; benchmarks/translate.py runs it with JoeyNMT's Python.

    python joey.py CONFIG SECONDS

CONFIG is JoeyNMT's configuration as JSON. Prints one JSON object: steps, tokens, seconds, outputs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from joeynmt.config import parse_global_args, set_validation_args
from joeynmt.prediction import predict, prepare
from joeynmt.training import TrainManager


class Timed(TrainManager):
    """A trainer that ends at its deadline."""

    deadline = 0.0
    tokens = 0

    def _train_step(self, batch: Any) -> Any:
        done = super()._train_step(batch)
        self.tokens += int(batch.ntokens)
        if time.process_time() >= self.deadline:
            self.stats.is_max_update = True
        return done

    def _save_checkpoint(self, new_best: bool, score: float) -> None:
        """Save nothing: all of the time is for training."""


def main() -> None:
    torch.set_num_threads(1)
    config = json.loads(Path(sys.argv[1]).read_text())
    args = parse_global_args(config, rank=0, mode="train")
    model, train_data, dev_data, test_data = prepare(args, rank=0, mode="train")
    trainer = Timed(
        model=model,
        model_dir=args.model_dir,
        device=args.device,
        n_gpu=0,
        rank=0,
        num_workers=0,
        autocast=args.autocast,
        seed=args.seed,
        train_args=args.train,
        dev_args=set_validation_args(args.test),
    )
    started = time.process_time()
    trainer.deadline = started + float(sys.argv[2])
    trainer.train_and_validate(train_data=train_data, valid_data=dev_data)
    seconds = time.process_time() - started
    model.eval()
    outputs = predict(model, test_data, args.device, 0, args=args.test, autocast=args.autocast)[2]
    print(json.dumps({"steps": trainer.stats.steps, "tokens": trainer.tokens, "seconds": seconds, "outputs": outputs}))


if __name__ == "__main__":
    main()
