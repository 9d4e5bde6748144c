from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from packtrain.data.order import Ids, block, share
from packtrain.errors import Mistake
from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes import Decoding, EvaluationRequest, Measurement, Scores
from packtrain.recipes.caption import Caption
from packtrain.recipes.caption.model import Captioner
from packtrain.recipes.caption.scores import Cider
from recipes.captioned import THINGS, TRAIN, MakeRecipe, captions_of, make_caption, model_of, tensors, write_set

EVERYTHING = np.arange(len(THINGS))


@pytest.fixture(scope="module")
def recipe(make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Caption:
    return make_caption(make_recipe, tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def model(recipe: Caption) -> Captioner:
    return model_of(recipe)


# The batch.


def test_a_batch_has_pictures_and_one_caption_of_each(recipe: Caption) -> None:
    batch = recipe.batch(np.array([5, 0]), 0)
    assert batch["pixels"].shape == (2, 32, 32, 3)
    assert batch["pixels"].dtype == np.uint8
    assert set(batch["tokens"][:, 0].tolist()) == {BOS}
    said = recipe.pack.vocabulary.decode(batch["tokens"].tolist())
    assert said[0] in captions_of(*THINGS[5])
    assert said[1] == captions_of(*THINGS[0])[0]
    for row in batch["tokens"].tolist():
        assert [token for token in row if token != PAD][-1] == EOS


def test_which_caption_is_drawn_goes_by_the_epoch_and_the_sample_alone(recipe: Caption) -> None:
    def drawn(ids: Ids, epoch: int) -> list[str]:
        return recipe.pack.vocabulary.decode(recipe.batch(ids, epoch)["tokens"].tolist())

    two = np.array([1, 3, 5, 7])  # those with two captions
    assert drawn(two[::-1], 3) == drawn(two, 3)[::-1]
    seen = [set(captions) for captions in zip(*(drawn(two, epoch) for epoch in range(12)), strict=True)]
    assert seen == [set(captions_of(*THINGS[sample])) for sample in two]
    assert len({tuple(drawn(two, epoch)) for epoch in range(6)}) > 1


def test_a_picture_that_comes_again_in_an_epoch_may_have_another_caption_and_shows_another_part(
    recipe: Caption,
) -> None:
    two, turns = np.repeat([1, 3, 5, 7], 6), np.tile(np.arange(6), 4)  # those with two captions, six times each
    batch = recipe.batch(two, 0, turns)
    said = np.array(recipe.pack.vocabulary.decode(batch["tokens"].tolist())).reshape(4, 6)
    assert [set(captions) for captions in said.tolist()] == [set(captions_of(*THINGS[sample])) for sample in two[::6]]
    assert len({picture.tobytes() for picture in batch["pixels"]}) > 12
    first = recipe.batch(two[::6], 0)
    assert said[:, 0].tolist() == recipe.pack.vocabulary.decode(first["tokens"].tolist())
    assert np.array_equal(batch["pixels"][::6], first["pixels"])


def test_pictures_are_not_mirrored(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """What is left of a mirrored picture would be right of it in its caption."""
    recipe = make_caption(make_recipe, tmp_path, train={**TRAIN, "min_scale": 1.0, "size": 36})
    first = recipe.batch(EVERYTHING[:1], 0)["pixels"].astype(int)
    for epoch in range(1, 8):
        assert abs(recipe.batch(EVERYTHING[:1], epoch)["pixels"].astype(int) - first).mean() < 40
    left, right = first[0, 12:24, 8:14], first[0, 12:24, -8:-2]
    assert left[..., 1].mean() + 100 < right[..., 1].mean()  # the square is on the left


def test_a_sample_costs_one_and_all_are_alike(recipe: Caption) -> None:
    assert recipe.costs.tolist() == [1] * len(THINGS)
    assert set(recipe.likeness.tolist()) == {0}
    assert recipe.lengths.tolist() == [1] * len(THINGS)
    assert [recipe.count(split) for split in ("train", "valid", "test")] == [8, 5, 0]


def test_copies_are_used_where_they_are_large_enough(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    paths = write_set(tmp_path, THINGS)
    data = {"train": [{"coco": paths}], "valid": [{"coco": paths}], "vocabulary": 300, "sizes": [20]}
    small, large = (
        make_caption(make_recipe, tmp_path / str(size), data=data, train={**TRAIN, "size": size}) for size in (16, 32)
    )
    assert small._copies._name("train", 16) == "train@20"
    assert large._copies._name("train", 32) == "train"
    with small.fetching(EVERYTHING, 0):
        assert small.batch(EVERYTHING, 0)["pixels"].shape == (8, 16, 16, 3)


# The loss.


def gradients(recipe: Caption, model: nn.Module, shares: list[Ids]) -> tuple[float, list[Tensor]]:
    """The losses and gradients of all shares, added up."""
    model.zero_grad()
    total = 0.0
    for ids in shares:
        loss = recipe.loss(model, tensors(recipe, ids))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, [torch.zeros(()) if one.grad is None else one.grad.clone() for one in model.parameters()]


@pytest.mark.parametrize("num_ranks", [2, 3, len(THINGS) + 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shares_of_all_ranks_add_up_to_the_whole(
    make_recipe: MakeRecipe, tmp_path: Path, num_ranks: int, smoothing: float
) -> None:
    """But for the statistics of norms that learn, which are of each rank's part: here they stand still."""
    recipe = make_caption(make_recipe, tmp_path, train={**TRAIN, "label_smoothing": smoothing})
    model = model_of(recipe)
    whole_loss, whole = gradients(recipe, model, [EVERYTHING])
    loss, added = gradients(recipe, model, [share(EVERYTHING, rank, num_ranks) for rank in range(num_ranks)])
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for one, other in zip(added, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_the_loss_is_that_of_real_tokens_and_of_places_that_were_not_looked_at(
    recipe: Caption, model: Captioner
) -> None:
    batch = tensors(recipe, EVERYTHING)
    tokens = batch["tokens"]
    expected = 0.0
    for row in range(len(tokens)):
        seen = model.see(batch["pixels"][row : row + 1])
        state, places = model.start(seen), torch.zeros(1, seen.features.shape[1])
        for before, after in zip(tokens[row], tokens[row, 1:], strict=False):
            if after == PAD:
                break
            state, looked = model._advance(model.embedding(before[None]), state, seen)
            places += looked
            expected -= float(model._logits(state).log_softmax(-1)[0, after].detach()) / recipe._mean_tokens
        expected += float((1 - places).square().mean().detach())
    assert recipe.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_the_mean_length_is_of_all_captions_with_their_end(recipe: Caption) -> None:
    captions = [text for number, thing in enumerate(THINGS) for text in captions_of(*thing)[: 1 + number % 2]]
    lengths = [len(row) + 1 for row in recipe.pack.vocabulary.encode(captions)]
    assert recipe._mean_tokens == pytest.approx(sum(lengths) / len(lengths))


def test_a_share_without_samples_costs_nothing_and_has_gradients_of_zero(recipe: Caption) -> None:
    model = model_of(recipe).train()
    loss = recipe.loss(model, tensors(recipe, EVERYTHING[:0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert all(one.grad is not None and float(one.grad.abs().sum()) == 0.0 for one in model.parameters())


# Evaluation.


def measured(recipe: Caption, model: nn.Module, parts: int, beam: int = 1) -> Scores:
    ids = np.arange(recipe.count("valid"))
    decoded = ids[::2]
    found = [
        recipe.measure(
            model,
            EvaluationRequest(
                "valid", ids[list(block(len(ids), part, parts))], decoded[list(block(len(decoded), part, parts))], beam
            ),
        )
        for part in range(parts)
    ]
    return recipe.score("valid", decoded, found)


@pytest.mark.parametrize("parts", [2, 7])
def test_scores_do_not_depend_on_how_many_measured(recipe: Caption, model: Captioner, parts: int) -> None:
    whole, divided = measured(recipe, model, 1, 3), measured(recipe, model, parts, 3)
    assert divided.values == pytest.approx(whole.values, rel=1e-5)
    assert divided.samples == whole.samples


def test_what_is_right_scores_100_and_every_source_has_scores_of_its_own(recipe: Caption) -> None:
    decoded = np.arange(5)
    right = [captions[0] for captions in recipe._truth("valid").references]
    wrong = [*right[:3], "no idea", "none at all"]
    scores = recipe.score("valid", decoded, [Measurement({"loss": 10.0, "tokens": 5.0}, wrong)])
    assert scores.values["loss"] == 2.0
    assert scores.values["cider_vizwiz"] == 0.0
    assert scores.values["cider_coco"] > scores.values["cider"] > 0.0
    perfect = recipe.score("valid", decoded, [Measurement({"loss": 0.0, "tokens": 5.0}, right)])
    assert perfect.values["bleu1"] == pytest.approx(100.0)
    assert "CIDEr-D|" in perfect.signatures["cider"]
    assert [(one.input, one.prediction) for one in perfect.samples][:2] == [
        ("valid picture 0", "a red square"),
        ("valid picture 1", "a green square"),
    ]
    assert perfect.samples[1].reference == "a green square / a square that is green, on white paper"


def test_a_source_s_scores_are_what_they_would_be_of_it_alone(recipe: Caption) -> None:
    outputs = ["a red square", "a red square", "a circle that is blue", "a red circle", "a green one"]
    values = recipe.score("valid", np.arange(5), [Measurement({"loss": 0.0, "tokens": 1.0}, outputs)]).values
    references = recipe._truth("valid").references
    for name, part in (("coco", slice(0, 3)), ("vizwiz", slice(3, 5))):
        alone = Cider(references[part]).score(outputs[part], references[part])
        assert values[f"cider_{name}"] == pytest.approx(alone)
        assert alone != pytest.approx(Cider(references).score(outputs[part], references[part]))
    assert values["cider"] == pytest.approx(Cider(references).score(outputs, references))


def test_a_score_of_nothing_decoded_has_a_loss_alone(recipe: Caption, model: Captioner) -> None:
    ids, nothing = np.arange(2), np.arange(0)
    scores = recipe.score("valid", nothing, [recipe.measure(model, EvaluationRequest("valid", ids, nothing, 1, 0))])
    assert scores.values.keys() == {"loss"}


def test_the_measured_loss_is_the_mean_over_the_tokens_of_all_captions(recipe: Caption, model: Captioner) -> None:
    found = recipe.measure(model, EvaluationRequest("valid", np.arange(5), np.arange(0), 1, 0)).sums
    rows = recipe.pack.vocabulary.encode([text for texts in recipe._truth("valid").references for text in texts])
    assert found["tokens"] == sum(len(row) + 1 for row in rows)
    assert found["loss"] > 0


def test_an_evaluation_can_be_left_between_its_batches(recipe: Caption, model: Captioner) -> None:
    def leave() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        recipe.measure(model, EvaluationRequest("valid", np.arange(5), np.arange(0), on_batch=leave))


# A published encoder.


@pytest.fixture(scope="module")
def weights(recipe: Caption, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "encoder.safetensors"
    tensors = model_of(recipe, seed=5).encoder.state_dict()
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def test_a_published_encoder_is_loaded_frozen_and_then_tuned(
    make_recipe: MakeRecipe, recipe: Caption, weights: Path, tmp_path: Path
) -> None:
    size = {"size": "tiny", "width": 16, "attention": 12, "weights": str(weights), "frozen_epochs": 2}
    published = make_caption(make_recipe, tmp_path, model=size)
    model = model_of(published, seed=1)
    model.load_state_dict(published.first_weights(model), strict=False)
    assert torch.equal(model.encoder.conv1.weight, model_of(recipe, seed=5).encoder.conv1.weight)
    assert torch.equal(model.query.weight, model_of(recipe, seed=1).query.weight)
    frozen = []
    for epoch in range(4):
        published.prepare(epoch, model)
        frozen.append(model.encoder_is_frozen)
    assert frozen == [True, True, False, False]


def test_a_random_encoder_is_never_frozen(recipe: Caption, model: Captioner) -> None:
    recipe.prepare(0, model)
    assert not model.encoder_is_frozen


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"conv1.weight": torch.zeros(3)}, "model.weights: conv1.weight is 3, where this model has 64 x 3 x 7 x 7"),
        ({"other": torch.zeros(3)}, "model.weights has no conv1.weight: these are the weights of another model"),
    ],
)
def test_weights_of_another_model_are_refused(
    make_recipe: MakeRecipe, tmp_path: Path, content: dict[str, Tensor], fault: str
) -> None:
    save_file(content, tmp_path / "other.safetensors")
    size = {"size": "tiny", "width": 16, "attention": 12, "weights": str(tmp_path / "other.safetensors")}
    recipe = make_caption(make_recipe, tmp_path, model=size)
    with pytest.raises(Mistake, match=f"^{fault}$"):
        recipe.first_weights(recipe.build_model())


# Predictions.


def test_a_picture_has_a_caption_and_a_picture_of_where_was_looked(
    recipe: Caption, model: Captioner, tmp_path: Path
) -> None:
    path = tmp_path / "wide.png"
    Image.new("RGB", (300, 120), "red").save(path)
    one, other = recipe.predict(model, [str(path), str(path)], Decoding(beam=2))
    assert one == other
    assert [gaze["word"] for gaze in one.details["words"]] == one.text.split()
    for gaze in one.details["words"]:
        assert np.sum(gaze["looked"]) == pytest.approx(1.0, abs=0.01)
    assert one.picture is not None
    with Image.open(io.BytesIO(one.picture)) as sheet:
        assert sheet.format == "PNG"
        assert min(sheet.size) > 150


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("words.jpg", b"not a picture", "not an image"),
        ("empty.jpg", b"", "empty"),
        ("cut.png", b"\x89PNG\r\n\x1a\n\0\0", "damaged"),
    ],
)
def test_an_image_that_is_none_is_refused_in_one_line(
    recipe: Caption, model: Captioner, tmp_path: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Mistake, match=fault) as refused:
        recipe.predict(model, [str(tmp_path / name)], Decoding())
    assert "\n" not in str(refused.value)
    with pytest.raises(Mistake, match="no such file"):
        recipe.predict(model, [str(tmp_path / "nowhere.jpg")], Decoding())


def test_nothing_to_look_at_gives_no_predictions(recipe: Caption, model: Captioner) -> None:
    assert recipe.predict(model, [], Decoding()) == []
