"""Make train.tar and valid.tar from folders of images, one per class: the first images of each, recompressed.

    python make.py SOURCE train 600     SOURCE/train/<class>/*.JPEG -> train.tar
    python make.py SOURCE val 100       SOURCE/val/<class>/*.JPEG   -> valid.tar

SOURCE/synset_words.txt has the names of the classes. The same images give the same bytes.
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

from PIL import Image

QUALITY = 80


def small(image: Path) -> bytes:
    out = io.BytesIO()
    Image.open(image).convert("RGB").save(out, "WEBP", quality=QUALITY, method=6)
    return out.getvalue()


def class_tar(images: list[Path]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in enumerate(images):
            add(tar, f"{number:04d}.webp", small(image))
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
            images = sorted((source / split / number).iterdir())[:count]
            add(tar, f"{name}.tar", class_tar(images))
    print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
