"""Shared by the image recipes: the sizes of ResNets, batches from the right copies of a pack, and reading a file.

Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import io
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from packtrain.data.images import ImageBatches
from packtrain.data.order import Ids
from packtrain.data.pack import Pack, SplitReader
from packtrain.data.threads import in_threads, num_threads
from packtrain.errors import Mistake, printable
from packtrain.job import Job
from packtrain.job.job import EpochSettings
from packtrain.pack.picture import MAX_BYTES, UnusableImage, to_tiled
from packtrain.pack.tiles import Box, Pixels, Tiled, decode_crop
from packtrain.recipes.forms import Exportable
from packtrain.recipes.recipe import LAST_EPOCH, PASSES, ModelSize, Sized
from packtrain.run.records import MAX_PICTURE_BYTES, Sample
from packtrain.units import show_bytes

if TYPE_CHECKING:
    from torch import nn

_PICTURE_SIDE = 256  # pixels of the longer side of a picture in a run's folder
_PICTURE_QUALITIES = (85, 70, 50, 30)  # the first one that makes a small enough file
_ZOOM = 1.14  # as in data.images: evaluation reads a copy of this many times the size without enlarging it


@dataclass(frozen=True)
class ResNetShape:
    """Blocks in each stage, the width of the first stage, and the stem.

    The large stem reduces an image four times, the small one keeps its size: for images of about 32 pixels. Every
    further stage halves the image and doubles the width. With `zero_init_residual` every block starts as its shortcut
    alone, which helps deep networks.
    """

    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]
    width: int = 64
    stem: str = "large"
    zero_init_residual: bool = True

    @property
    def features(self) -> int:
        """Channels of the last stage."""
        return (self.width << len(self.depths) - 1) * (4 if self.block == "bottleneck" else 1)

    @property
    def total_stride(self) -> int:
        """Pixels of the image, on each side, for one position of the last map."""
        return (4 if self.stem == "large" else 1) << len(self.depths) - 1

    def convolutions(self) -> Iterator[Convolution]:
        """Yield the convolutions in order; a norm follows each."""
        large = self.stem == "large"
        yield Convolution("conv1", "bn1", 0, 3, self.width, 7 if large else 3, 2 if large else 1)
        inputs, stride = self.width, 4 if large else 1
        for stage, depth in enumerate(self.depths, 1):
            width = self.width << stage - 1
            outputs = width * (4 if self.block == "bottleneck" else 1)
            for block in range(depth):
                name, before, halves = f"layer{stage}.{block}", stride, stage > 1 and block == 0
                stride *= 2 if halves else 1
                layers = [(inputs, width, 3, stride), (width, width, 3, stride)]
                if self.block == "bottleneck":
                    layers = [(inputs, width, 1, before), (width, width, 3, stride), (width, outputs, 1, stride)]
                for number, layer in enumerate(layers, 1):
                    yield Convolution(f"{name}.conv{number}", f"{name}.bn{number}", stage, *layer)
                if halves or inputs != outputs:
                    shortcut = f"{name}.downsample"
                    yield Convolution(f"{shortcut}.0", f"{shortcut}.1", stage, inputs, outputs, 1, stride)
                inputs = outputs


class Convolution(NamedTuple):
    """A convolution of a ResNet, the norm after it, and the stage it is in, or 0 for the stem.

    `stride` is the distance of its outputs in pixels of the image.
    """

    name: str
    norm: str
    stage: int
    inputs: int
    outputs: int
    kernel: int
    stride: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.kernel**2


def resnet_size(shape: ResNetShape, pixels: int, tuned_stages: int | None = None) -> ModelSize:
    """Return the size without a last layer, of which the last stages learn; None means all and the stem.

    Operations and activations are for one image.
    """
    first_tuned = 0 if tuned_stages is None else len(shape.depths) + 1 - tuned_stages
    weights = trained = buffers = 0
    flops = block_flops = held = largest = 0.0
    for convolution in shape.convolutions():
        positions = max(1, pixels // convolution.stride) ** 2
        forward = 2.0 * convolution.weights * positions
        weights += convolution.weights + 2 * convolution.outputs
        buffers += 2 * 4 * convolution.outputs + 8
        flops += forward
        if convolution.stage >= first_tuned:
            trained += convolution.weights + 2 * convolution.outputs
            flops += (PASSES - 1) * forward
            block_flops += forward
            activations = 2 * 4.0 * convolution.outputs * positions
            held, largest = held + activations, max(largest, activations)
    # Of each convolution its input and that of its norm are kept; of a block, the input alone.
    depth = 3 if shape.block == "bottleneck" else 2
    checkpointed = min(held, held / (2 * depth) + depth * largest)
    return ModelSize(weights, trained, buffers, flops, held, block_flops, checkpointed, shape.block)


RESNETS: Mapping[str, ResNetShape] = {
    "resnet18": ResNetShape("basic", (2, 2, 2, 2)),
    "resnet34": ResNetShape("basic", (3, 4, 6, 3)),
    "resnet50": ResNetShape("bottleneck", (3, 4, 6, 3)),
    "resnet101": ResNetShape("bottleneck", (3, 4, 23, 3)),
}


Batches = TypeVar("Batches", bound=ImageBatches)


class ImageCopies(Generic[Batches]):
    """Images of a pack, read from the smallest stored copies that are large enough.

    Thread-safe: the loader makes training batches while an evaluation makes its own.
    """

    def __init__(self, pack: Pack, sizes: Sequence[int], make: Callable[[SplitReader, int], Batches]) -> None:
        self._pack, self._sizes, self._make = pack, sizes, make
        self._open: dict[str, Batches] = {}
        self._opening = threading.Lock()

    def short_side(self, size: int) -> int | None:
        """Return the short side of the copies for images of a size; None means the originals."""
        return min((copy for copy in self._sizes if copy >= int(_ZOOM * size)), default=None)

    def split_name(self, split: str, size: int) -> str:
        """Return the name of the pack's split with the copies for a size."""
        name = f"{split}@{self.short_side(size)}"
        return name if name in self._pack.manifest.splits else split

    def reader(self, split: str, size: int) -> SplitReader:
        return self._pack.split(self.split_name(split, size))

    def batches(self, split: str, size: int) -> Batches:
        name = self.split_name(split, size)
        with self._opening:  # two threads must not make two pools for one split
            if name not in self._open:
                self._open[name] = self._make(self._pack.split(name), num_threads())
            return self._open[name]


