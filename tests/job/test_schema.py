"""The JSON Schema of the job file: it agrees with the settings that check a job, and says what each field means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from packtrain.cli.schema import EDITOR_LINE, SCHEMA, current_schema
from packtrain.cli.template import TEMPLATES, InitRequest, write_job
from packtrain.job.document import Document
from packtrain.job.load import apply_overrides, load_job, read_document
from packtrain.recipes import recipe_defaults

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
    ["fleet={ibm: {datacenter: dal10, cpus: 4, memory: 16 GB, os: UBUNTU_24_64, disks: [100 GB]}}"],
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
        "recipe: mine:Recipe\ndata: {train: {folder: a.jsonl}}\nmodel: {size: huge, layers: 3}\n"
        "train: {duration: 1 h, batch: 2 samples, schedule: {constant: {rate: 1}}}",
        "data: {train: {bitext: a.tsv, columns: [2, 1]}}",
    ],
)
def test_programs_own_recipes_and_packs_are_valid(text: str, tmp_path: Path, schema: dict[str, Any]) -> None:
    (tmp_path / "job.yaml").write_text(f"name: mine\n{text}\n")
    load_job(tmp_path / "job.yaml")
    assert faults(schema, read_document(tmp_path / "job.yaml")) == []


WRONG = [
    "train.bacth=5 tokens", "train.duration=500", "train.duration=5 stpes", "train.batch=64 samples", "seed=1",
    "train.precision=fp64", "train.clip=-1", "train.patience=5 steps", "train.seed=1.5", "train.compile=no",
    "train.schedule=noam", "train.schedule={noam: {}}", "train.schedule={nome: {warmup: 5 steps}}",
    "train.schedule={noam: {warmup: 5 steps}, constant: {rate: 1}}", "train.optimizer={adam: {beta: 1}}",
    "train.scale_rate=linear", "train.scale_rate={linear: 256}", "train.scale_rate={base: 5 tokens}",
    "model=huge", "model.depth=4", "model.heads=two", "name=My Job", "recipe=trans late", "environment=[a=b]",
    "data={}", "data.train={imagenet: images}", "data.train={bitext: [a, b, c]}", "data.train={weight: 2}",
    "data.train={bitext: a.tsv, links: true}", "data.vocabulary=12", "data.train={bitext: a, coco: [b, c]}",
    "fleet=ssh", "fleet={ssh: {}}", "fleet={local: {}, slurm: {}}", "fleet={local: {machines: 0}}", "fleet.worker=2",
    "fleet={local: {machines: many}}", "fleet.cache={size: big}", "budget={dollars: 0}", "checkpoint.every=often",
    "program=[train.py]", "origin={directory: /, inode: 1}", "inputs={a: /b}",
]  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_job_is_invalid(override: str, schema: dict[str, Any]) -> None:
    assert faults(schema, apply_overrides(read_document(TRANSLATE), [override]))


def objects(place: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every set of properties that an editor may offer."""
    if isinstance(place, dict):
        if isinstance(place.get("properties"), dict):
            yield path, place["properties"]
        for key, value in place.items():
            if key not in ("if", "then", "else", "dependentSchemas"):
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
