"""The documents that a run is on Kubernetes: settings and run in, plain values out. Nothing here asks a cluster.

A run is one `batch/v1` Job of as many parallel pods as it may have machines. `completions` is unset: pods have no
index, a pod that fails is replaced, and once one has exited with code 0 (the run has its result) no more are created.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from packtrain.errors import EXIT_FAILED, EXIT_MISTAKE, EXIT_NOT_FOUND, EXIT_STOPPED, FieldMistake, Mistake
from packtrain.fleet.cloud import budget_seconds, expiry, label_of
from packtrain.fleet.fleet import node_arguments, passed_variables, values_of
from packtrain.identity import identity
from packtrain.node.preemption import SECONDS_VARIABLE
from packtrain.run.run import Run
from packtrain.system import this_client

if TYPE_CHECKING:
    from packtrain.fleet.kubernetes.fleet import KubernetesSettings

Document = dict[str, Any]

LABEL = "packtrain.dev/label"
RUN, STORE, OWNER, EXPIRES, CODE = (
    f"packtrain.dev/{word}" for word in ("run", "store", "owner", "expires", "code")
)  # annotations
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_LEAST_PODS = "kueue.x-k8s.io/job-min-parallelism"
CONTAINER = "node"
FORMATS = ("job", "jobset", "trainjob")

# After these another pod would end the same way. The last three are the shell's and the runtime's: there is no such
# program, or it cannot be executed.
HOPELESS = (EXIT_MISTAKE, EXIT_FAILED, EXIT_NOT_FOUND, EXIT_STOPPED, 126, 127, 128)
_MIN_BACKOFF_LIMIT = 100  # without a pod failure policy, every disruption counts
_LOST_SECONDS = 30  # after a node does not answer, which takes 40 s to notice: its pods are replaced
_POD_SECONDS = 60  # more than the budget, for a pod's start and end
_SCRATCH = "/packtrain"  # a directory of the pod's own
# What tells a node where its store is. Keys are never among them.
PLAIN_VARIABLES = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
)  # fmt: skip


def documents(run: Run, settings: KubernetesSettings, form: str = "job") -> list[Document]:
    """Return what `kubectl apply` takes: a plain Job, or the same for the operators JobSet and Kubeflow Trainer."""
    seconds = budget_seconds(run, settings.machines.least)  # of a range: fewer machines may run longer
    if form == "jobset":
        spec = _job_spec(run, settings, seconds)
        spec["completionMode"] = "NonIndexed"  # JobSet's own default would need `completions`
        moved = {field: spec.pop(field) for field in ("ttlSecondsAfterFinished", "suspend") if field in spec}
        template = {"metadata": _marks(run, settings), "spec": spec}
        jobset: Document = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(_short_name(run), run, settings, seconds),
            "spec": {**moved, "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}]},
        }
        return [jobset]
    if form == "trainjob":
        return _trainjob(run, settings, seconds)
    metadata = _metadata(label_of(run), run, settings, seconds)
    if settings.queue is not None and not settings.machines.is_fixed:
        metadata["annotations"][_LEAST_PODS] = str(settings.machines.least)  # otherwise Kueue waits for room for all
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(run, settings, seconds)}]


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """True: a value that occurs twice is written twice, as people write manifests."""
        return True


def as_yaml(many: Sequence[Document], short_lists: bool = False) -> str:
    flow = None if short_lists else False
    return "---\n".join(
        yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=120, default_flow_style=flow)
        for document in many
    )


def role(namespace: str, form: str = "job") -> Document:
    """Return the least rights with which a person can start, watch and delete runs."""
    verbs = ["create", "get", "list", "delete"]
    operators = {
        "jobset": [("jobset.x-k8s.io", ["jobsets"])],
        "trainjob": [("trainer.kubeflow.org", ["trainjobs", "trainingruntimes"]), ("jobset.x-k8s.io", ["jobsets"])],
    }
    rules = [
        {"apiGroups": [group], "resources": resources, "verbs": verbs}
        for group, resources in [("batch", ["jobs"]), *operators.get(form, [])]
    ]
    rules += [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create", "get"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["list"]},
    ]
    metadata = {"name": "packtrain", "namespace": namespace}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}


def _metadata(name: str, run: Run, settings: KubernetesSettings, seconds: float | None) -> Document:
    place = {} if settings.namespace is None else {"namespace": settings.namespace}
    marks = _marks(run, settings, seconds)
    if settings.queue is not None:
        marks["labels"][QUEUE_LABEL] = settings.queue
    return {"name": name, **place, **marks}


def _marks(run: Run, settings: KubernetesSettings, seconds: float | None = None) -> Document:
    """Return the labels and annotations by which `ls` and `down` find what a run has, and a person its run."""
    labels = {**settings.labels, "app.kubernetes.io/name": "packtrain", LABEL: label_of(run)}
    annotations = {
        **settings.annotations,
        RUN: run.name,
        STORE: run.store.url,
        OWNER: this_client(),
        CODE: run.code_digest,
    }
    if seconds is not None and settings.queue is None:  # nobody knows when a queue starts it
        annotations[EXPIRES] = expiry(seconds + settings.wait.value + _POD_SECONDS)
    return {"labels": labels, "annotations": annotations}


def _job_spec(run: Run, settings: KubernetesSettings, seconds: float | None) -> Document:
    count = settings.machines.most
    spec: Document = {
        "parallelism": count,
        "backoffLimit": max(_MIN_BACKOFF_LIMIT, 10 * count),
        "ttlSecondsAfterFinished": int(settings.keep.value),
    }
    if seconds is not None:
        # From the creation of the Job: the time for which pods wait for machines counts here, but not in the budget.
        spec["activeDeadlineSeconds"] = int(seconds + settings.wait.value) + _POD_SECONDS
    if settings.queue is not None:
        spec["suspend"] = True  # Kueue starts it
    if settings.failure_policy:
        # Servers before 1.26 drop this. Without it every failure counts, and after a result the next pod exits with
        # code 0. With it Kubernetes replaces a pod only once it has ended: that of a lost node when the node is back.
        ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        codes = {"containerName": CONTAINER, "operator": "In", "values": sorted(HOPELESS)}
        # Empty, not absent: the schema of the first servers with it demands it.
        spec["podFailurePolicy"] = {
            "rules": [ignore, {"action": "FailJob", "onExitCodes": codes, "onPodConditions": []}]
        }
    spec["template"] = {"metadata": _marks(run, settings), "spec": _pod_spec(run, settings, seconds)}
    return spec


def _pod_spec(run: Run, settings: KubernetesSettings, seconds: float | None) -> Document:
    volumes, mounts = _volumes(settings)
    container: Document = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [*node_arguments(run, settings.python, settings, settings.interface), "--identity", identity()],
        "env": _environment(run, settings),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last lines of a node that failed become its pod's message, which `ls` shows.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if settings.pull is not None:
        container["imagePullPolicy"] = {"always": "Always", "missing": "IfNotPresent", "never": "Never"}[settings.pull]
    if settings.resources:
        amounts = dict(settings.resources)
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if settings.store_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": settings.store_secret}}]
    security: Document = {"seccompProfile": {"type": "RuntimeDefault"}}
    if settings.user != 0:
        security["runAsNonRoot"] = True
    if settings.user is not None:
        # The group owns what is mounted, so that a user without root can write there. The owner of a million images is
        # changed once, not before every start of a pod.
        security |= {"runAsUser": settings.user, "runAsGroup": settings.user, "fsGroup": settings.user}
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    spec: Document = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(settings.grace.value),
        # Otherwise the node is process 1, which nobody reaps for, and which ignores SIGTERM until it handles it.
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "securityContext": security,
        "tolerations": _tolerations(settings),
        **_placement(run, settings),
        "containers": [container],
        "volumes": volumes,
    }
    if seconds is not None:
        spec["activeDeadlineSeconds"] = int(seconds) + _POD_SECONDS
    return spec


def _placement(run: Run, settings: KubernetesSettings) -> Document:
    """Return on which nodes of the cluster pods run, as whom, and how they are connected."""
    placement: Document = {}
    if settings.node_selector:
        placement["nodeSelector"] = dict(settings.node_selector)
    if settings.spread != "none":
        term = {"labelSelector": {"matchLabels": {LABEL: label_of(run)}}, "topologyKey": "kubernetes.io/hostname"}
        if settings.spread == "required":
            rule: Document = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        else:
            rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
        placement["affinity"] = {"podAntiAffinity": rule}
    if settings.priority_class is not None:
        placement["priorityClassName"] = settings.priority_class
    if settings.service_account is None:
        placement["automountServiceAccountToken"] = False  # a run does not talk to the cluster
    else:
        placement["serviceAccountName"] = settings.service_account
    if settings.pull_secrets:
        placement["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    if settings.host_network:
        placement["hostNetwork"] = True
        placement["dnsPolicy"] = "ClusterFirstWithHostNet"
    return placement


def _tolerations(settings: KubernetesSettings) -> list[Document]:
    tolerations: list[Document] = []
    for toleration in settings.tolerations:
        operator = (
            {"operator": "Exists"} if toleration.value is None else {"operator": "Equal", "value": toleration.value}
        )
        key = {} if toleration.key is None else {"key": toleration.key}
        tolerations.append(key | operator | ({} if toleration.effect is None else {"effect": toleration.effect}))
    # Nodes with special hardware are commonly tainted with its name, to keep other pods away.
    special = [name for name in settings.resources if "/" in name]
    tolerations += [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in special]
    for state in ("not-ready", "unreachable"):
        lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_SECONDS}
        tolerations.append({"key": f"node.kubernetes.io/{state}", **lost})
    return tolerations


def _environment(run: Run, settings: KubernetesSettings) -> list[Document]:
    """Return the container's variables: plain values, and references to the keys of Secrets."""
    for number, variable in enumerate(run.job.environment):
        if (fault := settings.variable_fault(variable)) is not None:
            raise FieldMistake(f"environment.{number}", fault)
    needed = passed_variables((), run.store.url)
    plain = values_of([name for name in PLAIN_VARIABLES if name in needed])
    plain |= {
        SECONDS_VARIABLE: str(int(settings.grace.value)),
        # The image's may belong to another user. The cache is there, too, unless the job says otherwise.
        "HOME": _SCRATCH,
        **settings.variables,
    }
    variables: list[Document] = [{"name": name, "value": value} for name, value in plain.items()]
    for name, reference in settings.secrets.items():
        secret, _, key = reference.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def _volumes(settings: KubernetesSettings) -> tuple[list[Document], list[Document]]:
    """Return the pod's volumes, and where its container has them."""
    memory: Document = {"medium": "Memory"}
    if settings.shared_memory is not None:
        memory["sizeLimit"] = settings.shared_memory
    volumes: list[Document] = [{"name": "scratch", "emptyDir": {}}, {"name": "shared-memory", "emptyDir": memory}]
    mounts: list[Document] = [
        {"name": "scratch", "mountPath": _SCRATCH},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - workers pass batches through it
    ]
    for number, mount in enumerate(settings.mounts):
        name, only = f"mount-{number}", {"readOnly": True} if mount.read_only else {}
        source: Document = {"hostPath": {"path": mount.host, "type": "Directory"}}
        if mount.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": mount.claim, **only}}
        elif mount.nfs is not None:
            server, _, path = mount.nfs.partition(":/")  # an address of IPv6 has colons, too, and so may a path
            source = {"nfs": {"server": server, "path": f"/{path}", **only}}
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": mount.path, **only})
    return volumes, mounts


