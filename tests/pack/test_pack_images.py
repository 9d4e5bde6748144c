"""Packing images of every source, by any number of processes."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pack.rawsets import tar, zipped
from packtrain.errors import FieldMistake, PacktrainError
from packtrain.job.job import DataSettings
from packtrain.pack import images
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.manifest import Drops, Manifest, pack_key
from packtrain.pack.shard import Columns, open_shard
from packtrain.pack.tiles import Box, decode_crop
from packtrain.pack.vocabulary import BOS, EOS, Vocabulary
from packtrain.pack.workers import Dask, InProcess, Processes, Result, Task, Workers
from packtrain.store import Store, open_store


def picture(seed: int, width: int = 40, height: int = 32) -> bytes:
    """A smooth picture, each seed its own."""
    down, across = np.mgrid[:height, :width]
    waves = [
        127 + 120 * np.sin((down * (3 + seed % 7) + across * (1 + channel) + 9 * seed) / 40) for channel in range(3)
    ]
    pixels = np.stack(waves, axis=2).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def classes_in(folder: Path, names: str = "ab", each: int = 6, first: int = 0) -> str:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for place in range(each):
            (folder / name / f"{place}.jpg").write_bytes(picture(first + 100 * number + place))
    return str(folder)


def captions_in(folder: Path, count: int, marks: dict[str, bool] | None = None) -> list[str]:
    (folder / "images").mkdir(parents=True)
    rows = range(count)
    for number in rows:
        (folder / "images" / f"{number}.jpg").write_bytes(picture(number))
    document = {
        "images": [{"id": number, "file_name": f"{number}.jpg"} for number in rows],
        "annotations": [
            {"id": 2 * number + which, "image_id": number, "caption": f"picture {number} seen {which}", **(marks or {})}
            for number in rows
            for which in (0, 1)
        ],
    }
    (folder / "captions.json").write_text(json.dumps(document))
    return [str(folder / "captions.json"), str(folder / "images")]


def packed(store: Store, workers: Workers | None = None, said: list[str] | None = None, **data: Any) -> Manifest:
    tell = (said if said is not None else []).append
    return pack(
        "toy",
        DataSettings.model_validate({"vocabulary": 300, **data}),
        store,
        workers or InProcess(),
        PlainProgress(tell),
    )


def columns(store: Store, manifest: Manifest, split: str, folder: Path) -> list[Columns]:
    found = []
    for shard in manifest.splits[split].shards:
        store.get_file(pack_key(manifest.name, shard.name), folder / shard.name)
        found.append(open_shard(folder / shard.name))
    return found


def objects(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def test_images_keep_their_classes_and_their_pixels(any_store: Store, tmp_path: Path) -> None:
    manifest = packed(any_store, train=[{"imagenet": classes_in(tmp_path / "train")}])
    assert (manifest.kind, manifest.classes, manifest.splits["train"].samples) == ("labels", ("a", "b"), 12)
    [shard] = columns(any_store, manifest, "train", tmp_path)
    assert shard.plain["label"].tolist() == [0] * 6 + [1] * 6
    assert set(shard.plain["width"].tolist()) == {40}
    whole = decode_crop(shard.ragged["jpeg"][0], shard.ragged["segments"][0], 40, 32, Box(0, 0, 40, 32))
    original = np.asarray(Image.open(tmp_path / "train" / "a" / "0.jpg").convert("RGB"))
    assert np.abs(whole.astype(int) - original.astype(int)).mean() < 2


def test_validation_has_the_class_numbers_of_training(directory_store: Store, tmp_path: Path) -> None:
    train, valid = classes_in(tmp_path / "train", "abc"), classes_in(tmp_path / "valid", "bc", first=50)
    manifest = packed(directory_store, train=[{"imagenet": train}], valid=[{"imagenet": valid}])
    [shard] = columns(directory_store, manifest, "valid", tmp_path)
    assert shard.plain["label"].tolist() == [1] * 6 + [2] * 6


@pytest.mark.usefixtures("processes")
def test_any_number_of_processes_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHARD_BYTES", 2_000)
    source = classes_in(tmp_path / "train", "ab", each=8)
    made = []
    for name, workers in (("alone", InProcess()), ("one", Processes(1)), ("three", Processes(3))):
        store = open_store(str(tmp_path / name), create=True)
        manifest = packed(store, workers, train=[{"imagenet": source}], sizes=[16])
        assert len(manifest.splits["train"].shards) > 3
        made.append(objects(store))
    assert made[0] == made[1] == made[2]


@pytest.mark.usefixtures("processes")
def test_a_dask_cluster_makes_the_same_bytes(tmp_path: Path) -> None:
    from distributed import LocalCluster

    source = classes_in(tmp_path / "train")
    alone, cluster_store = (
        open_store(str(tmp_path / "alone"), create=True),
        open_store(str(tmp_path / "cluster"), create=True),
    )
    packed(alone, train=[{"imagenet": source}], sizes=[16])
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        workers = Dask(cluster.scheduler_address)
        packed(cluster_store, workers, train=[{"imagenet": source}], sizes=[16])
        workers.close()
    assert objects(alone) == objects(cluster_store)


def test_copies_in_other_sizes_have_the_same_samples(directory_store: Store, tmp_path: Path) -> None:
    manifest = packed(directory_store, train=[{"imagenet": classes_in(tmp_path / "train")}], sizes=[16, 24])
    assert list(manifest.splits) == ["train", "train@16", "train@24"]
    [small] = columns(directory_store, manifest, "train@16", tmp_path)
    assert (set(small.plain["width"].tolist()), set(small.plain["height"].tolist())) == ({20}, {16})
    assert small.plain["label"].tolist() == [0] * 6 + [1] * 6


def names(store: Store, manifest: Manifest, split: str, folder: Path) -> list[str]:
    return [
        bytes(shard.ragged["name"][row]).decode()
        for shard in columns(store, manifest, split, folder)
        for row in range(len(shard))
    ]


def captions_with_one_long_picture(folder: Path) -> list[str]:
    """Captions of 150 images, of which one is too long for a JPEG unless it is reduced."""
    source = captions_in(folder, 150)
    Image.new("RGB", (66_000, 150)).save(folder / "images" / "3.jpg", "PNG")
    return source


def test_an_image_that_is_unusable_in_one_size_is_left_out_of_all(directory_store: Store, tmp_path: Path) -> None:
    said: list[str] = []
    source = captions_with_one_long_picture(tmp_path / "coco")
    manifest = packed(directory_store, None, said, train=[{"coco": source}], sizes=[16])
    expected = [f"{number}.jpg" for number in range(150) if number != 3]
    assert names(directory_store, manifest, "train", tmp_path) == expected
    assert names(directory_store, manifest, "train@16", tmp_path) == expected
    assert said == ["train: 149 images with captions; left out 1 (too long)"]


class Losing(Workers):
    """Removes a file after every task, as a file system with read errors may."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = iter(paths)

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        for task in tasks:
            yield work(task)
            next(self._paths).unlink()


