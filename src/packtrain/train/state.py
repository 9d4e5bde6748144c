"""The state of a run at a step: the contents of a checkpoint, as safetensors and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from packtrain.errors import Mistake
from packtrain.run.checkpoint import CorruptCheckpoint, part_name, whole_name
from packtrain.store import RECORD_BYTES
from packtrain.store.records import DamagedRecord, decode
from packtrain.train.engine import Engine
from packtrain.train.numerics import LossScaleState
from packtrain.train.optimizer import load_optimizer, optimizer_tensors, refuse_unknown
from packtrain.train.progress import Progress
from packtrain.train.tensors import RowsOf, Shapes, open_tensors, own_part, placed, save_tensors, shapes_of
from packtrain.train.world import World

MODEL_FILE, EMA_FILE, OPTIMIZER_FILE = "model.safetensors", "ema.safetensors", "optimizer.safetensors"
GRADIENT_SYNC_FILE, WORKER_FILE = "gradient_sync.safetensors", "worker.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Description:
    """The origin of the weights, so that they are not loaded into another model, and the run's progress."""

    recipe: str
    pack: str
    model: dict[str, bool | int | float | str]
    versions: dict[str, str]
    progress: Progress
    loss_scale: LossScaleState | None = None


Files = dict[str, dict[str, Tensor]]


class SnapshotCopier:
    """Copies tensors in a thread, so that training continues meanwhile.

    Memory for copies is reused: the first copy into new memory takes several times as long.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copier")
        self._spare: list[Files] = []
        self._stream: torch.cuda.Stream | None = None

    def begin(
        self, files: Mapping[str, Mapping[str, Tensor]], at_once: Collection[tuple[str, str]] = ()
    ) -> Future[Files]:
        """Start to copy; until it is done, only what `at_once` names by file and tensor may change."""
        spare = self._spare.pop() if self._spare else {}
        copies: Files = {file: {} for file in files}
        pairs: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                copy = spare.get(file, {}).get(name)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    # Pinned for those of a GPU, which then are copied asynchronously.
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copies[file][name] = copy
                pairs[file, name] = copy, tensor.detach()
        for key in at_once:
            copy, tensor = pairs.pop(key)
            copy.copy_(tensor)
        device = next((tensor.device for _, tensor in pairs.values() if tensor.is_cuda), None)
        # Work that is queued on a GPU by now may still write what is copied.
        queued = None if device is None else torch.cuda.current_stream(device).record_event()
        return self._thread.submit(self._copy_after, copies, list(pairs.values()), queued)

    def _copy_after(self, copies: Files, pairs: list[tuple[Tensor, Tensor]], queued: torch.cuda.Event | None) -> Files:
        if queued is None:
            for copy, tensor in pairs:
                copy.copy_(tensor)
            return copies
        # On a stream of its own, so that the copy runs beside the next step instead of before it; always the same, for
        # torch has few and would soon give one that others use.
        if self._stream is None:
            self._stream = torch.cuda.Stream(queued.device)
        self._stream.wait_event(queued)
        with torch.cuda.stream(self._stream):
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return copies

    def give_back(self, copies: Future[Files]) -> None:
        """Return the memory of copies that nobody needs anymore."""
        self._spare.append(copies.result())

    def close(self) -> None:
        self._thread.shutdown(wait=False)


@dataclass(frozen=True)
class SnapshotPart:
    """One rank's part of a checkpoint, whose name all of them know; `rows` by file and tensor."""

    checkpoint: str
    rank: int
    rows: Mapping[str, RowsOf]


