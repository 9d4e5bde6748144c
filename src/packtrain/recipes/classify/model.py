"""The residual network as a classifier: of a run in torch, and as an ONNX graph."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from packtrain.pack.tiles import Pixels
from packtrain.recipes.classify import ClassifierNetwork
from packtrain.recipes.decode import at_once_on
from packtrain.recipes.graphs import Graph, ModelPart
from packtrain.recipes.resnet import ResNet, example_pixels, normalize


class TorchClassifier(ClassifierNetwork):
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.at_once = at_once_on(next(model.parameters()).device)

    @torch.inference_mode()
    def logits(self, pixels: Pixels) -> NDArray[np.float32]:
        on_device = torch.from_numpy(pixels).to(next(self._model.parameters()).device)
        logits: Tensor = self._model(normalize(on_device))
        return logits.float().cpu().numpy()


class Classifier(ModelPart[ResNet]):
    """From bytes, as packs store them, to logits."""

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(normalize(pixels))
        return logits


def graphs_of(model: ResNet) -> dict[str, Graph]:
    return {"classifier": Graph(Classifier(model), {"pixels": example_pixels(model)}, ["logits"])}
