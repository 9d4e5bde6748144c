"""Tests that every recipe must pass: a new recipe is a line in RECIPES and one in recipes/small.py."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from pack.pictures import photo, saved
from packtrain.data.order import Ids, share
from packtrain.recipes import RECIPES, Batch, Decoding, EvaluationRequest, Measurement, Recipe
from packtrain.recipes.transformer import Attention
from packtrain.run.parent import WEIGHTS_FILE, record_of
from packtrain.store.records import encode
from packtrain.train.ddp import DdpSettings, DdpSync
from packtrain.train.engine import Engine
from packtrain.train.gradient_sync import SyncedModel
from packtrain.train.progress import Progress
from packtrain.train.weights import parent_weights
from packtrain.train.world import World
from parts.host_reads import HostReads
from recipes.learn import learn
from recipes.small import SMALL

MakeRecipe = Callable[..., Recipe]


def test_every_recipe_has_a_small_job() -> None:
    assert SMALL.keys() == RECIPES.keys()


@pytest.fixture(scope="module", params=RECIPES)
def any_recipe(
    request: pytest.FixtureRequest, make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    return SMALL[request.param](make_recipe, tmp_path_factory.mktemp(request.param))


def everything(recipe: Recipe, split: str = "train") -> Ids:
    return np.arange(recipe.count(split))


def model_of(recipe: Recipe) -> nn.Module:
    torch.manual_seed(1)
    model = recipe.build_model()
    recipe.prepare(0, model)
    return model.eval()


def tensors(recipe: Recipe, ids: Ids) -> Batch:
    return {name: torch.from_numpy(rows) for name, rows in recipe.batch(ids, 0).items()}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", RECIPES)
def test_importing_a_recipe_does_not_import_torch(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {RECIPES[name].partition(':')[0]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_samples_have_costs_likeness_and_lengths(any_recipe: Recipe) -> None:
    count = any_recipe.count("train")
    assert count > 0
    assert any_recipe.count("nothing") == 0
    for numbers in (any_recipe.costs, any_recipe.sort_keys, any_recipe.lengths):
        assert numbers.shape == (count,)
    assert any_recipe.costs.min() > 0
    assert any_recipe.width > 0


def test_a_batch_is_the_same_every_time(any_recipe: Recipe) -> None:
    ids = everything(any_recipe)[::2]
    first, again = any_recipe.batch(ids, 3), any_recipe.batch(ids, 3)
    assert first.keys() == again.keys()
    for name, rows in first.items():
        assert np.array_equal(rows, again[name])


def test_losses_of_all_ranks_add_up_to_that_of_the_batch(any_recipe: Recipe) -> None:
    model = model_of(any_recipe)
    ids = everything(any_recipe)
    with torch.no_grad():
        whole = any_recipe.loss(model, tensors(any_recipe, ids)).item()
        for num_ranks in (2, 3, len(ids) + 2):
            shares = [share(ids, rank, num_ranks) for rank in range(num_ranks)]
            added = sum(any_recipe.loss(model, tensors(any_recipe, part)).item() for part in shares)
            assert added == pytest.approx(whole, rel=1e-4)


def test_a_rank_without_samples_has_zero_loss_and_zero_gradients(any_recipe: Recipe) -> None:
    """The gradient sync waits for every weight of every rank, also of a rank without samples."""
    model = model_of(any_recipe).train()
    loss = any_recipe.loss(model, tensors(any_recipe, everything(any_recipe)[:0]))
    loss.backward()
    assert loss.item() == 0.0
    learnt = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
    assert [name for name, weights in learnt.items() if weights.grad is None or weights.grad.any()] == []


def test_scores_say_of_how_many_samples_they_are(any_recipe: Recipe) -> None:
    few, some = np.arange(2), np.arange(3)
    part = any_recipe.measure(model_of(any_recipe).eval(), EvaluationRequest("valid", some, few, 2, 0))
    scores = any_recipe.score("valid", few, [part])
    assert scores.counts.keys() == scores.values.keys()
    assert scores.counts["loss"] == 3
    assert set(scores.counts.values()) <= {1, 2, 3}


def test_no_loss_makes_the_host_wait_for_the_device(any_recipe: Recipe) -> None:
    model, batch = model_of(any_recipe).train(), tensors(any_recipe, everything(any_recipe))
    any_recipe.loss(model, batch)  # the first one puts constants on the device
    with HostReads(batch[name] for name in any_recipe.on_host) as reads:
        any_recipe.loss(model, batch).backward()
    assert reads.found == []


# As the documentation of torch.use_deterministic_algorithms has them; cumsum only of numbers that are not whole.
REFUSED = re.compile(
    r"avg_pool3d_backward|_?adaptive_(avg|max)_pool[23]d_backward|fractional_max_pool[23]d_backward|max_unpool[23]d"
    r"|upsample_(linear|bilinear|bicubic|trilinear).*_backward|reflection_pad[123]d_backward|nll_loss2d_forward"
    r"|_?(cudnn_)?ctc_loss_backward|_embedding_bag_dense_backward|put_?|histc|bincount|median|kthvalue"
    r"|grid_sampler_[23]d_backward|cumsum_?|scatter_reduce_?"
)


class Operations(TorchDispatchMode):
    """Records the operations on numbers that are not whole, also those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in args):
            self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    @property
    def refused(self) -> list[str]:
        return sorted(name for name in self.names if REFUSED.fullmatch(name))


