"""The report of a run as Markdown: the same answers and tables, for a pull request, a wiki or a mail. No charts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from packtrain.errors import harmless
from packtrain.observe.evidence import Evidence
from packtrain.observe.measure import score_title
from packtrain.report.finding import VERDICTS, Finding, Rows, Text
from packtrain.report.render import TOPICS, newest_samples
from packtrain.report.sample_view import confusions
from packtrain.units import show_score

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
_TEXT_LENGTH = 300


def markdown(evidence: Evidence, findings: Sequence[Finding]) -> str:
    return "\n".join(_lines(evidence, findings)) + "\n"


def _lines(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[str]:
    summary = evidence.status
    yield from (f"# {plain(summary.run)}", "", f"**{plain(summary.outcome)}**, {plain(summary.description)}")
    if evidence.job.parent is not None:
        yield from ("", f"Started from {plain(evidence.job.parent.identified)}.")
    if summary.scores:
        rows = tuple(
            (score_title(name), show_score(value), f"{summary.counts[name]:,}" if name in summary.counts else "")
            for name, value in sorted(summary.scores.items())
        )
        yield from ("", *table_lines(Rows(("score", "value", "samples"), rows)))
    for topic, title in TOPICS.items():
        of_topic = [finding for finding in findings if finding.topic == topic]
        if of_topic:
            yield from ("", f"## {title}")
        for finding in of_topic:
            yield from (
                "",
                f"### {VERDICTS[finding.verdict].mark} {plain(finding.question)}",
                "",
                plain(finding.answer),
            )
            if finding.evidence:
                yield from ("", *(f"- {plain(fact)}" for fact in finding.evidence))
            for figure in finding.figures:
                if isinstance(figure, Rows):
                    yield from ("", *table_lines(figure))
                elif isinstance(figure, Text):
                    # Longer than any fence in the text, which could otherwise end it.
                    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", figure.text)), default=0))
                    text = harmless(figure.text.rstrip("\n"), keep="\n")
                    yield from ("", f"{plain(figure.title)}:", "", fence, text, fence)
    samples = newest_samples(evidence)
    if samples:
        rows = tuple((_cut(sample.input), _cut(sample.prediction), _cut(sample.reference)) for sample in samples)
        yield from ("", "## Samples", "", *table_lines(Rows(("input", "prediction", "reference"), rows)))
        confused = confusions(samples)
        if confused is not None:
            yield from ("", "Most often confused, among these samples:", "", *table_lines(confused))


def plain(text: str) -> str:
    """Return text on one line that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", harmless(text.replace("\n", " ")))


def table_lines(rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(map(plain, rows.heads))} |"
    yield f"|{' --- |' * len(rows.heads)}"
    yield from (f"| {' | '.join(map(plain, row))} |" for row in rows.rows)


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]} ..."