@dataclass(frozen=True)
class Snapshot:
    """Everything as it was between two steps, or one rank's part of it; `tensors` may still be on their way."""

    description: Description
    tensors: Future[Files]
    rank_part: SnapshotPart | None = None

    @property
    def step(self) -> int:
        return self.description.progress.step

    def write(self, directory: Path) -> dict[str, Path]:
        files: dict[str, Path] = {}
        if self.rank_part is None or self.rank_part.rank == 0:
            files[STATE_FILE] = directory / STATE_FILE
            files[STATE_FILE].write_text(json.dumps(asdict(self.description), indent=1), "utf-8")
        # Waits for the copy, in the committer's thread: the training loop does not.
        for name, tensors in self.tensors.result().items():
            files[name] = directory / name
            save_tensors(files[name], tensors, {} if self.rank_part is None else self.rank_part.rows[name])
        return files


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "packtrain": version("packtrain"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def take(
    engine: Engine, description: Description, world: World, copier: SnapshotCopier, checkpoint: str = ""
) -> Snapshot | None:
    """Start a copy of everything on the first rank, or of each rank's part for the checkpoint of that name. Collective.

    The copy runs while the next step computes its gradients, which changes nothing but the statistics of norm layers:
    those are copied immediately, and the engine's `before_update` waits for the rest.
    """
    sync, model = engine.gradient_sync, engine.model
    files: Files = {MODEL_FILE: {**model.state_dict(), **sync.common_weights()}}
    if engine.ema is not None:
        files[EMA_FILE] = engine.ema.model.state_dict()
    # Every rank takes part in gathering these, although only the first one keeps the result.
    states = sync.states_of_ranks(optimizer_tensors(engine.optimizer, model))
    files |= {_file_of(rank, OPTIMIZER_FILE): tensors for rank, tensors in enumerate(states)}
    if rank_state := sync.rank_state():
        states = sync.states_of_ranks(rank_state)
        files |= {_file_of(rank, WORKER_FILE): tensors for rank, tensors in enumerate(states)}
    if state := sync.state():
        files[GRADIENT_SYNC_FILE] = state
    # Whatever is not a parameter is a buffer, which the next forward pass may already change.
    learned = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    statistics = {(MODEL_FILE, name) for name in files[MODEL_FILE].keys() - learned}
    if not sync.saves_parts:
        return Snapshot(description, copier.begin(files, statistics)) if world.is_first else None
    names = {file: part_name(file, world.rank, world.num_ranks) for file in files}
    own_parts = {names[file]: own_part(tensors, world.is_first) for file, tensors in files.items()}
    at_once = {(names[file], name) for file, name in statistics if world.is_first}
    copies = copier.begin({name: tensors for name, (tensors, _) in own_parts.items()}, at_once)
    return Snapshot(
        description, copies, SnapshotPart(checkpoint, world.rank, {name: rows for name, (_, rows) in own_parts.items()})
    )


def restore(engine: Engine, directory: Path, expected: Description, rank: int) -> Progress:
    """Load a fetched checkpoint into the engine and return its progress."""
    description = _expected_description(directory, expected)
    load_weights(engine.model, directory, MODEL_FILE)
    if engine.ema is not None:
        load_weights(engine.ema.model, directory, EMA_FILE)
    # Ranks that update locally each saved a state. If there are now more ranks, some of them share one.
    names = {whole_name(path.name) for path in directory.glob("*.safetensors")}
    states = sum(name.startswith("optimizer") for name in names)
    saved = rank % max(1, states)
    load_optimizer(engine.optimizer, engine.model, open_tensors(directory, _file_of(saved, OPTIMIZER_FILE)))
    exchanged, rank_state = (
        {name: tensor.read() for name, tensor in open_tensors(directory, file).items()} if file in names else {}
        for file in (GRADIENT_SYNC_FILE, _file_of(saved, WORKER_FILE))
    )
    engine.gradient_sync.restore(exchanged)
    engine.gradient_sync.restore_rank_state(rank_state)
    engine.precision.scale.restore(description.loss_scale)
    return description.progress


def check(engine: Engine, directory: Path, expected: Description) -> None:
    """Raise if a fetched checkpoint does not fit the engine; of the tensors only names and shapes are read."""
    _expected_description(directory, expected)
    weights = [MODEL_FILE] if engine.ema is None else [MODEL_FILE, EMA_FILE]
    names = {whole_name(path.name) for path in directory.glob("*.safetensors")}
    shapes = {name: shapes_of(open_tensors(directory, name)) for name in sorted({OPTIMIZER_FILE, *weights} | names)}
    expected_shapes = shapes_of(engine.model.state_dict())
    for name in weights:
        _require_fit(name, expected_shapes, shapes[name])
    refuse_unknown(engine.model, shapes[OPTIMIZER_FILE])


def _expected_description(directory: Path, expected: Description) -> Description:
    description = read_description(directory)
    # Versions are recorded for people, and not compared.
    for trait in ("recipe", "pack", "model"):
        saved, current = getattr(description, trait), getattr(expected, trait)
        if saved != current:
            raise Mistake(f"the checkpoint's {trait} is {saved!r}, but the run's is {current!r}")
    return description


def _file_of(rank: int, file: str) -> str:
    """Ranks that update locally each have a state of their own."""
    return file if rank == 0 else file.replace(".", f"-{rank}.")


def read_description(directory: Path) -> Description:
    try:
        with (directory / STATE_FILE).open("rb") as file:
            data = file.read(RECORD_BYTES)  # a longer one is cut, and so invalid
        return decode(Description, data, STATE_FILE)
    except (OSError, DamagedRecord) as error:
        raise CorruptCheckpoint(f"the checkpoint's {STATE_FILE} cannot be read") from error


def load_weights(model: nn.Module, directory: Path, name: str) -> None:
    """Load a file of a checkpoint, or the parts of it, into a model that may be sharded."""
    state, stored = model.state_dict(), open_tensors(directory, name)
    _require_fit(name, shapes_of(state), shapes_of(stored))
    with torch.no_grad():
        for key, tensor in state.items():
            tensor.copy_(placed(stored[key], tensor))


def _require_fit(file: str, model: Shapes, stored: Shapes) -> None:
    for name in sorted(model.keys() ^ stored.keys()):
        raise CorruptCheckpoint(
            f"{file} does not fit the model: {name} is only in the {'model' if name in model else 'file'}"
        )
    for name in model:
        if model[name] != stored[name]:
            raise CorruptCheckpoint(f"{file} does not fit the model: {name} is {stored[name]}, expected {model[name]}")