def test_every_operation_has_a_deterministic_kernel_on_gpus(any_recipe: Recipe) -> None:
    """See train/numerics.py: torch would refuse others in the middle of a run."""
    model = model_of(any_recipe).train()
    with Operations() as found:
        any_recipe.loss(model, tensors(any_recipe, everything(any_recipe))).backward()
        few = everything(any_recipe, "valid")[:2]
        any_recipe.measure(model.eval(), EvaluationRequest("valid", few, few, 2, 0))
    assert "addmm" in found.names or "mm" in found.names
    assert found.refused == []
    with found:
        torch.ones(3).cumsum(0)
    assert found.refused == ["cumsum"]


def test_every_sample_of_a_split_is_measured_by_one_worker(any_recipe: Recipe) -> None:
    count = any_recipe.count("valid")
    for num_ranks in (1, 2, 5, count + 3):
        parts = any_recipe.divide("valid", num_ranks)
        assert len(parts) == num_ranks
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))


def test_scores_do_not_depend_on_the_number_of_workers(any_recipe: Recipe) -> None:
    model = model_of(any_recipe)
    decoded = everything(any_recipe, "valid")
    found = []
    for num_ranks in (1, 2, 3):
        outputs = np.array_split(decoded, num_ranks)
        parts = [
            any_recipe.measure(model, EvaluationRequest("valid", ids, outputs[rank], 2, 0))
            for rank, ids in enumerate(any_recipe.divide("valid", num_ranks))
        ]
        found.append(any_recipe.score("valid", decoded, parts).values)
    assert "loss" in found[0]
    assert any_recipe.best_metric in found[0]
    for scores in found[1:]:
        assert scores == pytest.approx(found[0], rel=1e-4)


def test_an_evaluation_works_in_half_precision(any_recipe: Recipe) -> None:
    model, ids = model_of(any_recipe), everything(any_recipe, "valid")
    plain = any_recipe.score("valid", ids, [any_recipe.measure(model, EvaluationRequest("valid", ids, ids, 2, 0))])
    with torch.autocast("cpu", torch.float16):
        half = any_recipe.score("valid", ids, [any_recipe.measure(model, EvaluationRequest("valid", ids, ids, 2, 0))])
    assert half.values["loss"] == pytest.approx(plain.values["loss"], rel=0.02)
    assert half.values.keys() == plain.values.keys()


def test_an_evaluation_can_end_before_any_batch(any_recipe: Recipe) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    ids = everything(any_recipe, "valid")
    with pytest.raises(KeyboardInterrupt):
        any_recipe.measure(model_of(any_recipe), EvaluationRequest("valid", ids, ids, on_batch=stop))


@pytest.mark.usefixtures("training")
def test_training_lowers_the_loss(any_recipe: Recipe) -> None:
    ids = everything(any_recipe, "valid")

    def loss(model: nn.Module) -> float:
        part = any_recipe.measure(model, EvaluationRequest("valid", ids, ids[:0], 1, 0))
        return any_recipe.score("valid", ids[:0], [part]).values["loss"]

    before = loss(model_of(any_recipe))
    after = loss(learn(any_recipe, 40).eval())
    assert math.isfinite(before)
    assert after < 0.95 * before


