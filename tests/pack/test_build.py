from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

from pack.corpus import GREETINGS, QUESTIONS, data_of, job_of, write_pairs
from packtrain.errors import Mistake
from packtrain.job.job import DataSettings, Job
from packtrain.pack import pairs
from packtrain.pack.build import PlainProgress, digest, pack, settings_of
from packtrain.pack.manifest import Manifest, RawText
from packtrain.pack.vocabulary import Vocabulary
from packtrain.pack.workers import InProcess
from packtrain.store import Store, open_store
from parts.runs import recipe_job
from parts.s3 import S3Server


def objects(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def quietly(job: Job, store: Store, allow_drops: bool = False) -> Manifest:
    return pack(job.name, job.data, store, InProcess(), PlainProgress(lambda _: None), allow_drops)


def told(job: Job, store: Store) -> list[str]:
    said: list[str] = []
    pack(job.name, job.data, store, InProcess(), PlainProgress(said.append))
    return said


def test_a_pack_holds_its_shards_its_vocabulary_and_its_manifest(any_store: Store, tmp_path: Path) -> None:
    manifest = quietly(job_of(tmp_path), any_store)
    folder = f"packs/{manifest.name}"
    assert objects(any_store).keys() == {
        f"{folder}/manifest.json",
        f"{folder}/train-00000.safetensors",
        f"{folder}/valid-00000.safetensors",
        f"{folder}/vocabulary.json",
    }
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 8, "valid": 5}


def test_the_manifest_has_the_size_and_hash_of_every_file(directory_store: Store, tmp_path: Path) -> None:
    manifest = quietly(job_of(tmp_path), directory_store)
    assert manifest.vocabulary is not None
    files = [manifest.vocabulary, *(shard for split in manifest.splits.values() for shard in split.shards)]
    assert len(files) == 3
    for file in files:
        data = directory_store.get(f"packs/{manifest.name}/{file.name}")
        assert (file.bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("held_out", [None, "50%"])
def test_the_manifest_has_the_size_of_the_raw_text_on_each_side(
    held_out: str | None, directory_store: Store, tmp_path: Path
) -> None:
    """As `wc` counts it, whatever is left out, compressed or held out to validate."""
    numbers = range(20)
    sides = ["The same.\nThe same.\n\n" + "".join(f"word {number}\n" for number in numbers)]
    sides.append("Größe.\nGröße.\nleer\n" + "".join(f"das Wort {number}\n" for number in numbers))
    (tmp_path / "train.en").write_text(sides[0], "utf-8")
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(sides[1].encode()))
    train = [{"bitext": [str(tmp_path / "train.en"), str(tmp_path / "train.de.gz")]}]
    valid = {"valid": held_out} if held_out else {"valid": [{"bitext": [str(tmp_path / "train.en")] * 2}]}
    job = recipe_job(data={"train": train, "vocabulary": 300, **valid})
    splits = quietly(job, directory_store, allow_drops=True).splits
    assert splits["train"].raw == tuple(RawText(len(side.encode()), 23) for side in sides)
    assert splits["valid"].raw == (() if held_out else (RawText(len(sides[0]), 23),) * 2)


def test_packing_again_reads_the_manifest_and_writes_nothing(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path)
    first, listed = quietly(job, any_store), any_store.list("")

    def refuse(*_: object) -> None:
        raise AssertionError("an object was written")

    for method in ("put", "put_if_absent", "put_file"):
        monkeypatch.setattr(any_store, method, refuse)
    assert quietly(job, any_store) == first
    assert any_store.list("") == listed
    assert told(job, any_store) == [f"pack {first.name} already exists"]


@pytest.mark.parametrize("harm", ["delete", "cut"])
def test_a_pack_that_lacks_a_file_is_packed_again(directory_store: Store, tmp_path: Path, harm: str) -> None:
    job = job_of(tmp_path)
    name = quietly(job, directory_store).name
    whole, shard = objects(directory_store), f"packs/{name}/train-00000.safetensors"
    if harm == "delete":
        directory_store.delete(shard)
    else:
        directory_store.put(shard, whole[shard][:-1])
    assert told(job, directory_store)[0] == f"pack {name} lacks 1 file, such as train-00000.safetensors; packing again"
    assert objects(directory_store) == whole


