from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pack.corpus import job_of
from packtrain.errors import Mistake, NotFound
from packtrain.export.card import card_of
from packtrain.export.export import ExportOptions, TooFar, export_run, home_job
from packtrain.export.model import CARD, MANIFEST, is_model, read_model
from packtrain.export.predict import load_model
from packtrain.recipes.decode import TorchText
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.translate import ctranslate2
from packtrain.run.run import Run
from parts.models import commit_model, list_again, packed_run


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
    hostile = "x|`<b>\u202e\n# y"
    model = read_model(tmp_path / "model")
    manifest = replace(model.manifest, scores={f"{hostile}.{hostile}": 1.0})
    card = card_of(manifest, run.job, model.recipe, None)
    assert "\u202e" not in card and "\n# y" not in card
    assert "| x\\|\\`\\<b\\>" in card


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


def damage(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    """Damage the weights on their way into the form."""
    real = ctranslate2._spec_of

    def damaged(model: Any) -> object:
        spec = real(model)
        bias = spec.decoder.projection.bias
        bias += noise * np.random.default_rng(1).normal(size=bias.shape).astype(np.float32)
        return spec

    monkeypatch.setattr(ctranslate2, "_spec_of", damaged)
    monkeypatch.setattr("packtrain.recipes.translate.Translate.tolerances", {"loss": 0.01})


def test_a_model_that_is_worse_than_the_tolerance_is_not_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, 30.0)
    with pytest.raises(TooFar) as refused:
        export(run, tmp_path / "model")
    assert re.fullmatch(
        r"loss on 5 samples of valid: \S+, in torch \S+; worse by \S+ \(95 % interval \S+ to \S+\), beyond the"
        r" tolerance of 0.01; nothing was written; accept it with --tolerance",
        str(refused.value),
    )
    assert [path.name for path in tmp_path.iterdir() if "model" in path.name and path.is_dir()] == []
    export(run, tmp_path / "model", tolerance=1000.0)
    assert is_model(tmp_path / "model")


def test_a_model_that_noise_alone_may_have_made_worse_is_written_with_the_interval_on_its_card(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch, -0.07)
    said = export(run, tmp_path / "model", tolerance=0.0005)
    [parity] = read_model(tmp_path / "model").manifest.parity
    assert parity.drop == pytest.approx(parity.exported - parity.trained)
    assert parity.interval.low < 0.0005 < parity.drop < parity.interval.high
    words = f"worse by {parity.drop:.3g} (95 % interval {parity.interval.low:.3g} to {parity.interval.high:.3g})"
    assert any(words in line for line in said)
    assert f"loss of this model is {words} than in the run." in (tmp_path / "model" / CARD).read_text("utf-8")
    assert not any("cannot rule out" in line for line in said)  # there are no more samples
    said = export(run, tmp_path / "model", tolerance=0.0005, samples=3)
    assert "3 samples cannot rule out a loss beyond the tolerance of 0.0005; for more, pass --samples 5" in said


def test_a_folder_of_something_else_is_never_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(Mistake, match="exists and is not an exported model"):
        export(run, tmp_path / "photos", replace=True)
    with pytest.raises(Mistake, match="is a file"):
        export(run, tmp_path / "file", replace=True)


