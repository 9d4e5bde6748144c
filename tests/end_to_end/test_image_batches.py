"""From raw images to batches of pixels, through store and cache: the same for any number of ranks and threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pack.pictures import photo, saved
from packtrain.data.images import ImageBatches
from packtrain.data.order import epoch_batches, share
from packtrain.data.pack import Pack
from packtrain.job.job import DataSettings
from packtrain.pack import images
from packtrain.pack.build import PlainProgress, pack
from packtrain.pack.workers import InProcess
from packtrain.store import Store

SEED, EPOCH, SIZE = 7, 3, 32


@pytest.fixture
def opened(any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Return a pack of 24 images in several shards."""
    monkeypatch.setattr(images, "SHARD_BYTES", 20_000)
    for number in range(24):
        path = tmp_path / "raw" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(90 + 3 * number, 120 - 2 * number, seed=number), "JPEG", quality=90))
    data = DataSettings.model_validate({"train": [{"imagenet": str(tmp_path / "raw")}]})
    manifest = pack("photos", data, any_store, InProcess(), PlainProgress(lambda _: None))
    assert len(manifest.splits["train"].shards) > 2
    return Pack(any_store, manifest.name, tmp_path / "cache")


@pytest.mark.parametrize(("num_ranks", "threads"), [(1, 1), (2, 3), (3, 1), (4, 2)])
def test_batches_are_the_same_for_any_number_of_ranks_and_threads(opened: Pack, num_ranks: int, threads: int) -> None:
    split = opened.split("train")
    ones = np.ones(len(split), np.int64)
    with ImageBatches(split, 1) as alone, ImageBatches(split, threads) as many:
        for batch in epoch_batches(ones, ones, 7, SEED, EPOCH):
            whole = alone.random(batch, SEED, EPOCH, SIZE, 0.3)
            together = np.empty_like(whole)
            for rank in range(num_ranks):
                part = many.random(share(batch, rank, num_ranks), SEED, EPOCH, SIZE, 0.3)
                together[rank::num_ranks] = part
            assert np.array_equal(whole, together)


def test_each_epoch_crops_differently(opened: Pack) -> None:
    ids = np.arange(8)
    with ImageBatches(opened.split("train"), 2) as batches:
        first, again = (batches.random(ids, SEED, EPOCH, SIZE, 0.3) for _ in range(2))
        other = batches.random(ids, SEED, EPOCH + 1, SIZE, 0.3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert opened.split("train").plain("label").tolist() == [0] * 12 + [1] * 12
