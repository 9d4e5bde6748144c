"""Mutated files of every raw format: each is refused with one line, or gives samples that hold what samples promise."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pack.rawsets import (
    MANY,
    class_tars,
    coco,
    cornell_conversations,
    cornell_lines,
    json_lines,
    meta_mat,
    numbered,
    picture,
    tar,
    with_checksum,
    write,
    write_classes,
    zipped,
)
from packtrain.errors import Mistake
from packtrain.job.kinds import Drop
from packtrain.pack.bitext import BitextSource
from packtrain.pack.coco import CocoSource
from packtrain.pack.dialogue import DialogueSource
from packtrain.pack.folder import FolderSource
from packtrain.pack.imagenet import ImageNetSource
from packtrain.pack.raw import DropCounter, RawImage, TextPair

Sample = RawImage | TextPair
Read = Callable[[Path, Drop], Iterable[Sample]]

CLASSES = ("n01", "n02")
TEXTS = {"L1": "They do not!", "L2": "They do to! é", "L3": "I hope so."}
CAPTIONS = coco([(0, "a.jpg"), (1, "deep/b.jpg")], [(0, "a cat"), (0, "a tabby"), (1, "a dog é")])
for annotation in CAPTIONS["annotations"]:
    annotation |= {"is_precanned": False, "is_rejected": False}
SGML = """<refset setid="x"><doc docid='1.é'><p><seg id="1">one &amp; &#1234; &#xD800;</seg>
<seg id=2>two
lines</seg></p></doc></refset>
""".encode()
IMAGES = [("set/a.jpg", picture()), ("set/deep/b.jpg", picture(1))]

pytestmark = pytest.mark.usefixtures("thorough")


def captioned(folder: Path, images: str, drop: Drop) -> Iterable[RawImage]:
    return CocoSource(paths=(f"{folder}/captions.json", images)).captioned(drop, drop)


# The files of each format that are mutated, and the reader.
FORMATS: dict[str, tuple[dict[str, bytes], Read]] = {
    "class tars": (
        {"train.tar": class_tars({"n01": ["1.JPEG", "long/" * 30 + "2.JPEG"], "n02": ["3.JPEG"]})},
        lambda folder, drop: ImageNetSource(paths=(f"{folder}/train.tar",)).labeled(CLASSES, drop, drop),
    ),
    "flat tar": (
        {
            "val.tar": tar(((name, picture()) for name in numbered(3)), form=2),
            "truth.txt": b"1\n2\n1\n",
            "synsets.txt": b"n01 dog, hound\nn02 cat\n",
        },
        lambda folder, drop: ImageNetSource(
            paths=(f"{folder}/val.tar", f"{folder}/truth.txt", f"{folder}/synsets.txt"),
        ).labeled(CLASSES, drop, drop),
    ),
    "class folders in a compressed tar": (
        {"train.tgz": gzip.compress(tar([("set/n01/1", picture()), ("set/n02/deep/2", picture())]))},
        lambda folder, drop: ImageNetSource(paths=(f"{folder}/train.tgz",)).labeled(CLASSES, drop, drop),
    ),
    "class folders in a zip": (
        {"train.zip": zipped([("set/n01/1", picture()), ("set/n02/deep/2", picture())])},
        lambda folder, drop: ImageNetSource(paths=(f"{folder}/train.zip",)).labeled(CLASSES, drop, drop),
    ),
    "devkit": (
        {
            "val.tar": tar((name, picture()) for name in numbered(3)),
            "devkit/data/meta.mat": meta_mat({1: "n02", 2: "n01", 3: "n00"}, compress=False),
            "devkit/data/ILSVRC2012_validation_ground_truth.txt": b"1\n2\n1\n",
        },
        lambda folder, drop: ImageNetSource(paths=(f"{folder}/val.tar", f"{folder}/devkit")).labeled(
            CLASSES, drop, drop
        ),
    ),
    "Kaggle": (
        {
            "val.tar": tar((name, picture()) for name in numbered(2)),
            "solution.csv": b"ImageId,PredictionString\nILSVRC2012_val_00000002,n01 1 2 3 4 \n"
            b'ILSVRC2012_val_00000001,"n02 1 2 3 4 n02 1 2 3 4"\n',
        },
        lambda folder, drop: ImageNetSource(paths=(f"{folder}/val.tar", f"{folder}/solution.csv")).labeled(
            CLASSES, drop, drop
        ),
    ),
    "class folders": (
        {"names.txt": b"n01/1.JPEG\nn02/2.JPEG\nn02/3.JPEG\n"},
        lambda folder, drop: ImageNetSource(paths=(_folders(folder),)).labeled(CLASSES, drop, drop),
    ),
    "captions": (
        {"captions.json": json.dumps(CAPTIONS).encode()},
        lambda folder, drop: captioned(folder, str(folder), drop),
    ),
    "captions and a tar": (
        {"captions.json": json.dumps(CAPTIONS).encode(), "images.tar": tar(IMAGES)},
        lambda folder, drop: captioned(folder, f"{folder}/images.tar", drop),
    ),
    "captions and a zip": (
        {"captions.json": json.dumps(CAPTIONS).encode(), "images.zip": zipped(IMAGES)},
        lambda folder, drop: captioned(folder, f"{folder}/images.zip", drop),
    ),
    "cornell": (
        {
            "movie_lines.txt": cornell_lines(TEXTS).encode("latin-1"),
            "movie_conversations.txt": cornell_conversations(["L1", "L2", "L3"], ["L2", "L1"]).encode(),
        },
        lambda folder, drop: DialogueSource(paths=(str(folder),)).pairs(drop),
    ),
    "cornell in a zip": (
        {
            "cornell.zip": zipped(
                [
                    ("set/movie_lines.txt", cornell_lines(TEXTS).encode("latin-1")),
                    ("set/movie_conversations.txt", cornell_conversations(["L1", "L2", "L3"], ["L2", "L1"]).encode()),
                ]
            )
        },
        lambda folder, drop: DialogueSource(paths=(f"{folder}/cornell.zip",), without_last=1).pairs(drop),
    ),
    "SGML": (
        {"a-src.en.sgm": SGML, "a-ref.de.sgm": SGML},
        lambda folder, drop: BitextSource(paths=(f"{folder}/a-src.en.sgm", f"{folder}/a-ref.de.sgm")).pairs(drop),
    ),
    "columns in a compressed tar": (
        {"set.tgz": gzip.compress(tar([("set/a.txt", b"1\tone\teins\n2\ttwo\tzwei\tx\n")]))},
        lambda folder, drop: BitextSource(paths=(f"{folder}/set.tgz#a.txt",), columns=(2, 3)).pairs(drop),
    ),
    "pairs": (
        {"pairs.tsv": "one\teins\ntwo\tzwei é\n".encode()},
        lambda folder, drop: BitextSource(paths=(f"{folder}/pairs.tsv",)).pairs(drop),
    ),
    "labels": (
        {"x.jsonl": json_lines({"image": "a.jpg", "label": "n01"}, {"image": "deep/b.jpg", "label": "n02"}).encode()},
        lambda folder, drop: FolderSource(paths=(f"{folder}/x.jsonl",)).labeled(CLASSES, drop, drop),
    ),
    "own captions": (
        {"x.jsonl": json_lines({"image": "a.jpg", "caption": "é"}, {"image": "out", "caption": ["a", "b"]}).encode()},
        lambda folder, drop: FolderSource(paths=(f"{folder}/x.jsonl",)).captioned(drop, drop),
    ),
    "own texts": (
        {"x.jsonl": json_lines({"source": "one", "target": "eins"}, {"source": "two", "target": "zwei"}).encode()},
        lambda folder, drop: FolderSource(paths=(f"{folder}/x.jsonl",)).pairs(drop),
    ),
}

SPICE = [
    b"\0", b"\n", b"\r", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\t", b" +++$+++ ", b"../", b"/", b"'", b'"',
    b"[", b"{", b"}", b",", b"\\", b"\\ud800", b"NaN", b"null", b"true", b"-1", b"0", b"9" * 30, b"9" * 5000, b"1e999",
    b"[" * 3000, b"\x1b[2J", b"x" * 300, b".tar", b"ustar\0", b"ustar  \0", b"9 path=a\n", b"9 size=1\n", b"\x80",
    b"\x1f\x8b", b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"1", b"2", b"5", b"L", b"x", b"g", b"S",
    b"<seg>", b"</seg>", b"<doc>", b"&#x110000;", b"&#0;",
]  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with some bytes overwritten, put in, taken out or repeated, or with its end cut off."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 600)))
        new = draw(st.sampled_from(SPICE) | st.binary(min_size=1, max_size=12))
        data = draw(
            st.sampled_from(
                [
                    data[:start] + new + data[start + len(new) :],
                    data[:start] + new + data[start:],
                    data[:start] + data[end:],
                    data[:end] + data[start:],
                    data[:start],
                ]
            )
        )
    return data


def with_checksums(data: bytes) -> bytes:
    """A tar whose headers, however they were mutated, are taken for headers."""
    blocks = [data[start : start + 512] for start in range(0, len(data), 512)]
    return b"".join(
        with_checksum(block) if block[257:262] == b"ustar" and len(block) == 512 else block for block in blocks
    )


@contextmanager
def data_set(files: dict[str, bytes]) -> Iterator[Path]:
    """A folder with the files, two pictures, and a link that leads out."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        for name, data in files.items():
            write(folder / name, data)
        write(folder / "a.jpg", b"a")
        write(folder / "deep/b.jpg", b"b")
        (folder / "out").symlink_to("/etc/hostname")
        yield folder
    finally:
        shutil.rmtree(folder)


