"""Weights of ResNets from other libraries: what a file has, by the names and shapes in its header, and what fits.

                    block                                         last layer
torchvision, timm   layer1.0.conv1.weight                         fc.weight               as our own
Hugging Face        resnet.encoder.stages.0.layers.0.layer.0.…    classifier.1.weight

Nothing here needs torch, except to load the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from packtrain.errors import FieldMistake, Mistake, printable
from packtrain.pack.shard import check_header
from packtrain.recipes.images import RESNETS, ResNetShape
from packtrain.units import counted

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]

_COUNTER = "num_batches_tracked"  # of norms: files often lack it, and nothing depends on it
_HEAD = ("fc.weight", "fc.bias")
_NORM = ("weight", "bias", "running_mean", "running_var")
_PICKLES = (b"PK\x03\x04", b"\x80")  # torch's archive of pickles, and a bare one

# How pixels between 0 and 1 became numbers in training: mean and deviation of red, green and blue.
PIXELS: Mapping[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}

_OWN_BLOCK = "layer1.0.conv1.weight"
_HUGGING_FACE_BLOCK = "encoder.stages.0.layers.0.layer.0.convolution.weight"
_HUGGING_FACE_STEM = re.compile(r"embedder\.embedder\.(convolution|normalization)\.(\w+)")
_HUGGING_FACE_LAYER = re.compile(
    r"encoder\.stages\.(\d+)\.layers\.(\d+)\.(shortcut|layer\.(\d+))\.(convolution|normalization)\.(\w+)"
)


@dataclass(frozen=True)
class PretrainedFit:
    """The tensors to take, as own names and those in the file, and the own tensors that start anew."""

    origin: str
    names: Mapping[str, str]
    new: tuple[str, ...]

    @property
    def in_words(self) -> str:
        return counted(len(self.names), "tensor") + (f"; new: {', '.join(self.new)}" if self.new else "")


# Names.


def own_names(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return whose names these are, and the names of a file by our own; refuse what has no ResNet.

    A prefix, such as `module.` of DistributedDataParallel or `encoder.` of a captioner, is left out.
    """
    listed = sorted(names)
    places = [
        (name.removesuffix(block), block)
        for block in (_OWN_BLOCK, _HUGGING_FACE_BLOCK)
        for name in listed
        if name == block or name.endswith(f".{block}")
    ]
    if not places:
        shown = printable(", ".join(listed[:2]), 60) or "nothing"
        raise Mistake(f"no ResNet with names of torchvision, timm or Hugging Face; it has {shown}")
    if len(places) > 1:
        prefixes = " and ".join(printable(prefix, 40) or "one without a prefix" for prefix, _ in places[:2])
        raise Mistake(f"the file has more than one ResNet: {prefixes}; keep one of them")
    [(prefix, block)] = places
    inside = {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}
    if block == _OWN_BLOCK:
        return "torchvision's names", inside
    translated = {_translated(name): theirs for name, theirs in inside.items()}
    head = prefix.removesuffix("resnet.")
    last = {f"fc.{tensor}": f"{head}classifier.1.{tensor}" for tensor in ("weight", "bias")}
    return "Hugging Face's names", translated | {our_name: name for our_name, name in last.items() if name in listed}


def _translated(name: str) -> str:
    """Return our name of one of Hugging Face's tensors; a name that is not a ResNet's stays."""
    if stem := _HUGGING_FACE_STEM.fullmatch(name):
        return f"{'conv1' if stem[1] == 'convolution' else 'bn1'}.{stem[2]}"
    if layer := _HUGGING_FACE_LAYER.fullmatch(name):
        stage, block, _, number, kind, tensor = layer.groups()
        if number is None:
            inner = f"downsample.{0 if kind == 'convolution' else 1}"
        else:
            inner = f"{'conv' if kind == 'convolution' else 'bn'}{int(number) + 1}"
        return f"layer{int(stage) + 1}.{block}.{inner}.{tensor}"
    return name


# Shapes.


