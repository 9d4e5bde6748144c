"""An exported model: a folder with all that predicting needs, and the digest of every file in it. No torch.

model.json        what it is, where it comes from, how close it is to the trained model, the digest of every file
README.md         the same for people
job.json          the job, without the places of its data
vocabulary.json   for texts
...               the files of its form, such as ctranslate2/model.bin or onnx/decoder.onnx
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from PIL import Image
from pydantic import Field, ValidationError

from packtrain.data.pack import Pack
from packtrain.errors import Mistake, NotFound, PacktrainError, harmless, printable, quoted
from packtrain.export.bootstrap import Interval
from packtrain.files import sha256_of
from packtrain.job import Job
from packtrain.pack.manifest import FORMAT as PACK_FORMAT
from packtrain.pack.manifest import Manifest, PackFile
from packtrain.recipes import Recipe, recipe_class
from packtrain.recipes.forms import Exportable, Precision, form_of
from packtrain.recipes.recipe import Network
from packtrain.run.checkpoint import StoredFile
from packtrain.store.records import Count, DamagedRecord, Digest, FileName, Label, Many, Measurements, Time, decode

FORMAT = 1
MANIFEST, CARD, JOB, VOCABULARY = "model.json", "README.md", "job.json", "vocabulary.json"
MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Origin:
    """The checkpoints whose weights are in the model: several if they were averaged. `made` is when it was exported."""

    run: FileName
    checkpoints: Many[FileName]
    step: Count
    pack: FileName
    job: Digest
    packtrain: Label
    made: Time


@dataclass(frozen=True)
class Parity:
    """A metric of the trained model, in torch, and of the exported one on the same samples.

    `drop` is how much worse the exported one is, with its 95 % interval; negative if it is better.
    """

    metric: Label
    split: Label
    samples: Count
    trained: float
    exported: float
    drop: float
    interval: Interval
    tolerance: float
    signature: Annotated[str, Field(max_length=1000)] = ""


@dataclass(frozen=True)
class ModelManifest:
    """`scores` are those of the run on its test split, or else on its validation split."""

    format: Count
    recipe: Label
    form: Label
    precision: Precision
    classes: Many[str]
    origin: Origin
    parity: Many[Parity]
    scores: Measurements
    files: Many[StoredFile]


@dataclass(frozen=True)
class ExportedModel:
    """A model whose files have been read and match their digests."""

    folder: Path
    manifest: ModelManifest

    @cached_property
    def job(self) -> Job:
        try:
            return Job.model_validate_json((self.folder / JOB).read_bytes())
        except ValidationError as error:
            raise Mistake(f"{self.folder}: {JOB} is from another version of Packtrain; export the run again") from error

    @cached_property
    def recipe(self) -> Exportable:
        """The recipe, which knows what goes into the network and what its output means."""
        return exportable(self.manifest.recipe)(self.job, HomePack(self.folder, self.manifest))

    def network(self, threads: int | None = None) -> Network:
        """Load the network, and try it: a file can be what its digest says, and still be damaged or foreign."""
        try:
            network = form_of(type(self.recipe), self.manifest.form).load(self.recipe, self.folder, threads)
            self.recipe.predict(network, trial_inputs(self.recipe), replace(self.recipe.decoding, n_best=1))
        except PacktrainError:
            raise
        except Exception as error:  # of any runtime, on any bytes
            fault = f"its {self.manifest.form} files do not compute what {self.manifest.recipe} needs"
            raise Mistake(
                f"{printable(str(self.folder))}: {fault} ({type(error).__name__}); export or copy the model again"
            ) from error
        return network


def exportable(name: str) -> type[Exportable]:
    """Return the class of a recipe whose models can be exported."""
    recipe = recipe_class(name)
    if not issubclass(recipe, Exportable):
        raise Mistake(f"models of {name} cannot be exported: it has no ONNX graphs")
    return recipe


def trial_inputs(recipe: Recipe) -> list[Any]:
    """Return inputs of different sizes for the first computation of a network."""
    if recipe.inputs == "texts":
        return ["Hello, world!", "Hello"]
    files = [io.BytesIO(), io.BytesIO()]
    for file, size in zip(files, ((64, 64), (96, 48)), strict=True):
        Image.new("RGB", size, "gray").save(file, "PNG")
    return [file.getvalue() for file in files]


class HomePack(Pack):
    """The part of a pack that goes home with a model: vocabulary and classes, but no samples."""

    def __init__(self, folder: Path, model: ModelManifest) -> None:
        self._folder = folder
        self.name = model.origin.pack
        file = next((file for file in model.files if file.name == VOCABULARY), None)
        vocabulary = None if file is None else PackFile(file.name, file.bytes, file.sha256)
        kind = recipe_class(model.recipe).kind
        self.manifest = Manifest(PACK_FORMAT, self.name, kind, {}, {}, model.classes, vocabulary)

    def _path_of(self, file: PackFile, is_suspect: bool = False) -> Path:  # noqa: ARG002 - it was just checked
        return self._folder / file.name


def is_model(path: Path) -> bool:
    """True if this is the folder of an exported model."""
    return (path / MANIFEST).is_file()


def read_model(folder: Path) -> ExportedModel:
    """Read the folder of a model; refuse it if a file is missing, altered, or not of this version."""
    manifest, name = read_manifest(folder), printable(str(folder))
    if ":" in manifest.recipe:
        raise Mistake(f"{name}: {manifest.recipe} is a recipe of your own; use its files with their own runtime")
    used = {JOB, *form_of(exportable(manifest.recipe), manifest.form).files(folder)} | {
        VOCABULARY for _ in folder.glob(VOCABULARY)
    }
    if unlisted := sorted(used - {file.name for file in manifest.files}):
        fault = f"{printable(unlisted[0], 80)} is not listed in {MANIFEST}, so it cannot be verified"
        raise Mistake(f"{name}: {fault}; export or copy the model again")
    return ExportedModel(folder, manifest)


def read_manifest(folder: Path) -> ModelManifest:
    """Read what the folder of a model holds; refuse it if a file is missing, altered, or not of this version."""
    name = printable(str(folder))
    try:
        manifest_file = folder / MANIFEST
        if not manifest_file.is_file():
            raise NotFound(f"{name}: not an exported model; there is no {MANIFEST}; `packtrain export` writes one")
        if manifest_file.stat().st_size > MAX_MANIFEST_BYTES:
            raise Mistake(f"{name}: {MANIFEST} is too large to be that of a model")
        manifest = decode_manifest(manifest_file.read_bytes(), name)
        for file in manifest.files:
            _check_file(folder, file, name)
    except (OSError, RuntimeError) as error:  # Python raises the second for a loop of symbolic links
        fault = error.strerror if isinstance(error, OSError) else "a loop of symbolic links"
        raise Mistake(f"{name}: cannot read the model: {fault}") from None
    return manifest


@dataclass(frozen=True)
class _Version:
    """The only field that every version of the format has."""

    format: Count


def decode_manifest(data: bytes, name: str) -> ModelManifest:
    try:
        # First alone: the rest of a newer manifest may look like anything.
        version = decode(_Version, data, f"{name}/{MANIFEST}").format
        if version > FORMAT:
            raise Mistake(f"{name}: the model was exported by a newer Packtrain (format {version}); update this one")
        return decode(ModelManifest, data, f"{name}/{MANIFEST}")
    except DamagedRecord as error:
        raise Mistake(f"{error}; export or copy the model again") from error


def _check_file(folder: Path, file: StoredFile, name: str) -> None:
    # Names come from a file that anyone may have written: none of them may lead out of the folder.
    path = folder / file.name
    if harmless(file.name) != file.name:
        raise Mistake(f"{name}: {MANIFEST} names {quoted(file.name)}, which contains a control character")
    if (
        Path(file.name).is_absolute()
        or ".." in Path(file.name).parts
        or not path.resolve().is_relative_to(folder.resolve())
    ):
        raise Mistake(f"{name}: {MANIFEST} names {quoted(file.name)}, which is outside of the model")
    if not path.is_file():
        raise Mistake(f"{name}: {file.name} is missing; export or copy the model again")
    if path.stat().st_size != file.bytes or sha256_of(path) != file.sha256:
        raise Mistake(f"{name}: {file.name} does not match its digest; export or copy the model again")