class ImageRecipe(Exportable, Sized, Generic[Batches]):
    """A recipe that learns from images: every sample costs 1, and all have the same length."""

    unit = "samples"
    inputs = "images"

    def __init__(self, job: Job, pack: Pack, make: Callable[[SplitReader, int], Batches]) -> None:
        super().__init__(job, pack)
        self.copies = ImageCopies(pack, job.data.sizes, make)

    longest_output: ClassVar[int] = 0
    """The most tokens of a prediction; 0 if it is no text."""
    prediction_side: int | None = None
    """The short side to which an image is reduced before it is cropped for a prediction; None keeps its size."""

    @abstractmethod
    def evaluated(self, split: str, ids: Ids, size: int) -> Pixels:
        """Return images as an evaluation shows them to the model."""

    def read(self, source: ImageInput) -> Tiled:
        """Return an image that a user gives as a pack would have it."""
        return source if isinstance(source, Tiled) else read_image(source, self.prediction_side)

    def read_all(self, inputs: Sequence[ImageInput]) -> list[Tiled]:
        """Return all images that a user gives, so that a bad one is refused before any work."""
        return list(in_threads(self.read, inputs, num_threads()))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        from packtrain.recipes.resnet import BasicBlock, Bottleneck

        return [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]

    @property
    def final_settings(self) -> EpochSettings:
        """Settings of the last evaluation, which predictions use too."""
        return self.job.train.in_epoch(LAST_EPOCH)

    @property
    def costs(self) -> NDArray[np.int64]:
        return np.ones(self.count("train"), np.int64)

    @property
    def sort_keys(self) -> NDArray[np.int64]:
        return np.zeros(self.count("train"), np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.costs

    def count(self, split: str) -> int:
        splits = self.pack.manifest.splits
        return splits[split].samples if split in splits else 0

    def place_of(self, split: str, sample: int) -> dict[str, Any]:
        """Return where an image is in the raw data: the number of its source, and its name there."""
        shard, row = self.pack.split(split).at(sample)
        name = shard.ragged["name"][row].tobytes().decode(errors="replace")
        return {"source": self.source_of(split, sample)[0], "file": name}

    def pictured(
        self, split: str, size: int, samples: Mapping[int, Sample]
    ) -> tuple[dict[int, Sample], dict[str, bytes]]:
        """Return the samples of a split with their pictures, and these by their digests."""
        batches = self.copies.batches(split, size)
        jpegs = in_threads(lambda sample: picture_of(batches.full(sample)), list(samples), num_threads())
        by_sample = dict(zip(samples, jpegs, strict=True))
        digests = {sample: hashlib.sha256(jpeg).hexdigest() for sample, jpeg in by_sample.items()}
        pictures = {digests[sample]: jpeg for sample, jpeg in by_sample.items()}
        return {sample: replace(record, picture=digests[sample]) for sample, record in samples.items()}, pictures

    def prefetch(self, ids: Ids, epoch: int) -> AbstractContextManager[None]:
        reader = self.copies.reader("train", self.job.train.in_epoch(epoch).size)
        return reader.prefetched(reader.order_of_use(ids))


def picture_of(pixels: Pixels) -> bytes:
    """Return a small JPEG of an image, to be shown beside a prediction."""
    image = Image.fromarray(pixels)
    image.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE), Image.Resampling.LANCZOS)
    while True:
        for quality in _PICTURE_QUALITIES:
            file = io.BytesIO()
            image.save(file, "JPEG", quality=quality)
            if file.tell() <= MAX_PICTURE_BYTES:
                return file.getvalue()
        image.thumbnail((image.width // 2, image.height // 2))


# Images that a user gives to `packtrain predict`.

ImageInput = str | bytes | Tiled
"""An image to predict for: the path of a file, the bytes of one, or what `ImageRecipe.read` has made of either."""


def read_image(source: str | bytes, short_side: int | None = None) -> Tiled:
    """Read an image file, given by its path or its bytes, and prepare it as packing does."""
    name = "the image" if isinstance(source, bytes) else printable(source)
    try:
        if not isinstance(source, bytes) and not Path(source).is_file():
            raise Mistake(f"{name}: {'not a file' if Path(source).exists() else 'no such file'}")
        size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
        if size > MAX_BYTES:
            raise Mistake(f"{name}: {show_bytes(size)} is too large; the limit is {show_bytes(MAX_BYTES)}")
        return to_tiled(source if isinstance(source, bytes) else Path(source).read_bytes(), short_side)
    except UnusableImage as error:
        raise Mistake(f"{name}: {error.reason}; use a JPEG, PNG, WebP, GIF, BMP or TIFF file") from error
    except OSError as error:
        raise Mistake(f"{name}: cannot read: {error.strerror}") from None


def decode_box(image: Tiled, box: Box) -> Pixels:
    return decode_crop(image.jpeg, image.segments, image.width, image.height, box)
