from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packtrain.data.loader import Position
from packtrain.errors import Mistake
from packtrain.run.checkpoint import CorruptCheckpoint
from packtrain.train.engine import Engine
from packtrain.train.numerics import LossScaleState
from packtrain.train.progress import Progress
from packtrain.train.state import (
    EMA_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Description,
    Snapshot,
    SnapshotCopier,
    check,
    restore,
    take,
    versions,
)
from packtrain.train.world import World
from train.tiny import SAMPLES, Tiny, tiny_engine, tiny_job

AVERAGED = tiny_job(train={"ema": 0.9})
PROGRESS = Progress(7, 1.5, Position(1, 3), 12.5, -0.25)
DESCRIPTION = Description("translate", "pack-1", {"size": "tiny", "dropout": 0.3}, versions(), PROGRESS)


def step(engine: Engine, numbers: range) -> list[float]:
    recipe, losses = Tiny(AVERAGED), []
    for number in numbers:
        ids = torch.arange(number, number + 4).numpy() % SAMPLES
        batch = {name: torch.from_numpy(array) for name, array in recipe.batch(ids, 0).items()}
        losses.append(float(engine.step(Progress(number, 0.0), [batch], 4, 4).loss))
    return losses


def saved(directory: Path, description: Description = DESCRIPTION) -> Engine:
    engine = tiny_engine(AVERAGED)
    step(engine, range(7))
    directory.mkdir()
    taken(engine, description).write(directory)
    return engine


def taken(engine: Engine, description: Description = DESCRIPTION, copier: SnapshotCopier | None = None) -> Snapshot:
    snapshot = take(engine, description, World(), copier or SnapshotCopier())
    assert snapshot is not None
    return snapshot


def test_a_restored_state_continues_bit_for_bit(tmp_path: Path) -> None:
    straight = saved(tmp_path / "saved")
    resumed = tiny_engine(tiny_job(train={"ema": 0.9}))
    assert restore(resumed, tmp_path / "saved", DESCRIPTION, 0) == PROGRESS
    assert step(resumed, range(7, 12)) == step(straight, range(7, 12))
    for name, tensor in straight.evaluation_model().state_dict().items():
        assert torch.equal(tensor, resumed.evaluation_model().state_dict()[name]), name


def test_a_snapshot_is_consistent_although_it_is_copied_during_the_next_step() -> None:
    engine, copier, held = tiny_engine(AVERAGED), SnapshotCopier(), threading.Event()
    step(engine, range(3))
    expected = {
        name: {key: it.clone() for key, it in part.items()} for name, part in taken(engine).tensors.result().items()
    }
    copier._thread.submit(held.wait)
    snapshot = taken(engine, copier=copier)
    statistic = engine.model.get_buffer("mean").clone()

    def let_copy() -> None:
        assert not torch.equal(engine.model.get_buffer("mean"), statistic), "the next step is at work"
        held.set()
        snapshot.tensors.result()

    engine.before_update = let_copy
    step(engine, range(3, 4))
    assert held.is_set()
    for name, part in snapshot.tensors.result().items():
        for key, tensor in part.items():
            assert torch.equal(tensor, expected[name][key]), f"{name} {key}"


def test_a_state_consists_of_safetensors_and_json_only(tmp_path: Path) -> None:
    files = taken(saved(tmp_path / "saved")).write(tmp_path)
    assert files.keys() == {STATE_FILE, MODEL_FILE, OPTIMIZER_FILE, EMA_FILE}
    assert json.loads(files[STATE_FILE].read_text())["progress"]["step"] == 7
    without = taken(tiny_engine())
    assert EMA_FILE not in without.tensors.result()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"recipe": "classify"}, "the checkpoint's recipe is 'translate', but the run's is 'classify'"),
        ({"pack": "pack-2"}, "the checkpoint's pack is 'pack-1', but the run's is 'pack-2'"),
        ({"model": {"size": "base"}}, "the checkpoint's model is .*, but the run's is {'size': 'base'}"),
    ],
)
def test_a_state_of_another_recipe_pack_or_model_is_refused(
    tmp_path: Path, change: dict[str, object], line: str
) -> None:
    saved(tmp_path / "saved")
    engine = tiny_engine(AVERAGED)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    expected = replace(DESCRIPTION, **change)  # type: ignore[arg-type]
    with pytest.raises(Mistake, match=line):
        restore(engine, tmp_path / "saved", expected, 0)
    with pytest.raises(Mistake, match=line):
        check(engine, tmp_path / "saved", expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.model.state_dict().items())


