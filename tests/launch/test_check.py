"""A job is refused, or put into a form that machines can use, before there is a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pack.pictures import photo, saved
from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.launch.check import check, make_portable
from packtrain.launch.load import load
from packtrain.launch.start import dry_run
from packtrain.pack.build import PlainProgress
from packtrain.run.inputs import staged
from packtrain.store import Store, open_store
from parts.runs import write_files


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("program", "runs", "workers"),
    [
        ("[torchrun, --nproc_per_node=2, train.py, a]", ("torchrun", "train.py", "a"), 2),
        ("[accelerate, launch, --num_processes, '2', -m, lib.train]", ("python", "-m", "lib.train"), 2),
        ("[python, -u, train.py]", ("python", "-u", "train.py"), None),
        ("[run.sh]", ("./run.sh",), None),
        ("[python, -m, json.tool]", ("python", "-m", "json.tool"), None),
        ("[sh, -c, 'true']", ("sh", "-c", "true"), None),
        ("[sh, -c, 'echo $PACKTRAIN_RUN']", ("sh", "-c", "echo $PACKTRAIN_RUN"), None),
    ],
)
def test_a_program_may_be_written_as_it_is_started_by_hand(
    tmp_path: Path, program: str, runs: tuple[str, ...], workers: int | None
) -> None:
    write_files(tmp_path, {"job.yaml": f"name: mine\nprogram: {program}\n".encode(), "train.py": b"", "run.sh": b""})
    write_files(tmp_path, {"lib/train.py": b""})
    (tmp_path / "run.sh").chmod(0o755)
    loaded = load(tmp_path / "job.yaml", [f"store={tmp_path / 'store'}"])
    assert loaded.job.program is not None
    assert (loaded.job.program.command, loaded.job.fleet.workers) == (runs, workers)
    assert "train.py" in dry_run(loaded).code.sizes


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("[no.py]", "there is no file {}/no.py"),
        ("[python, no.py]", "there is no file {}/no.py"),
        ("[python, -u]", "Python has no script to run; write [train.py], or [python, -m, module]"),
        ("[python, -m, no_such_module]", "module no_such_module is neither in {} nor installed"),
        ("[run.sh]", "{}/run.sh is not executable; run `chmod +x ./run.sh`"),
        ("[no-such-command]", "there is no file {0}/no-such-command, and no command no-such-command on this machine"),
        (
            "[sh, -c, x, '--out=${PACKTRAIN_CHECKPOINT}/a']",
            "there is no variable $PACKTRAIN_CHECKPOINT; did you mean $PACKTRAIN_CHECKPOINTS?",
        ),
        ("{command: [sh], resume: [$PACKTRAIN_CHECKPONTS]}", "there is no variable $PACKTRAIN_CHECKPONTS; did you"),
        ("[torchrun, --fast, a.py]", "torchrun: unknown option '--fast'; write the program alone, such as"),
    ],
)
def test_a_program_that_cannot_start_is_refused_before_anything_is_created(
    tmp_path: Path, program: str, fault: str
) -> None:
    write_files(tmp_path, {"job.yaml": f"name: mine\nprogram: {program}\n".encode(), "run.sh": b""})
    with pytest.raises(Mistake) as refused:
        dry_run(load(tmp_path / "job.yaml", [f"store={tmp_path / 'store'}"]))
    assert str(refused.value).startswith(f"{tmp_path}/job.yaml:2: program: {fault.format(tmp_path)}")


@pytest.fixture
def below(processes: None, tmp_path: Path) -> Path:
    """A job whose code is the directory above its own."""
    job = (
        f"name: mine\nprogram: [train.py]\nstore: {tmp_path / 'store'}\ncode: ..\ndirectory: project\noutputs: [out/]\n"
    )
    write_files(tmp_path / "work", {"project/job.yaml": job.encode(), "project/train.py": b"", "data/words": b"a"})
    return tmp_path / "work" / "project" / "job.yaml"


def test_a_directory_above_the_job_file_may_be_the_code(below: Path, directory_store: Store) -> None:
    loaded = load(below)
    assert sorted(dry_run(loaded).code.sizes) == ["data/words", "project/job.yaml", "project/train.py"]
    assert loaded.job.outputs == ("project/out",)
    elsewhere = make_portable(loaded, directory_store, PlainProgress(lambda _: None)).document
    assert (elsewhere["code"], elsewhere["directory"], elsewhere["outputs"]) == (".", "project", ["out/"])


def test_code_that_lacks_the_directory_or_has_the_whole_home_is_refused(
    below: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Mistake, match=r"^--set directory: there is no directory .*/work/no$"):
        dry_run(load(below, ["directory=no"]))
    with pytest.raises(Mistake, match=r"job.yaml:2: program: there is no file .*/work/train.py$"):
        dry_run(load(below, ["directory=."]))
    with pytest.raises(Mistake, match=r"^--set code: there is no directory .*/no$"):
        dry_run(load(below, ["code=no", "directory=."]))
    monkeypatch.setenv("HOME", str(below.parent.parent))
    with pytest.raises(Mistake, match=r"job.yaml:4: code: .*/work contains your home directory; choose a smaller one"):
        dry_run(load(below))


@pytest.mark.usefixtures("processes")
def test_the_data_of_a_program_goes_into_the_store_for_machines_elsewhere(tmp_path: Path) -> None:
    job = "name: mine\nprogram: [train.py]\ndata: {corpus: data/corpus, images: 's3://bucket/images'}\n"
    write_files(tmp_path, {"job.yaml": job.encode(), "train.py": b"", "data/corpus/a.txt": b"a"})
    store = open_store(str(tmp_path / "elsewhere"), create=True)
    prepared = make_portable(load(tmp_path / "job.yaml"), store, PlainProgress(lambda _: None))
    data = prepared.document["data"]
    assert data["images"] == "s3://bucket/images"
    assert sorted(prepared.files) == [entry.key for entry in store.list("files/")]
    assert (staged(data["corpus"], store, tmp_path / "cache") / "a.txt").read_bytes() == b"a"


@pytest.mark.usefixtures("processes")
def test_a_run_drops_unusable_samples_only_if_it_is_allowed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        f"data/{label}/{number}.jpg": saved(photo(40, 30, number), "JPEG") for label in "ab" for number in range(3)
    }
    write_files(tmp_path, {**files, "data/a/broken.jpg": b"?", "data/a/README.txt": b"?"})
    job = f"name: pets\nrecipe: classify\nstore: {tmp_path}/store\ndata: {{train: {{imagenet: data}}}}\nmodel: tiny\n"
    (tmp_path / "job.yaml").write_text(job)
    for step in ("_start", "_follow"):
        monkeypatch.setattr(f"packtrain.cli.jobs.{step}", lambda *_: None)
    command = ["run", str(tmp_path / "job.yaml")]
    refused = CliRunner().invoke(app, command)
    assert "1 of 7 samples are unusable" in str(refused.exception)
    done = CliRunner().invoke(app, [*command, "--allow-drops"])
    assert done.exit_code == 0, done.exception
    assert "train: 6 images; left out 1 (not a picture by its name), 1 (not an image" in done.output


@pytest.mark.usefixtures("processes")
def test_settings_that_are_larger_than_the_data_are_named_with_what_to_set(tmp_path: Path) -> None:
    lines = "".join(f"a sentence with number {number}\t ein Satz mit Nummer {number}\n" for number in range(30))
    write_files(tmp_path, {"pairs.tsv": lines.encode()})
    job = "name: small\nrecipe: translate\nmodel: tiny\ndata: {train: [{bitext: pairs.tsv}], vocabulary: VOCABULARY}\n"
    train = "train: {duration: 5 steps, batch: BATCH tokens, schedule: {constant: {rate: 0.1}}}\n"

    def notes(vocabulary: int, batch: int) -> list[str]:
        text = (job + train).replace("VOCABULARY", str(vocabulary)).replace("BATCH", str(batch))
        (tmp_path / "job.yaml").write_text(text)
        loaded = load(tmp_path / "job.yaml", [f"store={tmp_path / 'store'}"])
        return [f"{label}: {line}" for label, line in check(loaded, PlainProgress(lambda _: None)).notes]

    assert notes(300, 50) == []
    batch, vocabulary = sorted(notes(8000, 25000), reverse=True)
    assert batch.startswith("warning: train.batch: 25000 tokens, but the data has about ")
    assert vocabulary.startswith("warning: data.vocabulary: 8000, but the text has only 3")
    assert vocabulary.endswith(" pieces; set 300")
    assert all(len(line) <= 100 for line in (batch, vocabulary))