def test_an_image_that_cannot_be_read_again_is_still_in_all_sizes(directory_store: Store, tmp_path: Path) -> None:
    source = captions_in(tmp_path / "coco", 5)
    losing = Losing([tmp_path / "coco" / "images" / f"{number}.jpg" for number in range(5)])
    manifest = packed(directory_store, losing, train=[{"coco": source}], sizes=[16, 24])
    expected = [f"{number}.jpg" for number in range(5)]
    for split in ("train", "train@16", "train@24"):
        assert names(directory_store, manifest, split, tmp_path) == expected


def test_copies_of_an_interrupted_shard_are_made_again_with_it(directory_store: Store, tmp_path: Path) -> None:
    train = [{"imagenet": classes_in(tmp_path / "train", each=120)}]
    first = tmp_path / "train" / "a" / "0.jpg"
    kept = first.read_bytes()
    status = first.stat()

    def change(data: bytes) -> None:  # of the same size and time, so that the pack has the same name
        first.write_bytes(data)
        os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))

    change(bytes(len(kept)))
    with pytest.raises(KeyboardInterrupt):
        packed(directory_store, Interrupted(1), train=train, sizes=[16])
    # As if it had been killed between the shard and its copy.
    for entry in directory_store.list(""):
        if "making/" in entry.key or "@16" in entry.key:
            directory_store.delete(entry.key)
    change(kept)
    manifest = packed(directory_store, train=train, sizes=[16])
    found = names(directory_store, manifest, "train", tmp_path)
    assert len(found) == 240
    assert names(directory_store, manifest, "train@16", tmp_path) == found


