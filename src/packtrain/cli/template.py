"""The job files that `packtrain init` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packtrain.errors import Mistake, nearest
from packtrain.parts import is_name

_TRANSLATE = """\
# A translator from two aligned text files. Reference of every field: docs/job.md
name: {name}
recipe: translate
store: ./store                      # a directory, or s3://bucket/prefix with keys from the environment

data:
  train: [{{bitext: [train.en, train.de]}}]     # plain or .gz, or one TSV; several sources make a mix
  valid: [{{bitext: [valid.en, valid.de]}}]
  # test: [{{bitext: [test.en, test.de]}}]      # measured once, at the end
  vocabulary: 8000                  # pieces of the joint byte-pair encoding

model: base                         # tiny, small, base, big; or {{size: base, dropout: 0.3}}

train:
  duration: 50000 steps             # steps, epochs, or a time such as 6 h
  batch: 25000 tokens               # of all workers together, however many there are
  schedule: {{noam: {{warmup: 8000 steps, scale: 2.0}}}}
  # precision: auto                 # fp32, bf16, fp16
  # seed: 1

evaluate: {{every: 1000 steps}}
checkpoint: {{every: 5 min, keep_last: 2, keep_best: 1}}
fleet: {{local: {{}}, workers: 2}}      # worker processes on each machine
# budget: {{hours: 24}}               # the run commits and ends by itself
"""
_PROGRAM = """\
# Your own program under Packtrain. Reference of every field: docs/job.md
name: {name}
program: [train.py, --lr, "0.1"]    # started as torchrun would: RANK, WORLD_SIZE, MASTER_ADDR and so on are set
store: ./store                      # a directory, or s3://bucket/prefix with keys from the environment
code: .                             # what the run takes along; what git ignores stays behind

# Files that the program writes to the directory in $PACKTRAIN_CHECKPOINTS are kept in the store
# and are back there when the run is resumed.
checkpoint: {{every: 1 min, keep_last: 2}}
fleet: {{local: {{}}, workers: 2}}      # worker processes on each machine
# environment: [WANDB_API_KEY]      # variables by name; never write a secret here
# budget: {{hours: 24}}               # the run commits and ends by itself
"""
TEMPLATES: Mapping[str, str] = {"translate": _TRANSLATE, "program": _PROGRAM}


def write_template(path: Path, kind: str, name: str | None) -> None:
    if kind not in TEMPLATES:
        raise Mistake(f"--kind: no template {kind!r}; {nearest(kind, TEMPLATES)}")
    name = name or path.stem.lower().replace("_", "-")
    if not is_name(name):
        raise Mistake(f"--name: {name!r} must be 1 to 63 of the characters a-z, 0-9 and -")
    try:
        with path.open("x") as file:
            file.write(TEMPLATES[kind].format(name=name))
    except FileExistsError:
        raise Mistake(f"{path} is there already; give another name") from None
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None
