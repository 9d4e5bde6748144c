"""Plans end to end: packed and raw data, measured here, or from the table; what `run` says and remembers of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from pack.corpus import GREETINGS, QUESTIONS, write_pairs
from pack.pictures import photo, saved
from packtrain.cli import app
from packtrain.errors import Mistake
from packtrain.launch.check import check, pack_data
from packtrain.launch.create import create
from packtrain.launch.load import load
from packtrain.pack.build import PlainProgress
from packtrain.pack.images import LabelPacks
from packtrain.pack.kind import kind_of
from packtrain.pack.manifest import read_manifest
from packtrain.pack.pairs import PairPacks
from packtrain.pack.workers import InProcess
from packtrain.plan import raw
from packtrain.plan.estimate import Layout, Speed
from packtrain.plan.known import KnownSpeeds, expected, remember_speeds, remembered_speeds
from packtrain.plan.plan import PlanRequest, make_plan
from packtrain.run.records import Point
from packtrain.run.run import Run, open_run
from packtrain.store import open_store
from parts.runs import MEASURED

TABLE = PlanRequest(device="t4")
SPEED = Speed("made up", "cpu", 0.0, 0.001, 0.0, 0.0, 0.0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def write_job(folder: Path, **changes: Any) -> Path:
    job = {
        "name": "greetings",
        "recipe": "translate",
        "store": str(folder / "store"),
        "data": {
            "train": [{"bitext": write_pairs(folder / "train.tsv", GREETINGS)}],
            "valid": [{"bitext": write_pairs(folder / "valid.tsv", QUESTIONS)}],
            "vocabulary": 300,
        },
        "model": {"size": "tiny", "width": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1},
        "train": {"duration": "10 steps", "batch": "64 tokens", "schedule": {"constant": {"rate": 0.001}}},
        "evaluate": {"every": "5 steps", "samples": 2, "beam": 1},
        "fleet": {"local": {}, "workers": 1},
        **changes,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def pack(path: Path) -> None:
    loaded = load(path)
    store = open_store(loaded.job.store, create=True)
    pack_data(loaded, store, PlainProgress(lambda _: None), InProcess())


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def refused(*arguments: str) -> str:
    with pytest.raises(Mistake) as error:
        CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def quiet(_: str) -> None:
    pass


# From the table.


def test_a_plan_compares_numbers_of_machines(tmp_path: Path) -> None:
    path = write_job(tmp_path, fleet={"local": {}, "price": 2.0, "workers": 1})
    pack(path)
    made = json.loads(plan(str(path), "--device", "T4", "--machines", "1,2,4", "--json").stdout)
    assert [one["machines"] for one in made["estimates"]] == [1, 2, 4]
    assert all(one["dollars"] > 0 and one["memory_limit_bytes"] == 16 * 10**9 for one in made["estimates"])
    assert made["workload"]["samples"] == len(GREETINGS)
    assert made["workload"]["exact"]
    assert made["advice"]["cheapest"] == 1
    assert made["goal"]["steps"] == 10


def test_a_plan_is_a_page_of_words_and_a_table(tmp_path: Path) -> None:
    path = write_job(tmp_path, fleet={"local": {}, "price": 2.0}, budget={"hours": 5.0})
    pack(path)
    text = plan(str(path), "--device", "t4", "--machines", "1,2", "--link", "10 Gbit/s").output
    for words in (
        "greetings  translate tiny", "thousand parameters", "8 samples", "10 steps of", "table of devices: NVIDIA T4",
        "10 Gbit/s", "1 x 1", "2 x 1", "cheapest and fastest  1 machine", "within 5 hours",
    ):  # fmt: skip
        assert words in text, text


def test_an_impossible_budget_has_no_choice(tmp_path: Path) -> None:
    path = write_job(tmp_path, train={"duration": "900000000 steps", "batch": "64 tokens",
                                      "schedule": {"constant": {"rate": 0.1}}}, budget={"hours": 0.1})  # fmt: skip
    pack(path)
    assert "none fits: none ends within 0.1 hours; raise the budget" in plan(str(path), "--device", "t4").output


def test_machines_of_aws_are_in_the_table(tmp_path: Path) -> None:
    fleet = {"aws": {"region": "us-east-1", "instances": ["g5.12xlarge"], "role": "trainer", "machines": "1..2"}}
    path = write_job(tmp_path, fleet=fleet, store="s3://bucket/store")
    loaded = load(path)
    loaded = replace(loaded, job=loaded.job.model_copy(update={"store": str(tmp_path / "none")}))
    made = make_plan(loaded, PlanRequest(), quiet)
    assert made.source.startswith("table of devices: NVIDIA A10G at ")
    assert [one.machines for one in made.estimates] == [1, 2, 4, 8]
    assert [one.workers for one in made.estimates][:2] == [4, 8]
    assert made.link.bytes_per_second == 40e9 / 8
    assert all(one.dollars for one in made.estimates)


# Raw data.


def test_raw_data_is_estimated_from_its_first_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairPacks, "first_samples", 4)
    path = write_job(tmp_path)
    made = make_plan(load(path), TABLE, quiet)
    assert made.pack is None
    assert made.workload.samples == len(GREETINGS)
    assert made.workload.parameters > 300 * 32, "the vocabulary has the size that the job asks for"
    assert any("not packed" in note for note in made.notes)
    assert not (tmp_path / "store").exists(), "a plan creates nothing"


def test_raw_images_are_estimated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelPacks, "first_samples", 4)
    for number in range(10):
        image = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(saved(photo(40, 40, seed=number), "JPEG"))
    train = {"duration": "2 epochs", "batch": "4 samples", "schedule": {"constant": {"rate": 0.1}}, "size": 32}
    data = {"train": [{"imagenet": str(tmp_path / "photos")}]}
    path = write_job(tmp_path, recipe="classify", data=data, model={"size": "tiny", "width": 8}, train=train)
    made = make_plan(load(path), TABLE, quiet)
    assert (made.workload.samples, made.workload.unit) == (10, "samples")
    assert made.goal.steps == 5


def test_a_batch_larger_than_what_was_read_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairPacks, "first_samples", 50)
    pairs = [(f"good morning {number}", f"guten Morgen {number}") for number in range(1000)]
    few = [(f"yes {number}", f"ja, das ist wahr und gut und schön {number}") for number in range(100)]
    data = {
        "train": [
            {"bitext": write_pairs(tmp_path / "many.tsv", pairs)},
            {"bitext": write_pairs(tmp_path / "few.tsv", few), "weight": 5.0},
        ],
        "vocabulary": 300,
    }
    train = {"duration": "3 epochs", "batch": "2000 tokens", "schedule": {"constant": {"rate": 0.1}}}
    path = write_job(tmp_path, data=data, train=train)
    raw_plan = make_plan(load(path), TABLE, quiet)
    pack(path)
    packed = make_plan(load(path), TABLE, quiet)
    assert packed.workload.exact
    assert raw_plan.workload.samples == packed.workload.samples == 1100
    # The vocabulary of a few samples makes other tokens; batches and the mix are those of all.
    assert raw_plan.workload.units_per_step == pytest.approx(2000)
    epochs = [made.workload.steps_per_epoch * made.workload.samples_per_step for made in (raw_plan, packed)]
    assert epochs == [pytest.approx(1500)] * 2, "the second source is read five times"


def test_counting_stops_after_a_while_and_sizes_of_files_tell_the_rest(tmp_path: Path) -> None:
    lines = [(f"good morning {number}", f"guten Morgen {number}") for number in range(4000)]
    source = load(write_job(tmp_path, data={"train": [{"bitext": write_pairs(tmp_path / "many.tsv", lines)}]}))
    [one] = source.job.data.train
    assert raw.count_samples(one, kind_of("pairs")) == 4000
    assert raw.count_samples(one, kind_of("pairs"), seconds=0.0) == pytest.approx(4000, rel=0.1)


# Without the data.


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "samples", "valid", "words"),
    [
        ("classify-imagenet", 1_281_167, 50_000, "ImageNet"),
        ("translate-wmt14", 4_562_102, 3_000, "WMT14 English-German"),
        ("chat-cornell", 215_956, 5_326, "Cornell Movie-Dialogs"),
        ("caption-coco-vizwiz", 106_214, 48_254, "COCO 2014 and VizWiz-Captions"),
    ],
)
def test_the_full_examples_are_planned_without_their_data(
    example: str, samples: int, valid: int, words: str, tmp_path: Path
) -> None:
    store = f"store={tmp_path / 'store'}"
    made = make_plan(load(EXAMPLES / f"{example}.yaml", [store]), TABLE, quiet)
    assert (made.workload.samples, made.workload.valid_samples) == (samples, valid)
    assert f"its size is that of {words}, by the names of its files" in made.notes[0]
    assert (made.pack, made.workload.exact) == (None, False)
    assert made.estimates[0].seconds > 600
    assert not (tmp_path / "store").exists()


def test_imagenet_in_phases_has_its_epochs_and_its_batches(tmp_path: Path) -> None:
    path = str(EXAMPLES / "classify-imagenet.yaml")
    text = plan(path, "--device", "v100", "--set", "fleet.workers=8", "--set", f"store={tmp_path / 'store'}").output
    for words in ("16,399 steps of 4,096, then 1,792, then 1,024 samples, 28 epochs", "313 steps per epoch at first"):
        assert words in text, text
    assert "compute" in text
    assert "network" not in text


def test_sizes_may_be_given_instead_of_data(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"train": [{"bitext": ["a.en", "a.de"]}], "vocabulary": 32000})
    made = json.loads(plan(str(path), "--device", "t4", "--samples", "1281167", "--length", "27", "--json").stdout)
    work = made["workload"]
    assert (work["samples"], work["valid_samples"]) == (1_281_167, 0)
    assert work["units_per_step"] / work["samples_per_step"] == pytest.approx(27)
    assert work["steps_per_epoch"] == pytest.approx(1_281_167 * 27 / 64)
    assert any("--samples covers only training samples" in note for note in made["notes"])
    named = json.loads(plan(str(path), "--device", "t4", "--samples", "WMT14-en-de", "--json").stdout)["workload"]
    assert (named["samples"], named["valid_samples"], named["test_samples"]) == (4_562_102, 3_000, 3_003)
    mix = write_job(tmp_path, data={"train": [{"bitext": [name, name]} for name in "abc"], "vocabulary": 32000})
    thirds = json.loads(plan(str(mix), "--device", "t4", "--samples", "1000", "--json").stdout)
    assert thirds["workload"]["samples"] == 1000
    assert "targets of 25 tokens are assumed; set --length" in thirds["notes"]


def test_images_of_a_size_that_is_given_have_as_many_classes_as_imagenet(tmp_path: Path) -> None:
    train = {"duration": "5 steps", "batch": "4 samples", "schedule": {"constant": {"rate": 0.1}}}
    path = write_job(tmp_path, recipe="classify", data={"train": [{"imagenet": "train"}]}, model="tiny", train=train)
    for samples, assumed in (("1000", True), ("imagenet", False)):
        made = make_plan(load(path), replace(TABLE, samples=samples), quiet)
        assert ("1,000 classes are assumed" in made.notes) == assumed


@pytest.mark.usefixtures("processes")
def test_a_plan_without_data_needs_no_torch(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from packtrain.cli import app\n"
        f"app(['plan', {str(path)!r}, '--samples', '1000', '--device', 't4'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cheapest and fastest" in done.stdout


def test_given_sizes_are_those_of_each_source_of_a_mix(tmp_path: Path) -> None:
    mix = [{"bitext": ["a.en", "a.de"]}, {"bitext": ["b.en", "b.de"], "weight": 3.0}]
    path = str(write_job(tmp_path, data={"train": mix, "vocabulary": 32000}))
    made = json.loads(plan(path, "--device", "t4", "--samples", "1000,200", "--length", "8", "--json").stdout)
    assert made["workload"]["samples"] == 1200
    assert made["workload"]["steps_per_epoch"] == pytest.approx((1000 + 3 * 200) * 8 / 64)
    assert "data.train is a mix with weights; give each source's, as in 100000,100000" in refused(
        path, "--samples", "1000"
    )
    assert "has 3 values, but data.train has 2 sources" in refused(path, "--samples", "1,2,3")


def test_data_of_this_machine_is_not_measured_without_being_read(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    made = make_plan(load(path), PlanRequest(samples="1000", length=9.0), quiet)
    assert made.source.startswith("table of devices: ")
    assert "speed not measured: measuring needs the data" in made.notes


@pytest.mark.usefixtures("processes")
def test_remote_data_is_sized_by_its_headers(tmp_path: Path) -> None:
    asked = []

    class Head(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "147000000000" if "images" in self.path else "700000000")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Head) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            made = make_plan(
                load(write_job(tmp_path, data={"train": [{"bitext": [f"{url}/a.en", f"{url}/a.de"]}]})), TABLE, quiet
            )
            assert made.workload.samples == pytest.approx(700e6 / 5 / 25)
            data = {"train": [{"imagenet": f"{url}/images.tar"}]}
            train = {"duration": "5 steps", "batch": "4 samples", "schedule": {"constant": {"rate": 0.1}}}
            changes = {"recipe": "classify", "data": data, "model": {"size": "tiny", "width": 8}, "train": train}
            images = make_plan(load(write_job(tmp_path, **changes)), TABLE, quiet)
            assert images.workload.samples == pytest.approx(147e9 / 115e3, rel=0.001)
        finally:
            server.shutdown()
    assert sorted(asked) == ["/a.de", "/images.tar"], "nothing is downloaded"
    assert any("estimated from the sizes of its files; set --samples" in note for note in made.notes)


def test_data_in_the_store_is_sized_by_its_objects(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    store.put("raw/a.tsv", b"x" * 100_000)
    made = make_plan(load(write_job(tmp_path, data={"train": [{"bitext": "store:raw/a.tsv"}]})), TABLE, quiet)
    assert made.workload.samples == pytest.approx(100_000 / 2 / 5 / 25)
    path = write_job(tmp_path, data={"train": [{"bitext": "store:raw/none.tsv"}]})
    assert "store:raw/none.tsv: not found in" in refused(str(path), "--device", "t4")


def test_servers_of_ibm_are_in_the_table(tmp_path: Path) -> None:
    fleet = {"ibm": {"datacenter": "dal10", "flavor": "AC2_16X120X100", "os": "UBUNTU_LATEST_64", "network_mbps": 1000}}
    path = write_job(tmp_path, fleet=fleet, store="s3://bucket/store")
    made = make_plan(load(path), PlanRequest(samples="1000", length=9.0, machines=(1, 2)), quiet)
    assert made.source.startswith("table of devices: NVIDIA V100 at ")
    assert [one.workers for one in made.estimates] == [2, 4]
    assert made.link.bytes_per_second == 1e9 / 8
    assert [one.dollars for one in made.estimates] == [None, None], "its price is not known"


def test_machines_of_the_local_fleet_share_this_one(tmp_path: Path) -> None:
    path = write_job(tmp_path, fleet={"local": {}, "workers": 1, "price": 2.0})
    made = make_plan(load(path), PlanRequest(samples="1000", length=9.0, machines=(1, 2)), quiet)
    one, two = made.estimates
    assert two.step_seconds >= one.step_seconds, "no machine is added"
    assert two.dollars == pytest.approx((one.dollars or 0.0) * two.seconds / one.seconds)
    assert any("are all this one: they share its" in note for note in made.notes)
    others = make_plan(load(path), replace(TABLE, samples="1000", length=9.0, machines=(1, 2)), quiet)
    assert not any("are all this one" in note for note in others.notes), "--device is about other machines"


# Measured.


@pytest.mark.usefixtures("processes")
def test_a_plan_is_measured_here_and_a_run_expects_the_same(tmp_path: Path) -> None:
    path = write_job(tmp_path, fleet={"local": {}, "workers": 2})
    pack(path)
    made = make_plan(load(path), PlanRequest(seconds=0.1), quiet)
    [one] = made.estimates
    assert made.source.endswith("steps of 2 workers on this machine")
    assert one.workers == 2
    assert one.sent_bytes == pytest.approx(made.workload.exchange_bytes)
    assert 0 < one.compute_seconds < one.step_seconds
    assert one.memory_bytes > 100e6, "a process with torch has more"
    assert one.evaluation_seconds > 0
    run = create(check(load(path, ["train.duration=20 steps"]), PlainProgress(quiet)))
    found = run.forecast()
    assert found is not None
    assert (found.source, found.steps) == (made.source, 20)
    assert found.step_seconds == pytest.approx(one.step_seconds)


@pytest.mark.usefixtures("processes")
def test_a_probe_of_a_fleet_runs_on_its_machines(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    pack(path)
    before = {entry.key for entry in open_store(str(tmp_path / "store")).list("scratch/")}
    made = make_plan(load(path), PlanRequest(probe=True, seconds=0.1), quiet)
    assert made.source.endswith("1 worker on this machine")
    assert {entry.key for entry in open_store(str(tmp_path / "store")).list("scratch/")} == before


# Wrong inputs.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--machines", "0"], "--machines 0: must be up to 20 numbers of machines, such as 1,2,4"),
        (["--machines", "1,two"], "must be up to 20 numbers"),
        (["--device", "h1000"], "--device h1000: not in the table; did you mean 'h100'?"),
        (["--link", "fast"], '--link fast: must be a speed, such as "10 Gbit/s"'),
        (["--link", "0 Gbit/s"], "must be a speed"),
        (["--samples", "many"], "--samples many: must be a number of samples, or a well-known set; "),
        (["--samples", "imagnet"], "did you mean 'imagenet'?"),
        (["--samples", "0"], "such as 1281167"),
        (["--samples", "imagenet"], "--samples imagenet: is a set of images, and this job learns from texts"),
        (["--length", "7"], "--length is for data that is not read; this job's data is here"),
        (["--samples", "100", "--probe"], "--probe needs the data; plan without it"),
        (["--probe", "--device", "t4"], "use one of them"),
        (["--set", "data.pack=missing"], "data.pack: no such pack"),
    ],
)
def test_wrong_options_are_refused_in_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in refused(str(write_job(tmp_path)), *arguments)


def test_a_program_cannot_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: mine\nprogram: [train.py]\n")
    assert "plan needs a recipe; this job has a program" in refused(str(path))


def test_rented_machines_cannot_be_probed(tmp_path: Path) -> None:
    fleet = {"aws": {"region": "us-east-1", "instances": ["g5.xlarge"], "role": "trainer"}}
    path = write_job(tmp_path, fleet=fleet, store="s3://bucket/store")
    loaded = load(path)
    local = replace(loaded, job=loaded.job.model_copy(update={"store": str(tmp_path / "store")}))
    with pytest.raises(Mistake, match="--probe needs the packed data; run `packtrain pack"):
        make_plan(local, PlanRequest(probe=True), quiet)


def test_missing_data_is_named(tmp_path: Path) -> None:
    path = write_job(tmp_path, data={"train": [{"bitext": str(tmp_path / "none.tsv")}]})
    open_store(str(tmp_path / "store"), create=True)
    assert "none.tsv does not exist; to plan without it, pass its size: --samples 100000" in refused(
        str(path), "--device", "t4"
    )


def test_the_length_of_images_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path, recipe="classify", data={"train": [{"imagenet": "train"}]}, model="tiny",
                     train={"batch": "4 samples", "schedule": {"constant": {"rate": 0.1}}})  # fmt: skip
    assert "--length is the mean length of a target text; the samples of this job are images" in refused(
        str(path), "--samples", "100", "--length", "7"
    )


# What a run expects without measuring.


@pytest.mark.usefixtures("processes")
def test_a_run_expects_something_before_anyone_has_planned(tmp_path: Path) -> None:
    run = create(check(load(write_job(tmp_path)), PlainProgress(quiet)))
    found = run.forecast()
    assert found is not None
    assert found.source.startswith("rough: peak of")
    assert (found.workers, found.steps, found.limit) == (1, 10, "compute")
    assert found.seconds > 0


@pytest.mark.usefixtures("processes")
def test_expecting_needs_no_torch(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from packtrain.launch import check, create, load\n"
        "check.find_spec = lambda name: True\n"  # it only asks whether torch is installed
        "from packtrain.pack.build import PlainProgress\n"
        f"new = check.check(load.load({str(path)!r}), PlainProgress(lambda text: None))\n"
        "run = create.create(new)\n"
        "print(run.forecast().parameters)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000


@pytest.mark.usefixtures("processes")
def test_an_earlier_run_of_the_same_job_tells_the_pace(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    first = create(check(load(path), PlainProgress(quiet)))
    points = first.point_writer("000001-rank-0")
    for step in range(1, 31):
        points.append(Point("train", 1, step, float(step), {**MEASURED, "tokens": 50.0, "step_seconds": 0.5}))
    points.flush()
    second = create(check(load(path, ["train.duration=100 steps"]), PlainProgress(quiet)))
    found = second.forecast()
    assert found is not None
    assert found.source == "as in greetings-1"
    assert (found.step_seconds, found.units_per_second) == (0.5, 100.0)
    assert found.seconds >= 50.0
    other = create(check(load(path, ["train.batch=32 tokens"]), PlainProgress(quiet))).forecast()
    assert other is not None
    assert other.source.startswith("rough"), "another batch is other work"


def test_a_damaged_memory_of_a_plan_is_forgotten(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    pack(path)
    made = make_plan(load(path), TABLE, quiet)
    job, name = load(path).job, str(made.pack)
    assert remembered_speeds(job, name) is None, "a run has other machines than those of --device"
    remember_speeds(job, name, KnownSpeeds(made.workload, made.link, ((Layout(1, 1, 0), SPEED),)))
    assert remembered_speeds(job, name) is not None
    [file] = (tmp_path / "cache" / "plans").iterdir()
    file.write_text("{}")
    assert remembered_speeds(job, name) is None


@pytest.mark.usefixtures("processes")
def test_a_recipe_of_ones_own_starts_without_a_prediction(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from packtrain.recipes.translate import Translate\nclass Mine(Translate): pass\n"
    )
    run: Run = create(check(load(write_job(tmp_path, recipe="mine:Mine")), PlainProgress(quiet)))
    assert run.forecast() is None
    again = open_run(run.store, run.name)
    assert expected(again, read_manifest(run.store, run.pack_name())) is None
