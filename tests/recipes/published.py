"""Models of other libraries as tests have them: names and shapes, numbers that a name decides, and the real outputs.

The libraries are not installed for tests. `python published.py`, where torchvision, timm and transformers are, writes
what they say into `pretrained/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

FOLDER = Path(__file__).with_name("pretrained")
SIDE, SHOWN = 64, 8  # pixels of the input; logits that are compared
HUGGING_FACE = {
    "resnet18": {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]},
    "resnet50": {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]},
}


@dataclass(frozen=True)
class Published:
    """A model of another library; `logits` are the first ones of its answer to `picture()` with the weights below."""

    made_by: str
    shapes: Mapping[str, tuple[int, ...]]
    logits: tuple[float, ...]

    def tensors(self) -> dict[str, Tensor]:
        return {name: numbers(name, shape) for name, shape in self.shapes.items()}


def published(name: str) -> Published:
    found = json.loads((FOLDER / f"{name}.json").read_text())
    shapes = {tensor: tuple(shape) for tensor, shape in found["shapes"].items()}
    return Published(found["made_by"], shapes, tuple(found["logits"]))


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers for a tensor that depend on nothing but its name and shape, of a size that signals survive."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    count = int(np.prod(shape))
    words = np.random.Philox(key=crc32(name.encode())).random_raw(count)  # the same in every version of NumPy
    uniform = torch.from_numpy((words >> 11).astype(np.float64) / 2**52 - 1).float().reshape(shape)
    if name.endswith("running_var"):
        return 1 + uniform / 2
    if len(shape) == 1:
        return uniform / 4 + (0.5 if name.endswith("weight") else 0)
    return uniform * (6 / np.prod(shape[1:])) ** 0.5


def picture() -> Tensor:
    return numbers("picture", (1, 3, SIDE, SIDE))


def write(name: str, made_by: str, model: nn.Module) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: numbers(name, shape) for name, shape in shapes.items()})
    with torch.inference_mode():
        answer: Any = model.eval().double()(picture().double())
    logits = getattr(answer, "logits", answer)[0, :SHOWN].tolist()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    text = f'{{"made_by": "{made_by}", "logits": {json.dumps(logits)}, "shapes": {{\n{lines}}}}}\n'
    (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    torchvision, timm, transformers = map(import_module, ("torchvision", "timm", "transformers"))
    for size, options in HUGGING_FACE.items():
        config = transformers.ResNetConfig(num_labels=1000, **options)
        hugging_face = transformers.ResNetForImageClassification(config)
        write(f"huggingface-{size}", f"transformers {version('transformers')}", hugging_face)
        write(f"torchvision-{size}", f"torchvision {version('torchvision')}", torchvision.models.get_model(size))
    for name in ("resnet50", "resnet50d"):
        write(f"timm-{name}", f"timm {version('timm')}", timm.create_model(name))
