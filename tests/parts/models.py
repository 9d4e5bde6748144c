"""Runs with a checkpoint but without training: an untrained model serves most tests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from packtrain.data.pack import Pack
from packtrain.export.model import MANIFEST
from packtrain.files import sha256_of
from packtrain.job import Job
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.recipes import Recipe, recipe_class
from packtrain.run.checkpoint import Checkpoint, commit
from packtrain.run.code import archive
from packtrain.run.run import Run, add_run
from packtrain.store import Store, open_store
from packtrain.train.progress import Progress
from packtrain.train.state import MODEL_FILE, STATE_FILE, Description, versions


def packed_run(folder: Path, job: Job) -> Run:
    """Create a run with its pack, in a store in that folder."""
    store = open_store(str(folder / "store"), create=True)
    manifest = pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None))
    return add_run(store, job, archive({}), manifest.name)


def with_files(job: Job, store: Store) -> Job:
    """Put the files that options of the model name into the store, as the start of a run does; return the new job."""
    options = dict(job.model.options)
    for name in set(recipe_class(str(job.recipe)).files) & options.keys():
        path = Path(str(options[name]))
        options[name] = f"store:files/{sha256_of(path)}"
        store.put_file(f"files/{sha256_of(path)}", path)
    return job.model_copy(update={"model": job.model.model_copy(update={"options": options})})


def recipe_on(run: Run, folder: Path) -> Recipe:
    """Return the recipe of a run on its pack."""
    return recipe_class(str(run.job.recipe))(run.job, Pack(run.store, run.pack_name(), folder / "cache"))


def commit_model(
    run: Run,
    folder: Path,
    step: int,
    seed: int = 1,
    score: float | None = None,
    trained: nn.Module | None = None,
    **of: Any,
) -> Checkpoint:
    """Commit a checkpoint of a model, untrained if none is given; `of` overrides what its description says."""
    job, pack_name = run.job, run.pack_name()
    torch.manual_seed(seed)
    model = recipe_on(run, folder).build_model() if trained is None else trained
    traits = {"recipe": job.recipe, "pack": pack_name, "model": {"size": job.model.size, **job.model.options}, **of}
    description = Description(**traits, versions=versions(), progress=Progress(step))
    files = {MODEL_FILE: folder / MODEL_FILE, STATE_FILE: folder / STATE_FILE}
    save_file({name: one.contiguous() for name, one in model.state_dict().items()}, files[MODEL_FILE])
    files[STATE_FILE].write_text(json.dumps(asdict(description)))
    return commit(run, step, 1, score, files)


def list_again(folder: Path) -> None:
    """List all files of an exported model with their digests, as someone would who altered it."""
    document = json.loads((folder / MANIFEST).read_text())
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    document["files"] = [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    ]
    (folder / MANIFEST).write_text(json.dumps(document))
