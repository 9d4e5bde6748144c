"""What is in a pack, for people: tables for the terminal, and a page of samples to look at.

The page stands alone: no script, nothing to fetch, pictures inside it. All text in it is escaped.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packtrain.errors import printable
from packtrain.pack.manifest import Drops
from packtrain.pack.shard import Columns
from packtrain.report.pack_stats import ClassCount, ColumnsOf, Measure, PackStats, SplitStats
from packtrain.report.page import HEIGHT, POLICY, WIDTH, nice_ticks, page
from packtrain.units import show_bytes, show_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from packtrain.pack.vocabulary import Vocabulary

PICTURES, TEXTS = 60, 40
THUMBNAIL_PIXELS = 128

_CLASSES_IN_PAGE, _CLASSES_IN_TERMINAL = 20, 10  # at each end
_TEXT_LENGTH = 500


# In words, for both.

_WORDS = {"split", "", "reason", "the first", "class", "by source"}
"""Heads of columns that hold words; all others hold numbers, which end at the right and are never broken."""
_SPLIT_HEADS = ("samples", "filtered", "dropped", "shards", "size", "by source")
_MEASURE_HEADS = ("least", "median", "mean", "95 %", "most")


def _subject(stats: PackStats) -> str:
    what = {"pairs": "pairs of texts", "labels": "pictures with classes", "captions": "pictures with captions"}
    size = sum(split.bytes for split in stats.splits)
    classes = max((len(split.classes) for split in stats.splits), default=0)
    words = [what[stats.kind], show_bytes(size)]
    words += [f"{show_count(classes)} classes"] if classes else []
    if stats.vocabulary:
        sizes = [show_count(one) for one in (stats.vocabulary, stats.target_vocabulary) if one]
        words.append(f"{'vocabularies' if sizes[1:] else 'a vocabulary'} of {' and '.join(sizes)} pieces")
    return ", ".join(words)


def _split_cells(split: SplitStats) -> list[str]:
    sources = " + ".join(map(show_count, split.sources)) if len(split.sources) > 1 else ""
    return [
        show_count(split.samples),
        show_count(sum(drops.count for drops in split.filtered.values())),
        show_count(sum(drops.count for drops in split.dropped.values())),
        show_count(split.shards),
        show_bytes(split.bytes),
        sources,
    ]


def _measure_cells(measure: Measure) -> list[str]:
    spread = (measure.median, measure.percentile_95, measure.most)
    least, (median, high, most) = show_count(measure.least), map(show_count, spread)
    return [least, median, f"{measure.mean:,.1f}", high, most]


def _what(measure: Measure) -> str:
    return f"{measure.name}, {measure.unit}"


def _balance(split: SplitStats) -> str:
    ranked = split.ranked_classes()
    ends = f"from {show_count(ranked[-1].count)} to {show_count(ranked[0].count)} samples each"
    return f"{show_count(len(ranked))}, {ends}"


def _share(count: int, split: SplitStats) -> str:
    return f"{count / max(split.samples, 1):.1%}"


def _ends(ranked: Sequence[ClassCount], most: int) -> tuple[Sequence[ClassCount], Sequence[ClassCount]]:
    """The first and the last `most`; nothing is left out, and nothing is there twice, if there are no more."""
    return ranked[:most], ranked[max(most, len(ranked) - most) :]


def _left_out(stats: PackStats) -> Iterator[tuple[str, str, str, Drops]]:
    """Split, whether it was filtered or dropped, and why. What the copy of a split lacks, its original lacks."""
    for split in (one for one in stats.splits if not one.is_copy):
        for word, reasons in (("filtered", split.filtered), ("dropped", split.dropped)):
            for reason, drops in sorted(reasons.items(), key=lambda item: -item[1].count):
                yield split.name, word, reason, drops


# For the terminal.


def print_stats(console: Console, stats: PackStats) -> None:
    console.print(_plain(stats.name, "bold"), _plain(_subject(stats), "dim"))
    splits = _table(["split", *_SPLIT_HEADS])
    measures = _table(["split", "", *_MEASURE_HEADS])
    for split in stats.splits:
        _add(splits, [split.name, *_split_cells(split)])
        for measure in split.measures:
            _add(measures, [split.name, _what(measure), *_measure_cells(measure)])
    left_out = _table(["split", "", "count", "reason", "the first"])
    for name, word, reason, drops in _left_out(stats):
        _add(left_out, [name, word, show_count(drops.count), reason, ", ".join(drops.names)])
    tables = {"splits": splits, "lengths and sizes": measures, "left out": left_out}
    for split in stats.splits:
        if split.classes and not split.is_copy:
            tables[f"classes of {split.name}: {_balance(split)}"] = _class_table(split)
    for title, table in tables.items():
        if table.row_count:
            console.print("", _plain(title, "bold"), table, sep="\n")


def _class_table(split: SplitStats) -> Table:
    table = _table(["class", "samples", "share"])
    largest, smallest = _ends(split.ranked_classes(), _CLASSES_IN_TERMINAL)
    left_out = len(split.classes) - len(largest) - len(smallest)
    for one in largest:
        _add(table, [one.name, show_count(one.count), _share(one.count, split)])
    if left_out:
        _add(table, [f"... {show_count(left_out)} more ...", "", ""])
    for one in smallest:
        _add(table, [one.name, show_count(one.count), _share(one.count, split)])
    return table


def _table(heads: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in heads:
        is_words = head in _WORDS
        table.add_column(
            head, justify="left" if is_words else "right", overflow="fold", no_wrap=not is_words, header_style="dim"
        )
    return table


def _add(table: Table, cells: Iterable[str]) -> None:
    table.add_row(*(_plain(cell) for cell in cells))


def _plain(text: str, style: str = "") -> Text:
    """Text that is no markup and steers no terminal, whatever a file was named."""
    from rich.text import Text

    return Text(printable(text), style)


# The page.

_STYLE = """
h1 { overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; } figcaption b { color: var(--ink); } .wide { overflow-x: auto; }
td, th { padding: .3rem 1.2rem .3rem 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.names { overflow-wrap: anywhere; font-size: .85rem; } .text { width: 48%; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 1rem;
  margin: 1rem 0; align-items: start; }
.charts figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
figcaption { margin-bottom: .3rem; } .name { font-size: 11px; fill: var(--ink); }
.bar { fill: var(--s0); } .rest { fill: var(--s1); }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(128px, 1fr)); gap: 1rem .75rem; }
.sheet figure { margin: 0; min-width: 0; }
.frame { display: flex; align-items: center; justify-content: center; height: 128px; background: var(--shade);
  border-radius: 6px; color: var(--dim); font-size: .8rem; overflow: hidden; }