def test_every_input_has_a_prediction(any_recipe: Recipe, tmp_path: Path) -> None:
    inputs = ["good morning", "hello", "hello"]
    if any_recipe.inputs == "images":
        for number, name in enumerate(inputs):
            (tmp_path / name).write_bytes(saved(photo(50 + number, 40), "PNG"))
        inputs = [str(tmp_path / name) for name in inputs]
    model = model_of(any_recipe)
    found = any_recipe.predict(model, inputs, Decoding(beam=2))
    assert len(found) == 3
    assert any_recipe.predict(model, [], Decoding(beam=2)) == []
    assert found[1].text == any_recipe.predict(model, inputs[1:2], Decoding(beam=2))[0].text


def test_scores_are_functions_of_what_each_sample_contributes(any_recipe: Recipe) -> None:
    ids = everything(any_recipe, "valid")[::-1]
    request = EvaluationRequest("valid", ids, ids, beam=2, by_sample=True)
    measured = any_recipe.measure(model_of(any_recipe), request)
    scores = any_recipe.score("valid", ids, [measured])
    statistics = any_recipe.statistics("valid", ids, measured)
    assert any_recipe.best_metric in statistics
    assert {len(one.rows) for one in statistics.values()} == {len(ids)}
    without = {name for name in scores.values if name.startswith("distinct")}
    assert scores.values.keys() - statistics.keys() == without
    for name in scores.values.keys() - without:
        assert statistics[name].value == pytest.approx(scores.values[name]), name


def test_samples_are_measured_one_by_one_only_if_that_is_asked_for(any_recipe: Recipe) -> None:
    ids, model = everything(any_recipe, "valid"), model_of(any_recipe)
    plain = any_recipe.measure(model, EvaluationRequest("valid", ids, ids[:0]))
    assert plain.rows == {}
    rows = any_recipe.measure(model, EvaluationRequest("valid", ids, ids[:0], by_sample=True)).rows
    alone = [any_recipe.measure(model, EvaluationRequest("valid", ids[one : one + 1], ids[:0])) for one in ids]
    for name, values in rows.items():
        assert sum(values) == pytest.approx(plain.sums[name], rel=1e-5)
        assert values == pytest.approx([part.sums[name] for part in alone], rel=1e-4, abs=1e-5)


def test_by_default_a_recipe_knows_only_the_predictions_of_its_samples(any_recipe: Recipe) -> None:
    def records(*outputs: str) -> list[dict[str, object]]:
        return list(Recipe.sample_records(any_recipe, "valid", np.arange(2), Measurement({}, list(outputs))))

    assert records("a", "b") == [{"prediction": "a"}, {"prediction": "b"}]
    assert records() == [{}, {}]


