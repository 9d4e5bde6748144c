"""A run as a Job of a Kubernetes cluster: its manifests, and the real client against an API server without machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fleet.jobs import packtrain
from packtrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_MISTAKE, EXIT_STOPPED, FieldMistake, Mistake, PacktrainError
from packtrain.fleet import states_of
from packtrain.fleet.cloud import label_of
from packtrain.fleet.fleet import Check
from packtrain.fleet.kubernetes.cluster import PODS, Cluster, Namespace, RequestRefused
from packtrain.fleet.kubernetes.fleet import KubernetesFleet, KubernetesSettings
from packtrain.fleet.kubernetes.manifests import CODE, LABEL, as_yaml, documents, role
from packtrain.identity import identity
from packtrain.job import Job
from packtrain.launch.load import load
from packtrain.launch.start import dry_run, manifests, start
from packtrain.run.records import Result
from packtrain.run.run import Run, open_run
from packtrain.store import Store, open_store
from parts.api_server import NAMESPACE, ApiServer, api_server, kubeconfig
from parts.runs import a_lease, new_run, program_job
from parts.sandbox import EXAMPLES

JOB, POD, NODE, EVENT = "batch/v1/jobs", "v1/pods", "v1/nodes", "v1/events"
VERSIONS = ("1.25", "1.26", "1.31", kubernetes_validate.latest_version())
EVERYTHING: dict[str, Any] = {
    "machines": "2..4",
    "namespace": "team-a",
    "resources": {"cpu": 8, "memory": "32Gi", "nvidia.com/gpu": 1},
    "node_selector": {"pool": "gpu"},
    "tolerations": [{"key": "spot", "effect": "NoSchedule"}, {"key": "team", "value": "a"}],
    "priority_class": "low",
    "service_account": "trainer",
    "pull": "always",
    "pull_secrets": ["registry"],
    "secrets": {"WANDB_API_KEY": "wandb/api-key"},
    "store_secret": "store-keys",
    "variables": {"NCCL_DEBUG": "INFO", "THREADS": 4},
    "mounts": [
        {"path": "/data", "claim": "imagenet", "read_only": True},
        {"path": "/efs", "nfs": "fs-1.efs.eu-west-1.amazonaws.com:/"},
        {"path": "/nvme", "host": "/mnt/nvme"},
    ],
    "shared_memory": "8Gi",
    "spread": "required",
    "queue": "gpus",
    "host_network": True,
    "user": 1000,
    "labels": {"team": "a"},
    "annotations": {"note": "as a test"},
    "failure_policy": True,
}


@pytest.fixture
def server(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with api_server() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "kubeconfig", server.url)))
        monkeypatch.setattr("packtrain.fleet.kubernetes.fleet._START_SECONDS", 0.0)  # nothing starts pods here
        monkeypatch.setattr("packtrain.fleet.kubernetes.cluster._RETRY_SECONDS", 2.0)
        yield server


def settings_of(**fields: Any) -> KubernetesSettings:
    return KubernetesSettings.model_validate({"image": "registry.example/train:1", **fields})


def a_job(fields: dict[str, Any] | None = None, **sections: Any) -> Job:
    return program_job(fleet={"kubernetes": {"image": "registry.example/train:1", **(fields or {})}}, **sections)


def a_run(store: Store, fields: dict[str, Any] | None = None, **sections: Any) -> Run:
    return new_run(store, a_job(fields, **sections))


def the_job(run: Run) -> dict[str, Any]:
    assert isinstance(run.job.fleet.kind, KubernetesSettings)
    [document] = documents(run, run.job.fleet.kind)
    return document


def pod_of(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = document["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def fleet_of(run: Run | Job) -> KubernetesFleet:
    kind = (run if isinstance(run, Job) else run.job).fleet.kind
    assert isinstance(kind, KubernetesSettings)
    return kind.build()


def put_pod(server: ApiServer, run: Run, name: str = "a", phase: str = "Pending", **status: Any) -> None:
    metadata = {"labels": {LABEL: label_of(run)}, **status.pop("metadata", {})}
    server.put(POD, name, metadata=metadata, spec={"nodeName": f"node-{name}"}, status={"phase": phase, **status})


def container(state: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": "node", "ready": state == "running", "state": {state: fields or {"startedAt": "now"}}}]


# Manifests.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["least", "everything"])
def test_manifests_are_valid_for_old_and_new_clusters(
    directory_store: Store, version: str, fields: dict[str, Any]
) -> None:
    document = the_job(a_run(directory_store, fields, budget={"hours": 2}))
    assert kubernetes_validate.validate(yaml.safe_load(as_yaml([document])), version, strict=True)
    assert kubernetes_validate.validate(role("team-a"), version, strict=True)


def test_a_run_is_a_job_of_parallel_pods_without_completions(directory_store: Store) -> None:
    run = a_run(directory_store, {"machines": "2..4"})
    document = the_job(run)
    assert document["metadata"]["name"] == label_of(run)
    assert document["spec"]["parallelism"] == 4
    assert "completions" not in document["spec"]
    assert document["spec"]["backoffLimit"] >= 100
    spec, node = pod_of(document)
    assert spec["restartPolicy"] == "Never"
    assert node["command"][:6] == ["python", "-P", "-m", "packtrain", "node", run.name]
    assert node["command"][-2:] == ["--identity", identity()]


def test_a_pod_has_what_the_job_asks_for(directory_store: Store) -> None:
    run = a_run(directory_store, EVERYTHING, environment=["WANDB_API_KEY"])
    document = the_job(run)
    spec, node = pod_of(document)
    amounts = {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "1"}
    assert node["resources"] == {"requests": amounts, "limits": amounts}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert {"key": "team", "operator": "Equal", "value": "a"} in spec["tolerations"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("low", "trainer")
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert "requiredDuringSchedulingIgnoredDuringExecution" in spec["affinity"]["podAntiAffinity"]
    assert node["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert {"name": "THREADS", "value": "4"} in node["env"]
    key = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": key} in node["env"]
    paths = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    volumes = {paths[volume["name"]]: volume for volume in spec["volumes"]}
    assert volumes["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert volumes["/data"]["persistentVolumeClaim"] == {"claimName": "imagenet", "readOnly": True}
    assert volumes["/efs"]["nfs"] == {"server": "fs-1.efs.eu-west-1.amazonaws.com", "path": "/"}
    assert volumes["/nvme"]["hostPath"]["path"] == "/mnt/nvme"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert document["spec"]["suspend"] is True


def test_a_lost_node_is_replaced_in_about_a_minute(directory_store: Store) -> None:
    spec, _ = pod_of(the_job(a_run(directory_store)))
    lost = {one["key"]: one["tolerationSeconds"] for one in spec["tolerations"]}
    assert lost == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}
    # With a failure policy, Kubernetes would wait for the end of a pod that cannot tell it.
    assert "podFailurePolicy" not in the_job(a_run(directory_store))["spec"]


def test_pods_are_not_root_unless_asked(directory_store: Store) -> None:
    for user, is_root in ((None, False), (1000, False), (0, True)):
        spec, node = pod_of(the_job(a_run(directory_store, {"user": user})))
        assert spec["securityContext"].get("runAsNonRoot") is (None if is_root else True)
        assert node["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_pod_has_its_grace_period_to_commit(directory_store: Store) -> None:
    spec, node = pod_of(the_job(a_run(directory_store, {"grace": "45 s"})))
    assert spec["terminationGracePeriodSeconds"] == 45
    assert {"name": "PACKTRAIN_NOTICE_SECONDS", "value": "45"} in node["env"]


def test_with_a_failure_policy_a_result_or_a_mistake_ends_the_job_and_disruptions_do_not(
    directory_store: Store,
) -> None:
    ignore, fail = the_job(a_run(directory_store, {"failure_policy": True}))["spec"]["podFailurePolicy"]["rules"]
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert fail["action"] == "FailJob"
    assert {EXIT_MISTAKE, EXIT_FAILED, EXIT_STOPPED} <= set(fail["onExitCodes"]["values"])
    assert 101 not in fail["onExitCodes"]["values"]


def test_the_job_says_where_the_cache_is(directory_store: Store) -> None:
    _, node = pod_of(the_job(a_run(directory_store)))
    names = {one["name"]: one["value"] for one in node["env"]}
    assert "PACKTRAIN_CACHE" not in names  # it would take precedence over fleet.cache
    assert {"name": "scratch", "mountPath": names["HOME"]} in node["volumeMounts"]


def test_kueue_may_start_fewer_pods_and_decides_when_the_budget_begins(directory_store: Store) -> None:
    fields = {"queue": "gpus", "machines": "2..4"}
    document = the_job(a_run(directory_store, fields, budget={"hours": 2}))
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert document["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "2"
    assert "packtrain.dev/expires" not in document["metadata"]["annotations"]
    assert document["spec"]["suspend"]


def test_a_budget_of_any_size_is_a_number_that_the_api_accepts(directory_store: Store) -> None:
    spec, _ = pod_of(the_job(a_run(directory_store, budget={"hours": 1e30})))
    assert 0 < spec["activeDeadlineSeconds"] < 2**31


@pytest.mark.parametrize(
    ("nfs", "server", "path"),
    [("fs-1.example:/", "fs-1.example", "/"), ("[fd00::1]:/a:b/c", "[fd00::1]", "/a:b/c")],
)
def test_an_nfs_export_may_have_colons(nfs: str, server: str, path: str, directory_store: Store) -> None:
    spec, _ = pod_of(the_job(a_run(directory_store, {"mounts": [{"path": "/data", "nfs": nfs}]})))
    assert spec["volumes"][-1]["nfs"] == {"server": server, "path": path}


def test_a_dry_run_with_a_budget_needs_no_store_yet(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "to-be-created"))
    run = Run(store, "job-1", a_job(budget={"hours": 2}).model_dump_json().encode(), b"")
    assert pod_of(the_job(run))[0]["activeDeadlineSeconds"] == 2 * 3600 + 60


def test_the_printed_role_covers_the_objects_of_the_format(directory_store: Store) -> None:
    run = a_run(directory_store, {"machines": 2})
    for form in fleet_of(run).formats:
        text = fleet_of(run).manifests(run, form)
        kinds = {f"{document['kind'].lower()}s" for document in yaml.safe_load_all(text)}
        comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
        assert all(kind in comment for kind in kinds)


def test_the_cluster_keeps_the_budget_too(directory_store: Store) -> None:
    run = a_run(directory_store, {"wait": "10 min"}, budget={"hours": 2})
    run.renew(a_lease("a", used_seconds=3600.0))
    document = the_job(run)
    assert document["spec"]["activeDeadlineSeconds"] == 3600 + 600 + 60
    assert pod_of(document)[0]["activeDeadlineSeconds"] == 3600 + 60
    assert "packtrain.dev/expires" in document["metadata"]["annotations"]
    assert "activeDeadlineSeconds" not in the_job(a_run(directory_store))["spec"]


def test_secrets_never_reach_the_manifests(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "canary-of-the-test")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    run = a_run(s3_store, {"secrets": {"WANDB_API_KEY": "wandb/key"}}, environment=["WANDB_API_KEY"])
    fleet = fleet_of(run)
    texts = [str(fleet.plan(run)), *(fleet.manifests(run, form) for form in fleet.formats)]
    assert "canary-of-the-test" not in " ".join(texts)
    _, node = pod_of(the_job(run))
    plain = {one["name"]: one.get("value") for one in node["env"]}
    assert plain["AWS_REGION"] == "eu-west-1"
    assert plain["AWS_ENDPOINT_URL"] == s3_store.endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", str(s3_store.endpoint))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://me:canary-of-the-test@other.example")
    assert "canary-of-the-test" not in str(fleet.plan(run))


def test_a_variable_without_a_secret_is_refused(directory_store: Store) -> None:
    with pytest.raises(FieldMistake, match=r"environment.0: TOKEN .* write fleet.kubernetes.secrets: \{TOKEN: SECRET/"):
        the_job(a_run(directory_store, environment=["TOKEN"]))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"power_off": True}, "does not apply to pods"),
        ({"mounts": [{"path": "/data"}]}, "must have one of claim, nfs and host"),
        ({"mounts": [{"path": "/a", "host": "/b"}, {"path": "/a", "claim": "c"}]}, "is that of another mount"),
        ({"resources": {"memory": "lots"}}, "is not an amount"),
        ({"secrets": {"KEY": "no-key"}}, "is not a secret's key"),
        ({"image": "-x"}, "is not an image"),
        ({"namespace": "Team A"}, "is not a name of Kubernetes"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        settings_of(**fields)


def test_jobset_and_trainjob_are_other_formats(directory_store: Store) -> None:
    run = a_run(directory_store, {"machines": 2})
    assert isinstance(run.job.fleet.kind, KubernetesSettings)
    [jobset] = documents(run, run.job.fleet.kind, "jobset")
    [replicated] = jobset["spec"]["replicatedJobs"]
    assert (replicated["replicas"], replicated["template"]["spec"]["parallelism"]) == (1, 2)
    assert replicated["template"]["spec"]["completionMode"] == "NonIndexed"
    runtime, train = documents(run, run.job.fleet.kind, "trainjob")
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train["spec"]["trainer"]["numNodes"] == 2
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job}
    assert kubernetes_validate.validate(whole, VERSIONS[-1], strict=True)
    with pytest.raises(Mistake, match="a TrainJob has a fixed number of machines"):
        documents(run, settings_of(machines="1..2"), "trainjob")


def test_the_example_is_a_valid_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-test")
    loaded = load(EXAMPLES / "fleets" / "kubernetes.yaml")
    run = Run(open_store(loaded.job.store), "meet-kubernetes-1", loaded.job.model_dump_json().encode(), b"")
    monkeypatch.setattr(Run, "leases", lambda _: [])  # there is no such bucket
    assert kubernetes_validate.validate(the_job(run), VERSIONS[-1], strict=True)


@pytest.mark.usefixtures("processes")
def test_run_prints_manifests_that_kubectl_takes(server: ApiServer, tmp_path: Path) -> None:
    assert server.url
    (tmp_path / "train.py").touch()
    path, store = tmp_path / "job.yaml", tmp_path / "store"
    fleet = f"{{kubernetes: {{image: train:1, mounts: [{{path: {tmp_path}, host: {tmp_path}}}]}}}}"
    path.write_text(f"name: small\nprogram: [train.py]\nstore: {store}\nfleet: {fleet}\n")
    [plan] = dry_run(load(path)).plans
    looked = manifests(load(path), "job", None)
    assert yaml.safe_load(looked)["kind"] == yaml.safe_load(plan.script or "")["kind"] == "Job"
    assert not store.exists()
    printed = packtrain("run", path, "--format", "job", directory=tmp_path, environment={})
    command = yaml.safe_load(printed.stdout)["spec"]["template"]["spec"]["containers"][0]["command"]
    run = open_run(open_store(str(store)), None)  # it waits for whoever applies the manifest
    assert {run.name, run.code_digest} <= set(command)
    assert len(run.launches()) == 1
    with pytest.raises(Mistake, match="no such manifests; it has job, jobset, trainjob"):
        manifests(load(path), "helm", None)
    with pytest.raises(Mistake, match="this fleet has no such manifests"):
        manifests(load(path, ["fleet=local"]), "job", None)


# What is checked before.


def test_the_server_validates_the_job_before_anything_is_packed(server: ApiServer, directory_store: Store) -> None:
    job = a_job({"mounts": [{"path": directory_store.url, "host": directory_store.url}]})
    fleet_of(job).check(job, directory_store)
    assert f"POST /apis/batch/v1/namespaces/{NAMESPACE}/jobs?dryRun=All" in server.asked()
    assert server.objects(JOB) == []
    server.refuse("post", JOB, 422, "Job is invalid: spec.template.spec: no such thing")
    with pytest.raises(Mistake, match=r"refuses to create jobs.batch in namespace training: Job is invalid"):
        fleet_of(job).check(job, directory_store)


def test_a_store_that_pods_cannot_see_or_write_is_refused(directory_store: Store) -> None:
    mount = {"path": directory_store.url, "claim": "runs", "read_only": True}
    for job in (a_job(), a_job({"mounts": [mount]})):
        with pytest.raises(Mistake, match="pods cannot write to the store"):
            fleet_of(job).check(job, directory_store)
    run = a_run(directory_store)
    with pytest.raises(Mistake, match="pods cannot write to the store"):
        fleet_of(run).plan(run)


def test_a_cluster_without_gpus_is_refused_unless_it_adds_nodes(server: ApiServer, s3_store: Store) -> None:
    server.put(NODE, "small", None, status={"allocatable": {"cpu": "4", "memory": "8Gi"}})
    wanted = {"resources": {"nvidia.com/gpu": 1}}
    with pytest.raises(Mistake, match=r"no node of the cluster has 1 of nvidia.com/gpu; none has any; .*autoscaling"):
        fleet_of(a_job(wanted)).check(a_job(wanted), s3_store)
    big = {"resources": {"cpu": 16}}
    with pytest.raises(Mistake, match=r"has 16 of cpu; the largest has 4"):
        fleet_of(a_job(big)).check(a_job(big), s3_store)
    for allowed in ({**wanted, "autoscaling": True}, {"resources": {"cpu": "500m", "memory": "8Gi"}}):
        fleet_of(a_job(allowed)).check(a_job(allowed), s3_store)
    server.refuse("get", NODE, 403, 'nodes is forbidden: User "ann" cannot list resource "nodes" in API group ""')
    fleet_of(a_job(wanted)).check(a_job(wanted), s3_store)  # who may not look finds out later


def test_what_the_job_names_and_the_cluster_lacks_is_refused(server: ApiServer, s3_store: Store) -> None:
    names = {"store_secret": "keys", "service_account": "trainer", "mounts": [{"path": "/data", "claim": "imagenet"}]}
    kinds = {"v1/secrets": "keys", "v1/persistentvolumeclaims": "imagenet", "v1/serviceaccounts": "trainer"}
    for kind, name in kinds.items():
        with pytest.raises(Mistake, match=f"there is no [A-Za-z]+ {name} in namespace training; create it"):
            fleet_of(a_job(names)).check(a_job(names), s3_store)
        server.put(kind, name)
    fleet_of(a_job(names)).check(a_job(names), s3_store)
    other = {"store_secret": "hidden"}
    server.refuse("get", "v1/secrets", 403, 'User "ann" cannot get resource "secrets"')
    fleet_of(a_job(other)).check(a_job(other), s3_store)  # who may not look finds out later


def test_a_webhook_without_dry_runs_is_not_asked(server: ApiServer, s3_store: Store) -> None:
    server.refuse("post", JOB, 400, 'admission webhook "a.example" does not support dry run')
    fleet_of(a_job()).check(a_job(), s3_store)


def test_pods_without_keys_for_the_store_are_said(server: ApiServer, s3_store: Store) -> None:
    assert server.url
    said: list[str] = []
    fleet_of(a_job()).check(a_job(), s3_store, said.append)
    assert any("set store_secret or service_account" in line for line in said)
    assert any("this machine's own" in line for line in said)


# Creation and deletion.


def test_a_run_is_started_once_and_taken_down(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store, {"machines": 2})
    said: list[str] = []
    start(run, False, said.append)
    [created] = server.objects(JOB)
    assert created["metadata"]["name"] == label_of(run)
    assert created["metadata"]["annotations"][CODE] == run.code_digest
    start(run, False, said.append)
    assert any("already there" in line for line in said)
    put_pod(server, run, "a", "Running", containerStatuses=container("running"))
    fleet_of(run).down(run, said.append)
    assert server.objects(JOB) == server.objects(POD) == []
    assert any(line.startswith(f"deleting Job {label_of(run)}") for line in said)


def test_resources_of_all_runs_are_found_by_their_label(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    start(run, False, print)
    server.put(JOB, "somebody-elses")
    [provider] = KubernetesSettings.providers(())
    [found] = provider.resources(None)
    assert (found.kind, found.name, found.run, found.store) == ("Job", label_of(run), run.name, s3_store.url)
    assert provider.resources("packtrain-other-1") == []
    assert [one.place for one in KubernetesSettings.providers(["a", "b"])] == ["namespace a", "namespace b"]


def test_an_ended_job_is_replaced_when_its_run_is_resumed(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    metadata = {"labels": {LABEL: label_of(run)}, "annotations": {CODE: run.code_digest}}
    ended = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    server.put(JOB, label_of(run), metadata=metadata, status=ended)
    start(run, False, print)
    [created] = server.objects(JOB)
    assert "status" not in created


def test_a_job_that_creates_no_more_pods_is_replaced(server: ApiServer, s3_store: Store) -> None:
    """A pod that came after the result has succeeded, and the others are about to end: none is replaced."""
    run = a_run(s3_store)
    metadata = {"labels": {LABEL: label_of(run)}, "annotations": {CODE: run.code_digest}}
    server.put(JOB, label_of(run), metadata=metadata, status={"succeeded": 1, "active": 1})
    start(run, False, print)
    [created] = server.objects(JOB)
    assert "status" not in created


def test_a_job_of_other_code_is_replaced(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    metadata = {"labels": {LABEL: label_of(run)}, "annotations": {CODE: "older"}}
    server.put(JOB, label_of(run), metadata=metadata, spec={"parallelism": 9})
    start(run, False, print)
    assert server.objects(JOB)[0]["metadata"]["annotations"][CODE] == run.code_digest


def test_a_name_in_use_is_refused_and_left_alone(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    server.put(JOB, label_of(run), spec={"parallelism": 9})
    with pytest.raises(Mistake, match="is already in use in namespace training"):
        start(run, False, print)
    assert server.objects(JOB)[0]["spec"] == {"parallelism": 9}


def test_a_creation_whose_answer_was_lost_is_not_repeated(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    server.refuse("post", JOB, 503, "etcd is slow", times=1)  # kmock creates it nevertheless
    start(run, False, print)
    assert len(server.objects(JOB)) == 1


def test_an_image_that_cannot_be_pulled_leaves_nothing(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    waiting = container("waiting", reason="ErrImagePull", message="manifest for train:1 not found")
    fleet = fleet_of(run)
    put_pod(server, run, containerStatuses=waiting)
    with pytest.raises(Mistake, match=r"pods do not start: ErrImagePull \(manifest for train:1 not found\); check"):
        fleet.create(run, fleet.plan(run), print)
    fleet.down(run)
    assert server.objects(JOB) == server.objects(POD) == []


def test_a_node_that_refuses_to_start_leaves_nothing(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    ended = container("terminated", exitCode=EXIT_MISTAKE, reason="Error", message="packtrain: no keys for the store")
    put_pod(server, run, phase="Failed", containerStatuses=ended)
    with pytest.raises(Mistake, match="a node ended at its start: no keys for the store"):
        fleet_of(run).create(run, fleet_of(run).plan(run), print)


def test_a_failed_start_is_undone(server: ApiServer, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(s3_store)
    fleet = fleet_of(run)

    def fail(*_: object) -> None:
        raise Mistake("pods do not start")

    monkeypatch.setattr("packtrain.fleet.kubernetes.fleet._machines", fail)
    with pytest.raises(Mistake, match="pods do not start"):
        fleet.start(run, fleet.plan(run), False)
    assert server.objects(JOB) == []


def test_the_pod_of_a_node_that_does_not_answer_is_deleted_by_force(server: ApiServer, s3_store: Store) -> None:
    run, now = a_run(s3_store), [0.0]
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 60, "finalizers": ["x"]}
    put_pod(server, run, "a", "Running", metadata=metadata)
    provider = Namespace(Cluster(), lambda: now[0])
    for seconds, asked in ((0.0, 0), (60.0, 0), (100.0, 1)):
        now[0] = seconds
        for resource in provider.resources(label_of(run)):
            provider.delete(resource)
        assert sum(line.startswith("DELETE") for line in server.asked()) == asked


# States in words.


@pytest.mark.parametrize(
    ("phase", "status", "words"),
    [
        ("Running", {"containerStatuses": container("running")}, "Running"),
        ("Pending", {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
          "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}]},
         "Unschedulable (0/3 nodes are available: 3 Insufficient nvidia.com/gpu.)"),
        ("Pending", {"containerStatuses": container("waiting", reason="ImagePullBackOff", message="Back-off pulling")},
         "ImagePullBackOff (Failed to pull image: unauthorized)"),
        ("Pending", {"containerStatuses": container("waiting", reason="ContainerCreating")},
         "ContainerCreating (Failed to pull image: unauthorized)"),
        ("Pending", {"containerStatuses": container("waiting", reason="CreateContainerConfigError",
          message='secret "wandb" not found')}, 'CreateContainerConfigError (secret "wandb" not found)'),
        ("Running", {"containerStatuses": container("running"),
          "conditions": [{"type": "Ready", "status": "False"}]}, "Running (its node does not answer)"),
        ("Running", {"containerStatuses": container("running"), "metadata": {"deletionTimestamp": "now"}},
         "Terminating"),
    ],
)  # fmt: skip
def test_the_state_of_a_pod_has_its_reason(
    server: ApiServer, s3_store: Store, phase: str, status: dict[str, Any], words: str
) -> None:
    run = a_run(s3_store)
    put_pod(server, run, "a", phase, **status)
    event = {"type": "Warning", "reason": "Failed", "message": "Failed to pull image: unauthorized"}
    server.put(EVENT, "1", involvedObject={"name": "a"}, lastTimestamp="1", **event)
    server.put(EVENT, "2", involvedObject={"name": "a"}, lastTimestamp="2", type="Warning", reason="Failed",
               message="Error: ImagePullBackOff")  # fmt: skip
    assert states_of(fleet_of(run).machines(run)) == f"1 {words}"
    assert fleet_of(run).queue(run) == f"1 {words}"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "Evicted", "message": "The node was low on resource: memory."},
         "Evicted (The node was low on resource: memory.)"),
        ({"containerStatuses": container("terminated", reason="OOMKilled", exitCode=137)},
         "OOMKilled (its memory limit is too small)"),
        ({"containerStatuses": container("terminated", reason="Error", exitCode=2,
          message="joining\npacktrain: no keys for the store\n")}, "Failed (exit code 2: no keys for the store)"),
    ],
)  # fmt: skip
def test_a_job_between_two_pods_says_how_the_last_one_ended(
    server: ApiServer, s3_store: Store, status: dict[str, Any], words: str
) -> None:
    run = a_run(s3_store)
    start(run, False, print)
    put_pod(server, run, "a", "Failed", **status)
    [machine] = fleet_of(run).machines(run)
    assert machine.state == f"waiting for new pods; the last one: {words}"
    assert not machine.is_over


def test_an_ended_job_has_no_machine_left(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active too long"}
    server.put(JOB, label_of(run), metadata={"labels": {LABEL: label_of(run)}}, status={"conditions": [failed]})
    [machine] = fleet_of(run).machines(run)
    assert (machine.state, machine.is_over) == ("Failed (DeadlineExceeded: Job was active too long)", True)


def test_a_job_without_pods_says_why(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store, {"queue": "gpus"})
    start(run, False, print)
    assert fleet_of(run).queue(run) == "1 Suspended (in queue gpus)"
    other = a_run(s3_store)
    start(other, False, print)
    involved = {"name": label_of(other)}
    server.put(EVENT, "1", involvedObject=involved, type="Warning", reason="FailedCreate", message="exceeded quota")
    assert fleet_of(other).queue(other) == "1 FailedCreate (exceeded quota)"


def test_states_need_no_right_to_list_events(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    put_pod(server, run, containerStatuses=container("waiting", reason="ContainerCreating"))
    server.refuse("get", EVENT, 403, 'User "ann" cannot list resource "events"')
    assert fleet_of(run).queue(run) == "1 ContainerCreating"


def test_a_stopped_run_that_waits_for_machines_loses_its_job(server: ApiServer, s3_store: Store) -> None:
    run = a_run(s3_store)
    start(run, False, print)
    put_pod(server, run, "a", "Running")
    fleet_of(run).cancel_queued(run)
    assert server.objects(JOB)  # a node is there, and ends the run itself
    server.remove(POD, "a")
    fleet_of(run).cancel_queued(run)
    assert server.objects(JOB) == []


# A shell.


def test_attach_finds_the_pod_by_its_name_its_node_or_its_lease(
    server: ApiServer, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(s3_store)
    fleet = fleet_of(run)
    with pytest.raises(Mistake, match="no pod is running"):
        fleet.shell(run, None)
    put_pod(server, run, "a", "Running", podIP="10.0.0.1")
    put_pod(server, run, "b", "Running", podIP="10.0.0.2")
    run.renew(a_lease("some-node", address="10.0.0.2"))
    assert fleet.shell(run, None)[-7:-3] == ("a", "-c", "node", "--")
    for name in ("b", "node-b", "some-node"):
        assert "b" in fleet.shell(run, name)
    with pytest.raises(Mistake, match="no pod 'c' is running; there are a, b"):
        fleet.shell(run, "c")
    monkeypatch.setenv("PATH", "")
    where = ("-P", "-m", "packtrain.fleet.kubernetes.fleet", "exec", f"--namespace={NAMESPACE}", "a")
    assert fleet.shell(run, None) == (sys.executable, *where)


# Bad input.


def test_missing_rights_name_the_verb_the_resource_and_the_namespace(server: ApiServer, s3_store: Store) -> None:
    said = 'jobs.batch is forbidden: User "ann" cannot create resource "jobs" in API group "batch" in the namespace'
    server.refuse("post", JOB, 403, said)
    with pytest.raises(Mistake, match=r"ann may not create jobs.batch in namespace training; ask its administrator"):
        fleet_of(a_job()).check(a_job(), s3_store)


def test_a_quota_is_not_taken_for_missing_rights(server: ApiServer, s3_store: Store) -> None:
    server.refuse("post", JOB, 403, 'jobs.batch "a" is forbidden: exceeded quota: jobs, requested: 1')
    with pytest.raises(Mistake, match="exceeded quota"):
        fleet_of(a_job()).check(a_job(), s3_store)


def test_a_missing_namespace_is_named(server: ApiServer, s3_store: Store) -> None:
    server.refuse("post", JOB, 404, 'namespaces "training" not found')
    with pytest.raises(Mistake, match=r"there is no namespace training; create it, or set fleet.kubernetes.namespace"):
        fleet_of(a_job()).check(a_job(), s3_store)


def test_a_rejected_login_is_told(server: ApiServer) -> None:
    server.refuse("get", POD, 401, "Unauthorized")
    with pytest.raises(Mistake, match=r"rejects this login; try `kubectl get pods`"):
        Cluster().objects(PODS)


def test_a_busy_server_is_asked_again_and_a_silent_one_is_named(server: ApiServer, tmp_path: Path) -> None:
    server.refuse("get", POD, 503, "overloaded", times=2)
    server.refuse("get", POD, 429, "too many requests", times=1)
    assert Cluster().objects(PODS) == []
    kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")
    with pytest.raises(RequestRefused, match=r"http://127.0.0.1:9 does not answer \(.*refused\); check the context"):
        Cluster().objects(PODS)


def test_a_missing_kubeconfig_or_context_is_told(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.url
    with pytest.raises(Mistake, match=r"nowhere.*kubectl config get-contexts"):
        Cluster(context="nowhere")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(Mistake, match=r"there is no kubeconfig at .*absent; log in to a cluster, or set KUBECONFIG"):
        Cluster()


@pytest.mark.parametrize("text", ["clusters: [", "hello", "- 1", "", "contexts: 3"])
def test_a_file_that_is_no_kubeconfig_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(Mistake, match=r"config: .*; see `kubectl config"):
        Cluster()


def test_a_kubeconfig_that_is_a_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path))
    with pytest.raises(Mistake, match=r"cannot be read \(.*; see `kubectl config"):
        Cluster()


def test_a_pod_reaches_its_own_cluster_without_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(PacktrainError, match=r"Service token file does not exist|namespace"):
        Cluster()


def test_the_client_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client.configuration", None)
    with pytest.raises(Mistake, match=r"Kubernetes needs its client; run `pip install"):
        Cluster()


# The node in its pod.


def node(run: Run, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtrain", "node", run.name, "--store", run.store.url]
    words = [*command, "--code", run.code_digest, "--address", "127.0.0.1", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("processes")
def test_another_packtrain_in_the_image_is_refused(directory_store: Store) -> None:
    done = node(a_run(directory_store), "--identity", "0.0.0-other")
    assert done.returncode == EXIT_MISTAKE
    assert f"this machine has packtrain {identity()}, the client has 0.0.0-other" in done.stderr


@pytest.mark.usefixtures("processes")
def test_a_pod_that_comes_after_the_result_ends_the_job(directory_store: Store) -> None:
    run = a_run(directory_store)
    run.finish(Result("failed", "as a test", 0, 0.0))
    assert node(run, "--identity", "0.0.0-other").returncode == EXIT_DONE


def test_a_plan_is_what_kubectl_would_be_given(directory_store: Store) -> None:
    place = [{"path": directory_store.url, "claim": "store"}]
    run = a_run(directory_store, {"context": "prod", "namespace": "team-a", "mounts": place})
    [plan] = fleet_of(run).plan(run)
    assert plan.arguments == ("kubectl", "apply", "--context=prod", "--namespace=team-a", "-f", "-")
    assert plan.script is not None
    assert yaml.safe_load(plan.script) == the_job(run)
    assert "#   verbs: [create, get, list, delete]" in plan.script.splitlines()


# Doctor.

NAMED: dict[str, Any] = {
    "pull_secrets": ["registry"], "service_account": "trainer", "mounts": [{"path": "/data", "claim": "imagenet"}],
    "resources": {"cpu": 4},
}  # fmt: skip


def prepare_cluster(server: ApiServer) -> None:
    """Create what NAMED names."""
    server.handler[f"get /api/v1/namespaces/{NAMESPACE}"] << {"metadata": {"name": NAMESPACE}}  # not kmock's own
    server.put("v1/secrets", "registry")
    server.put("v1/serviceaccounts", "trainer")
    server.put("v1/persistentvolumeclaims", "imagenet")
    server.put(NODE, "big", namespace=None, status={"allocatable": {"cpu": "8"}})


def checks_of(fields: dict[str, Any], store: Store | None = None) -> dict[str, Check]:
    return {check.step: check for check in KubernetesFleet(settings_of(**fields)).checks(store)}


def test_doctor_asks_a_cluster_for_everything_that_a_run_needs_and_creates_nothing(
    server: ApiServer, s3_store: Store
) -> None:
    prepare_cluster(server)
    checks = checks_of(NAMED, s3_store)
    assert [check for check in checks.values() if not check.ok or check.advice] == []
    assert [*checks] == [
        "configuration", "API server", "namespace", "jobs.batch", "pods", "pods/exec", "events", "Secret",
        "PersistentVolumeClaim", "ServiceAccount", "nodes", "store",
    ]  # fmt: skip
    assert checks["jobs.batch"].detail == "may create, get, list, delete"
    assert checks["nodes"].detail == "1 node; a pod asks for 4 of cpu, the largest node has 8"
    assert not any(line.startswith(("POST", "DELETE")) and "accessreviews" not in line for line in server.asked())


def test_doctor_says_what_a_cluster_lacks_and_forbids(server: ApiServer, directory_store: Store) -> None:
    server.put(NODE, "small", namespace=None, status={"allocatable": {"cpu": "2"}})
    server.forbidden.add(("delete", "jobs"))
    server.refuse("GET", "v1/serviceaccounts", 403, 'User "me" cannot get resource "serviceaccounts"')
    checks = checks_of(NAMED, directory_store)
    failed = {step: (check.detail, check.advice) for step, check in checks.items() if not check.ok}
    assert failed["namespace"] == (f"there is no namespace {NAMESPACE}", "create it, or correct the job")
    assert failed["jobs.batch"][0] == "may not delete"
    assert "Role that `packtrain run --dry-run` prints" in failed["jobs.batch"][1]
    assert failed["Secret"][0] == "there is no Secret registry"
    assert failed["nodes"][0] == "no node of the cluster has 4 of cpu"
    assert "pods cannot write to the store" in failed["store"][0]
    assert checks["ServiceAccount"].skipped, "who may not look does not know"
    assert all(advice for _, advice in failed.values())


def test_doctor_of_a_cluster_that_does_not_answer_asks_nothing_else(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "nowhere", "http://127.0.0.1:9")))
    checks = checks_of(NAMED)
    assert [*checks] == ["configuration", "API server"]
    assert "does not answer" in checks["API server"].detail
    assert server.asked() == []
