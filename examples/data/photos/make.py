"""Makes train.tar and valid.tar from folders of pictures, one for each class: the first so many of each, made small.

    python make.py SOURCE train 600     SOURCE/train/<class>/*.JPEG -> train.tar
    python make.py SOURCE val 100       SOURCE/val/<class>/*.JPEG   -> valid.tar

SOURCE/synset_words.txt has the words for the classes. The same pictures give the same bytes.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from PIL import Image

QUALITY = 80


def small(picture: Path) -> bytes:
    out = io.BytesIO()
    Image.open(picture).convert("RGB").save(out, "WEBP", quality=QUALITY, method=6)
    return out.getvalue()


def class_tar(pictures: list[Path]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, picture in enumerate(pictures):
            add(tar, f"{number:04d}.webp", small(picture))
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def main() -> None:
    source, split, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rows = (line.split(None, 1) for line in (source / "synset_words.txt").read_text().splitlines())
    words = {number: name.strip() for number, name in rows}
    target = Path(__file__).parent / f"{'valid' if split == 'val' else split}.tar"
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, name in sorted(words.items(), key=lambda pair: pair[1]):
            pictures = sorted((source / split / number).iterdir())[:count]
            add(tar, f"{name}.tar", class_tar(pictures))
    print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