def test_captions_of_an_image_stay_together(directory_store: Store, tmp_path: Path) -> None:
    manifest = packed(directory_store, train=[{"coco": captions_in(tmp_path / "coco", 5)}])
    [shard] = columns(directory_store, manifest, "train", tmp_path)
    assert manifest.vocabulary is not None
    vocabulary = Vocabulary.from_json(directory_store.get(pack_key(manifest.name, "vocabulary.json")).decode())
    tokens, lengths = shard.ragged["captions"][3].tolist(), shard.ragged["caption_lengths"][3].tolist()
    first, second = tokens[: lengths[0]], tokens[lengths[0] :]
    assert [first[0], first[-1], second[0], second[-1]] == [BOS, EOS, BOS, EOS]
    assert vocabulary.decode([first, second]) == ["picture 3 seen 0", "picture 3 seen 1"]


def test_caption_sources_are_mixed_and_marked_captions_filtered(directory_store: Store, tmp_path: Path) -> None:
    coco, vizwiz = captions_in(tmp_path / "coco", 5), captions_in(tmp_path / "good", 3)
    marked = captions_in(tmp_path / "marked", 2, {"is_precanned": True})
    train = [{"coco": coco, "weight": 2.0}, {"vizwiz": vizwiz}, {"vizwiz": marked}]
    split = packed(directory_store, train=train).splits["train"]
    assert split.sources == (5, 3, 0)
    assert sum(drops.count for drops in split.filtered.values()) > 0
    assert split.dropped == {}


def test_bad_images_are_counted_and_named(directory_store: Store, tmp_path: Path) -> None:
    source = Path(classes_in(tmp_path / "train", each=120))
    (source / "a" / "0.jpg").write_bytes(b"")
    (source / "b" / "7.jpg").write_bytes(picture(1)[:300])
    split = packed(directory_store, train=[{"imagenet": str(source)}]).splits["train"]
    assert split.samples == 238
    assert sum(drops.count for drops in split.dropped.values()) == 2
    assert {name for drops in split.dropped.values() for name in drops.names} == {"a/0.jpg", "b/7.jpg"}


def test_too_many_bad_images_stop_the_pack_unless_allowed(directory_store: Store, tmp_path: Path) -> None:
    source = Path(classes_in(tmp_path / "train"))
    (source / "a" / "0.jpg").write_bytes(b"not a picture")
    data = DataSettings.model_validate({"train": [{"imagenet": str(source)}]})
    with pytest.raises(FieldMistake, match=r"data\.train: 1 of 12 samples .* such as a/0\.jpg; .* --allow-drops"):
        pack("toy", data, directory_store, InProcess(), PlainProgress(lambda _: None))
    allowed = pack("toy", data, directory_store, InProcess(), PlainProgress(lambda _: None), allow_drops=True)
    assert allowed.splits["train"].samples == 11


def test_an_image_in_train_and_valid_causes_a_warning(directory_store: Store, tmp_path: Path) -> None:
    source = classes_in(tmp_path / "train")
    said: list[str] = []
    packed(directory_store, None, said, train=[{"imagenet": source}], valid=[{"imagenet": source}])
    assert said[-1].startswith("warning: 12 samples of valid are also in train")


def test_sources_of_different_kinds_are_refused(directory_store: Store, tmp_path: Path) -> None:
    train = [{"imagenet": classes_in(tmp_path / "train")}, {"coco": captions_in(tmp_path / "coco", 2)}]
    with pytest.raises(FieldMistake, match=r"data\.train\.1: has captions, but the first training source has labels"):
        packed(directory_store, train=train)


