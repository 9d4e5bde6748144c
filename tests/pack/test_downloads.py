"""The full-size examples name their files as they are downloaded: the same layouts, in small, are packed."""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pack.rawsets import (
    class_tars,
    coco,
    cornell_conversations,
    cornell_lines,
    meta_mat,
    numbered,
    picture,
    tar,
    write,
    zipped,
)
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.manifest import Manifest
from packtrain.pack.shard import open_shard
from packtrain.pack.workers import InProcess
from packtrain.recipes import recipe_defaults
from packtrain.store import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"


def packed(example: str, folder: Path, changes: Sequence[tuple[str, str]]) -> Manifest:
    """The pack of an example whose data is in `folder` instead of /data."""
    text = (EXAMPLES / example).read_text().replace("/data/", f"{folder}/")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    job = load_job(write(folder / "job.yaml", text), (), recipe_defaults).job
    return pack(
        job.name, job.data, open_store(str(folder / "store"), create=True), InProcess(), PlainProgress(lambda _: None)
    )


def tgz(path: Path, members: dict[str, str]) -> None:
    write(path, gzip.compress(tar([(name, text.encode()) for name, text in members.items()])))


def aligned(stem: str, *numbers: int) -> dict[str, str]:
    """Two aligned files among those of other languages."""
    texts = {"cs": "Věta číslo", "de": "Satz Nummer", "en": "sentence number"}
    return {f"{stem}.{language}": "".join(f"{text} {one}\n" for one in numbers) for language, text in texts.items()}


def sgml(kind: str, text: str, *numbers: int) -> str:
    segments = "".join(f'<seg id="{one}">{text} {one} &amp; more</seg>\n' for one in numbers)
    head = f'<{kind} setid="newstest2014" srclang="any">\n<doc sysid="ref" docid="1.abc" genre="news" origlang="en">'
    return f"{head}\n<p>\n{segments}</p>\n</doc>\n</{kind}>\n"


def test_wmt14_is_packed_from_its_archives(tmp_path: Path) -> None:
    folder = tmp_path / "wmt14"
    tgz(folder / "training-parallel-europarl-v7.tgz", aligned("training/europarl-v7.de-en", *range(40)))
    crawled = aligned("commoncrawl.de-en", *range(40, 60))
    tgz(folder / "training-parallel-commoncrawl.tgz", {**crawled, "commoncrawl.de-en.annotation": "a\nb\n"})
    news = aligned("training-parallel-nc-v11/news-commentary-v11.de-en", *range(60, 70))
    tgz(folder / "training-parallel-nc-v11.tgz", news)
    tgz(folder / "dev.tgz", {"dev/._newstest2013.en": "\0", **aligned("dev/newstest2013", 70, 71)})
    test = {
        "test-full/newstest2014-deen-ref.de.sgm": sgml("refset", "Satz Nummer", 72, 73, 74),
        "test-full/newstest2014-deen-src.en.sgm": sgml("srcset", "sentence number", 72, 73, 74),
    }
    tgz(folder / "test-full.tgz", test)
    manifest = packed("translate-wmt14.yaml", tmp_path, [("vocabulary: 32768", "vocabulary: 300")])
    splits = manifest.splits
    assert splits["train"].sources == (40, 20, 10)
    assert (splits["valid"].samples, splits["test"].samples) == (2, 3)


def test_cornell_movie_dialogs_is_packed_from_its_zip(tmp_path: Path) -> None:
    folder = "cornell movie-dialogs corpus"
    lines = cornell_lines({f"L{number}": f"line number {number}é" for number in range(9, -1, -1)}).encode("cp1252")
    conversations = cornell_conversations(["L0", "L1", "L2"], ["L3", "L4"], ["L5", "L6"], ["L7", "L8", "L9"]).encode()
    members = [
        (f"{folder}/.DS_Store", b"\0"),
        (f"{folder}/chameleons.pdf", b"%PDF-1.4"),
        (f"__MACOSX/{folder}/._chameleons.pdf", b"\0"),
        (f"{folder}/movie_characters_metadata.txt", b"u0 +++$+++ BIANCA\n"),
        (f"{folder}/movie_conversations.txt", conversations),
        (f"{folder}/movie_lines.txt", lines),
        (f"{folder}/README.txt", b"Cornell Movie-Dialogs Corpus\n"),
    ]
    write(tmp_path / "cornell_movie_dialogs_corpus.zip", zipped(members))
    manifest = packed("chat-cornell.yaml", tmp_path, [("vocabulary: 8000", "vocabulary: 300"), (": 2000", ": 2")])
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 3, "valid": 3}


def synsets(count: int) -> dict[int, str]:
    """Synsets in the devkit's order, which is not that of their names."""
    return {number: f"n{(7919 * number) % 100_000:08d}" for number in range(1, count + 1)}


