from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pack.corpus import job_of
from packtrain.errors import Mistake, NotFound
from packtrain.export.export import ExportOptions, TooFar, export_run, home_job
from packtrain.export.model import CARD, MANIFEST, is_model, read_model
from packtrain.export.predict import load_model
from packtrain.recipes.decode import TorchText
from packtrain.recipes.recipe import Decoding
from packtrain.run.run import Run
from parts.models import commit_model, packed_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10, seed=1, score=3.0)
    commit_model(run, tmp_path, 20, seed=2, score=2.0)
    return run


def export(run: Run, folder: Path, **options: object) -> list[str]:
    said: list[str] = []
    export_run(run, folder, ExportOptions(**options), said.append)  # type: ignore[arg-type]
    return said


def test_an_exported_model_answers_as_the_run_does(run: Run, tmp_path: Path) -> None:
    said = export(run, tmp_path / "model")
    assert "writing step 10 of greetings-1 for ctranslate2 in fp32" in said
    model = read_model(tmp_path / "model")
    trained = load_model(run, "best")
    inputs = ["good morning", "", "how are you today"]
    decoding = Decoding(beam=2)
    expected = trained.recipe.predict(trained.model, inputs, decoding)
    found = model.recipe.predict(model.network(1), inputs, decoding)
    assert [made.text for made in found] == [made.text for made in expected]
    assert model.manifest.origin.step == 10
    [parity] = model.manifest.parity
    assert (parity.metric, parity.split, parity.samples) == ("bleu", "valid", 5)
    assert parity.exported == pytest.approx(parity.trained, abs=parity.tolerance)


def test_the_card_has_front_matter_and_says_where_the_model_comes_from(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model", license="apache-2.0")
    card = (tmp_path / "model" / CARD).read_text()
    _, front, body = card.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter["license"] == "apache-2.0"
    assert (matter["pipeline_tag"], matter["library_name"]) == ("translation", "ctranslate2")
    assert "greetings-1" in body
    assert run.job_digest in body
    assert "`train.tsv`" in body
    assert str(tmp_path) not in card


def test_the_mean_of_several_checkpoints_is_exported(run: Run, tmp_path: Path) -> None:
    assert "averaged the weights of steps 10, 20" in export(run, tmp_path / "model", average=2)
    one, two = (load_model(run, step).model.state_dict() for step in (10, 20))
    recipe, mean, _ = load_model(run)
    mean.load_state_dict({name: (one[name] + two[name]) / 2 for name in one})
    model = read_model(tmp_path / "model")
    assert len(model.manifest.origin.checkpoints) == 2
    inputs, decoding = ["good evening everybody", "hello"], Decoding(beam=2)
    expected = [made.text for made in recipe.predict(TorchText(mean), inputs, decoding)]  # type: ignore[arg-type]
    assert [made.text for made in model.recipe.predict(model.network(1), inputs, decoding)] == expected
    with pytest.raises(Mistake, match=r"--average 3: greetings-1 has 2; checkpoint.keep_best"):
        export(run, tmp_path / "other", average=3)
    with pytest.raises(Mistake, match="remove the step of --checkpoint"):
        export(run, tmp_path / "other", average=2, choice=10)
    assert not (tmp_path / "other").exists()


def test_a_model_that_is_worse_than_the_tolerance_is_not_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from packtrain.export import ctranslate2

    real = ctranslate2._spec_of  # damages the weights on their way

    def damaged(model: object) -> object:
        spec = real(model)  # type: ignore[arg-type]
        spec.decoder.projection.bias[:] += torch.randn(len(spec.decoder.projection.bias)).numpy() * 30
        return spec

    monkeypatch.setattr(ctranslate2, "_spec_of", damaged)
    commit_model(run, tmp_path, 30, seed=3, score=9.0)
    monkeypatch.setattr("packtrain.recipes.translate.Translate.tolerances", {"loss": 0.01})
    with pytest.raises(TooFar, match=r"loss of the exported model is .*: worse by more than 0.01; nothing was"):
        export(run, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name and path.is_dir()] == []
    export(run, tmp_path / "model", tolerance=1000.0)
    assert is_model(tmp_path / "model")


def test_a_folder_of_something_else_is_never_replaced_but_a_model_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(Mistake, match="exists and is not an exported model"):
        export(run, tmp_path / "photos")
    with pytest.raises(Mistake, match="is a file"):
        export(run, tmp_path / "file")
    export(run, tmp_path / "model", choice=10)
    export(run, tmp_path / "model", choice=20)
    assert read_model(tmp_path / "model").manifest.origin.step == 20
    assert sorted(path.name for path in tmp_path.glob(".model*")) == []


def test_the_job_of_a_model_has_no_places_machines_or_signatures(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    assert str(tmp_path) not in (tmp_path / "model" / "job.json").read_text()
    signed = run.job.model_copy(
        update={"data": run.job.data.map_paths(lambda _: "https://host/dir/corpus.tsv?signature=abc#member")}
    )
    text = home_job(signed, ()).model_dump_json()
    assert "corpus.tsv" in text
    assert "signature" not in text
    assert "https" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "vocabulary.json").unlink(), "vocabulary.json is missing"),
        (
            lambda folder: (folder / "ctranslate2" / "model.bin").write_bytes(b"x"),
            "model.bin does not match its digest",
        ),
        (lambda folder: (folder / MANIFEST).write_text("{"), "is damaged"),
        (lambda folder: _change(folder, format=99), "exported by a newer Packtrain"),
        (lambda folder: _change(folder, precision="int4"), "is damaged"),
        (lambda folder: _change(folder, form="tflite"), "no format 'tflite'"),
        (lambda folder: _rename(folder, "../outside"), "outside of the model"),
        (lambda folder: _rename(folder, "/etc/passwd"), "outside of the model"),
    ],
)
def test_a_model_that_was_tampered_with_is_refused(run: Run, tmp_path: Path, change: object, message: str) -> None:
    export(run, tmp_path / "model")
    assert callable(change)
    change(tmp_path / "model")
    with pytest.raises(Mistake, match=message):
        read_model(tmp_path / "model").network()


def test_a_folder_that_is_no_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"not an exported model; there is no model.json"):
        read_model(tmp_path)


def _change(folder: Path, **values: object) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(document | values))


def _rename(folder: Path, name: str) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    document["files"][0]["name"] = name
    (folder / MANIFEST).write_text(json.dumps(document))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["packtrain", *sys.argv[1:]]
from packtrain.cli import main
main()
"""


@pytest.mark.usefixtures("processes")
def test_the_commands_work_where_torch_is_not_installed(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    trained = load_model(run, "best")
    inputs = ["good morning", "how are you today"]
    expected = [made.text for made in trained.recipe.predict(trained.model, inputs, trained.recipe.decoding)]
    command = [sys.executable, "-c", WITHOUT_TORCH, "predict", str(tmp_path / "model"), *inputs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected
    refused = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "export", run.name, "--store", run.store.url],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith("packtrain: export needs torch for a run; run `pip install ")
