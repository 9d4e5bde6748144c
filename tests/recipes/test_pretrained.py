"""Weights of ResNets from other libraries: the same answers as there, or one line that says what a file is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import conv2d

from packtrain.errors import Mistake
from packtrain.recipes.caption import ENCODERS
from packtrain.recipes.classify import SIZES
from packtrain.recipes.images import RESNETS, ResNetShape
from packtrain.recipes.pretrained import PIXELS, fit_pretrained, load_pretrained, read_fit, resnet_shapes
from packtrain.recipes.resnet import ResNet
from recipes.published import FOLDER, SHOWN, numbers, picture, published

SMALL = ResNetShape("basic", (1, 1), 8, "small")


def saved(tensors: Mapping[str, Tensor | None], path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items() if value is not None}, path)
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*-resnet??.json")))
def test_a_model_with_weights_of_a_library_answers_as_the_library_does(name: str, tmp_path: Path) -> None:
    theirs, size = published(name), name.partition("-")[2]
    model = ResNet(RESNETS[size], 1000)
    loaded = load_pretrained(saved(theirs.tensors(), tmp_path / "weights"), RESNETS[size], 1000)
    assert {name for name in model.state_dict() if not name.endswith("num_batches_tracked")} == loaded.keys()
    model.load_state_dict(loaded, strict=False)
    with torch.inference_mode():
        logits = model.eval()(picture())[0, :SHOWN].tolist()
    assert logits == pytest.approx(theirs.logits, abs=1e-5)


@pytest.mark.parametrize("shape", [*SIZES.values(), *ENCODERS.values(), SMALL], ids=str)
@pytest.mark.parametrize("classes", [None, 3])
def test_shapes_are_known_without_a_model(shape: ResNetShape, classes: int | None) -> None:
    with torch.device("meta"):
        state = ResNet(shape, classes).state_dict()
    own = {name: tuple(one.shape) for name, one in state.items() if not name.endswith("num_batches_tracked")}
    assert resnet_shapes(shape, classes) == own


def test_a_last_layer_for_other_classes_starts_anew() -> None:
    for library in ("torchvision", "huggingface"):
        fit = fit_pretrained(published(f"{library}-resnet50").shapes, RESNETS["resnet50"], 10)
        assert fit.new == ("fc.weight", "fc.bias")
        assert len(fit.names) == 265
    assert fit.origin == "a ResNet-50 with Hugging Face's names"
    assert fit.in_words == "265 tensors; new: fc.weight, fc.bias"
    assert not fit_pretrained(published("timm-resnet50").shapes, RESNETS["resnet50"], 1000).new


def test_an_encoder_needs_no_last_layer_and_a_classifier_starts_its_own_anew() -> None:
    encoder = resnet_shapes(SMALL)
    assert fit_pretrained(encoder, SMALL, None).new == ()
    assert fit_pretrained(encoder, SMALL, 3).new == ("fc.weight", "fc.bias")
    assert "fc.weight" not in fit_pretrained(resnet_shapes(SMALL, 3), SMALL, None).names


def test_a_prefix_is_left_out_and_two_networks_are_refused() -> None:
    plain = resnet_shapes(SMALL, 3)
    inside = {f"module.encoder.{name}": shape for name, shape in plain.items()}
    assert fit_pretrained(inside, SMALL, 3).names["fc.bias"] == "module.encoder.fc.bias"
    hub = {name: shape for name, shape in published("huggingface-resnet18").shapes.items() if "classifier" not in name}
    backbone = {name.removeprefix("resnet."): shape for name, shape in hub.items()}
    assert fit_pretrained(backbone, RESNETS["resnet18"], None).names["bn1.bias"].startswith("embedder.embedder.")
    with pytest.raises(Mistake, match=r"more than one ResNet: one without a prefix and module\.encoder\."):
        fit_pretrained({**plain, **inside}, SMALL, 3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, "the file has a ResNet-18, but the model is a ResNet-50; change model.size, or use other weights"),
        ({"layer1.0.se.fc1.bias": (4,)}, "the file has a variant of ResNet-18: it has layer1.0.se.fc1.bias; use weights"
         " of a plain ResNet"),
        ({"layer4.1.bn2.bias": None}, "the file has a variant of ResNet-18: it has no layer4.1.bn2.bias; use weights"
         " of a plain ResNet"),
        ({"layer2.1.conv1.weight": (128, 64, 3, 3)}, "the file has a variant of ResNet-18: layer2.1.conv1.weight is"
         " 128 x 64 x 3 x 3, not 128 x 128 x 3 x 3; use weights of a plain ResNet"),
        ({"layer1.0.conv1.weight": None}, "no ResNet with names of torchvision, timm or Hugging Face; it has bn1.bias,"
         " bn1.num_batches_tracked"),
    ],
)  # fmt: skip
def test_another_network_is_refused_with_what_it_is(change: Mapping[str, tuple[int, ...] | None], fault: str) -> None:
    changed = {**published("torchvision-resnet18").shapes, **change}
    found = {name: shape for name, shape in changed.items() if shape is not None}
    with pytest.raises(Mistake) as refused:
        fit_pretrained(found, RESNETS["resnet50"], 10)
    assert str(refused.value) == fault


def test_variants_of_timm_are_refused_with_what_they_are() -> None:
    with pytest.raises(Mistake, match=r"^the file has a variant of ResNet-50: its stem has several convolutions"):
        fit_pretrained(published("timm-resnet50d").shapes, RESNETS["resnet50"], 10)
    plain = published("timm-resnet50").shapes
    without = {name: shape for name, shape in plain.items() if "running_" not in name}
    with pytest.raises(Mistake, match=r"^the file has a variant of ResNet-50: its norms have no statistics"):
        fit_pretrained(without, RESNETS["resnet50"], 10)


def test_other_widths_and_stems_are_named() -> None:
    wider = resnet_shapes(replace(SMALL, width=16, stem="large"))
    with pytest.raises(Mistake) as refused:
        fit_pretrained(wider, SMALL, 3)
    kind = "ResNet-6 (1-1 basic blocks)"
    named = f"a {kind} of width 16 with a large stem, but the model is a {kind} of width 8 with a small stem"
    assert str(refused.value) == f"the file has {named}; change model.size, or use other weights"


@pytest.mark.parametrize("content", [b"PK\x03\x04\x00\x00\x08\x08\x00", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 "])
def test_a_pickle_file_is_refused_with_how_to_convert_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "resnet50.pth"
    path.write_bytes(content + bytes(100))
    with pytest.raises(Mistake) as refused:
        read_fit(path, SMALL, 3)
    assert str(refused.value) == (
        "a pickle file, which can run any code when it is read; convert it to safetensors once:"
        " save_file(torch.load(FILE, weights_only=True), 'weights.safetensors')"
    )


def test_a_header_that_looks_like_a_pickle_is_none(tmp_path: Path) -> None:
    """The first bytes of a safetensors file are the length of its header, which may be any number."""
    tensors = {name: numbers(name, shape) for name, shape in resnet_shapes(SMALL).items()}
    for filler in range(256):
        path = saved({**tensors, "x" * (filler + 1): torch.zeros(1)}, tmp_path / "weights")
        if path.read_bytes()[:1] == b"\x80":
            break
    assert path.read_bytes()[:1] == b"\x80"
    assert len(read_fit(path, SMALL, None).names) == len(tensors)


@pytest.mark.parametrize("content", [None, b"", b"no tensors", b"\xff" * 100])
def test_other_files_are_refused_with_their_field(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "none").write_bytes(content)
    with pytest.raises(Mistake, match=r"^model\.weights: not a safetensors file"):
        load_pretrained(tmp_path / "none", SMALL, 3)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    path = saved(
        {name: numbers(name, shape).bfloat16() for name, shape in resnet_shapes(SMALL).items()}, tmp_path / "w"
    )
    assert {one.dtype for one in load_pretrained(path, SMALL, None).values()} == {torch.float32}


@pytest.mark.parametrize("pixels", [name for name in PIXELS if name != "imagenet"])
def test_pixels_that_were_normalized_otherwise_give_the_same_inside_of_an_image(pixels: str, tmp_path: Path) -> None:
    """The folded stem gives, for our pixels, what the given one gives for theirs."""
    path = saved({name: numbers(name, shape) for name, shape in resnet_shapes(SMALL).items()}, tmp_path / "w")
    image = (picture() + 1) / 2

    def stem(weights: Mapping[str, Tensor], kind: str) -> Tensor:
        mean, deviation = (torch.tensor(one)[:, None, None] for one in PIXELS[kind])
        out = conv2d((image - mean) / deviation, weights["conv1.weight"])  # without padding
        norm = nn.BatchNorm2d(8).eval()
        norm.load_state_dict({name: weights[f"bn1.{name}"] for name in norm.state_dict() if f"bn1.{name}" in weights},
                             strict=False)  # fmt: skip
        normed: Tensor = norm(out)
        return normed

    given, folded = (load_pretrained(path, SMALL, None, kind) for kind in ("imagenet", pixels))
    assert torch.allclose(stem(folded, "imagenet"), stem(given, pixels), atol=1e-5)
    assert not torch.allclose(stem(given, "imagenet"), stem(given, pixels), atol=1e-1)
