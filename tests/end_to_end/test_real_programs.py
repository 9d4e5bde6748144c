"""Programs as people write them, with the trainers that they use: killed in the middle, they resume by themselves.

Nothing in them is made for Packtrain but the place of their checkpoints.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import packtrain as pt

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.usefixtures("needs_accelerate", "needs_lightning", "needs_transformers")


@pytest.mark.parametrize(
    ("script", "workers", "loss"),
    [
        ("with_lightning.py", 1, "train_loss"),
        ("with_transformers.py", 1, "train/loss"),
        ("with_accelerate.py", 2, "train/loss"),
    ],
)
def test_a_program_whose_worker_is_killed_resumes_and_its_numbers_are_the_runs(
    script: str, workers: int, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("line_data.py", script):
        shutil.copy(PROGRAMS / name, tmp_path)
    (tmp_path / "job.yaml").write_text(
        f"name: line\nprogram: [{script}]\nfleet: {{local: {{}}, workers: {workers}}}\ncheckpoint: {{every: 1 s}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = pt.run("job.yaml")
    result = run.wait(280)
    assert result is not None
    assert result.status == "finished", (result.reason, [line.text for line in run.logs()][-20:])
    assert "finished at step 24" in [line.text for line in run.logs() if line.rank == 0]
    points = [point for point in run.points() if point.kind == "log" and loss in point.values]
    again = [point.step for point in points if point.generation == 2]
    assert again[0] > 4, "it starts again from its checkpoint, not from the beginning"
    assert {point.generation for point in points} == {1, 2}
    assert again[-1] >= 23
    assert len({point.step for point in points}) == len(points) >= 23
