"""The full-size examples of text name their files as they are downloaded: the same layouts, in small, are packed."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

from pack.rawsets import cornell_conversations, cornell_lines, tar, write, zipped
from packtrain.job.load import load_job
from packtrain.pack.build import PlainProgress
from packtrain.pack.manifest import Manifest
from packtrain.pack.packing import pack
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
