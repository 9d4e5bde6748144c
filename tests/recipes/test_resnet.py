from __future__ import annotations

import pytest
import torch

from packtrain.recipes.images import RESNETS, ResNetShape
from packtrain.recipes.resnet import ResNet, normalize

SMALL = ResNetShape("basic", (1, 1), 8, "small")
# What torchvision's models of 1,000 classes have.
PARAMETERS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160}


def numbers(count: int, size: int = 16) -> torch.Tensor:
    torch.manual_seed(1)
    return normalize(torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8))


@pytest.mark.parametrize("size", RESNETS)
def test_sizes_have_as_many_parameters_as_torchvision_s(size: str) -> None:
    with torch.device("meta"):
        model = ResNet(RESNETS[size], 1000)
    assert sum(one.numel() for one in model.parameters()) == PARAMETERS[size]


def test_parameters_have_torchvision_s_names() -> None:
    with torch.device("meta"):
        names = set(ResNet(RESNETS["resnet50"], 1000).state_dict())
    assert len(names) == 320
    assert names >= {
        "conv1.weight", "bn1.running_mean", "layer1.0.conv3.weight", "layer1.0.bn3.bias",
        "layer1.0.downsample.0.weight", "layer1.0.downsample.1.running_var", "layer3.5.conv2.weight",
        "layer4.2.bn3.num_batches_tracked", "fc.weight", "fc.bias",
    }  # fmt: skip
    assert "layer1.1.downsample.0.weight" not in names


def test_the_small_stem_keeps_the_size_of_images() -> None:
    assert ResNet(SMALL).features(numbers(2, 32)).shape == (2, SMALL.features, 32 // SMALL.total_stride, 32 // 2)
    large = ResNetShape("bottleneck", (1, 1, 1, 1), 8)
    assert ResNet(large).features(numbers(2, 64)).shape == (2, large.features, 2, 2)
    assert (large.features, large.total_stride) == (256, 32)


def test_every_block_starts_as_its_shortcut_and_the_last_layer_near_zero() -> None:
    torch.manual_seed(1)
    model = ResNet(RESNETS["resnet18"], 100)
    last = [value for name, value in model.named_parameters() if name.endswith("bn2.weight") and "layer" in name]
    assert len(last) == 8
    assert all(not value.any() for value in last)
    assert model.fc is not None
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not model.fc.bias.any()


def test_pixels_are_numbers_around_zero_with_channels_last_in_memory() -> None:
    pixels = torch.zeros(2, 4, 5, 3, dtype=torch.uint8)
    pixels[1] = 255
    found = normalize(pixels)
    assert found.shape == (2, 3, 4, 5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found[0, :, 0, 0].tolist() == pytest.approx([-2.118, -2.036, -1.804], abs=1e-3)
    assert found[1, :, 0, 0].tolist() == pytest.approx([2.249, 2.429, 2.640], abs=1e-3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_part_of_a_batch_may_have_one_sample_or_none(count: int) -> None:
    """With one sample and a map of one pixel there is no variance to take."""
    model = ResNet(ResNetShape("basic", (1, 1), 8, "large"), 3).train()
    model(numbers(count, 4)).sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    if count == 0:
        assert not any(one.grad.any() for one in model.parameters() if one.grad is not None)