def test_versions_and_progress_may_differ(tmp_path: Path) -> None:
    saved(tmp_path / "saved", replace(DESCRIPTION, versions={"torch": "1.0"}))
    expected = replace(DESCRIPTION, progress=Progress())
    assert restore(tiny_engine(AVERAGED), tmp_path / "saved", expected, 0).step == 7


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    engine = tiny_engine(AVERAGED)
    engine.model.out = torch.nn.Linear(5, 1)
    line = rf"^{MODEL_FILE} does not fit the model: out\.weight is \(1, 4\), expected \(1, 5\)$"
    with pytest.raises(CorruptCheckpoint, match=line):
        restore(engine, tmp_path / "saved", DESCRIPTION, 0)
    with pytest.raises(CorruptCheckpoint, match=line):
        check(engine, tmp_path / "saved", DESCRIPTION)


def test_missing_or_extra_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    engine = tiny_engine(AVERAGED)
    engine.model.more = torch.nn.Linear(1, 1, bias=False)
    with pytest.raises(CorruptCheckpoint, match=r"more\.weight is only in the model$"):
        check(engine, tmp_path / "saved", DESCRIPTION)


@pytest.mark.parametrize("name", [STATE_FILE, MODEL_FILE, OPTIMIZER_FILE, EMA_FILE])
@pytest.mark.parametrize("damage", ["missing", "garbage", "cut off", "pickle"])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    saved(tmp_path / "saved")
    path = tmp_path / "saved" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "pickle":
        torch.save({"weight": torch.zeros(1)}, path)
    elif damage != "missing":
        path.write_bytes(b"\xff" * 20 if damage == "garbage" else data[: len(data) // 2])
    engine = tiny_engine(AVERAGED)
    with pytest.raises(CorruptCheckpoint, match=name):
        restore(engine, tmp_path / "saved", DESCRIPTION, 0)
    with pytest.raises(CorruptCheckpoint, match=name):
        check(engine, tmp_path / "saved", DESCRIPTION)


def test_a_saved_state_passes_the_check(tmp_path: Path) -> None:
    check(saved(tmp_path / "saved"), tmp_path / "saved", DESCRIPTION)


def test_the_loss_scale_of_fp16_survives_a_restart(tmp_path: Path) -> None:
    job = tiny_job(train={"precision": "fp16"})
    engine = tiny_engine(job)
    step(engine, range(1))
    taken(engine, replace(DESCRIPTION, loss_scale=LossScaleState(1024.0, 17))).write(tmp_path)
    resumed = tiny_engine(job)
    restore(resumed, tmp_path, DESCRIPTION, 0)
    assert (resumed.precision.scale.value, resumed.precision.scale.clean_steps) == (1024.0, 17)
    other = tiny_engine()
    restore(other, tmp_path, DESCRIPTION, 0)
    assert other.precision.scale.value == 1.0


def test_a_state_of_local_steps_is_refused_by_ddp(tmp_path: Path) -> None:
    local = tiny_engine(tiny_job(train={"exchange": {"local": {"every": "2 steps"}}}))
    step(local, range(2))
    taken(local).write(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="belongs to a run with another kind of exchange"):
        restore(tiny_engine(), tmp_path, DESCRIPTION, 0)


def test_tensors_copied_at_once_may_change_immediately() -> None:
    statistic, weight = torch.zeros(3), torch.ones(3)
    copies = SnapshotCopier().begin({"model": {"statistic": statistic, "weight": weight}}, {("model", "statistic")})
    statistic += 1
    copied = copies.result()["model"]
    weight += 1
    assert copied["statistic"].tolist() == [0, 0, 0]
    assert copied["weight"].tolist() == [1, 1, 1]


def test_only_returned_memory_is_reused() -> None:
    copier, weights = SnapshotCopier(), {"model": {"weight": torch.arange(4.0)}}
    first = copier.begin(weights)
    copier.give_back(first)
    weights["model"]["weight"] += 1
    second, third = copier.begin(weights).result(), copier.begin(weights).result()
    assert second["model"]["weight"] is first.result()["model"]["weight"]
    assert third["model"]["weight"] is not second["model"]["weight"]
    assert second["model"]["weight"].tolist() == [1, 2, 3, 4]


def test_a_tensor_of_another_shape_gets_new_memory() -> None:
    copier = SnapshotCopier()
    copier.give_back(copier.begin({"model": {"weight": torch.zeros(4)}}))
    files = {"model": {"weight": torch.ones(5), "bias": torch.ones(1)}, "other": {"x": torch.ones(2)}}
    copied = copier.begin(files).result()
    assert {name: len(it) for part in copied.values() for name, it in part.items()} == {"weight": 5, "bias": 1, "x": 2}


def test_copies_keep_their_dtype_and_need_no_gradient() -> None:
    tensors = {
        "half": torch.ones(2, dtype=torch.float16),
        "count": torch.tensor(3),
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    copied = SnapshotCopier().begin({"model": tensors}).result()["model"]
    assert [tensor.dtype for tensor in copied.values()] == [torch.float16, torch.int64, torch.float32]
    assert not copied["weight"].requires_grad