def test_a_run_replaces_its_own_model_and_that_of_another_run_only_if_told_to(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(run, folder, choice=10)
    export(run, folder, choice=20)
    assert read_model(folder).manifest.origin.step == 20
    assert sorted(path.name for path in tmp_path.glob(".model*")) == []

    other = packed_run(tmp_path, run.job)
    commit_model(other, tmp_path, 30)
    with pytest.raises(Mistake) as refused:
        export(other, folder)
    assert str(refused.value) == (
        f"{folder}: has the model of greetings-1; choose another folder with --output, or pass --replace"
    )
    assert read_model(folder).manifest.origin.run == "greetings-1"
    export(other, folder, replace=True)
    assert read_model(folder).manifest.origin.run == "greetings-2"

    (folder / MANIFEST).write_text("{")
    with pytest.raises(Mistake, match="has a model that cannot be read; choose another folder"):
        export(other, folder)
    export(other, folder, replace=True)
    assert read_model(folder).manifest.origin.step == 30


def test_a_run_of_the_same_name_in_another_store_is_another_run(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    job = job_of(tmp_path / "elsewhere", model={"size": "tiny", "dropout": 0.2})
    other = packed_run(tmp_path / "elsewhere", job)
    commit_model(other, tmp_path / "elsewhere", 10)
    assert other.name == run.name
    with pytest.raises(Mistake, match="has the model of greetings-1"):
        export(other, tmp_path / "model")


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


def test_only_files_that_are_listed_are_loaded(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    read_model(tmp_path / "model").network(1)
    for name in ("job.json", "vocabulary.json", "ctranslate2/model.bin", "ctranslate2/source_vocabulary.json"):
        altered = tmp_path / f"without-{Path(name).stem}"
        shutil.copytree(tmp_path / "model", altered)
        files = json.loads((altered / MANIFEST).read_text())["files"]
        _change(altered, files=[file for file in files if file["name"] != name])
        with (altered / name).open("ab") as opened:
            opened.write(b"\n")
        with pytest.raises(Mistake, match=f"{re.escape(name)} is not listed in model.json, so it cannot be verified"):
            read_model(altered)


@pytest.mark.parametrize("name", ["job\0.json", "job\n.json", "\x1b[31mjob.json"])
def test_a_listed_name_that_no_file_can_have_is_one_line(run: Run, tmp_path: Path, name: str) -> None:
    export(run, tmp_path / "model")
    _rename(tmp_path / "model", name)
    with pytest.raises(Mistake, match="which contains a control character") as error:
        read_model(tmp_path / "model")
    assert str(error.value).isprintable()


def test_a_loop_of_links_is_one_line(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    (tmp_path / "model" / "job.json").unlink()
    (tmp_path / "model" / "job.json").symlink_to("job.json")
    with pytest.raises(Mistake, match=r"cannot read the model: a loop of symbolic links|job\.json is missing"):
        read_model(tmp_path / "model")


DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "longer": lambda data: data[:40] + data,
    "zeros": lambda data: bytes(len(data)),
    "another name": lambda data: data.replace(b"Transformer", b"Transfarmer").replace(b'"17"', b'"seventeen"'),
}


def test_a_damaged_file_with_the_right_digest_is_one_line(run: Run, tmp_path: Path) -> None:
    export(run, tmp_path / "model")
    tried = 0
    for name in ("ctranslate2/model.bin", "ctranslate2/shared_vocabulary.json", "ctranslate2/config.json"):
        whole = (tmp_path / "model" / name).read_bytes()
        for damaged in {damage(whole) for damage in DAMAGES.values()} - {whole}:
            (tmp_path / "model" / name).write_bytes(damaged)
            list_again(tmp_path / "model")
            with pytest.raises(Mistake, match="CTranslate2 cannot load it: ") as error:
                read_model(tmp_path / "model").network(1)
            assert "\n" not in str(error.value)
            tried += 1
        (tmp_path / "model" / name).write_bytes(whole)
    assert tried == 14


def test_a_network_that_computes_nonsense_is_refused_when_it_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, tmp_path / "model")

    def search(*_: object) -> list[object]:
        return [[]]

    monkeypatch.setattr(ctranslate2.Ctranslate2Text, "search", search)
    with pytest.raises(Mistake, match=r"its ctranslate2 files do not compute what translate needs \(\w+Error\)"):
        read_model(tmp_path / "model").network(1)


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
def test_files_are_utf_8_whatever_the_locale(run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "packtrain", "export", run.name, "--store", run.store.url, "-o", "model"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    vocabulary = (tmp_path / "model" / "vocabulary.json").read_bytes().decode("utf-8")
    assert "ü" in vocabulary
    assert read_model(tmp_path / "model").recipe.pack.vocabulary.to_json() == vocabulary


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