.frame img { width: 100%; height: 100%; object-fit: contain; } .small { image-rendering: pixelated; }
.sheet figcaption { color: var(--ink); font-size: .8rem; line-height: 1.3; margin: .3rem 0 0; overflow: hidden;
  overflow-wrap: anywhere; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3; }
"""
_POLICY = f"{POLICY}; img-src data:"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def sample_page(
    stats: PackStats,
    columns: ColumnsOf,
    vocabulary: Vocabulary | None = None,
    target_vocabulary: Vocabulary | None = None,
) -> str:
    """The numbers, and samples taken evenly from each split, as one page of HTML."""
    measures = ([split.name, _what(one), *_measure_cells(one)] for split in stats.splits for one in split.measures)
    body = [
        f"<h1>{_name(stats.name)}</h1>",
        f'<p class="dim">{escape(_subject(stats))}</p>',
        "<h2>Splits</h2>",
        _rows(["split", *_SPLIT_HEADS], ([one.name, *_split_cells(one)] for one in stats.splits)),
        "<h3>Lengths and sizes</h3>",
        _rows(["split", "", *_MEASURE_HEADS], measures),
        _left_out_rows(stats),
    ]
    for split in (one for one in stats.splits if not one.is_copy):
        body += [f"<h2>{_name(split.name)}</h2>", _charts(split)]
        if stats.kind == "pairs":
            body.append(_texts(split, columns, vocabulary, target_vocabulary or vocabulary))
        else:
            body.append(_contact_sheet(split, columns, vocabulary))
    return page(printable(stats.name), "".join(body), _STYLE, _POLICY)


def _name(text: str) -> str:
    return escape(printable(text))


def _text(text: str) -> str:
    """What people wrote, cut if it is long; only what is no character at all is replaced."""
    short = text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]} ..."
    return escape(_CONTROL.sub("\ufffd", short))


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    kinds = ["" if head in _WORDS else ' class="number"' for head in heads]

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{_name(text)}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", heads)}</tr>{body}</table></div>'


def _left_out_rows(stats: PackStats) -> str:
    rows = "".join(
        f'<tr><td>{_name(split)}</td><td>{word}</td><td class="number">{show_count(drops.count)}</td>'
        f'<td>{_name(reason)}</td><td class="names dim">{_name(", ".join(drops.names))}</td></tr>'
        for split, word, reason, drops in _left_out(stats)
    )
    head = '<tr><th>split</th><th></th><th class="number">count</th><th>reason</th><th>the first</th></tr>'
    return f"<h3>Left out</h3><table>{head}{rows}</table>" if rows else ""


def _charts(split: SplitStats) -> str:
    charts = [histogram(measure) for measure in split.measures if measure.most > measure.least]
    if split.classes:
        ranked = split.ranked_classes()
        for title, part in zip(("the largest", "the smallest"), _ends(ranked, _CLASSES_IN_PAGE), strict=True):
            some = "" if len(ranked) <= _CLASSES_IN_PAGE else f"{title} {len(part)} of "
            charts.append(class_chart(f"{some}{_balance(split)}", part, ranked[0].count))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 24
_NAMES_WIDTH, _ROW_HEIGHT, _NAME_LENGTH, _COUNT_WIDTH = 190, 17, 30, 60


def histogram(measure: Measure) -> str:
    """A bar for each bin. The last one has another colour when it also has what lies far above."""
    bins = measure.bins
    ticks = [tick for tick in nice_ticks(0, max(one.count for one in bins), 4) if tick == int(tick)]
    across = (WIDTH - _LEFT - _RIGHT) / len(bins)
    up = (HEIGHT - _TOP - _BOTTOM) / ticks[-1]
    floor = HEIGHT - _BOTTOM
    has_rest = measure.most > bins[-1].high
    words = f"median {show_count(measure.median)}, 95 % at most {show_count(measure.percentile_95)}"
    words += f"; the last bar: {bins[-1].low:,} or more" if has_rest else ""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_what(measure))}">']
    for tick in ticks:
        y = round(floor - tick * up, 1)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:,.0f}</text>')
    every = -(-len(bins) // 8)
    for number, one in enumerate(bins):
        x, height = round(_LEFT + number * across, 1), round(one.count * up, 1)
        is_rest = has_rest and one is bins[-1]
        span = f"{one.low:,} or more" if is_rest else f"{one.low:,} to {one.high:,}" if one.high > one.low else one.low
        parts.append(
            f'<rect class="{"rest" if is_rest else "bar"}" x="{x + 0.5}" y="{round(floor - height, 1)}"'
            f' width="{round(across - 1, 1)}" height="{height}">'
            f"<title>{span} {escape(measure.unit)}: {show_count(one.count)}</title></rect>"
        )
        if number % every == 0:
            parts.append(f'<text class="tick" x="{x}" y="{HEIGHT - 8}">{one.low:,}</text>')
    return f"<figure><figcaption><b>{escape(_what(measure))}</b>: {words}</figcaption>{''.join(parts)}</svg></figure>"


def class_chart(title: str, classes: Sequence[ClassCount], most: int) -> str:
    """A bar for each class, on a scale that ends at `most`; nothing for no classes."""
    if not classes:
        return ""
    scale = (WIDTH - _NAMES_WIDTH - _COUNT_WIDTH) / max(most, 1)
    height = len(classes) * _ROW_HEIGHT
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for number, one in enumerate(classes):
        y, width = number * _ROW_HEIGHT, round(one.count * scale, 1)
        short = one.name if len(one.name) <= _NAME_LENGTH else f"{one.name[: _NAME_LENGTH - 3]}..."
        parts.append(
            f"<g><title>{_name(one.name)}: {show_count(one.count)}</title>"
            f'<text class="name" x="{_NAMES_WIDTH - 8}" y="{y + 12}" text-anchor="end">{_name(short)}</text>'
            f'<rect class="bar" x="{_NAMES_WIDTH}" y="{y + 2}" width="{width}" height="{_ROW_HEIGHT - 4}"/>'
            f'<text class="tick" x="{_NAMES_WIDTH + width + 6}" y="{y + 12}">{show_count(one.count)}</text></g>'
        )
    return f"<figure><figcaption><b>classes</b>: {escape(title)}</figcaption>{''.join(parts)}</svg></figure>"


# The samples.


def _texts(
    split: SplitStats, columns: ColumnsOf, vocabulary: Vocabulary | None, target_vocabulary: Vocabulary | None
) -> str:
    rows = []
    sides = (("source", vocabulary), ("target", target_vocabulary))
    for shard, row in _chosen(split, columns, TEXTS):
        texts = [_text(_decoded(shard.ragged[name][row], known)) for name, known in sides]
        rows.append("".join(f'<td class="text" dir="auto">{text}</td>' for text in texts))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"{_samples_head(len(rows), split)}<table><tr><th>source</th><th>target</th></tr>{body}</table>"


def _contact_sheet(split: SplitStats, columns: ColumnsOf, vocabulary: Vocabulary | None) -> str:
    pictures = [_picture(shard, row, split, vocabulary) for shard, row in _chosen(split, columns, PICTURES)]
    return f'{_samples_head(len(pictures), split)}<div class="sheet">{"".join(pictures)}</div>'


def _samples_head(count: int, split: SplitStats) -> str:
    return f"<h3>{show_count(count)} of {show_count(split.samples)} samples, taken evenly</h3>"


def _chosen(split: SplitStats, columns: ColumnsOf, most: int) -> Iterator[tuple[Columns, int]]:
    """The shard and row of some samples of all parts of a split."""
    numbers = evenly(split.samples, most)
    before = 0
    for shard in columns(split.name):
        for number in numbers:
            if before <= number < before + len(shard):
                yield shard, number - before
        before += len(shard)


def evenly(total: int, most: int) -> list[int]:
    """At most `most` of the numbers below `total`, as far apart as they can be, with both ends."""
    return sorted({round(place) for place in np.linspace(0, total - 1, min(total, most)).tolist()})


def _decoded(tokens: NDArray[Any], vocabulary: Vocabulary | None) -> str:
    numbers = tokens.tolist()
    return " ".join(map(str, numbers)) if vocabulary is None else vocabulary.decode([numbers])[0]


def _picture(shard: Columns, row: int, split: SplitStats, vocabulary: Vocabulary | None) -> str:
    if split.classes:
        label = int(shard.plain["label"][row])
        named = label in range(len(split.classes))
        words = [printable(split.classes[label].name) if named else f"class {label}, which has no name"]
    else:
        ends = np.cumsum(shard.ragged["caption_lengths"][row], dtype=np.int64)[:-1]
        tokens = shard.ragged["captions"][row]
        words = [_decoded(part, vocabulary) for part in np.split(tokens, ends) if len(tokens)]
    width, height = int(shard.plain["width"][row]), int(shard.plain["height"][row])
    data = thumbnail(shard.ragged["jpeg"][row].tobytes())
    kind = ' class="small"' if max(width, height) < THUMBNAIL_PIXELS // 2 else ""
    source = "" if data is None else f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    image = f'<img{kind} src="{source}" alt="">' if source else "cannot be opened"
    hint = _text("\n".join([f"{width:,} x {height:,}", *words]))
    first = _text(words[0]) if words else ""
    return (
        f'<figure title="{hint}"><div class="frame">{image}</div><figcaption dir="auto">{first}</figcaption></figure>'
    )


def thumbnail(jpeg: bytes) -> bytes | None:
    """A small copy of the picture; None for what cannot be opened, as packs from elsewhere may hold."""
    from PIL import Image

    from packtrain.pack.picture import MOST_PIXELS

    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            if image.width * image.height > MOST_PIXELS:
                return None
            image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
            out = io.BytesIO()
            image.convert("RGB").save(out, "JPEG", quality=80)
            return out.getvalue()
    except Exception:  # Pillow's decoders raise whatever hostile bytes lead them to
        return None
