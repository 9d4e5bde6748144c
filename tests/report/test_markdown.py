from __future__ import annotations

from packtrain.report import findings_of
from packtrain.report.markdown import markdown
from packtrain.run.records import Event, Point, Sample
from parts.runs import program_job
from report.made import evaluations_of, evidence_of, falling, generation_of, steps_of

EVIL = "<script>alert(1)</script> `|` # *x*\nnext \x1b[31m"


def test_markdown_has_every_answer_with_its_mark_and_its_tables() -> None:
    evidence = evidence_of(
        [*steps_of(), *evaluations_of(falling)], status={"scores": {"test.bleu": 20.123}, "counts": {"test.bleu": 800}}
    )
    findings = findings_of(evidence)
    lines = markdown(evidence, findings).splitlines()
    assert lines[0] == "# job-1"
    assert "| test bleu | 20.12 | 800 |" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## The model", "## Speed", "## The run"]
    assert len([line for line in lines if line.startswith("### ")]) == len(findings)
    assert "### ✓ Did data loading keep up?" in lines
    assert "packtrain run job.yaml" in lines
    assert "name: job" in lines


def test_nothing_in_a_text_is_markup() -> None:
    point = Point("valid", 1, 400, 1.0, {"loss": 1.0}, (Sample(EVIL, EVIL, EVIL),))
    job = program_job(program=["train.py", EVIL.replace("\x1b", "")])
    generations = (generation_of(1), generation_of(1, number=2, cause="program", reason=EVIL))
    evidence = evidence_of(
        [*steps_of(), point], job, generations=generations, events=[Event(1.0, "warning", EVIL)],
        status={"reason": EVIL, "description": EVIL, "scores": {EVIL: 1.0}},
    )  # fmt: skip
    text = markdown(evidence, findings_of(evidence))
    outside = "".join(text.split("```")[::2])
    assert "<script" not in outside.replace("\\<script", "")
    assert "\x1b" not in text
    assert all(
        line.count("|") - line.count("\\|") in (0, 3, 4, 7) for line in outside.splitlines() if line.startswith("|")
    )


def test_a_fence_in_the_job_does_not_end_the_block() -> None:
    job = program_job(program=["train.py", "```"])
    evidence = evidence_of(job=job)
    assert "````" in markdown(evidence, findings_of(evidence))
