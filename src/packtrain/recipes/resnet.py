"""The residual network, with torchvision's parameter names so that pretrained weights fit.

pixels = normalize(batch)           uint8 [N, height, width, RGB] as packs store them
maps = model.features(pixels)       [N, features, height / total_stride, width / total_stride]
logits = model(pixels)              [N, classes]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import batch_norm

from packtrain.recipes.graphs import Input
from packtrain.recipes.images import ResNetShape
from packtrain.recipes.pretrained import PIXELS

_MEAN, _DEVIATION = PIXELS["imagenet"]  # on a scale of 0 to 1: what pretrained weights expect


def normalize(pixels: Tensor) -> Tensor:
    """Return bytes [N, height, width, RGB] as numbers [N, RGB, height, width] around 0, channels last in memory."""
    mean, deviation = _statistics(pixels.device)
    return ((pixels.float() - mean) / deviation).permute(0, 3, 1, 2)


@cache  # every copy to a GPU would make the host wait
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # an evaluation may be the first caller, and training uses the same tensors
        return torch.tensor(_MEAN, device=device) * 255, torch.tensor(_DEVIATION, device=device) * 255


class Norm(nn.BatchNorm2d):
    """Batch norm that uses its running statistics if the batch has at most one value per channel.

    A rank's part of a batch may be one sample, or none.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() <= x.shape[1]:
            return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        return super().forward(x)


class BasicBlock(nn.Module):
    expansion = 1
    varying_sizes = ()  # convolutions are fastest if compiled for one size

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, width, stride)
        self.bn1 = Norm(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = Norm(width)
        self.downsample = _shortcut(inputs, width, stride)

    @property
    def last_norm(self) -> Norm:
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """The stride is on the 3 x 3 convolution, as in torchvision."""

    expansion = 4
    varying_sizes = ()

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv1x1(inputs, width)
        self.bn1 = Norm(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = Norm(width)
        self.conv3 = _conv1x1(width, outputs)
        self.bn3 = Norm(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    @property
    def last_norm(self) -> Norm:
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = torch.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


_BLOCKS: Mapping[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Without `classes` there is no last layer: the network has features only."""

    def __init__(self, shape: ResNetShape, classes: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        large = shape.stem == "large"
        self.conv1 = nn.Conv2d(3, shape.width, 7, 2, 3, bias=False) if large else _conv3x3(3, shape.width)
        self.bn1 = Norm(shape.width)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        inputs, block = shape.width, _BLOCKS[shape.block]
        for number, depth in enumerate(shape.depths):
            width = shape.width * 2**number
            first, outputs = block(inputs, width, 1 if number == 0 else 2), width * block.expansion
            stage = nn.Sequential(first, *(block(outputs, width, 1) for _ in range(depth - 1)))
            self.add_module(f"layer{number + 1}", stage)
            inputs = outputs
        self.fc = None if classes is None else nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (BasicBlock, Bottleneck)) and self.shape.zero_init_residual:
                nn.init.zeros_(module.last_norm.weight)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def stages(self) -> list[nn.Module]:
        """The stages in order; each may be frozen or fine-tuned separately."""
        return [cast("nn.Module", getattr(self, f"layer{number + 1}")) for number in range(len(self.shape.depths))]

    def features(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = stage(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        assert self.fc is not None
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits


def example_pixels(network: ResNet) -> Input:
    """Return images for an ONNX graph that starts with this network."""
    side = 2 * network.shape.total_stride
    blank = torch.zeros(2, side, side + 8, 3, dtype=torch.uint8)
    return Input(blank, {0: Dim("images"), 1: Dim("height"), 2: Dim("width")})


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def _conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv1x1(inputs, outputs, stride), Norm(outputs))