def is_mounted(path: str, settings: KubernetesSettings) -> bool:
    """True if pods have this directory of the client, too, and can write to it."""
    return any(PurePosixPath(path).is_relative_to(mount.path) for mount in settings.mounts if not mount.read_only)


# For operators. Their names are shorter: they append to them, and a pod's name has at most 63 characters.


def _short_name(run: Run) -> str:
    return f"pt-{run.name[:32].rstrip('-')}-{label_of(run)[-8:]}"


def _trainjob(run: Run, settings: KubernetesSettings, seconds: float | None) -> list[Document]:
    """Return a TrainJob and a runtime of its own: the fields by which a TrainJob changes a runtime vary by version."""
    if not settings.machines.is_fixed:
        raise Mistake(f"a TrainJob has a fixed number of machines, not {settings.machines}; set machines to a number")
    name, api = _short_name(run), {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    spec = _job_spec(run, settings, seconds)
    suspend = {"suspend": True} if "suspend" in spec else {}
    for field in ("parallelism", "ttlSecondsAfterFinished", "suspend"):  # the trainer's own
        spec.pop(field, None)
    marks = _marks(run, settings)
    marks["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    job = {"name": CONTAINER, "template": {"metadata": marks, "spec": spec}}
    count = {"numNodes": settings.machines.most}
    runtime = {
        **api,
        "kind": "TrainingRuntime",
        "metadata": _metadata(name, run, settings, seconds),
        "spec": {"mlPolicy": count, "template": {"spec": {"replicatedJobs": [job]}}},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    train = {**api, "kind": "TrainJob", "metadata": _metadata(name, run, settings, seconds)}
    return [runtime, {**train, "spec": {"runtimeRef": reference, "trainer": count, **suspend}}]
