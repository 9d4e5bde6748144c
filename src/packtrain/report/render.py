"""The report of a run as one HTML page: answers first, each opens to its evidence. All text in it is escaped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from packtrain.errors import harmless
from packtrain.observe.evidence import Evidence, values_of
from packtrain.observe.history import step_seconds
from packtrain.observe.measure import of_samples, score_title
from packtrain.observe.spans import SPANS
from packtrain.observe.status import Status
from packtrain.report.finding import VERDICTS, Chart, Figure, Finding, Rows, Shares, Text, Topic
from packtrain.report.learning import training_loss
from packtrain.report.page import POLICY, Series, cut, escape, html_table, line_chart, page, style_sheet, wide
from packtrain.report.sample_view import STYLE as SAMPLE_STYLE
from packtrain.report.sample_view import confusions, samples_html
from packtrain.run.records import Event, Sample
from packtrain.units import counted, show_count, show_dollars, show_score, show_seconds, show_speed

TOPICS: Mapping[Topic, str] = {"model": "The model", "speed": "Speed", "run": "The run"}
_STATE_CLASSES = {"finished": "good", "failed": "bad"}  # all others are notes
_MAX_SCORES = 4
_MAX_CURVES = 60  # of a program's own numbers
_FEW_POINTS = 20  # are drawn as dots: one alone is no line
_MAX_EVENTS = 200  # a run of weeks must still be a page that opens
_STYLE = style_sheet("report.css")


def render(evidence: Evidence, findings: Sequence[Finding], pictures: Mapping[str, bytes] | None = None) -> str:
    """Return the page; `pictures` are those that its samples name, by their digests."""
    summary, parent = evidence.status, evidence.job.parent
    counts = Counter(finding.verdict for finding in findings)
    tally = "".join(
        f'<span><b class="{verdict}">{words.mark} {counts[verdict]}</b> {words.meaning}</span>'
        for verdict, words in VERDICTS.items()
        if counts[verdict]
    )
    answers = {
        title: "".join(_finding(finding) for finding in findings if finding.topic == topic)
        for topic, title in TOPICS.items()
    }
    sections = [
        "<header>",
        f"<h1>{escape(summary.run)}</h1>",
        f'<p><b class="{_STATE_CLASSES.get(summary.state, "note")}">{escape(summary.outcome)}</b></p>',
        f'<p class="dim">{escape(summary.description)}</p>',
        *([f'<p class="dim">Started from {escape(parent.identified)}.</p>'] if parent is not None else []),
        _figures(summary),
        *(
            f'<p class="dim">{escape(name)}: <code>{escape(signature)}</code></p>'
            for name, signature in summary.signatures.items()
        ),
        f'<p class="tally">{tally}</p>',
        "</header><main>",
        *(f"<h2>{title}</h2>{details}" for title, details in answers.items() if details),
        _curves(evidence),
        _samples(newest_samples(evidence), pictures or {}),
        _events(evidence.events),
        "</main>",
    ]
    # Names, texts and the job come from users: every piece above escapes them.
    return page(summary.run, "".join(sections), _STYLE + SAMPLE_STYLE, f"{POLICY}; img-src data:")


def newest_samples(evidence: Evidence) -> Sequence[Sample]:
    if evidence.result is not None and evidence.result.samples:
        return evidence.result.samples
    return next((point.samples for point in reversed(evidence.points) if point.samples), ())


def _figures(summary: Status) -> str:
    """Show the numbers that people look for first."""
    # The score that counts comes first, and the test split before validation.
    names = sorted(summary.scores, key=lambda name: (not f".{name}".endswith(f".{summary.measure}"), name))
    shown = [
        (of_samples(harmless(score_title(name)), summary.counts.get(name)), show_score(summary.scores[name]))
        for name in names[:_MAX_SCORES]
    ]
    # Of a program that logs nothing, only its commits are known.
    noun = "step" if summary.unit else "commit"
    shown.append((noun if summary.step == 1 else f"{noun}s", show_count(summary.step)))
    shown.append(("time", show_seconds(summary.seconds)))
    if summary.cost is not None:
        shown.append(("cost so far" if summary.cost.per_hour else "cost", show_dollars(summary.cost.so_far)))
        if summary.cost.expected is not None:
            shown.append(("cost expected", show_dollars(summary.cost.expected)))
    if summary.units_per_second is not None:
        shown.append((f"{summary.unit}/s", show_speed(summary.units_per_second)))
    boxes = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown)
    return f'<dl class="figures">{boxes}</dl>'


# Answers.


def _finding(finding: Finding) -> str:
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in finding.evidence)
    charts = "".join(_figure(figure) for figure in finding.figures if isinstance(figure, Chart))
    tables = "".join(_figure(figure) for figure in finding.figures if not isinstance(figure, Chart))
    body = (
        (f"<ul>{facts}</ul>" if facts else "") + (f'<div class="charts">{charts}</div>' if charts else "") + tables
    ) or '<p class="dim">There is nothing more to show.</p>'
    return (
        f'<details id="{escape(finding.key)}"><summary>'
        f'<span class="verdict {finding.verdict}"><b aria-hidden="true">{VERDICTS[finding.verdict].mark}</b></span>'
        f'<span><span class="question">{escape(finding.question)}'
        f'<span class="hidden"> ({VERDICTS[finding.verdict].meaning})</span></span>'
        f'<span class="answer">{escape(finding.answer)}</span></span></summary>'
        f'<div class="evidence">{body}</div></details>'
    )


def _figure(figure: Figure) -> str:
    if isinstance(figure, Chart):
        return line_chart(figure.title, figure.series, figure.x_label, figure.marks)
    if isinstance(figure, Shares):
        return _bar(figure)
    if isinstance(figure, Text):
        return f'<p class="dim">{escape(figure.title)}</p><pre tabindex="0">{escape(figure.text)}</pre>'
    return _table(figure)


def _bar(shares: Shares) -> str:
    spans = {span.label: span for span in SPANS.values()}
    total = sum(seconds for _, seconds in shares.parts)
    bars, keys = [], []
    for label, seconds in shares.parts:
        span = spans.get(label, SPANS["other"])
        text = escape(f"{label} {seconds / total:.1%}")
        style = f"width:{100 * seconds / total:.2f}%;opacity:{span.opacity:.2f}"
        bars.append(f'<span class="{span.color}" style="{style}" title="{text}"></span>')
        keys.append(
            f'<span class="key {span.color}" style="--fade:{span.opacity:.2f}"><span class=label>{text}</span></span>'
        )
    return (
        f'<div class="bar" role="img" aria-label="{escape(shares.title)}">{"".join(bars)}</div><p>{"".join(keys)}</p>'
    )


def _table(rows: Rows) -> str:
    return html_table(rows.heads, [[escape(cell) for cell in row] for row in rows.rows])


# Curves, samples, events.


def _curves(evidence: Evidence) -> str:
    steps, valid, unit = evidence.steps, evidence.evaluations, evidence.status.unit
    # Every score of a recipe gets a chart; the loss has one together with that of training.
    measures = sorted(
        {name for point in valid for name in point.values if name != "loss" and not name.endswith("_seconds")}
    )
    restarts = tuple((float(generation.step), "restart") for generation in evidence.generations[1:])[-8:]
    losses = [training_loss(evidence), Series("validation", values_of(valid, "loss"), True)]
    speeds = [
        (float(point.step), point.values.get(unit, 0.0) / step_seconds(point))
        for point in steps
        if step_seconds(point) > 0
    ]
    # The numbers that a program has logged, those first that it logged first.
    names = list(dict.fromkeys(name for point in evidence.logged for name in point.values))
    logged = [(name, values_of(evidence.logged, name)) for name in names[:_MAX_CURVES]]
    charts = [
        line_chart("loss", losses, marks=restarts),
        *(line_chart(f"validation {name}", [Series(name, values_of(valid, name), True)]) for name in measures),
        line_chart("learning rate", [Series("learning rate", values_of(steps, "rate"))]),
        line_chart("gradient norm", [Series("norm", values_of(steps, "gradient_norm"))]),
        line_chart(f"{unit}/s", [Series(unit, speeds)], marks=restarts) if speeds else "",
        *(line_chart(harmless(name), [Series("last", line, len(line) < _FEW_POINTS)]) for name, line in logged),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _samples(samples: Sequence[Sample], pictures: Mapping[str, bytes]) -> str:
    if not samples:
        return ""
    confused = confusions(samples)
    intro = "Words that differ from the reference are underlined."
    if any(sample.attention for sample in samples):
        intro = "For each word, the picture is bright where the model looked when it wrote the word."
    elif any(sample.picture for sample in samples):
        intro = "Pictures that were taken for another class come first, with how sure the model was."
    return (
        f'<h2>Samples</h2><p class="dim">{intro}</p>'
        + samples_html(samples, pictures)
        + (f'<p class="dim">Most often confused, among these samples</p>{_table(confused)}' if confused else "")
    )


def _events(events: Sequence[Event]) -> str:
    rows = "".join(
        f'<tr class="{"warning" if event.display == "warning" else ""}">'
        f"<td class=time>{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(event.time))}</td>"
        f"<td>{escape(event.kind)}</td><td>{cut(event.text)}</td></tr>"
        for event in events[-_MAX_EVENTS:]
    )
    if not rows:
        return ""
    shown = f"last {_MAX_EVENTS} of {len(events):,}" if len(events) > _MAX_EVENTS else counted(len(events), "event")
    return (
        f'<h2>Events (UTC)</h2><details class="plain"><summary><span>{shown}</span></summary>'
        f'<div class="evidence">{wide(rows)}</div></details>'
    )
