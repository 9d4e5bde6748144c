"""Packing in the terminal: progress bars, and the statistics of `packtrain pack --stats`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn as Column
from rich.text import Text

from packtrain.cli.screen import Screen
from packtrain.data.pack import Pack
from packtrain.pack.build import Advance
from packtrain.pack.manifest import Manifest, pack_key
from packtrain.pack.shard import Columns
from packtrain.report.pack_page import print_stats, sample_page
from packtrain.report.pack_stats import stats_of
from packtrain.store import Store
from packtrain.system import cache_directory
from packtrain.units import show_count


def show_stats(screen: Screen, store: Store, manifest: Manifest) -> None:
    """Print the statistics of a pack, and store a page of samples beside it."""
    pack = Pack(store, manifest.name, cache_directory() / "packs")

    def columns(split: str) -> Iterator[Columns]:
        reader = pack.split(split)
        return (reader.shard(number) for number in range(reader.num_shards))

    vocabularies = [pack.vocabulary] if manifest.vocabulary else []
    vocabularies += [pack.target_vocabulary] if manifest.target_vocabulary else []
    stats = stats_of(manifest, columns, [len(vocabulary) for vocabulary in vocabularies])
    print_stats(screen, stats)
    key = pack_key(manifest.name, "samples.html")
    store.put(key, sample_page(stats, columns, vocabularies).encode())
    screen.say(f"samples: {store.url}/{key}")


class _Rate(Column):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{show_count(speed)}/s" if speed else "", style="cyan")


class ProgressBars:
    """Progress with rate and time left; where there is no terminal, only the lines are printed."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def say(self, text: str) -> None:
        style = "yellow" if text.startswith("warning") else "dim"
        self._screen.say(("pack", style), f"  {text}")

    @contextmanager
    def track(self, activity: str, total: int | None) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _Rate(),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        # `transient`: the bar disappears when it is done, and the line that `say` prints remains.
        with RichProgress(*columns, console=self._screen, transient=True, disable=not self._screen.is_terminal) as bars:
            task = bars.add_task(activity, total=total)
            yield lambda count: bars.advance(task, count)
