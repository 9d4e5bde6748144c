"""What is gathered from a run's folder, and that nothing in it can break an answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from pack.corpus import job_of
from packtrain.observe.evidence import gather
from packtrain.pack.manifest import pack_key
from packtrain.report import QUESTIONS, findings_of, report_json
from packtrain.report.markdown import markdown
from packtrain.report.render import render
from packtrain.run.checkpoint import commit
from packtrain.run.chunks import ChunkWriter, encode_line
from packtrain.run.points import decode_points
from packtrain.run.records import Event, Point, Result, Telemetry, TelemetrySample, TimeSpent
from packtrain.run.run import Run, add_run
from packtrain.store import Store
from parts.runs import a_generation, a_lease, new_run, write_files
from report.made import evidence_of, generation_of, steps_of, trained
from report.pages import Page


def a_run(store: Store, folder: Path) -> Run:
    """Return a run with something in every part of its folder."""
    run = add_run(store, job_of(folder), b"", "greetings-abc")
    parts: tuple[tuple[ChunkWriter[Any], list[Any]], ...] = (
        (run.point_writer("0"), steps_of(30)),
        (run.event_writer("0"), [Event(2.0, "checkpoint", "second", 1), Event(1.0, "generation", "first", 1)]),
        (run.time_spent_writer("0"), [TimeSpent(1003.0, 1, 0, 30, {"forward": 3.0})]),
        (run.telemetry_writer("a"), [TelemetrySample(1001.0, "a", Telemetry(cpu_fraction=0.5))]),
    )
    for writer, records in parts:
        for record in records:
            writer.append(record)
        writer.flush()
    run.propose(a_generation(1, "a", workers=2))
    run.renew(a_lease("a", left=True))
    state = b'{"recipe": "translate", "versions": {"torch": "2.13.0"}}'
    commit(run, 30, 1, None, write_files(folder / "files", {"model.safetensors": b"12", "state.json": state}))
    run.finish(Result("finished", "reached 30 steps", 30, 3.0))
    return run


def test_everything_in_the_folder_of_a_run_is_gathered(directory_store: Store, tmp_path: Path) -> None:
    evidence = gather(a_run(directory_store, tmp_path))
    assert len(evidence.steps) == 30
    assert [event.text for event in evidence.events] == ["first", "second"]
    assert (evidence.workers, evidence.machines) == (2, 1)
    assert evidence.versions == {"torch": "2.13.0"}
    assert (evidence.pack, len(evidence.job_digest), len(evidence.code_digest)) == ("greetings-abc", 64, 64)
    assert len(evidence.training_telemetry) == 1
    assert evidence.status.state == "finished"


def test_what_the_store_has_lost_is_left_out(directory_store: Store, tmp_path: Path) -> None:
    run = a_run(directory_store, tmp_path)
    [checkpoint] = gather(run).checkpoints
    directory_store.put(run.key(f"checkpoints/{checkpoint.name}/files/state.json"), b"not JSON")
    directory_store.delete(run.key("pack.txt"))
    directory_store.delete(run.key("code.tar.zst"))
    evidence = gather(Run(directory_store, run.name))
    assert (evidence.versions, evidence.pack, evidence.code_digest, evidence.manifest) == ({}, "", "", None)
    assert findings_of(evidence)


def test_a_damaged_manifest_does_not_keep_a_report_from_being_written(directory_store: Store, tmp_path: Path) -> None:
    run = a_run(directory_store, tmp_path)
    directory_store.put(pack_key("greetings-abc", "manifest.json"), b"{}")
    assert gather(run).manifest is None


def test_the_run_of_a_program_has_answers(directory_store: Store) -> None:
    evidence = gather(new_run(directory_store))
    assert [finding.key for finding in findings_of(evidence)] == [
        "duration", "devices", "faults", "money", "checkpoints", "machines", "reproduce",
    ]  # fmt: skip


def test_answers_for_scripts_have_numbers_and_tables_but_no_series(directory_store: Store, tmp_path: Path) -> None:
    answers = report_json(gather(a_run(directory_store, tmp_path)))
    assert answers["run"] == "greetings-1"
    findings = {one["key"]: one for one in answers["findings"]}
    assert findings["duration"]["numbers"]["goodput"] == 1.0
    assert findings["duration"]["tables"][0]["heads"] == ("part", "time", "share")
    assert "figures" not in findings["duration"]


def test_every_question_has_a_key_of_its_own() -> None:
    found = findings_of(evidence_of(steps_of(), workers=(1, 1)))
    assert len({finding.key for finding in found}) == len(found)
    assert len(QUESTIONS) >= len(found)


# Whatever a store holds.

ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -1.0, 1e300, 1e-300, math.nan])
ANY_SECONDS = st.floats(-1e15, 1e15)


@st.composite
def any_points(draw: st.DrawFn) -> list[Point]:
    points = []
    kinds: list[Literal["train", "valid", "start", "test", "log"]] = ["train", "valid", "start", "test", "log"]
    for step in draw(st.lists(st.integers(0, 60), max_size=40)):
        kind = draw(st.sampled_from(kinds))
        values = {"loss": draw(ANY_NUMBER), "bleu": draw(ANY_NUMBER)}
        if kind == "train":
            spans = {f"{span}_seconds": draw(ANY_SECONDS) for span in ("data", "forward", "wait", "evaluation", "step")}
            values |= {"rate": draw(ANY_NUMBER), "epoch": draw(st.floats(-1e6, 1e6)), "tokens": draw(ANY_NUMBER)}
            values |= {"elapsed_seconds": draw(ANY_SECONDS), "gradient_norm": draw(ANY_NUMBER), **spans}
        points.append(Point(kind, draw(st.integers(0, 3)), step, draw(st.floats(0, 1e10)), values))
    return decode_points(b"".join(map(encode_line, points)), "")


@given(any_points(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), ANY_SECONDS, ANY_SECONDS), max_size=8))
def test_no_record_breaks_an_answer(points: list[Point], times: list[tuple[int, int, float, float]]) -> None:
    spent = [TimeSpent(100.0, number, rank, 5, {"forward": one, "wait": two}) for number, rank, one, two in times]
    generations = (generation_of(1), generation_of(1, 1, number=2, cause="machine"), generation_of(3, number=3))
    telemetry = [TelemetrySample(50.0, "a", Telemetry(cpu_fraction=-1e15, sent_bytes_per_second=1e15))]
    evidence = evidence_of(points, generations=generations, spent=spent, telemetry=telemetry)
    findings = findings_of(evidence)
    Page(render(evidence, findings))
    markdown(evidence, findings)
    report_json(evidence)


def test_times_that_are_zero_divide_nothing() -> None:
    flat = [trained(step, data=0.0, forward=0.0, backward=0.0, optimizer=0.0) for step in range(1, 60)]
    assert findings_of(
        evidence_of(flat, workers=(1, 1), spent=[TimeSpent(1.0, 1, 0, 59, {}), TimeSpent(1.0, 1, 1, 59, {})])
    )