def test_unfinished_uploads_of_an_interrupted_build_are_removed_with_the_next(
    s3_store: Store, s3_environment: S3Server, tmp_path: Path
) -> None:
    job = job_of(tmp_path)
    name = quietly(job, s3_store).name
    s3_store.delete(f"packs/{name}/manifest.json")
    for owner in (name, "another-0123"):
        s3_environment.begin_upload(s3_store.url, f"packs/{owner}/train-00000.safetensors")
    quietly(job, s3_store)
    assert s3_environment.uploads(s3_store.url) == ["packs/another-0123/train-00000.safetensors"]


def test_the_same_data_makes_the_same_bytes(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / name), create=True) for name in ("one", "other")]
    for store in stores:
        quietly(job_of(tmp_path), store)
    one, other = (objects(store) for store in stores)
    assert len(one) == 4
    assert one == other


def test_the_manifest_is_written_last(directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    put = directory_store.put

    def noted(key: str, data: bytes) -> None:
        keys.append(key)
        put(key, data)

    monkeypatch.setattr(directory_store, "put", noted)
    manifest = quietly(job_of(tmp_path), directory_store)
    assert len(keys) == 6  # with a note for each shard
    assert keys[-1] == f"packs/{manifest.name}/manifest.json"


def test_an_interrupted_pack_resumes_with_the_shards_that_exist(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, put = job_of(tmp_path), any_store.put

    def interrupted(key: str, data: bytes) -> None:
        if key.endswith("valid-00000.safetensors"):
            raise KeyboardInterrupt
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(any_store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quietly(job, any_store)
    assert not any(key.endswith("manifest.json") for key in objects(any_store))

    written: list[str] = []

    def noted(key: str, data: bytes) -> None:
        written.append(key)
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(any_store, "put", noted)
        quietly(job, any_store)
    assert not any(key.endswith("train-00000.safetensors") for key in written)
    untouched = open_store(str(tmp_path / "untouched"), create=True)
    quietly(job, untouched)
    assert objects(any_store) == objects(untouched)


def test_a_shard_that_was_cut_off_is_made_again(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, put = job_of(tmp_path), any_store.put

    def interrupted(key: str, data: bytes) -> None:
        put(key, data[: len(data) // 2])
        if key.endswith("train-00000.safetensors"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(any_store, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quietly(job, any_store)
    quietly(job, any_store)
    untouched = open_store(str(tmp_path / "untouched"), create=True)
    quietly(job, untouched)
    assert objects(any_store) == objects(untouched)


def test_packing_reports_samples_and_what_was_left_out(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path, pairs=[*GREETINGS, GREETINGS[0], ("", "leer")])
    assert told(job, directory_store) == [
        "train: 8 pairs; left out 1 (10.0%, duplicate pair), 1 (10.0%, one side is empty)",
        "valid: 5 pairs",
        "warning: 10.0% of the training pairs were filtered, most often (1): one side is empty, such as train.tsv:10;"
        " check them, data.max_words and data.max_ratio",
    ]
    filtered = quietly(job, directory_store).splits["train"].filtered
    assert {reason: (drops.count, drops.names) for reason, drops in filtered.items()} == {
        "one side is empty": (1, ("train.tsv:10",)),
        "duplicate pair": (1, ("train.tsv:9",)),
    }


def test_a_sample_in_train_and_valid_causes_a_warning(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path, valid=[*QUESTIONS, GREETINGS[0], GREETINGS[1]])
    assert told(job, directory_store)[-1].startswith(
        "warning: 2 samples of valid are also in train; scores will be too optimistic"
    )


def test_no_warning_for_a_few_filtered_pairs_and_for_duplicates(directory_store: Store, tmp_path: Path) -> None:
    lines = [(f"line {number}", f"Zeile {number}") for number in range(19)]
    assert told(job_of(tmp_path, pairs=[*lines * 2, ("", "leer"), ("", "leer")]), directory_store) == [
        "train: 19 pairs; left out 19 (47.5%, duplicate pair), 2 (5.0%, one side is empty)",
        "valid: 5 pairs",
    ]


def test_a_text_that_is_too_long_is_left_out_before_it_is_tokenized(directory_store: Store, tmp_path: Path) -> None:
    long = ("x" * 9_000_000, "lang")  # minutes, if a vocabulary were fitted to it
    job = job_of(tmp_path, pairs=[*GREETINGS * 20, long], valid=[*QUESTIONS, long])
    with pytest.raises(Mistake, match=r"data.valid: 1 of 6 samples are unusable.*text of more than 16,000 bytes"):
        quietly(job, directory_store)
    made = quietly(job, directory_store, allow_drops=True)
    assert [split.samples for split in made.splits.values()] == [8, 5]


def test_the_vocabulary_of_a_large_set_is_learned_from_a_sample(
    directory_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [f"number {number:04}" for number in range(1000)]
    job = job_of(tmp_path, pairs=[(side, side) for side in sides])
    monkeypatch.setattr(pairs, "FIT_CHARACTERS", 2 * 250 * len(sides[0]))
    manifest = quietly(job, directory_store)
    assert manifest.splits["train"].samples == 1000
    expected = Vocabulary.fit([side for side in sides[3::4] for _ in range(2)], 300).to_json()
    assert directory_store.get(f"packs/{manifest.name}/vocabulary.json").decode() == expected


def test_every_source_has_shards_of_its_own(directory_store: Store, tmp_path: Path) -> None:
    sources = [
        {"bitext": write_pairs(tmp_path / f"{name}.tsv", pairs)}
        for name, pairs in zip("ab", (GREETINGS, QUESTIONS), strict=True)
    ]
    split = quietly(job_of(tmp_path, data={"train": sources, "vocabulary": 300}), directory_store).splits["train"]
    assert split.sources == (8, 5)
    assert [shard.samples for shard in split.shards] == [8, 5]


def test_each_side_can_have_a_vocabulary(directory_store: Store, tmp_path: Path) -> None:
    data = {"train": [{"bitext": write_pairs(tmp_path / "a.tsv", GREETINGS)}], "vocabulary": 300, "joint": False}
    manifest = quietly(job_of(tmp_path, data=data), directory_store)
    assert manifest.vocabulary is not None
    assert manifest.target_vocabulary is not None
    assert manifest.vocabulary.sha256 != manifest.target_vocabulary.sha256


def test_two_jobs_with_the_same_data_have_packs_of_their_own(directory_store: Store, tmp_path: Path) -> None:
    one = quietly(job_of(tmp_path), directory_store).name
    other = quietly(job_of(tmp_path, name="others"), directory_store).name
    assert one.removeprefix("greetings-") == other.removeprefix("others-")


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_split_without_usable_samples_is_refused(directory_store: Store, tmp_path: Path, split: str) -> None:
    job = job_of(tmp_path)
    (tmp_path / f"{split}.tsv").write_text("")
    with pytest.raises(Mistake, match=f"data.{split}: no usable samples: the source is empty"):
        quietly(job, directory_store)
    assert not any(key.endswith("manifest.json") for key in objects(directory_store))


def test_a_split_left_empty_by_filters_is_refused_with_the_reasons(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path, pairs=[("", "leer"), ("a " * 99, "lang")])
    with pytest.raises(Mistake, match=r"data.train: no usable samples; left out 1 \(one side is empty\), 1 \(more"):
        quietly(job, directory_store)


def test_a_missing_source_is_named(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "valid.tsv").unlink()
    with pytest.raises(Mistake, match=r"valid\.tsv: No such file or directory; packing needs the raw data"):
        quietly(job, directory_store)
    assert objects(directory_store) == {}


def test_a_pipe_in_place_of_a_source_does_not_block(directory_store: Store, tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "valid.tsv").unlink()
    os.mkfifo(tmp_path / "valid.tsv")
    with pytest.raises(Mistake, match=r"data.valid.0: .*valid\.tsv: is not a regular file"):
        quietly(job, directory_store)


def digest_of(data: DataSettings) -> str:
    return digest(settings_of(data, "pairs"))


def bitext(folder: Path, source: bytes = b"one\ntwo\n", target: bytes = b"eins\nzwei\n") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.en").write_bytes(source)
    (folder / "a.de").write_bytes(target)
    return [str(folder / "a.en"), str(folder / "a.de")]


def test_the_digest_does_not_depend_on_where_the_data_lies_or_when_it_was_written(tmp_path: Path) -> None:
    here, there = bitext(tmp_path / "here"), bitext(tmp_path / "there" / "deeper")
    os.utime(there[0], (1, 1))
    assert digest_of(data_of(here)) == digest_of(data_of(there))


def test_the_digest_depends_on_every_byte_of_every_source(tmp_path: Path) -> None:
    digests = {
        digest_of(data_of(bitext(tmp_path / "1"))),
        digest_of(data_of(bitext(tmp_path / "2", source=b"one\ntwo \n"))),
        digest_of(data_of(bitext(tmp_path / "3", target=b"eins\nZwei\n"))),
        digest_of(data_of(bitext(tmp_path / "4", source=b"two\none\n"))),
        digest_of(data_of(bitext(tmp_path / "5", source=b"eins\nzwei\n", target=b"one\ntwo\n"))),
    }
    assert len(digests) == 5


def test_the_digest_depends_on_every_setting_and_on_the_split_of_each_source(tmp_path: Path) -> None:
    paths = bitext(tmp_path)
    other = {"bitext": write_pairs(tmp_path / "b.tsv", QUESTIONS)}
    digests = {
        digest_of(data_of(paths)),
        digest_of(data_of(paths, vocabulary=301)),
        digest_of(data_of(paths, max_words=79)),
        digest_of(data_of(paths, max_ratio=8.5)),
        digest_of(data_of(paths, valid=[other])),
        digest_of(data_of(paths, test=[other])),
        digest_of(data_of(paths, train=[{"bitext": paths}, other])),
        digest_of(data_of(paths, train=[other, {"bitext": paths}])),
        digest_of(data_of(paths, train=[{"bitext": paths, "last": 1}])),
        digest_of(data_of(paths, train=[{"bitext": paths, "without_last": 1}])),
        digest_of(data_of(paths, train=[other])),
        digest_of(data_of(paths, train=[{**other, "columns": [2, 1]}])),
    }
    assert len(digests) == 12


def images(train: str, *, folder: bool) -> str:
    data = DataSettings.model_validate({"train": [{"folder" if folder else "imagenet": train}]})
    return digest(settings_of(data, "labels"))


def test_the_digest_of_json_lines_depends_on_the_images_that_they_name(tmp_path: Path) -> None:
    lines = tmp_path / "samples.jsonl"
    lines.write_text('{"image": "a.jpg", "label": "cat"}\n{"image": "b.jpg", "label": "dog"}\n')
    found = [images(str(lines), folder=True)]
    for change in ("a", "ab", "c"):  # an image appears, grows, and is replaced by another of another time
        (tmp_path / "a.jpg").write_text(change)
        found.append(images(str(lines), folder=True))
    (tmp_path / "other.jpg").write_text("not named")
    assert images(str(lines), folder=True) == found[-1]
    assert len(set(found)) == len(found)


def test_the_digest_of_a_folder_depends_on_linked_classes_and_ends_at_circles(tmp_path: Path) -> None:
    for name in ("set/cat/1.jpg", "elsewhere/2.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    found = [images(str(tmp_path / "set"), folder=False)]
    (tmp_path / "set/dog").symlink_to(tmp_path / "elsewhere")
    found.append(images(str(tmp_path / "set"), folder=False))
    (tmp_path / "elsewhere/3.jpg").write_text("y")
    found.append(images(str(tmp_path / "set"), folder=False))
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "set")
    images(str(tmp_path / "set"), folder=False)
    assert len(set(found)) == 3


def test_compressed_sources_make_the_same_shards(tmp_path: Path) -> None:
    plain, packed = bitext(tmp_path / "plain"), []
    for path in plain:
        Path(path + ".gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        packed.append(path + ".gz")
    shards = []
    for name, paths in (("one", plain), ("other", packed)):
        store = open_store(str(tmp_path / name), create=True)
        job = job_of(tmp_path, data={"train": [{"bitext": paths}], "vocabulary": 300})
        shards.append(store.get(f"packs/{quietly(job, store).name}/train-00000.safetensors"))
    assert shards[0] == shards[1]
