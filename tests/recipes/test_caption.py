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
from recipes.captioned import (
    THINGS,
    TRAIN,
    MakeRecipe,
    captions_of,
    make_caption,
    mean_cider,
    model_of,
    tensors,
    write_set,
)

EVERYTHING = np.arange(len(THINGS))


@pytest.fixture(scope="module")
def recipe(make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Caption:
    return make_caption(make_recipe, tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def model(recipe: Caption) -> Captioner:
    return model_of(recipe)


# Batches.


def test_a_batch_has_images_and_one_caption_of_each(recipe: Caption) -> None:
    batch = recipe.batch(np.array([5, 0]), 0)
    assert batch["pixels"].shape == (2, 32, 32, 3)
    assert batch["pixels"].dtype == np.uint8
    assert set(batch["tokens"][:, 0].tolist()) == {BOS}
    said = recipe.pack.vocabulary.decode(batch["tokens"].tolist())
    assert said[0] in captions_of(*THINGS[5])
    assert said[1] == captions_of(*THINGS[0])[0]
    for row in batch["tokens"].tolist():
        assert [token for token in row if token != PAD][-1] == EOS


def test_the_epoch_and_the_sample_alone_decide_which_caption_is_used(recipe: Caption) -> None:
    def drawn(ids: Ids, epoch: int) -> list[str]:
        return recipe.pack.vocabulary.decode(recipe.batch(ids, epoch)["tokens"].tolist())

    two = np.array([1, 3, 5, 7])  # those with two captions
    assert drawn(two[::-1], 3) == drawn(two, 3)[::-1]
    seen = [set(captions) for captions in zip(*(drawn(two, epoch) for epoch in range(12)), strict=True)]
    assert seen == [set(captions_of(*THINGS[sample])) for sample in two]
    assert len({tuple(drawn(two, epoch)) for epoch in range(6)}) > 1


def test_a_repeated_image_gets_another_crop_and_possibly_another_caption(
    recipe: Caption,
) -> None:
    two, repeats = np.repeat([1, 3, 5, 7], 6), np.tile(np.arange(6), 4)  # those with two captions, six times each
    batch = recipe.batch(two, 0, repeats)
    said = np.array(recipe.pack.vocabulary.decode(batch["tokens"].tolist())).reshape(4, 6)
    assert [set(captions) for captions in said.tolist()] == [set(captions_of(*THINGS[sample])) for sample in two[::6]]
    assert len({image.tobytes() for image in batch["pixels"]}) > 12
    first = recipe.batch(two[::6], 0)
    assert said[:, 0].tolist() == recipe.pack.vocabulary.decode(first["tokens"].tolist())
    assert np.array_equal(batch["pixels"][::6], first["pixels"])


def test_images_are_not_mirrored(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A caption that says left would be wrong about a mirrored image."""
    recipe = make_caption(make_recipe, tmp_path, train={**TRAIN, "min_scale": 1.0, "size": 36})
    first = recipe.batch(EVERYTHING[:1], 0)["pixels"].astype(int)
    for epoch in range(1, 8):
        assert abs(recipe.batch(EVERYTHING[:1], epoch)["pixels"].astype(int) - first).mean() < 40
    left, right = first[0, 12:24, 8:14], first[0, 12:24, -8:-2]
    assert left[..., 1].mean() + 100 < right[..., 1].mean()  # the square is on the left


def test_every_sample_costs_one_and_has_the_same_length(recipe: Caption) -> None:
    assert recipe.costs.tolist() == [1] * len(THINGS)
    assert set(recipe.sort_keys.tolist()) == {0}
    assert recipe.lengths.tolist() == [1] * len(THINGS)
    assert [recipe.count(split) for split in ("train", "valid", "test")] == [8, 5, 0]


def test_a_smaller_copy_is_used_if_it_is_large_enough(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    paths = write_set(tmp_path, THINGS)
    data = {"train": [{"coco": paths}], "valid": [{"coco": paths}], "vocabulary": 300, "sizes": [20]}
    small, large = (
        make_caption(make_recipe, tmp_path / str(size), data=data, train={**TRAIN, "size": size}) for size in (16, 32)
    )
    assert small.copies.split_name("train", 16) == "train@20"
    assert large.copies.split_name("train", 32) == "train"
    with small.prefetch(EVERYTHING, 0):
        assert small.batch(EVERYTHING, 0)["pixels"].shape == (8, 16, 16, 3)


# The loss.


def gradients(recipe: Caption, model: nn.Module, shares: list[Ids]) -> tuple[float, list[Tensor]]:
    """Return the sums of the losses and of the gradients of all shares."""
    model.zero_grad()
    total = 0.0
    for ids in shares:
        loss = recipe.loss(model, tensors(recipe, ids))
        loss.backward()
        total += loss.item()
    return total, [torch.zeros(()) if one.grad is None else one.grad.clone() for one in model.parameters()]


@pytest.mark.parametrize("num_ranks", [2, 3, len(THINGS) + 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradients_of_all_ranks_add_up_to_those_of_the_batch(
    make_recipe: MakeRecipe, tmp_path: Path, num_ranks: int, smoothing: float
) -> None:
    """In evaluation mode: in training mode, batch norm uses the statistics of each rank's part."""
    recipe = make_caption(make_recipe, tmp_path, train={**TRAIN, "label_smoothing": smoothing})
    model = model_of(recipe)
    whole_loss, whole = gradients(recipe, model, [EVERYTHING])
    loss, added = gradients(recipe, model, [share(EVERYTHING, rank, num_ranks) for rank in range(num_ranks)])
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    for one, other in zip(added, whole, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def test_the_loss_counts_real_tokens_and_positions_without_attention(recipe: Caption, model: Captioner) -> None:
    batch = tensors(recipe, EVERYTHING)
    tokens = batch["tokens"]
    expected = 0.0
    for row in range(len(tokens)):
        encoded = model.encode(batch["pixels"][row : row + 1])
        state, attention = model.start(encoded), torch.zeros(1, encoded.features.shape[1])
        for before, after in zip(tokens[row], tokens[row, 1:], strict=False):
            if after == PAD:
                break
            state, attended = model.advance(model.embedding(before[None]), state, encoded)
            attention += attended
            expected -= float(model.logits(state).log_softmax(-1)[0, after].detach()) / recipe.mean_tokens
        expected += float((1 - attention).square().mean().detach())
    assert recipe.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_the_mean_caption_length_includes_eos(recipe: Caption) -> None:
    captions = [text for number, thing in enumerate(THINGS) for text in captions_of(*thing)[: 1 + number % 2]]
    lengths = [len(row) + 1 for row in recipe.pack.vocabulary.encode(captions)]
    assert recipe.mean_tokens == pytest.approx(sum(lengths) / len(lengths))


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
def test_scores_do_not_depend_on_the_number_of_workers(recipe: Caption, model: Captioner, parts: int) -> None:
    whole, divided = measured(recipe, model, 1, 3), measured(recipe, model, parts, 3)
    assert divided.values == pytest.approx(whole.values, rel=1e-5)
    assert divided.samples == whole.samples


def test_right_captions_score_100_and_every_source_has_its_own_scores(recipe: Caption) -> None:
    decoded = np.arange(5)
    right = [captions[0] for captions in recipe.references("valid").texts]
    wrong = [*right[:3], "no idea", "none at all"]
    scores = recipe.score("valid", decoded, [Measurement({"loss": 10.0, "tokens": 5.0, "samples": 5.0}, wrong)])
    assert scores.values["loss"] == 2.0
    assert scores.values["cider_vizwiz"] == 0.0
    assert scores.values["cider_coco"] > scores.values["cider"] > 0.0
    perfect = recipe.score("valid", decoded, [Measurement({"loss": 0.0, "tokens": 5.0, "samples": 5.0}, right)])
    assert perfect.values["bleu1"] == pytest.approx(100.0)
    assert "CIDEr-D|" in perfect.signatures["cider"]
    assert [(one.input, one.prediction) for one in perfect.samples][:2] == [
        ("valid image 0", "a red square"),
        ("valid image 1", "a green square"),
    ]
    assert perfect.samples[1].reference == "a green square / a square that is green, on white paper"


def test_the_scores_of_a_source_do_not_depend_on_the_other_sources(recipe: Caption) -> None:
    outputs = ["a red square", "a red square", "a circle that is blue", "a red circle", "a green one"]
    values = recipe.score(
        "valid", np.arange(5), [Measurement({"loss": 0.0, "tokens": 1.0, "samples": 5.0}, outputs)]
    ).values
    references = recipe.references("valid").texts
    for name, part in (("coco", slice(0, 3)), ("vizwiz", slice(3, 5))):
        alone = mean_cider(Cider(references[part]), outputs[part], references[part])
        assert values[f"cider_{name}"] == pytest.approx(alone)
        assert alone != pytest.approx(mean_cider(Cider(references), outputs[part], references[part]))
    assert values["cider"] == pytest.approx(mean_cider(Cider(references), outputs, references))


def test_without_decoded_samples_there_is_only_a_loss(recipe: Caption, model: Captioner) -> None:
    ids, nothing = np.arange(2), np.arange(0)
    scores = recipe.score("valid", nothing, [recipe.measure(model, EvaluationRequest("valid", ids, nothing, 1, 0))])
    assert scores.values.keys() == {"loss"}


def test_an_evaluation_measures_the_loss_of_every_caption_of_an_image(recipe: Caption, model: Captioner) -> None:
    found = recipe.measure(model, EvaluationRequest("valid", np.arange(5), np.arange(0), 1, 0)).sums
    rows = recipe.pack.vocabulary.encode([text for texts in recipe.references("valid").texts for text in texts])
    assert found["tokens"] == sum(len(row) + 1 for row in rows)
    assert found["loss"] > 0


# A pretrained encoder.


@pytest.fixture(scope="module")
def weights(recipe: Caption, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "encoder.safetensors"
    tensors = model_of(recipe, seed=5).encoder.state_dict()
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return path


def test_a_pretrained_encoder_is_loaded_then_frozen_then_tuned(
    make_recipe: MakeRecipe, recipe: Caption, weights: Path, tmp_path: Path
) -> None:
    size = {"size": "tiny", "width": 16, "attention": 12, "weights": str(weights), "frozen_epochs": 2}
    pretrained = make_caption(make_recipe, tmp_path, model=size)
    model = model_of(pretrained, seed=1)
    model.load_state_dict(pretrained.initial_weights(model), strict=False)
    assert torch.equal(model.encoder.conv1.weight, model_of(recipe, seed=5).encoder.conv1.weight)
    assert torch.equal(model.query.weight, model_of(recipe, seed=1).query.weight)
    frozen = []
    for epoch in range(4):
        pretrained.prepare(epoch, model)
        frozen.append(model.encoder_is_frozen)
    assert frozen == [True, True, False, False]


def test_a_random_encoder_is_never_frozen(recipe: Caption, model: Captioner) -> None:
    recipe.prepare(0, model)
    assert not model.encoder_is_frozen


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"conv1.weight": torch.zeros(3)}, "it has conv1.weight"),
        ({"other": torch.zeros(3)}, "it has other"),
    ],
)
def test_weights_of_another_model_are_refused(
    make_recipe: MakeRecipe, tmp_path: Path, content: dict[str, Tensor], fault: str
) -> None:
    save_file(content, tmp_path / "other.safetensors")
    size = {"size": "tiny", "width": 16, "attention": 12, "weights": str(tmp_path / "other.safetensors")}
    recipe = make_caption(make_recipe, tmp_path, model=size)
    no_resnet = "no ResNet with names of torchvision, timm or Hugging Face"
    with pytest.raises(Mistake, match=f"^model.weights: {no_resnet}; {fault}$"):
        recipe.initial_weights(recipe.build_model())


# Predictions.


def test_a_prediction_has_a_caption_and_an_attention_map_for_every_word(
    recipe: Caption, model: Captioner, tmp_path: Path
) -> None:
    path = tmp_path / "wide.png"
    Image.new("RGB", (300, 120), "red").save(path)
    one, other = recipe.predict(model, [str(path), str(path)], Decoding(beam=2))
    assert one == other
    assert [row["word"] for row in one.details["words"]] == one.text.split()
    for row in one.details["words"]:
        assert np.sum(row["attention"]) == pytest.approx(1.0, abs=0.01)
    assert one.attention_map is not None
    with Image.open(io.BytesIO(one.attention_map)) as sheet:
        assert sheet.format == "PNG"
        assert min(sheet.size) > 150


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("words.jpg", b"not a image", "not an image"),
        ("empty.jpg", b"", "empty"),
        ("cut.png", b"\x89PNG\r\n\x1a\n\0\0", "damaged"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused_in_one_line(
    recipe: Caption, model: Captioner, tmp_path: Path, name: str, content: bytes, fault: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Mistake, match=fault) as refused:
        recipe.predict(model, [str(tmp_path / name)], Decoding())
    assert "\n" not in str(refused.value)
    with pytest.raises(Mistake, match="no such file"):
        recipe.predict(model, [str(tmp_path / "nowhere.jpg")], Decoding())


def test_no_inputs_give_no_predictions(recipe: Caption, model: Captioner) -> None:
    assert recipe.predict(model, [], Decoding()) == []
