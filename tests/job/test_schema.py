"""The JSON Schema of the job file: it agrees with the settings that check a job, and says what each field means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from packtrain.cli.template import EDITOR_LINE, SCHEMA, TEMPLATES, InitRequest, current_schema, write_job
from packtrain.errors import FieldMistake, Mistake
from packtrain.job.document import Document
from packtrain.job.load import apply_overrides, load_job, read_document
from packtrain.recipes import check_recipe, recipe_defaults

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSLATE = EXAMPLES / "translate.yaml"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made = current_schema()
    Draft202012Validator.check_schema(made)
    return made


def faults(schema: dict[str, Any], document: Document) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document.data)]


@pytest.mark.parametrize("job", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_job_is_valid(job: Path, schema: dict[str, Any]) -> None:
    assert faults(schema, read_document(job)) == []


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_job_is_valid_and_its_first_line_tells_an_editor_where_the_schema_is(
    kind: str, tmp_path: Path, schema: dict[str, Any]
) -> None:
    data = tmp_path / "samples.jsonl"
    data.touch()
    write_job(InitRequest(kind, tmp_path / "job.yaml", train=[str(data)] if kind != "program" else []))
    text = (tmp_path / "job.yaml").read_text()
    assert text.startswith(EDITOR_LINE)
    assert json.loads((tmp_path / SCHEMA).read_text()) == schema
    assert faults(schema, read_document(tmp_path / "job.yaml")) == []


RIGHT = [
    ["train.duration=1,000 steps", "train.batch=2_000 tokens", "train.patience=90 s", "checkpoint.every=auto"],
    ["train.duration=1.5 h", "train.schedule={constant: {rate: 1e-3}}", "train.optimizer=adamw", "train.exchange=fsdp"],
    ["train.schedule={phases: [{until: 2 epochs, rate: [0.1, 1]}, {until: 3 epochs, rate: 1}]}", "evaluate="],
    ["train.exchange={ddp: {compress: bf16}}", "train.clip=", "model.dropout=0.1", "data.train.0.weight=2"],
    ["model={size: base, heads: 16}", "data.valid={folder: lines.jsonl}", "recipe=translate", "code=src"],
    ["train.scale_rate={sqrt: 4096 tokens}", "train.optimizer={lamb: {decay: 0}}"],
    ["fleet=slurm", "report={mlflow: runs}", "budget={hours: 2.5}", "environment=[WANDB_API_KEY]", "fleet.workers=2"],
    ["fleet={local: {machines: 2..4}, cache: {directory: /mnt, size: 200 GB}}"],
    ["fleet={ssh: {hosts: [a, b@c:2222], power_off: true}, failures: 0, price: 2}", "budget.dollars=9"],
    ["fleet={aws: {instances: g5.xlarge, region: us-east-1, create_role: true, disk: 200 GB}}"],
    ["fleet={kubernetes: {image: a/b:1, resources: {cpu: 8, memory: 32Gi}, mounts: [{path: /d, claim: x}]}}"],
    ["fleet={aws: {instances: [g5.xlarge], region: us-east-1, role: a, placement_group: a, zones: [us-east-1a]}}"],
    ["fleet={aws: {instances: [g5.xlarge], region: us-east-1, role: a, placement_group: a, subnets: [subnet-0a]}}"],
    ["fleet={ibm: {datacenter: dal10, flavor: B1_2X8X25, os: A, transient: true}}"],
    ["fleet={ibm: {datacenter: dal10, flavor: null, cpus: 4, memory: 16 GB, os: A, transient: true}}"],
    ["fleet={slurm: {options: [--nodes-x, --constraint=a]}}"],
    ["fleet={kubernetes: {image: a, resources: {cpu: 0.5, x.y/z: 1}, variables: {A: 1, B: ''}, shared_memory: 1Gi}}"],
    ["fleet={ibm: {datacenter: dal10, cpus: 4, memory: 16 GB, os: UBUNTU_24_64, disks: [100 GB]}}"],
    ["fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a}}", "budget.dollars=9", "store=s3://b/../x"],
    ["data.train={bitext: [a/../b.en, ./b.de]}", "data.valid=50 %", "data.test={bitext: S3://b/k.tsv}"],
    ["data.valid=0.5%", "code=./src/..x", "report={mlflow: 'file:x'}", "store=/../x", "train.patience=0.5 s"],
    ["data.train={bitext: a.tsv, columns: [2, 1], last: 5}", "train.scale_rate={linear: 5 tokens, sqrt: }"],
]


@pytest.mark.parametrize("overrides", RIGHT, ids=lambda overrides: overrides[0])
def test_what_loads_is_valid(overrides: list[str], schema: dict[str, Any]) -> None:
    load_job(TRANSLATE, overrides, recipe_defaults)
    assert faults(schema, apply_overrides(read_document(TRANSLATE), overrides)) == []


@pytest.mark.parametrize(
    "text",
    [
        "program: [train.py]\ndata: {corpus: /data/corpus}\noutputs: [out/]\ncheckpoint: {every: 1 min}",
        "program: [python, -m, lib]\ndata: [/a, s3://bucket/b]",
        "program: [train.py]\ndata: /a\ntrain:",
        "program: {command: [train.py, --lr, '1'], resume: [--init_from=resume]}",
        "program: [train.py]\ncode: ../..\ndirectory: a/b",
        "program: [train.py]\ncode: ./../",
        "program: [./a/../train.py, --lr, '']\ndata: [/a/, s3://b/c/., store:files/x]\noutputs: [./out/, a..b]",
        "program: [train.py]\ndata: []\nrecipe:\nweights:\nbudget: {dollars: 5}\nfleet: {price: 2}",
        "recipe: mine:Recipe\ndata: {train: {folder: a.jsonl}}\nmodel: {size: huge, layers: 3}\n"
        "train: {duration: 1 h, batch: 2 samples, schedule: {constant: {rate: 1}}}",
        "data: {train: {bitext: a.tsv, columns: [2, 1]}}",
    ],
)
def test_programs_own_recipes_and_packs_are_valid(text: str, tmp_path: Path, schema: dict[str, Any]) -> None:
    (tmp_path / "job.yaml").write_text(f"name: mine\n{text}\n")
    load_job(tmp_path / "job.yaml")
    assert faults(schema, read_document(tmp_path / "job.yaml")) == []


PROGRAM = "name: mine\nprogram: [train.py]\ndata: {corpus: /data}\n"
WRONG = [
    # Names, files and what belongs to what.
    "name=", "name=-a", "name=My Job", f"name={'a' * 64}", "seed=1", "recipe=nope", "recipe=trans late", "recipe=a.b",
    "store=../x", "store=~/x", "store=a/../../x", 'store="a\\tb"', "code=/src", "code=s3://a", "code=~/src",
    "environment=[a=b]", "environment=A", f"environment=[{'A' * 256}]", "weights=abc", "outputs=[out]",
    "program=[train.py]", "origin={directory: /, inode: 1}", "inputs={a: /b}", "parent={run: a}",
    # Data.
    "data={}", "data.train=[]", "data.train={weight: 2}", "data.train={bitext: [a, b, c]}", "data.train={bitext: []}",
    "data.train={bitext: a.tsv, links: true}", "data.train={bitext: a, coco: [b, c]}", "data.train={bitext: ../a.tsv}",
    "data.train={bitext: ~/a.tsv}", "data.train={bitext: ftp://a/b}", "data.train={bitext: [a, b], columns: [2, 1]}",
    "data.train={bitext: a, weight: 0}", "data.train={bitext: a, last: 3, without_last: 3}", "data.valid=60 %",
    "data.valid=0 %", "data.valid=5.1234 %", "data.held_out=0.1", "data.vocabulary=299", "data.max_ratio=0.5",
    "data.sizes=[64, 64]", "data.sizes=[7]", "data.pack=a/b", "data.joint=1", "data.train={imagenet: images}",
    # The model and training.
    "model=huge", "model.depth=4", "model.heads=two", "model.dropout=1", "model.dropout=-1", "model.encoder_layers=1.5",
    "train.bacth=5 tokens", "train.duration=500", "train.duration=5 stpes", "train.duration=0 steps",
    "train.batch=64 samples", "train.batch=0 tokens", "train.micro_batch=4 samples", "train.precision=fp64",
    "train.clip=-1", "train.clip=0", "train.patience=5 steps", "train.patience=0 s", "train.profile=5 min",
    "train.seed=1.5", "train.seed=-1", "train.compile=no", "train.ema=1", "train.size=7", "train.min_scale=0",
    "train.label_smoothing=1", "train.augment={erasing: 2}",
    "train.augment={mixup: 1}", "train.augment={randaugment: {operations: 9}}",
    "train.scale_rate=linear", "train.scale_rate={linear: 256}", "train.scale_rate={base: 5 tokens}",
    "train.scale_rate={}", "train.scale_rate={linear: 5 tokens, sqrt: 5 tokens}",
    "train.scale_rate={linear: 5 samples}", "train.schedule=noam", "train.schedule={noam: {}}",
    "train.schedule={nome: {warmup: 5 steps}}", "train.schedule={noam: {warmup: 5 steps}, constant: {rate: 1}}",
    "train.schedule={phases: []}",
    "train.schedule={noam: {warmup: 5 steps, scale: 1, peak: 1}}", "train.schedule={constant: {rate: -1}}",
    "train.duration=[5 steps]", "train.optimizer={adam: {beta: 1}}", "train.optimizer={adam: 0}",
    "train.optimizer={sgd: {momentum: 0, nesterov: true}}", "train.schedule={noam: ''}",
    "train.optimizer={adam: {betas: [0.9]}}", "train.exchange=nccl",
    # When to evaluate, save and stop.
    "evaluate.beam=0", "evaluate.every=0 steps", "checkpoint.every=often", "checkpoint.every=0 s",
    "checkpoint.keep_last=0", "checkpoint.best_by=Loss!", "budget={dollars: 0}", "budget={dollars: 9}",
    "budget={euros: 3}", "report={mlflow: ../x}", "report={mlflow: ~/x}",
    # Machines.
    "fleet=ssh", "fleet={ssh: {}}", "fleet={ssh: {hosts: []}}", "fleet={ssh: {hosts: [a, a]}}", "fleet={kind: local}",
    "fleet={mpi: {hosts: [-oProxyCommand=x]}}", "fleet={local: {}, slurm: {}}", "fleet={local: {machines: 0}}",
    "fleet={local: {machines: many}}", "fleet={local: {machines: 0..2}}", "fleet.worker=2", "fleet.workers=0",
    "fleet.price=0", "fleet.cache={size: big}", "fleet.cache={size: 0 GB}", "fleet.cache={directory: relative}",
    "fleet={local: false}", "fleet={kubernetes: {}}", "fleet={kubernetes: {image: a, resources: {cpu: -1}}}",
    "fleet={kubernetes: {image: a, resources: {memory: 32 GB}}}", "fleet={kubernetes: {image: a, shared_memory: ''}}",
    "fleet={kubernetes: {image: a, variables: {A B: x}}}", 'fleet={kubernetes: {image: a, variables: {A: "x\\ny"}}}',
    "fleet={kubernetes: {image: a, secrets: {A: b/c, '': b/c}}}",
    "fleet={kubernetes: {image: a, power_off: true}}",
    "fleet={kubernetes: {image: a, mounts: [{path: /d}]}}",
    "fleet={kubernetes: {image: a, mounts: [{path: /d, claim: x, host: /d}]}}",
    "fleet={slurm: {cpus_per_gpu: 2}}", "fleet={slurm: {options: [-C a]}}", "fleet={slurm: {bundle: b, python: /p}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a, create_role: true}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a, on_demand: 1}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a, power_off: true}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a, attach: ssh}}",
    "fleet={aws: {instances: [], region: us-east-1, role: a}}",
    "fleet={aws: {instances: [g5.xlarge, g5.xlarge], region: us-east-1, role: a}}",
    "fleet={aws: {instances: g5.xlarge, region: us-east-1, role: a, placement_group: a}}",
    "fleet={aws: {instances: g5.xlarge, region: eu-north-1, role: a, placement_group: a, subnets: []}}",
    "fleet={mpi: {hosts: ['a:22']}}", "fleet={slurm: {options: [--nodes=2]}}", "fleet={slurm: {options: [--requeue]}}",
    "fleet={ibm: {datacenter: dal10, flavor: B1, os: A, power_off: true}}",
    "fleet={ibm: {datacenter: dal10, flavor: B1, os: A, keep: true, cancel_with: [IBM_USER, IBM_KEY]}}",
    "fleet={ibm: {datacenter: dal10, flavor: B1, os: A, transient: true, local_disk: true}}",
    "fleet={ibm: {datacenter: dal10, flavor: AC2_8X60X100, os: A, transient: true}}",
    "fleet={ibm: {datacenter: dal10, flavor: B1, os: A, transient: true, hourly: false}}",
    "fleet={ibm: {datacenter: dal10, cpus: 4, os: UBUNTU_24_64}}",
    "fleet={ibm: {datacenter: dal10, cpus: 4, memory: 16 GB}}",
    "fleet={ibm: {datacenter: dal10, cpus: 4, memory: 16 GB, os: A, image: b}}",
    "fleet={ibm: {datacenter: dal10, flavor: B1_2X8X25, cpus: 4, memory: 16 GB, os: A}}",
]  # fmt: skip
WRONG_PROGRAM = [
    "program=[]", "program=['']", "program=[--lr]", "program=[/train.py]", "program=[../train.py]", "program=[3]",
    "program=[a/../../train.py]", "program=train.py", "program=", "outputs=[../out]", "outputs=[/out]", "outputs=[.]",
    "outputs=[./]", "outputs=[~/out]", "outputs=[out/../..]", "outputs=[s3://b/k]", "outputs=['']", "outputs=out",
    'outputs=["a\\tb"]', "checkpoint.every=5 steps", "checkpoint.every=auto", "checkpoint.keep_best=1",
    "checkpoint.best_by=loss", "data=https://a/b", "data=[../x]", "data={a b: /x}", "data={..: /x}", "data=[/a, /a]",
    "data={corpus: ~/x}", "data={corpus: http://a}", "data={train: {bitext: a}}", "data=/..", "weights=run:a",
    "recipe=translate", "train={}", "evaluate={beam: 3}", "model=tiny", "budget={dollars: 9}",
]  # fmt: skip
# Wrong jobs that are valid by the schema, and why it cannot refuse them.
BEYOND_SCHEMA = {
    "a pattern cannot count how deep a path was before it goes up": [
        "store=a/b/../../../x", "code=a/b/../../../c", "report={mlflow: a/b/../../../x}",
    ],
    "numbers with a unit are texts, which a schema cannot compare with a limit": [
        "train.duration=1e400 steps", "train.duration=1e-400 steps", "train.profile=101 steps",
    ],
    "it cannot compare two numbers": [
        "fleet={local: {machines: 4..2}}", "model.heads=7",
        "train.schedule={phases: [{until: 5 epochs, rate: 1}, {until: 3 epochs, rate: 1}]}",
    ],
    "the unit of one text decides about that of another, in any field of any schedule": [
        "train.schedule={cosine: {peak: 1, warmup: 5 epochs}}",
    ],
    "which options may be 0 is known to the recipe alone": ["model.heads=0"],
}  # fmt: skip


def loaded(job: Path, override: str) -> None:
    """Load a job as `packtrain run` does, whose recipe has the last word."""
    check_recipe(load_job(job, [override], recipe_defaults).job)


def assert_wrong(job: Path, override: str, schema: dict[str, Any], is_expressible: bool = True) -> None:
    with pytest.raises((Mistake, FieldMistake)):
        loaded(job, override)
    assert bool(faults(schema, apply_overrides(read_document(job), [override]))) == is_expressible


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_job_is_invalid_and_does_not_load(override: str, schema: dict[str, Any]) -> None:
    assert_wrong(TRANSLATE, override, schema)


@pytest.mark.parametrize("override", WRONG_PROGRAM)
def test_a_wrong_job_of_a_program_is_invalid_and_does_not_load(
    override: str, tmp_path: Path, schema: dict[str, Any]
) -> None:
    (tmp_path / "job.yaml").write_text(PROGRAM)
    assert_wrong(tmp_path / "job.yaml", override, schema)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("classify", "{stem: huge}"),
        ("classify", "{pixels: 8}"),
        ("caption", "{cell: rnn}"),
        ("caption", "{encoder: vgg}"),
    ],
)
def test_an_option_that_the_recipe_does_not_know_is_invalid_and_does_not_load(
    recipe: str, model: str, schema: dict[str, Any]
) -> None:
    assert_wrong(EXAMPLES / f"{recipe}.yaml", f"model={model}", schema)


@pytest.mark.parametrize("section", ["model: tiny", "train: {seed: 2}", "evaluate: {beam: 2}", "weights: run:a"])
def test_a_job_with_data_alone_has_nothing_that_belongs_to_a_recipe(
    section: str, tmp_path: Path, schema: dict[str, Any]
) -> None:
    (tmp_path / "job.yaml").write_text(f"name: mine\ndata: {{train: {{bitext: a.tsv}}}}\n{section}\n")
    assert_wrong(tmp_path / "job.yaml", "name=mine", schema)


@pytest.mark.parametrize("override", [override for overrides in BEYOND_SCHEMA.values() for override in overrides])
def test_what_the_schema_cannot_express_does_not_load(override: str, schema: dict[str, Any]) -> None:
    assert_wrong(TRANSLATE, override, schema, is_expressible=False)


def test_folders_of_the_same_name_do_not_load_but_are_beyond_the_schema(tmp_path: Path, schema: dict[str, Any]) -> None:
    (tmp_path / "job.yaml").write_text(PROGRAM)
    assert_wrong(tmp_path / "job.yaml", "data=[/a/corpus, /b/corpus]", schema, is_expressible=False)


def objects(place: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every set of properties that an editor may offer."""
    if isinstance(place, dict):
        if isinstance(place.get("properties"), dict):
            yield path, place["properties"]
        for key, value in place.items():
            if key not in ("if", "then", "else", "dependentSchemas", "allOf"):
                yield from objects(value, f"{path}/{key}")
    elif isinstance(place, list):
        for number, value in enumerate(place):
            yield from objects(value, f"{path}/{number}")


def test_every_field_says_what_it_means_and_what_it_takes(schema: dict[str, Any]) -> None:
    found = dict(objects(schema))
    assert len(found) > 30
    for path, properties in found.items():
        for name, field in properties.items():
            place = f"{path}/{name}"
            assert field.keys() & {"type", "anyOf", "enum", "$ref"} or place == "/data", place
            # Parts within the settings of a kind are described with the field that has them.
            is_described = "description" in field or path.rpartition("/")[2] in (
                "MountSettings", "TolerationSettings", "VolumeSettings",
            )  # fmt: skip
            assert is_described or name == "phases", place