def _folders(folder: Path) -> str:
    """Write the files of a list of names, as far as the file system allows their names."""
    write_classes(folder / "set", {"n01": [], "n02": []})
    for name in (folder / "names.txt").read_bytes().split(b"\n"):
        if b".." not in name and b"\0" not in name and len(name) < 200:
            with suppress(OSError):
                write(folder / "set" / os.fsdecode(name.strip(b"/")), picture())
    return str(folder / "set")


def check(samples: Iterable[Sample], folder: Path) -> None:
    names = set()
    for sample in samples:
        if isinstance(sample, TextPair):
            assert sample.source.encode() is not None
            assert sample.target.encode() is not None
            continue
        assert sample.name.isprintable()
        assert sample.name not in names
        names.add(sample.name)
        assert (sample.label in range(len(CLASSES))) != bool(sample.captions)
        assert all(caption.strip() and caption.encode() for caption in sample.captions)
        where = sample.where
        assert Path(where.path).resolve().is_relative_to(folder.resolve())
        size = Path(where.path).stat().st_size if where.length is None else where.length
        if where.inflated is None:
            assert len(where.read(MANY)) == size
        else:
            with suppress(OSError):  # it is damaged, which nobody knows before
                assert len(where.read(MANY)) == where.inflated


@pytest.mark.parametrize("name", FORMATS)
def test_valid_files_give_samples(name: str) -> None:
    files, read = FORMATS[name]
    dropped = DropCounter()
    with data_set(files) as folder:
        if name != "own captions":  # its second image is the link that leads out
            samples = list(read(folder, dropped))
            check(samples, folder)
            assert len(samples) >= 2
    assert not dropped.counts


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_mutated_file_is_refused_in_one_line_or_read_correctly(name: str, data: st.DataObject) -> None:
    files, read = FORMATS[name]
    chosen = data.draw(st.sampled_from(sorted(files)))
    mutated = data.draw(mutations(files[chosen]))
    if chosen.endswith(".tar") and data.draw(st.booleans()):
        mutated = with_checksums(mutated)
    with data_set(files | {chosen: mutated}) as folder:
        try:
            check(read(folder, DropCounter()), folder)
        except Mistake as refused:
            said = str(refused)
            assert said.isprintable()
            assert len(said) < 800


@settings(max_examples=60)
@given(content=st.binary(max_size=700))
def test_arbitrary_bytes_are_refused_or_read(content: bytes) -> None:
    for files, read in FORMATS.values():
        with data_set(dict.fromkeys(files, content)) as folder, suppress(Mistake):
            check(read(folder, DropCounter()), folder)
