"""No plan of any fleet has the value of a secret; every fleet is here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from packtrain.job.kinds import FLEETS
from packtrain.launch.load import load
from packtrain.launch.start import dry_run
from packtrain.store import Store

CANARY = "canary-of-the-test"
# What this person has in the environment for the fleets themselves; a machine needs none of it.
KEYS = ("SL_API_KEY", "KUBE_TOKEN", "AWS_SESSION_TOKEN", "IBM_CANCEL_USER", "IBM_CANCEL_KEY")
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "ssh": {"hosts": ["gpu-a", "gpu-b"]},
    "mpi": {"hosts": ["gpu-a", "gpu-b"]},
    "slurm": {"machines": 2},
    "kubernetes": {"image": "registry.example.com/packtrain:1", "secrets": {"SECRET": "keys/secret"}},
    "aws": {
        "region": "us-east-1",
        "instances": ["g5.xlarge"],
        "role": "train",
        "secrets": {"SECRET": "ssm:/keys/secret"},
    },
    "ibm": {
        "datacenter": "dal10",
        "flavor": "AC2_8X60X100",
        "os": "UBUNTU_24_64",
        "cancel_with": ["IBM_CANCEL_USER", "IBM_CANCEL_KEY"],
    },
}


def test_every_fleet_is_tried() -> None:
    assert set(SETTINGS) == set(FLEETS)


@pytest.mark.parametrize("word", SETTINGS)
def test_a_plan_names_secrets_and_never_shows_them(
    word: str, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECRET", *KEYS):
        monkeypatch.setenv(name, CANARY)
    (tmp_path / "train.py").write_text("print('trains')\n")
    job = {"name": "job", "program": ["train.py"], "store": s3_store.url, "environment": ["SECRET"]}
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "fleet": {word: SETTINGS[word]}}))
    loaded = load(tmp_path / "job.yaml")
    found = dry_run(loaded)
    assert found.plans
    shown = json.dumps([asdict(plan) for plan in found.plans]) + loaded.job.model_dump_json()
    assert "SECRET" in shown
    for value in (CANARY, "secret-of-moto"):
        assert value not in shown
        assert value.encode() not in found.code.archive
