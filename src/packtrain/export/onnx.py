"""Exported models as ONNX graphs, which ONNX Runtime computes on almost any machine.

In fp32 the graphs hold the trained weights; batch norms are folded into the convolutions before them. In int8, images
go through convolutions with calibrated activations (static quantization), and texts through products whose activations
are measured as they come (dynamic quantization).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.data.order import Ids
from packtrain.errors import Mistake, harmless
from packtrain.identity import install_command
from packtrain.pack.tiles import Pixels
from packtrain.recipes import Recipe
from packtrain.recipes.forms import Exportable, Form, Precision
from packtrain.recipes.images import ImageRecipe
from packtrain.recipes.onnx import GraphValue, Session, external_files
from packtrain.recipes.recipe import Network

if TYPE_CHECKING:
    from torch import Tensor, nn

    from packtrain.recipes.graphs import Graph

OWN_FILE = "model.onnx"
WEIGHTS_FILE = "model.safetensors"

_CALIBRATION_IMAGES, _CALIBRATION_BATCH = 256, 16
_OWN_TOLERANCE = 1e-3
_MAX_FILE_BYTES = 1 << 30  # of a graph with its weights: beyond 2 GB they must be in a file of their own


class OnnxForm(Form):
    folder = "onnx"

    def write(self, recipe: Exportable, model: nn.Module, folder: Path, precision: Precision) -> None:
        require_exporter()
        from packtrain.recipes.graphs import with_byte_embedding

        # A copy: the trained model may be on a GPU, where its own evaluations should stay fast.
        model = copy.deepcopy(model).cpu().eval()
        if precision == "int8":
            model = with_byte_embedding(model)
        (folder / self.folder).mkdir(parents=True, exist_ok=True)
        for name, graph in recipe.graphs(model).items():
            path = folder / self.folder / f"{name}.onnx"
            if precision == "fp32":
                write_graph(graph, path)
                continue
            with tempfile.TemporaryDirectory(prefix="packtrain-onnx-") as directory:
                unquantized = Path(directory) / path.name
                write_graph(graph, unquantized)
                if isinstance(recipe, ImageRecipe) and "pixels" in graph.inputs:
                    _quantize_images(unquantized, path, calibration_images(recipe))
                else:
                    _quantize_products(unquantized, path)

    def load(self, recipe: Exportable, folder: Path, threads: int | None = None) -> Network:
        return recipe.onnx_network(lambda name: Session(folder / self.folder / f"{name}.onnx", threads))

    def files(self, folder: Path) -> set[str]:
        graphs = [path for path in (folder / self.folder).glob("*.onnx") if path.is_file()]  # opening a pipe would wait
        return super().files(folder) | {f"{self.folder}/{name}" for path in graphs for name in external_files(path)}


def require_exporter() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401 - torch's exporter uses it
    except ImportError:
        raise Mistake(f"export to ONNX needs more packages; run `{install_command('train')}`") from None


def write_weights(model: nn.Module, folder: Path) -> Path:
    """Write the weights under the model's own names, which are torchvision's for a ResNet."""
    from safetensors.torch import save_file

    # Clones: parameters that share memory, such as tied embeddings, cannot be in one file.
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE, {"format": "pt"})
    return folder / WEIGHTS_FILE


# Graphs.


def write_graph(graph: Graph, path: Path) -> None:
    """Export a graph with sizes of inputs as free as it says."""
    import torch

    from packtrain.recipes.graphs import PlainArguments

    module = PlainArguments(graph.module).eval()
    # Clones: torch takes two inputs with the same tensor for one.
    examples = tuple(graph_input.example.clone() for graph_input in graph.inputs.values())
    with torch.no_grad():
        module(*examples)  # constants that a model caches must not be made while torch traces it
    with silence():
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            verbose=False,
            dynamic_shapes=(tuple(dict(graph_input.free) for graph_input in graph.inputs.values()),),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
        )
        assert program is not None
        for value, graph_input in zip(program.model.graph.inputs, graph.inputs.values(), strict=True):
            # Torch fixes a size without a word if the model uses it as a plain integer.
            assert value.shape is not None
            assert not any(isinstance(value.shape[place], int) for place in graph_input.free), (
                f"{value.name} has a fixed size"
            )
        program.save(path, external_data=_size(graph.module) > _MAX_FILE_BYTES)


def _size(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what torch and ONNX Runtime print, warn and log while they export away from the terminal."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Quantization. Weights have 7 bits: with 8, processors without VNNI would clip sums, and give other answers.


def _quantize_products(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # it transposes some weights, and would find their old shapes here
    with silence():
        quantize_dynamic(
            model, target, ["MatMul", "Gemm"], per_channel=True, reduce_range=True, weight_type=QuantType.QInt8
        )


def _quantize_images(source: Path, target: Path, images: Sequence[Pixels]) -> None:
    """Quantize all convolutions but the first, whose inputs are few and whose errors would go through all others."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(images)

        def get_next(self) -> dict[str, Pixels] | None:
            return next(({"pixels": batch} for batch in self._left), None)

    graph = onnx.load(source, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    first = next(node.name for node in graph.node if node.op_type == "Conv")
    biases = [node.name for node in graph.node if node.op_type == "Add" and constants & set(node.input)]
    with silence():
        quantize_static(
            source,
            target,
            Images(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Relu", "MaxPool", "Add"],
            nodes_to_exclude=[first, *biases],
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )


def calibration_images(recipe: ImageRecipe[Any]) -> list[Pixels]:
    """Return images of the training split as an evaluation would show them, in batches."""
    size, count = recipe.final_settings.size, recipe.count("train")
    chosen = np.unique(np.linspace(0, count - 1, min(count, _CALIBRATION_IMAGES)).astype(np.int64))
    starts = range(0, len(chosen), _CALIBRATION_BATCH)
    return [recipe.evaluated("train", chosen[start : start + _CALIBRATION_BATCH], size) for start in starts]


# Models of own recipes.


@dataclass(frozen=True)
class OwnGraph:
    """The inputs and outputs of the model of an own recipe; a free size is `batch`, or `any`."""

    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]


@dataclass(frozen=True)
class _Call:
    """The arguments with which a recipe called its model, and the tensors that the model returned."""

    samples: int
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    returned: dict[str, Tensor]

    @property
    def given(self) -> list[Tensor]:
        from torch.utils._pytree import tree_leaves

        return [leaf for leaf in tree_leaves((self.arguments, self.keywords)) if hasattr(leaf, "numpy")]


def export_own(recipe: Recipe, model: nn.Module, folder: Path) -> OwnGraph:
    """Write the model of an own recipe, as its loss calls it; refuse it if ONNX Runtime computes something else."""
    require_exporter()
    import torch

    name, model, path = recipe.job.recipe, copy.deepcopy(model).cpu().eval(), folder / OWN_FILE
    # Two batches: sizes that differ between them are free in the graph.
    by_length = np.argsort(recipe.sort_keys, kind="stable")
    smaller, larger = (_call(recipe, model, ids) for ids in (by_length[:2], by_length[-3:]))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with silence(), torch.no_grad():
            program = torch.onnx.export(
                model,
                smaller.arguments,
                kwargs=smaller.keywords,
                dynamo=True,
                verbose=False,
                dynamic_shapes=_free_sizes(smaller, larger, model),
                output_names=list(smaller.returned),
            )
            assert program is not None
            program.save(path, external_data=_size(model) > _MAX_FILE_BYTES)
    except Exception as error:  # torch passes on whatever the model's own code raises
        raise Mistake(f"{name}: torch cannot export this model to ONNX: {_reason(error)}") from error
    session = Session(path)
    for call in (smaller, larger):
        tensors = {value.name: tensor.numpy() for value, tensor in zip(session.inputs, call.given, strict=True)}
        computed = session([value.name for value in session.outputs], tensors)
        both = zip(computed, call.returned.values(), strict=True)
        difference = max(float(np.abs(output - expected.numpy()).max(initial=0.0)) for output, expected in both)
        if not difference <= _OWN_TOLERANCE:  # or it is not a number
            path.unlink()
            raise Mistake(f"{name}: in ONNX Runtime the outputs of this model differ by {difference:.2g}; not exported")
    pairs = (
        (session.inputs, smaller.given, larger.given),
        (session.outputs, smaller.returned.values(), larger.returned.values()),
    )
    inputs, outputs = (
        tuple(
            replace(value, shape=_sizes(small, large, smaller, larger))
            for value, small, large in zip(values, few_tensors, more_tensors, strict=True)
        )
        for values, few_tensors, more_tensors in pairs
    )
    return OwnGraph(inputs, outputs)


def _call(recipe: Recipe, model: nn.Module, ids: Ids) -> _Call:
    """Return how the loss of a batch calls the model."""
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    calls: list[_Call] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        returned = {}
        for path, tensor in tree_flatten_with_path(output)[0]:
            name = re.sub(r"\W+", "_", keystr(path)).strip("_")  # a key or field, or the number in a tuple
            returned[name if name[:1].isalpha() else f"output_{name}".rstrip("_")] = tensor
        calls.append(_Call(len(ids), arguments, keywords, returned))

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            recipe.loss(model, {key: torch.from_numpy(rows) for key, rows in recipe.batch(ids, 0).items()})
    finally:
        handle.remove()
    if not calls:
        raise Mistake(f"{recipe.job.recipe}: its loss does not call the model itself, so there is nothing to export")
    for tensor in calls[0].returned.values():
        if not isinstance(tensor, torch.Tensor):
            raise Mistake(
                f"{recipe.job.recipe}: its model returns {type(tensor).__name__}; only tensors can be exported"
            )
    return calls[0]


def _free_sizes(smaller: _Call, larger: _Call, model: nn.Module) -> dict[str, Any]:
    """Return which dimensions of each argument are free, as torch.export wants them."""
    import torch
    from torch.export import Dim
    from torch.utils._pytree import tree_map

    def free(small: Any, large: Any) -> Any:
        if not isinstance(small, torch.Tensor):
            return None
        return {
            place: Dim.DYNAMIC
            for place, size in enumerate(_sizes(small, large, smaller, larger))
            if isinstance(size, str)
        }

    names = inspect.signature(model.forward)
    small, large = (names.bind(*call.arguments, **call.keywords).arguments for call in (smaller, larger))
    return {name: tree_map(free, value, large[name]) for name, value in small.items()}


def _sizes(small: Tensor, large: Tensor, smaller: _Call, larger: _Call) -> tuple[int | str, ...]:
    """Return the shape that a tensor has in two calls, with words for the sizes that differ."""

    def size(place: int, sizes: tuple[int, int]) -> int | str:
        if sizes[0] == sizes[1]:
            return sizes[0]
        return "batch" if place == 0 and sizes == (smaller.samples, larger.samples) else "any"

    return tuple(size(place, sizes) for place, sizes in enumerate(zip(small.shape, large.shape, strict=True)))


def _reason(error: BaseException) -> str:
    """Return the first sentence of the innermost error, which names the operator, and the line of the model's code."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = harmless(str(error), keep="\n").strip()
    first, _, following = text.partition("\n")
    reason = f"{first} {following.strip().partition(chr(10))[0]}" if first.endswith(":") else first
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    where = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return f"{type(error).__name__}: {reason}{where}"