def test_tensors_with_a_row_for_each_piece_or_class_are_named(any_recipe: Recipe) -> None:
    """Otherwise a run that starts from another's weights could take rows of other pieces for its own."""
    classes = len(any_recipe.pack.manifest.classes)
    counts = {"pieces": -(-len(any_recipe.pack.vocabulary) // 8) * 8} if not classes else {"classes": classes}
    state = any_recipe.build_model().state_dict()
    for kind, count in counts.items():
        sized = {name for name, tensor in state.items() if tensor.ndim and tensor.shape[0] == count}
        assert sized == {name for name, of in any_recipe.rows.items() if of == kind}
    assert set(any_recipe.rows.values()) == counts.keys()


def test_weights_of_a_run_are_taken_by_their_names(any_recipe: Recipe, tmp_path: Path) -> None:
    """Of a run with the classes in another order, one tensor less and another more."""
    classes = any_recipe.pack.manifest.classes
    engine = Engine(any_recipe, any_recipe.job.train, World())
    *given, lacking = [name for name, one in engine.model.named_parameters() if name not in any_recipe.rows]
    torch.manual_seed(8)
    theirs = {name: torch.rand(one.shape) for name, one in engine.model.state_dict().items() if name != lacking}
    save_file({**theirs, "more": torch.zeros(1)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / "parent.json").write_bytes(encode(record_of(tmp_path, classes[::-1])))
    taken = parent_weights(any_recipe, engine, tmp_path)
    assert (taken.fit.anew, taken.fit.left_out) == ((lacking,), ("more",))
    before = engine.model.state_dict()[lacking].clone()
    engine.begin_with(taken.tensors)
    after = engine.model.state_dict()
    assert all(torch.equal(after[name], theirs[name]) for name in given)
    for name, kind in any_recipe.rows.items():
        assert torch.equal(after[name], theirs[name].flip(0) if kind == "classes" else theirs[name])
    assert torch.equal(after[lacking], before)


def test_scores_with_a_limit_stay_below_it(any_recipe: Recipe) -> None:
    ids = everything(any_recipe, "valid")
    measured = any_recipe.measure(model_of(any_recipe), EvaluationRequest("valid", ids, ids))
    values = any_recipe.score("valid", ids, [measured]).values
    assert all(0 <= values[name] <= limit for name, limit in any_recipe.limits.items() if name in values)


# Blocks that are compiled, or recomputed.


def engine_with(recipe: Recipe, **changes: Any) -> Engine:
    """Return an engine whose model has dropout everywhere, in a group of one worker with ddp."""
    settings = recipe.job.train.model_copy(update={"micro_batch": None, **changes})
    engine = Engine(recipe, settings, World())
    for module in engine.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        if isinstance(module, Attention):
            module.dropout = 0.2
    engine.gradient_sync = DdpSync(DdpSettings(), SyncedModel(engine.model, World(), engine.clock, torch.float32))
    return engine


def steps(engine: Engine, recipe: Recipe) -> list[Tensor]:
    """Make steps of two micro-batches, one of them empty; return their losses, and the state of the model."""
    ids, losses = everything(recipe), []
    recipe.prepare(0, engine.model)
    for number, batches in enumerate([[ids[:4], ids[3:7]], [ids[1:5], ids[:0]], [ids[2:6], ids[:4]]]):
        cost = int(sum(recipe.costs[part].sum() for part in batches))
        made = engine.step(Progress(number), [tensors(recipe, part) for part in batches], cost, cost)
        losses.append(made.loss)
    return [*losses, *engine.model.state_dict().values()]


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_changes_no_bit(any_recipe: Recipe, precision: str) -> None:
    plain = engine_with(any_recipe, precision=precision)
    frugal = engine_with(any_recipe, precision=precision, activation_checkpointing=True)
    assert plain.model.state_dict().keys() == frugal.model.state_dict().keys()
    for one, other in zip(steps(plain, any_recipe), steps(frugal, any_recipe), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("group_of_one")
def test_activation_checkpointing_saves_less_for_the_backward_pass(any_recipe: Recipe) -> None:
    def saved_bytes(**changes: Any) -> int:
        saved: dict[int, Tensor] = {}
        engine = engine_with(any_recipe, **changes)
        known = {one.data_ptr() for one in engine.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = any_recipe.loss(engine.model.train(), tensors(any_recipe, everything(any_recipe)[:6]))
        assert loss.requires_grad
        return sum(one.untyped_storage().nbytes() for place, one in saved.items() if place not in known)

    assert saved_bytes(activation_checkpointing=True) < 0.8 * saved_bytes()


@pytest.mark.usefixtures("training")
@pytest.mark.usefixtures("group_of_one", "compiler")
def test_blocks_are_compiled_once_for_all_batches_and_evaluations_do_not_compile(any_recipe: Recipe) -> None:
    counters.clear()
    compiled = engine_with(any_recipe, compile=True, compile_backend="aot_eager", activation_checkpointing=True)
    losses = steps(compiled, any_recipe)[:3]
    # Compiled, the gradients that meet in a block are added in another order.
    assert torch.allclose(torch.stack(losses), torch.stack(steps(engine_with(any_recipe), any_recipe)[:3]), rtol=1e-6)
    made = counters["stats"]["unique_graphs"]
    assert made <= len({repr(block) for block in any_recipe.blocks(compiled.model)})
    ids = everything(any_recipe, "valid")
    any_recipe.measure(compiled.evaluation_model(), EvaluationRequest("valid", ids, ids, beam=2))
    assert counters["stats"]["unique_graphs"] == made
    assert not counters["graph_break"]
    assert compiled.model.state_dict().keys() == any_recipe.build_model().state_dict().keys()
