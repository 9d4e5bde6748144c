"""The numbers and samples of a pack for people: tables in the terminal, and a page with charts and samples.

The page stands alone: no script, nothing to load, images embedded. All text in it is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from packtrain.errors import printable
from packtrain.pack.kind import ShownSample, kind_of
from packtrain.pack.manifest import Split, is_copy
from packtrain.pack.shard import Columns
from packtrain.report.pack_stats import Bar, ColumnsOf, PackStats, SplitStats
from packtrain.report.page import POLICY, WIDTH, cut, escape, page, style_sheet, wide
from packtrain.units import show_bytes, show_count

if TYPE_CHECKING:
    from rich.console import Console

    from packtrain.pack.vocabulary import Vocabulary

PICTURES, TEXTS = 60, 40
THUMBNAIL_PIXELS = 128

_CLASSES_IN_PAGE, _CLASSES_IN_TERMINAL = 20, 10  # at each end
_TEXT_LENGTH = 500
_WORDS = {"split", "", "reason", "examples", "class", "by source"}
"""Heads of columns with words; all others have numbers, which are right-aligned and never wrapped."""
_NAMES_WIDTH, _ROW_HEIGHT, _NAME_LENGTH, _COUNT_WIDTH = 190, 17, 30, 60
_STYLE = style_sheet("pack.css")


class StatsTable(NamedTuple):
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def _subject(stats: PackStats) -> str:
    manifest = stats.manifest
    facts = [kind_of(manifest.kind).title, show_bytes(sum(split.split.shard_bytes for split in stats.splits))]
    if manifest.classes:
        facts.append(f"{show_count(len(manifest.classes))} classes")
    facts += [f"vocabulary of {show_count(size)} tokens" for size in stats.vocabulary_sizes]
    return ", ".join(facts)


def _tables(stats: PackStats) -> Iterator[StatsTable]:
    def share(split: Split, count: int) -> str:
        return split.show_share(count) if kind_of(stats.manifest.kind).drops_samples_only else ""

    rows = []
    for name, split in stats.manifest.splits.items():
        left_out, size = map(show_count, (split.num_filtered, split.num_dropped)), show_bytes(split.shard_bytes)
        sources = " + ".join(map(show_count, split.sources)) if len(split.sources) > 1 else ""
        rows.append([name, show_count(split.samples), *left_out, show_count(len(split.shards)), size, sources])
    yield StatsTable("splits", ["split", "samples", "filtered", "dropped", "shards", "size", "by source"], rows)
    rows = [
        [split.name, measure.name, f"{measure.minimum:,}", f"{measure.median:,}", f"{measure.mean:,.1f}",
         f"{measure.percentile_95:,}", f"{measure.maximum:,}"]
        for split in stats.splits
        for measure in split.measures
    ]  # fmt: skip
    yield StatsTable("lengths and sizes", ["split", "", "min", "median", "mean", "95 %", "max"], rows)
    rows = [
        [split.name, word, show_count(drops.count), share(split.split, drops.count), reason, ", ".join(drops.names)]
        for split in stats.splits
        if not is_copy(split.name)  # a copy in another size lacks the samples that its original lacks
        for word, reasons in (("filtered", split.split.filtered), ("dropped", split.split.dropped))
        for reason, drops in sorted(reasons.items(), key=lambda item: -item[1].count)
    ]
    yield StatsTable("left out", ["split", "", "count", "share", "reason", "examples"], rows)


def _balance(classes: Sequence[Bar]) -> str:
    ends = f"{show_count(classes[-1].count)} to {show_count(classes[0].count)} samples each"
    return f"{show_count(len(classes))}, {ends}"


def _ends(classes: Sequence[Bar], limit: int) -> tuple[Sequence[Bar], Sequence[Bar]]:
    """Return the first and the last `most`; no class is in both."""
    return classes[:limit], classes[max(limit, len(classes) - limit) :]


def print_stats(console: Console, stats: PackStats) -> None:
    from rich.table import Table
    from rich.text import Text

    def plain(text: str, style: str = "") -> Text:  # no markup and no control characters, whatever a file is named
        return Text(printable(text), style)

    tables = list(_tables(stats))
    for split in stats.splits:
        if split.classes and not is_copy(split.name):
            first, last = _ends(split.classes, _CLASSES_IN_TERMINAL)
            rows = [
                [bar.name, show_count(bar.count), f"{bar.count / split.split.samples:.1%}"] for bar in (*first, *last)
            ]
            hidden = len(split.classes) - len(rows)
            if hidden:
                rows.insert(len(first), [f"... {show_count(hidden)} more ...", "", ""])
            title = f"classes of {split.name}: {_balance(split.classes)}"
            tables.append(StatsTable(title, ["class", "samples", "share"], rows))
    console.print(plain(stats.manifest.name, "bold"), plain(_subject(stats), "dim"))
    for table in tables:
        if table.rows:
            shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
            for head in table.heads:
                words = head in _WORDS
                shown.add_column(head, justify="left" if words else "right", overflow="fold", no_wrap=not words)
            for row in table.rows:
                shown.add_row(*map(plain, row))
            console.print("", plain(table.title, "bold"), shown, sep="\n")


def sample_page(stats: PackStats, columns: ColumnsOf, vocabularies: Sequence[Vocabulary] = ()) -> str:
    """Return a page with the numbers, and samples evenly spaced in each split."""
    body = [f'<h1>{_name(stats.manifest.name)}</h1><p class="dim">{_name(_subject(stats))}</p>']
    body += [f"<h3>{table.title.capitalize()}</h3>{_html(table)}" for table in _tables(stats) if table.rows]
    kind = kind_of(stats.manifest.kind)
    originals = [split for split in stats.splits if not is_copy(split.name)]  # copies have the same samples
    for split in originals:
        numbers, before = evenly(split.split.samples, TEXTS if kind.heads else PICTURES), 0
        chosen: list[tuple[Columns, int]] = []  # the shard and the row of each sample
        for shard in columns(split.name):
            chosen += [(shard, number - before) for number in numbers if before <= number < before + len(shard)]
            before += len(shard)
        shown = (kind.shown(shard, row, stats.manifest.classes, vocabularies) for shard, row in chosen)
        if kind.heads:
            heads = "".join(f"<th>{_name(head)}</th>" for head in kind.heads)
            cells = (
                "".join(f'<td class="text" dir="auto">{cut(text, _TEXT_LENGTH)}</td>' for text in sample.texts)
                for sample in shown
            )
            samples = f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        else:
            samples = f'<div class="sheet">{"".join(map(_picture, shown))}</div>'
        head = f"{show_count(len(chosen))} of {show_count(split.split.samples)} samples, evenly spaced"
        body.append(f"<h2>{_name(split.name)}</h2>{_charts(split)}<h3>{head}</h3>{samples}")
    # Besides its style, the page may show only the images embedded in it.
    return page(printable(stats.manifest.name), "".join(body), _STYLE, f"{POLICY}; img-src data:")


def _name(text: str) -> str:
    return escape(printable(text))


def _html(table: StatsTable) -> str:
    kinds = ["" if head in _WORDS else ' class="number"' for head in table.heads]

    def line(tag: str, texts: Sequence[str]) -> str:
        cells = (f"<{tag}{kind}>{_name(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    rows = "".join(line("td", row) for row in table.rows)
    return wide(line("th", table.heads) + rows)


def _charts(split: SplitStats) -> str:
    charts = [
        bar_chart(f"{measure.name}: median {measure.median:,}, 95 % at most {measure.percentile_95:,}", measure.bins)
        for measure in split.measures
        if measure.maximum > measure.minimum
    ]
    if split.classes:
        ends = _ends(split.classes, _CLASSES_IN_PAGE)
        for title, bars in zip(("largest", "smallest"), ends, strict=True):
            head = f"{title} {len(bars)} of " if len(split.classes) > _CLASSES_IN_PAGE else ""
            charts.append(bar_chart(f"classes: {head}{_balance(split.classes)}", bars, split.classes[0].count))
    return f'<div class="charts">{"".join(charts)}</div>'


def bar_chart(title: str, bars: Sequence[Bar], limit: int | None = None) -> str:
    """Draw a horizontal bar for each count, on a scale up to `most`; return an empty string for no bars."""
    if not bars:
        return ""
    scale = (WIDTH - _NAMES_WIDTH - _COUNT_WIDTH) / max(1, limit or max(bar.count for bar in bars))
    elements = [f'<svg viewBox="0 0 {WIDTH} {len(bars) * _ROW_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for number, bar in enumerate(bars):
        y, width = number * _ROW_HEIGHT, round(bar.count * scale, 1)
        short = bar.name if len(bar.name) <= _NAME_LENGTH else f"{bar.name[: _NAME_LENGTH - 3]}..."
        elements.append(
            f"<g><title>{_name(bar.name)}: {show_count(bar.count)}</title>"
            f'<text class="name" x="{_NAMES_WIDTH - 8}" y="{y + 12}" text-anchor="end">{_name(short)}</text>'
            f'<rect class="bar" x="{_NAMES_WIDTH}" y="{y + 2}" width="{width}" height="{_ROW_HEIGHT - 4}"/>'
            f'<text class="tick" x="{_NAMES_WIDTH + width + 6}" y="{y + 12}">{show_count(bar.count)}</text></g>'
        )
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(elements)}</svg></figure>"


def evenly(total: int, count: int) -> list[int]:
    """Return at most `most` of the numbers below `total`, as far apart as possible, with both ends."""
    return sorted({round(place) for place in np.linspace(0, total - 1, min(total, count)).tolist()})


def _picture(sample: ShownSample) -> str:
    data = thumbnail(sample.jpeg)
    size_class = ' class="small"' if max(sample.width, sample.height) < THUMBNAIL_PIXELS // 2 else ""
    source = base64.b64encode(data or b"").decode()
    image = f'<img{size_class} src="data:image/jpeg;base64,{source}" alt="">' if source else "unreadable"
    hint = cut("\n".join([f"{sample.width:,} x {sample.height:,}", *sample.texts]), _TEXT_LENGTH)
    caption = f'<figcaption dir="auto">{cut(sample.texts[0], _TEXT_LENGTH)}</figcaption>'
    return f'<figure title="{hint}"><div class="frame">{image}</div>{caption}</figure>'


def thumbnail(jpeg: bytes) -> bytes | None:
    """Return a small copy of the image, or None if it cannot be opened."""
    from PIL import Image

    from packtrain.pack.picture import MAX_PIXELS

    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))  # decodes at a reduced size, which is faster
            out = io.BytesIO()
            image.convert("RGB").save(out, "JPEG", quality=80)
            return out.getvalue()
    except Exception:  # Pillow's decoders raise anything on hostile bytes
        return None