class Interrupted(Workers):
    """Gives up after so many shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def do(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        for task in islice(tasks, self._shards):
            yield work(task)
        raise KeyboardInterrupt


def test_an_interrupted_pack_resumes_with_the_shards_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "SHARD_BYTES", 2_000)
    train = [{"imagenet": classes_in(tmp_path / "train", each=8)}]
    broken, whole = open_store(str(tmp_path / "broken"), create=True), open_store(str(tmp_path / "whole"), create=True)
    with pytest.raises(KeyboardInterrupt):
        packed(broken, Interrupted(2), train=train, sizes=[16])
    first = {entry.key: entry for entry in broken.list() if entry.key.endswith(".safetensors")}
    assert len(first) == 4
    packed(broken, train=train, sizes=[16])
    packed(whole, train=train, sizes=[16])
    assert objects(broken) == objects(whole)
    assert [broken.entry(key) for key in first] == list(first.values())


def test_packing_again_does_nothing(directory_store: Store, tmp_path: Path) -> None:
    train = [{"imagenet": classes_in(tmp_path / "train")}]
    said: list[str] = []
    first = packed(directory_store, train=train)
    before = directory_store.list("")
    assert packed(directory_store, None, said, train=train) == first
    assert said == [f"pack {first.name} already exists"]
    assert directory_store.list("") == before


def test_a_picture_of_terabytes_is_left_out_without_being_read(directory_store: Store, tmp_path: Path) -> None:
    source = Path(classes_in(tmp_path / "train", each=60))
    with (source / "a" / "0.jpg").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    split = packed(directory_store, train=[{"imagenet": str(source)}]).splits["train"]
    assert split.samples == 119
    assert split.dropped == {"unreadable: more than 300 MB": Drops(1, ("a/0.jpg",))}


def test_a_changed_member_of_a_zip_is_left_out(directory_store: Store, tmp_path: Path) -> None:
    captions, _ = captions_in(tmp_path / "coco", 150)
    archive = bytearray(zipped(((f"{number}.jpg", picture(number)) for number in range(150)), zipfile.ZIP_STORED))
    archive[archive.index(picture(1)) + 500] ^= 1
    images_zip = tmp_path / "images.zip"
    images_zip.write_bytes(archive)
    split = packed(directory_store, train=[{"coco": [captions, str(images_zip)]}]).splits["train"]
    assert (split.samples, split.dropped) == (149, {"unreadable: damaged in its archive": Drops(1, ("1.jpg",))})


def test_what_is_not_a_sample_is_said(directory_store: Store, tmp_path: Path) -> None:
    source = Path(classes_in(tmp_path / "train"))
    said: list[str] = []
    (source / "__MACOSX").mkdir()
    (source / "a" / "Thumbs.db").write_bytes(b"?")
    (source / "b" / "deeper").mkdir()
    (source / "b" / "deeper" / "7.JPEG").write_bytes(picture(7))
    (source / "list.csv").write_text("?")
    packed(directory_store, None, said, train=[{"imagenet": str(source)}])
    assert said == ["train: 13 images; left out 2 (hidden or system file), 1 (file outside of the class folders)"]


@pytest.mark.usefixtures("processes")
def test_a_compressed_tar_of_classes_is_packed_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHARD_BYTES", 2_000)
    folder = Path(classes_in(tmp_path / "train"))
    files = [(str(path.relative_to(tmp_path)), path.read_bytes()) for path in sorted(folder.rglob("*.jpg"))]
    (tmp_path / "train.tgz").write_bytes(gzip.compress(tar(files)))
    whole, compressed = (open_store(str(tmp_path / name), create=True) for name in ("whole", "compressed"))
    one = packed(whole, train=[{"imagenet": str(folder)}])
    other = packed(compressed, Processes(2), train=[{"imagenet": str(tmp_path / "train.tgz")}])
    assert one.splits == other.splits


def test_captions_that_are_too_long_for_a_vocabulary_are_left_out(directory_store: Store, tmp_path: Path) -> None:
    captions, folder = captions_in(tmp_path / "coco", 120)
    document = json.loads(Path(captions).read_text())
    for number in (0, 2, 3):  # one caption of the first image, and both of the second
        document["annotations"][number]["caption"] = "x" * 16_001
    Path(captions).write_text(json.dumps(document))
    split = packed(directory_store, train=[{"coco": [captions, folder]}]).splits["train"]
    assert split.samples == 119
    assert split.filtered == {"caption of more than 16,000 bytes": Drops(3, ("0.jpg", "1.jpg", "1.jpg"))}
    assert split.dropped == {"image without a caption": Drops(1, ("1.jpg",))}


def test_a_folder_and_a_zip_of_it_have_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHARD_BYTES", 2_000)
    captions, folder = captions_in(tmp_path / "coco", 12)
    archive = tmp_path / "images.zip"
    archive.write_bytes(zipped((path.name, path.read_bytes()) for path in Path(folder).iterdir()))
    stores = [open_store(str(tmp_path / name), create=True) for name in ("one", "two")]
    one = packed(stores[0], train=[{"coco": [captions, folder]}])
    two = packed(stores[1], train=[{"coco": [captions, str(archive)]}])
    assert one.splits == two.splits


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_said_in_one_line() -> None:
    with pytest.raises(PacktrainError, match="was killed, perhaps for lack of memory; pack again with fewer"):
        list(Processes(1).do(killed, range(3)))
