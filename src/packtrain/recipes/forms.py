"""Models that leave for machines without torch: what a recipe gives for them, and the formats that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from packtrain.errors import Mistake, nearest, quoted
from packtrain.recipes.recipe import Network, Recipe

if TYPE_CHECKING:
    from torch import nn

    from packtrain.recipes.graphs import Graph
    from packtrain.recipes.onnx import Session

Precision = Literal["fp32", "int8"]


class Exportable(Recipe):
    """A recipe whose model can be exported and then predicts without torch."""

    forms: ClassVar[Mapping[str, str]] = {"onnx": "packtrain.export.onnx:OnnxForm"}
    """Formats of its model, the fastest first. Names of classes, not the classes: a model imports one runtime only."""
    tolerances: ClassVar[Mapping[str, float]] = {"loss": 0.01}
    """The score that an exported model is compared by, and how much worse it may be."""

    @abstractmethod
    def graphs(self, model: nn.Module) -> Mapping[str, Graph]:
        """Return the ONNX graphs of a model by the names of their files."""

    @abstractmethod
    def onnx_network(self, session: Callable[[str], Session]) -> Network:
        """Return the network that these graphs compute; `session` opens one of them."""


class Form(ABC):
    """A format of trained models with its runtime, such as ONNX."""

    folder: ClassVar[str]
    """The folder of its files in that of a model; it has no others."""
    can_sample: ClassVar[bool] = True
    """False if its runtime has only a beam search."""

    @abstractmethod
    def write(self, recipe: Exportable, model: nn.Module, folder: Path, precision: Precision) -> None:
        """Write the files of the model to the folder; raise Mistake if this form cannot hold it."""

    @abstractmethod
    def load(self, recipe: Exportable, folder: Path, threads: int | None = None) -> Network:
        """Return the network that these files hold; `threads` of the machine's cores compute, all if None."""

    def files(self, folder: Path) -> set[str]:
        """Return the names of all files that `load` may read, whether they exist or not."""
        return {path.relative_to(folder).as_posix() for path in (folder / self.folder).rglob("*") if not path.is_dir()}


def form_of(recipe: type[Exportable], name: str) -> Form:
    if name not in recipe.forms:
        raise Mistake(f"no format {quoted(name)}; {nearest(name, recipe.forms)}")
    module, _, attribute = recipe.forms[name].partition(":")
    form: Form = getattr(import_module(module), attribute)()
    return form
