"""The keys by which scripts find answers, as docs/report.md names them."""

from __future__ import annotations

import re
from pathlib import Path

from packtrain.report import report_json
from packtrain.run.records import Forecast, JobSource
from parts.runs import a_lease
from report.made import evidence_of, spent_of, steps_of, telemetry_of

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
SECONDS = {"forward": 0.05, "communication": 0.05}


def test_the_keys_in_the_documentation_are_those_that_scripts_get() -> None:
    evidence = evidence_of(
        steps_of(communication=0.05),
        workers=(1, 1),
        spent=spent_of({0: SECONDS, 1: SECONDS}),
        telemetry=telemetry_of(),
        leases=[a_lease("a")],
        forecast=Forecast("table", "compute", 1, 10, 0.5, 64.0, 5.0, 0.1, 1 << 30, 1000, 4000, 12000, "10 steps"),
        source=JobSource("job.yaml", "name: job", ()),
    )
    report = report_json(evidence)
    findings = {finding["key"]: finding for finding in report["findings"]}
    assert re.findall(r"^\| `(\w+)` \|", PAGE.partition("## The model")[2], re.MULTILINE) == [*findings]
    for key, number in re.findall(r'select\(\.key == "(\w+)"\)\.numbers\.(\w+)', PAGE):
        assert number in findings[key]["numbers"]
    known = {*report, *report["source"], *findings["network"], *report["hardware"][0]}
    named = re.findall(r"`(\w+)`", PAGE.partition("## For scripts")[2])
    assert {*named} <= known
    assert len(named) > 10