def resnet_shapes(shape: ResNetShape, classes: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of `ResNet(shape, classes)`, without counters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in shape.convolutions():
        shapes[f"{layer.name}.weight"] = (layer.outputs, layer.inputs, layer.kernel, layer.kernel)
        shapes |= {f"{layer.norm}.{tensor}": (layer.outputs,) for tensor in _NORM}
    if classes is not None:
        shapes |= {"fc.weight": (classes, shape.features), "fc.bias": (classes,)}
    return shapes


def fit_pretrained(shapes: Shapes, shape: ResNetShape, classes: int | None) -> PretrainedFit:
    """Return what of a file with the shapes `shapes` a ResNet takes: everything but, maybe, the last layer.

    A file of another network is refused, with what it is.
    """
    origin, names = own_names(shapes)
    their_shapes = {our_name: shapes[name] for our_name, name in names.items() if not our_name.endswith(_COUNTER)}
    body = {our_name: size for our_name, size in their_shapes.items() if re.match(r"(conv1|bn1|layer\d+)\.", our_name)}
    in_file = _shape_of(body)
    if odd := _oddity(body, resnet_shapes(in_file)):
        raise Mistake(f"the file has a variant of {_in_words(in_file)}: {odd}; use weights of a plain ResNet")
    if replace(in_file, zero_init_residual=shape.zero_init_residual) != shape:
        named = [_in_words(described, beside=compared) for described, compared in ((in_file, shape), (shape, in_file))]
        raise Mistake(
            f"the file has a {named[0]}, but the model is a {named[1]}; change model.size, or use other weights"
        )
    our_shapes = resnet_shapes(shape, classes)
    restarted = tuple(name for name in _HEAD if name in our_shapes and their_shapes.get(name) != our_shapes[name])
    if restarted:
        restarted = _HEAD  # the weights of a class mean nothing without its bias
    loaded = {name: names[name] for name in our_shapes if name not in restarted}
    return PretrainedFit(f"a {_in_words(in_file)} with {origin}", loaded, restarted)


def _shape_of(body: Shapes) -> ResNetShape:
    """Return the plain ResNet that has most in common with these tensors."""
    depths = []
    for stage in count(1):
        blocks = {name.split(".")[1] for name in body if name.startswith(f"layer{stage}.")}
        if not blocks:
            break
        depths.append(len(blocks))
    stem = body.get("conv1.weight", ())
    bottleneck = "layer1.0.conv3.weight" in body
    first = body[_OWN_BLOCK]
    width = stem[0] if len(stem) == 4 else (first[1] if len(first) == 4 else 0)
    size = "small" if stem[2:] == (3, 3) else "large"
    return ResNetShape("bottleneck" if bottleneck else "basic", tuple(depths), width, size)


def _oddity(body: Shapes, plain: Shapes) -> str:
    """Return the first thing in which tensors are not those of a plain ResNet; nothing if there is none."""
    if "conv1.0.weight" in body:
        return "its stem has several convolutions (timm's c, d, s and t)"
    missing, extra = sorted(plain.keys() - body.keys()), sorted(body.keys() - plain.keys())
    if missing and all(name.endswith(("running_mean", "running_var")) for name in missing):
        return "its norms have no statistics (group norm)"
    if extra or missing:
        return f"it has {printable(extra[0], 60)}" if extra else f"it has no {missing[0]}"
    unlike = next((name for name in plain if body[name] != plain[name]), None)
    return "" if unlike is None else f"{unlike} is {_size(body[unlike])}, not {_size(plain[unlike])}"


def _in_words(shape: ResNetShape, beside: ResNetShape | None = None) -> str:
    """Return the usual name, such as ResNet-50, with all that tells it from another one."""
    layers = sum(shape.depths) * (3 if shape.block == "bottleneck" else 2) + 2
    is_usual = any((usual.block, usual.depths) == (shape.block, shape.depths) for usual in RESNETS.values())
    words = [] if is_usual else [f"({'-'.join(map(str, shape.depths))} {shape.block} blocks)"]
    if beside is not None and beside.width != shape.width:
        words.append(f"of width {shape.width}")
    if beside is not None and beside.stem != shape.stem:
        words.append(f"with a {shape.stem} stem")
    return " ".join([f"ResNet-{layers}", *words])


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"


# Files.


def read_fit(path: Path, shape: ResNetShape, classes: int | None) -> PretrainedFit:
    """Return what of a file fits; only its header is read."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start.startswith(_PICKLES) and not start.endswith(b"{"):  # where the header of a safetensors file starts
            raise Mistake(
                "a pickle file, which can run any code when it is read; convert it to safetensors once:"
                " save_file(torch.load(FILE, weights_only=True), 'weights.safetensors')"
            )
        check_header(path)
        with safe_open(path, "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise Mistake(f"not a safetensors file ({error})") from error
    return fit_pretrained(shapes, shape, classes)


def pretrained_notes(files: Mapping[str, Path], shape: ResNetShape, classes: int | None) -> list[str]:
    """Return what a ResNet will take of the file that `model.weights` names, for the person who starts a run."""
    if "weights" not in files:
        return []
    try:
        fitting = read_fit(files["weights"], shape, classes)
    except Mistake as mistake:
        raise FieldMistake("model.weights", str(mistake)) from None
    return [f"model.weights: {fitting.origin}", fitting.in_words]


def load_pretrained(path: Path, shape: ResNetShape, classes: int | None, pixels: str = "imagenet") -> dict[str, Tensor]:
    """Read the tensors of a file that fit `ResNet(shape, classes)`, under our names."""
    try:
        fitting = read_fit(path, shape, classes)
    except Mistake as mistake:
        raise Mistake(f"model.weights: {mistake}") from None
    with safe_open(path, "pt") as file:
        tensors = {our_name: file.get_tensor(name).float() for our_name, name in fitting.names.items()}
    return tensors if pixels == "imagenet" else tensors | _for_our_pixels(tensors, pixels)


def _for_our_pixels(tensors: Mapping[str, Tensor], pixels: str) -> dict[str, Tensor]:
    """Return the stem as it has to be for pixels that are normalized as ours are.

    The first convolution scales the channels, and the mean of its norm takes in what is added to them. Exact, except
    where the convolution reaches beyond the image: zero is another color there.
    """
    import torch

    mean, deviation = (torch.tensor(channels) for channels in PIXELS["imagenet"])
    their_mean, their_deviation = (torch.tensor(channels) for channels in PIXELS[pixels])
    weight = tensors["conv1.weight"]
    added = torch.einsum("oihw,i->o", weight, (mean - their_mean) / their_deviation)
    scaled = weight * (deviation / their_deviation)[:, None, None]
    return {"conv1.weight": scaled, "bn1.running_mean": tensors["bn1.running_mean"] - added}
