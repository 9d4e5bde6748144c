"""The hand-written script of recover.py: DDP, torch.save at regular steps, and resume from the file."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from packtrain.data.order import epoch_batches, share
from packtrain.data.pack import Pack
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import recipe_class, recipe_defaults
from packtrain.store import open_store
from packtrain.train.progress import Progress

EXAMPLE = Path(__file__).parents[2] / "examples" / "translate.yaml"


def main() -> None:
    directory, store, save_every = Path(sys.argv[1]), open_store(sys.argv[2], create=True), int(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = load_job(EXAMPLE, [], recipe_defaults).job
    # recover.py has packed the data already: this only finds the pack.
    manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
    recipe = recipe_class(str(job.recipe))(job, Pack(store, manifest.name, directory / "cache"))
    torch.manual_seed(1)
    model = recipe.build_model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    rate = job.train.schedule.build(recipe.width, job.train.duration)
    file, step = directory / "checkpoint.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    batches = epoch_batches(recipe.costs, recipe.sort_keys, job.train.batch.value, 1, 0)
    while True:
        ids = batches[step % len(batches)]
        batch = {name: torch.from_numpy(one) for name, one in recipe.batch(share(ids, rank, ranks), 0).items()}
        for group in optimizer.param_groups:
            group["lr"] = rate(Progress(step, 0.0))
        (recipe.loss(parallel, batch) * ranks / int(recipe.costs[ids].sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (directory / "steps.jsonl").open("a") as log:
                log.write(json.dumps([step, attempt, time.time()]) + "\n")
            if step % save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, directory / "new.pt")
                (directory / "new.pt").rename(file)


if __name__ == "__main__":
    main()