def test_imagenet_is_packed_from_its_tars(tmp_path: Path) -> None:
    names = synsets(1860)  # the first 1,000 are classes, the others are what they have in common
    trained = {names[number]: [f"{names[number]}_{which}.JPEG" for which in (1, 12)] for number in (1, 2, 490)}
    write(tmp_path / "ILSVRC2012_img_train.tar", class_tars(trained))
    images = [(name, picture(100 + shade)) for shade, name in enumerate(numbered(4))]
    write(tmp_path / "ILSVRC2012_img_val.tar", tar(images))
    devkit = [
        ("ILSVRC2012_devkit_t12/readme.txt", b"the devkit"),
        ("ILSVRC2012_devkit_t12/data/meta.mat", meta_mat(names)),
        ("ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt", b"490\n2\n1\n490\n"),
        ("ILSVRC2012_devkit_t12/evaluation/get_class2node.m", b"function"),
    ]
    write(tmp_path / "ILSVRC2012_devkit_t12.tar.gz", gzip.compress(tar(devkit)))
    manifest = packed("classify-imagenet.yaml", tmp_path, [])
    assert manifest.classes == tuple(sorted(trained))
    assert {name: split.samples for name, split in manifest.splits.items()} == {
        **{"train": 6, "train@160": 6, "train@352": 6},
        **{"valid": 4, "valid@160": 4, "valid@352": 4},
    }
    [shard] = manifest.splits["valid"].shards
    columns = open_shard(tmp_path / "store" / "packs" / manifest.name / shard.name)
    expected = [names[490], names[2], names[1], names[490]]
    assert [manifest.classes[label] for label in columns.plain["label"]] == expected


def test_imagenet_is_packed_as_kaggle_has_it(tmp_path: Path) -> None:
    data = "ILSVRC/Data/CLS-LOC"
    for shade, name in enumerate(
        ["train/n02/n02_1.JPEG", "train/n01/n01_4.JPEG", *(f"val/{one}" for one in numbered(2))]
    ):
        write(tmp_path / data / name, picture(shade))
    solution = "ImageId,PredictionString\nILSVRC2012_val_00000002,n01 1 2 3 4 \nILSVRC2012_val_00000001,n02 1 2 3 4 \n"
    write(tmp_path / "LOC_val_solution.csv", solution)
    example = (EXAMPLES / "classify-imagenet.yaml").read_text().replace("/data/", f"{tmp_path}/")
    [train_there, train] = re.findall(r"train: (\{imagenet.*?\})", example)[::-1]
    [valid, valid_there] = re.findall(r"valid: (\{imagenet.*?\})", example)
    manifest = packed("classify-imagenet.yaml", tmp_path, [(train_there, train), (valid_there, valid)])
    assert (manifest.splits["train"].samples, manifest.splits["valid"].samples) == (2, 2)


def captioned(split: str, names: Sequence[str], **marks: bool) -> dict[str, object]:
    document = coco(enumerate(names), [(number, f"a {split} picture") for number in range(len(names))])
    for annotation in document["annotations"]:
        annotation.update(marks)
    return document


def test_coco_and_vizwiz_are_packed_from_their_zips(tmp_path: Path) -> None:
    annotations, described = {}, {}
    for split, count in (("train", 5), ("val", 3)):
        names = [f"COCO_{split}2014_{number:012d}.jpg" for number in range(count)]
        images = [(f"{split}2014/{name}", picture(shade)) for shade, name in enumerate(names)]
        write(tmp_path / f"coco/{split}2014.zip", zipped([(f"{split}2014/", b""), *images], zipfile.ZIP_STORED))
        annotations[f"annotations/captions_{split}2014.json"] = captioned(split, names)
        annotations[f"annotations/instances_{split}2014.json"] = {"images": [], "annotations": []}
        others = [f"VizWiz_{split}_{number:08d}.jpg" for number in range(count)]
        write(tmp_path / f"vizwiz/{split}.zip", zipped((f"{split}/{name}", picture(50)) for name in others))
        described[f"annotations/{split}.json"] = captioned(split, others, is_precanned=False, is_rejected=False)
    for path, members in (("coco/annotations_trainval2014", annotations), ("vizwiz/annotations", described)):
        write(tmp_path / f"{path}.zip", zipped((name, json.dumps(one).encode()) for name, one in members.items()))
    manifest = packed("caption-coco-vizwiz.yaml", tmp_path, [("vocabulary: 10000", "vocabulary: 300")])
    assert {name: split.sources for name, split in manifest.splits.items()} == {
        **{"train": (5, 5), "train@256": (5, 5)},
        **{"valid": (3, 3), "valid@256": (3, 3)},
    }
