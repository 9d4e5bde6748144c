"""What `packtrain pack --stats` shows."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from packtrain.control import cache_directory
from packtrain.data.pack import Pack
from packtrain.pack.manifest import Manifest, pack_key
from packtrain.pack.shard import Columns
from packtrain.report.pack_page import print_stats, sample_page
from packtrain.report.pack_stats import stats_of
from packtrain.store import Store


def show_stats(screen: Console, store: Store, manifest: Manifest) -> None:
    """Prints the statistics of a pack, and puts a page of its samples beside it."""
    pack = Pack(store, manifest.name, cache_directory() / "packs")

    def columns(split: str) -> Iterator[Columns]:
        reader = pack.split(split)
        return (reader.shard(number) for number in range(reader.num_shards))

    source = pack.vocabulary if manifest.vocabulary else None
    target = pack.target_vocabulary if manifest.target_vocabulary else None
    stats = stats_of(manifest, columns, source, target)
    print_stats(screen, stats)
    key = pack_key(manifest.name, "samples.html")
    store.put(key, sample_page(stats, columns, source, target).encode())
    screen.print(f"samples: {escape(f'{store.url}/{key}')}")
