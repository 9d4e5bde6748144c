"""Validation data that is held out of the training data: by content alone, so that files and order do not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pack.corpus import data_of, write_pairs
from packtrain.data.pack import Pack
from packtrain.errors import FieldMistake
from packtrain.job import Job
from packtrain.job.job import DataSettings
from packtrain.pack.build import PlainProgress, is_held_out, pack
from packtrain.pack.manifest import Manifest
from packtrain.pack.workers import InProcess
from packtrain.store import Store
from parts.runs import recipe_job

PAIRS = [(f"sentence {number}", f"Satz {number}") for number in range(200)]


def packed(store: Store, data: DataSettings, said: list[str] | None = None) -> Manifest:
    return pack("held", data, store, InProcess(), PlainProgress((said if said is not None else []).append))


def texts(store: Store, manifest: Manifest, split: str, cache: Path) -> list[str]:
    found = Pack(store, manifest.name, cache)
    rows = found.split(split).column("source")
    return sorted(found.vocabulary.decode([rows[number].tolist() for number in range(len(rows))]))


def test_a_share_of_the_pairs_is_held_out_whatever_the_files_and_their_order(
    directory_store: Store, tmp_path: Path
) -> None:
    said: list[str] = []
    one = data_of([write_pairs(tmp_path / "all.tsv", [*PAIRS, *PAIRS[:50]])], valid="10 %")
    halves = [write_pairs(tmp_path / name, part) for name, part in (("b.tsv", PAIRS[100:]), ("a.tsv", PAIRS[:100]))]
    two = DataSettings.model_validate({**one.model_dump(), "train": [{"bitext": half} for half in halves]})
    first, second = packed(directory_store, one, said), packed(directory_store, two)
    sides = {split: texts(directory_store, first, split, tmp_path / "cache") for split in ("train", "valid")}
    assert sides == {split: texts(directory_store, second, split, tmp_path / "cache") for split in ("train", "valid")}
    assert sorted([*sides["train"], *sides["valid"]]) == sorted(source for source, _ in PAIRS)
    assert 10 <= len(sides["valid"]) <= 30
    assert f"valid: {len(sides['valid'])} pairs, 10 % of the training data, chosen by their content" in said
    assert not any("also in train" in line for line in said)


def test_another_share_is_another_pack_and_none_is_none(directory_store: Store, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "all.tsv", PAIRS)
    shares: list[dict[str, str]] = [{}, {"valid": "10 %"}, {"valid": "20 %"}]
    names = {packed(directory_store, data_of([path], **share)).name for share in shares}
    assert len(names) == 3


def test_the_same_source_is_never_on_both_sides(directory_store: Store, tmp_path: Path) -> None:
    pairs = [(f"sentence {number % 40}", f"Satz {number}") for number in range(120)]
    manifest = packed(directory_store, data_of([write_pairs(tmp_path / "all.tsv", pairs)], valid="30 %"))
    train, valid = (texts(directory_store, manifest, split, tmp_path / "cache") for split in ("train", "valid"))
    assert valid
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 120


@pytest.mark.parametrize("kind", ["labels", "captions"])
def test_images_are_held_out_by_their_bytes(directory_store: Store, tmp_path: Path, kind: str) -> None:
    from pack.test_pack_images import picture

    lines = []
    for number in range(40):
        name = f"{number}.jpg"
        (tmp_path / name).write_bytes(picture(number % 20))  # each is there twice
        about = {"label": f"class {number % 2}"} if kind == "labels" else {"caption": "a"}
        lines.append({"image": name, **about})
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": [{"folder": str(tmp_path / "lines.jsonl")}], "valid": "25 %", "vocabulary": 300}
    manifest = packed(directory_store, DataSettings.model_validate(data))
    found = Pack(directory_store, manifest.name, tmp_path / "cache")
    held = [is_held_out(picture(number), 0.25) for number in range(20)]
    assert 0 < sum(held) < 20
    assert manifest.splits["valid"].samples == 2 * sum(held)
    assert manifest.splits["train"].samples == 40 - 2 * sum(held)
    shard = found.split("valid").shard(0)
    column = shard.ragged["name"]
    names = [bytes(column[row]).decode() for row in range(len(column))]
    assert all(held[int(Path(name).stem) % 20] for name in names)


def test_a_share_in_which_no_sample_is_gets_a_line(directory_store: Store, tmp_path: Path) -> None:
    with pytest.raises(FieldMistake) as refused:
        packed(directory_store, data_of([write_pairs(tmp_path / "all.tsv", PAIRS[:3])], valid="1 %"))
    assert str(refused.value).endswith("none of the samples is in 1 % of them; hold out more")


@pytest.mark.parametrize(("text", "share"), [("5 %", 0.05), ("12.5%", 0.125), (" 50 % ", 0.5)])
def test_a_job_says_the_share_where_sources_would_be(text: str, share: float) -> None:
    job = recipe_job(data={"train": [{"bitext": ["a", "b"]}], "valid": text})
    assert (job.data.held_out, job.data.valid, job.data.has_valid) == (share, (), True)
    stored = json.loads(job.model_dump_json())
    assert stored["data"]["valid"] == f"{share * 100:g} %"
    assert Job.model_validate(stored) == job


@pytest.mark.parametrize("valid", ["0 %", "51 %", "5", "five %", "-5 %", "data/valid.tsv", ""])
def test_other_texts_are_refused(valid: Any) -> None:
    with pytest.raises(ValueError, match="must be sources, or a share of the training data of up to 50 %: 5 %"):
        data_of(["a.tsv"], valid=valid)
    with pytest.raises(ValueError, match="unknown key"):
        data_of(["a.tsv"], held_out=0.1)
