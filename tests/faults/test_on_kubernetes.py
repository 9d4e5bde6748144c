"""The job of the fault tests on a real Kubernetes cluster, whose pods and nodes come and go."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from packtrain.fleet.kubernetes.manifests import role
from packtrain.run.checkpoint import committed
from parts.host_run import bucket_on
from parts.kubernetes import IMAGE, NAMESPACE, KubernetesCluster
from parts.s3 import BUCKET, S3Server, fresh_location
from parts.sandbox import PACE, Sandbox, assert_same_as, make_sandbox, wait_until

PERSON = 1000  # pods do not run as root
KUBECTL_SECONDS = 1.0  # between two: asked all the time, it takes most of a core
GREETING = """
print("rank", os.environ.get("RANK"), "has a key of", len(os.environ.get("TRACKER_KEY", "")), "characters", flush=True)
"""


@dataclass(frozen=True)
class Site:
    """The cluster, a bucket on its network, and secrets that nothing else may contain."""

    cluster: KubernetesCluster
    bucket: S3Server
    canary: str

    def sandbox(self, name: str) -> Sandbox:
        """Return a directory with the job; pods see it, and so its pace."""
        directory = self.cluster.network.shared / name
        directory.mkdir()
        variables = {"KUBECONFIG": str(self.cluster.kubeconfig), **self.bucket.environment()}
        sandbox = make_sandbox(directory, fresh_location(), **variables)
        for file, added in (("code/paced.py", GREETING), ("job.yaml", "environment: [OMP_NUM_THREADS]\n")):
            (directory / file).write_text((directory / file).read_text() + added)
        return sandbox

    def fleet(self, sandbox: Sandbox, **changes: Any) -> str:
        """Return the setting that starts a run as two pods of a user who has only the rights that this takes."""
        settings = {
            "image": IMAGE,
            "context": "trainer",
            "machines": 2,
            "user": PERSON,
            "grace": "30 s",
            "store_secret": "bucket",
            "secrets": {"TRACKER_KEY": "tracker/key"},
            "variables": {"PACE": str(sandbox.directory / PACE), "OMP_NUM_THREADS": "1"},
            "mounts": [{"path": path, "host": path, "read_only": True} for path in self.cluster.mounts()],
        }
        return f"fleet={json.dumps({'kubernetes': {**settings, **changes}, 'workers': 1})}"


@pytest.fixture(scope="module")
def site(kubernetes_cluster: KubernetesCluster) -> Iterator[Site]:
    canary = f"canary-{uuid.uuid4().hex}"
    subject = {"kind": "User", "name": "trainer", "apiGroup": "rbac.authorization.k8s.io"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "packtrain", "namespace": NAMESPACE},
        "subjects": [subject],
        "roleRef": {"kind": "Role", "name": "packtrain", "apiGroup": "rbac.authorization.k8s.io"},
    }
    keys = {"AWS_ACCESS_KEY_ID": "AKMOTO", "AWS_SECRET_ACCESS_KEY": canary}
    secrets = [secret("bucket", keys), secret("tracker", {"key": canary})]
    kubernetes_cluster.apply(role(NAMESPACE), binding, *secrets)
    with bucket_on(kubernetes_cluster.network) as server, pytest.MonkeyPatch.context() as monkeypatch:
        bucket = replace(server, secret_key=canary)
        bucket.enter(monkeypatch)
        monkeypatch.setenv("KUBECONFIG", str(kubernetes_cluster.kubeconfig))
        yield Site(kubernetes_cluster, bucket, canary)


def secret(name: str, values: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}


def wait_for_generation(sandbox: Sandbox, number: int) -> None:
    """Wait for a commit by a generation, so that the next fault has something to lose.

    Then every step waits: however slow this machine is, the run does not end before that fault.
    """
    sandbox.pace(0.05)
    reached = lambda: any(one.generation >= number for one in committed(sandbox.run()))  # noqa: E731
    wait_until(reached, f"a commit of generation {number}")
    sandbox.pace(3)


def test_pods_that_are_cut_off_drained_and_evicted_are_replaced_and_nothing_is_lost(
    site: Site, uninterrupted: Sandbox
) -> None:
    cluster, sandbox = site.cluster, site.sandbox("disturbed")
    sandbox.detach("--set", site.fleet(sandbox), "--set", "budget={hours: 1}")
    wait_for_generation(sandbox, 1)
    assert sorted(cluster.pods().values()) == ["host1", "host2"]
    assert_it_can_be_watched(sandbox, cluster)

    first, second = cluster.nodes
    first.cut()
    both_here = ["host2", "host2"]
    try:
        wait_until(
            lambda: list(cluster.pods().values()) == both_here, "the lost pod's replacement", 240, KUBECTL_SECONDS
        )
    except AssertionError:
        print(cluster.kubectl("get", "nodes,pods,events", "-o", "wide"), sandbox.packtrain("show").stdout)  # why not
        first.restore()  # for the tests after this one
        raise
    wait_for_generation(sandbox, 2)
    first.restore()
    wait_until(lambda: cluster.is_ready(first), "the node to be back", 120, KUBECTL_SECONDS)

    cluster.drain(second)
    wait_for_generation(sandbox, 3)
    assert list(cluster.pods().values()) == ["host1", "host1"]
    cluster.uncordon(second)

    cluster.evict(next(iter(cluster.pods())))
    wait_for_generation(sandbox, 4)
    assert sorted(cluster.pods().values()) == ["host1", "host2"]

    sandbox.pace(0)
    assert sandbox.wait_for_result() == "finished"
    assert_same_as(uninterrupted, sandbox)
    causes = [generation.cause for generation in sandbox.run().generations()]
    assert causes == ["start", "machine", "resumed", "preempted"]  # a drain of both pods leaves none to tell
    assert_no_secret_is_stored(site, sandbox)
    assert cluster.items("jobs"), "an ended Job stays for a look"
    assert_down_leaves_nothing(site, sandbox)


def assert_it_can_be_watched(sandbox: Sandbox, cluster: KubernetesCluster) -> None:
    run = sandbox.run().name
    [listed] = json.loads(sandbox.packtrain("ls", "--json").stdout)
    assert listed["queue"] == "2 Running"
    assert "rank 1 has a key of 39 characters" in sandbox.packtrain("logs", run).stdout
    pod = sorted(cluster.pods())[1]
    shell = sandbox.packtrain("attach", run, pod, text="hostname; id -u; exit\n")
    assert [pod, str(PERSON)] == shell.stdout.split()[:2], shell.stderr
    [job] = cluster.items("jobs")
    assert 3600 < job["spec"]["activeDeadlineSeconds"] < 10_000
    assert 3600 < job["spec"]["template"]["spec"]["activeDeadlineSeconds"] < 4000


def assert_no_secret_is_stored(site: Site, sandbox: Sandbox) -> None:
    """Neither in the cluster, other than in its Secrets, nor in the store, nor here."""
    kept = site.cluster.kubectl("get", "jobs,pods,events,configmaps", "-o", "yaml")
    kept += site.cluster.kubectl(
        "logs", "--ignore-errors", "--tail=-1", "--prefix", "-l", "app.kubernetes.io/name=packtrain"
    )
    kept += sandbox.packtrain("run", "job.yaml", "--dry-run", "--set", site.fleet(sandbox)).stdout
    kept += sandbox.packtrain("show", "--json").stdout + sandbox.packtrain("logs").stdout
    assert "packtrain.dev/label" in kept
    client = site.bucket.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert keys
    objects = {key: client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}
    files = {path: path.read_bytes() for path in sandbox.directory.rglob("*") if path.is_file()}
    for word in (site.canary, *site.cluster.tokens.values()):
        assert word not in kept
        assert [name for name, data in {**objects, **files}.items() if word.encode() in data] == []


def assert_down_leaves_nothing(site: Site, sandbox: Sandbox) -> None:
    done = sandbox.packtrain("down", sandbox.run().name)
    assert done.returncode == 0, done.stderr
    assert [kind for kind in ("jobs", "pods") if site.cluster.items(kind)] == []


def test_a_run_moves_from_here_to_the_cluster_and_on_to_hosts(site: Site, uninterrupted: Sandbox) -> None:
    sandbox = site.sandbox("moved")
    sandbox.extra["PATH"] = site.cluster.network.search_path()
    sandbox.pace(0.1)
    sandbox.detach()
    stop_after(sandbox, 20)
    resume(sandbox, site.fleet(sandbox), "--detach")
    stop_after(sandbox, 40)
    hosts = [host.name for host in site.cluster.nodes]
    resume(sandbox, f"fleet={json.dumps({'ssh': {'hosts': hosts}, 'workers': 1})}")
    assert_same_as(uninterrupted, sandbox)
    assert len(sandbox.run().launches()) == 3
    assert_down_leaves_nothing(site, sandbox)


def stop_after(sandbox: Sandbox, step: int) -> None:
    sandbox.wait_for_commit(step)
    stopped = sandbox.packtrain("stop")
    assert "stopped at step" in stopped.stdout, stopped.stderr


def resume(sandbox: Sandbox, fleet: str, *options: str) -> None:
    done = sandbox.packtrain("resume", "--set", fleet, *options, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout


def test_what_the_cluster_refuses_is_one_line_and_leaves_nothing(site: Site) -> None:
    sandbox = site.sandbox("refused")

    def refusal(**changes: Any) -> str:
        done = sandbox.packtrain("run", "job.yaml", "--detach", "--set", site.fleet(sandbox, **changes))
        assert done.returncode == 2, done.stdout + done.stderr
        [line] = done.stderr.splitlines()
        return line

    nothing = f"{site.cluster.network.gateway}:1/nothing:1"
    assert "stranger may not create jobs.batch in namespace training" in refusal(context="stranger")
    assert "no node of the cluster has 1000 of cpu" in refusal(context="admin", resources={"cpu": 1000})
    line = refusal(image=nothing)
    assert "ErrImagePull" in line or "ImagePullBackOff" in line, line
    assert "check fleet.kubernetes.image" in line
    assert [kind for kind in ("jobs", "pods") if site.cluster.items(kind)] == []


def test_pods_that_no_node_has_room_for_say_so_and_wait(site: Site) -> None:
    """A user who may not list nodes learns it from the pods."""
    sandbox = site.sandbox("too-large")
    sandbox.detach("--set", site.fleet(sandbox, resources={"cpu": 1000}))
    [listed] = json.loads(sandbox.packtrain("ls", "--json").stdout)
    assert listed["queue"] == "2 Unschedulable (0/2 nodes are available: 2 Insufficient cpu.)"
    sandbox.packtrain("stop")
    wait_until(lambda: not site.cluster.items("jobs"), "the Job to be gone", 60, KUBECTL_SECONDS)
