"""Starting a run: refused, tried again, or only shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packtrain.errors import Mistake
from packtrain.fleet import Machine
from packtrain.launch.load import load
from packtrain.launch.start import dry_run, manifests, start
from packtrain.run.records import FleetLaunch
from packtrain.store import Store
from packtrain.system import this_client
from parts.loopback import free_port
from parts.runs import a_lease, new_run, program_job, write_files


def test_a_run_whose_fleet_refuses_to_start_has_failed(directory_store: Store) -> None:
    run = new_run(directory_store, program_job(fleet={"slurm": {}}))
    with pytest.raises(
        Mistake, match=r"cannot be tied to this command; .*; then run `packtrain resume job-1 --store .*`"
    ):
        start(run, tied=True)
    result = run.result()
    assert result is not None
    assert (result.status, result.reason[:32]) == ("failed", "could not start: a Slurm job can")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_launch_that_fails_does_not_end_a_run_whose_machines_may_come_back(
    directory_store: Store, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    run = new_run(directory_store, program_job(fleet={"slurm": {}}))
    run.record_launch(FleetLaunch(0.0, this_client(), {}))
    run.renew(a_lease("a", left=True, used_seconds=60.0))
    for number, entry in enumerate(
        (*directory_store.list(run.key("launches/")), directory_store.list(run.key("nodes/"))[0])
    ):
        os.utime(Path(directory_store.url) / entry.key, (1e9 + number, 1e9 + number))  # file systems have coarse clocks
    requeued = [Machine("node-1", "PENDING", is_over)]
    monkeypatch.setattr("packtrain.fleet.slurm.SlurmFleet.machines", lambda *_: requeued)
    with pytest.raises(Mistake, match="cannot be tied to this command"):
        start(run, tied=True)
    assert (run.result() is None) != is_over


@pytest.mark.usefixtures("no_aws", "processes")
@pytest.mark.parametrize("has_keys", [True, False])
def test_a_dry_run_leaves_the_number_open_if_the_bucket_does_not_tell_it(
    has_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if has_keys else ():
        monkeypatch.setenv(name, "canary")
    fleet = "{kubernetes: {image: 'registry/image:1', store_secret: keys, machines: 2}}"
    job = f"name: en-de\nprogram: [train.py]\nstore: s3://bucket/x/\nbudget: {{hours: 2}}\nfleet: {fleet}\n"
    write_files(tmp_path, {"job.yaml": job.encode(), "train.py": b""})
    loaded = load(tmp_path / "job.yaml")
    why = "cannot connect to the server" if has_keys else "no keys for the store"
    looked = dry_run(loaded)
    note = looked.note or ""
    assert note.startswith("the run is called en-de-n here, since its number is not known: ")
    assert why in note
    text = manifests(loaded, "job", progress=None)
    assert text.startswith(f"# {note}\n")
    for printed in (looked.plans[0].in_shell(), text):
        assert "node\n        - en-de-n\n        - --store\n        - s3://bucket/x\n" in printed


@pytest.mark.usefixtures("processes")
def test_a_dry_run_refuses_a_bucket_that_cannot_be_one(tmp_path: Path) -> None:
    write_files(tmp_path, {"job.yaml": b"name: mine\nprogram: [train.py]\nstore: s3://B\n", "train.py": b""})
    with pytest.raises(Mistake, match="invalid bucket name"):
        dry_run(load(tmp_path / "job.yaml"))
