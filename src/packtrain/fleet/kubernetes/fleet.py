"""Pods of a Kubernetes cluster: one plain Job per run, on any cluster since 1.20, without an operator.

The Job replaces pods that the cluster takes away. A pod that gets SIGTERM has `grace` to commit a checkpoint, and exits
with a code other than 0: only a run that has its result ends the Job.

`python -m packtrain.fleet.kubernetes.fleet exec POD` opens a shell in a pod where there is no kubectl.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BeforeValidator, Field

from packtrain.backoff import Backoff
from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.fleet.cloud import CloudBuilder, CloudFleet, Provider, field, label_of
from packtrain.fleet.fleet import (
    CancelsQueued,
    Check,
    HasManifests,
    LaunchPlan,
    Machine,
    Python,
    Say,
    Word,
    missing_package,
    passed_variables,
    run_to_check,
    silent,
    states_of,
    tried,
)
from packtrain.fleet.kubernetes.cluster import (
    ACCOUNTS,
    CLAIMS,
    EVENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PHASES_OVER,
    PODS,
    ROLE_ADVICE,
    SECRETS,
    Cluster,
    Exists,
    Forbidden,
    Kind,
    Namespace,
    RequestRefused,
    ending_of,
    has_access,
    is_ending,
    job_machine,
    phase_of,
    state_of_pod,
    stuck,
)
from packtrain.fleet.kubernetes.manifests import (
    CODE,
    CONTAINER,
    FORMATS,
    LABEL,
    PLAIN_VARIABLES,
    QUEUE_LABEL,
    Document,
    as_yaml,
    documents,
    is_mounted,
    role,
)
from packtrain.job import Job
from packtrain.job.part import (
    Boolean,
    Count,
    Location,
    Part,
    Seconds,
    Variable,
    in_schema,
    is_set,
    is_true,
    matching,
    rules_in_schema,
)
from packtrain.process import run_main
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.units import Duration, counted

_PLACE = "kubernetes"
_START_SECONDS = 20.0  # to look at new pods: by then a mistake shows, such as an image that does not exist
_REPLACE_SECONDS = 300.0
_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash -l || exec sh -l")
_DNS = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_KEY = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"


def _or_number(pattern: str) -> BeforeValidator:
    """Also read a plain number as its text: nobody writes `cpu: "8"`. Like a text, it must not begin with -."""
    schema = in_schema(type=["number", "string"], minimum=0, pattern=rf"^(?!-)(?:{pattern})$")
    return BeforeValidator(
        lambda value: str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value,
        json_schema_input_type=schema,
    )


ObjectName = Annotated[str, matching(_DNS, "a name of Kubernetes: a-z, 0-9, - and .")]
LabelKey = Annotated[str, matching(_KEY, "a label, as in example.com/pool")]
LabelValue = Annotated[str, matching(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", "a label's value")]
Text = Annotated[str, matching(r"[^\x00-\x1f]{0,4096}", "one line of text")]
Image = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}", "an image, as in registry.example/train:1")]
_AMOUNT = r"[0-9]+(\.[0-9]+)?([kMGTPE]i?|m)?"
_VALUE = r"[^\x00-\x1f]{0,4096}"
AmountText = Annotated[str, matching(_AMOUNT, "an amount, as in 8, 500m or 32Gi"), _or_number(_AMOUNT)]
ValueText = Annotated[str, matching(_VALUE, "one line of text"), _or_number(_VALUE)]
SecretKey = Annotated[str, matching(rf"{_DNS}/[A-Za-z0-9._-]{{1,253}}", "a secret's key, as in wandb/api-key")]
PodPath = Annotated[str, matching(r"/[^\x00-\x1f:]{1,1023}", "an absolute path")]
NfsPath = Annotated[str, matching(r"[A-Za-z0-9.:\[\]-]+:/[^\x00-\x1f]{0,1023}", "server:/path")]


class MountSettings(Part):
    """A volume at `path` in every pod: a claim (PVC), an NFS or EFS export, or a directory of the pod's machine."""

    model_config = rules_in_schema({"oneOf": [is_set("claim"), is_set("nfs"), is_set("host")]})

    path: PodPath
    claim: ObjectName | None = None
    nfs: NfsPath | None = None
    host: PodPath | None = None
    read_only: Boolean = False

    def faults(self) -> Iterator[tuple[Location, str]]:
        if sum(source is not None for source in (self.claim, self.nfs, self.host)) != 1:
            yield (), "must have one of claim, nfs and host"


class TolerationSettings(Part):
    """A taint that pods tolerate: any value of it, unless there is one here."""

    key: LabelKey | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KubernetesSettings(CloudBuilder):
    """Pods of a Kubernetes cluster, one per machine; `resources` are those of one.

    `grace` is the time from SIGTERM to SIGKILL, `keep` how long an ended Job stays for a look, `wait` how long pods may
    wait for machines before the budget's end on the cluster. `user: 0` is root; by default the image's user, which must
    not be. `autoscaling`: the cluster adds nodes when pods wait, so none needs to have the resources yet.
    """

    model_config = rules_in_schema({"not": is_true("power_off")})

    shares_machines = True  # several pods may be on one node of the cluster

    image: Image
    python: Python = "python"
    context: Text | None = None
    namespace: ObjectName | None = None
    resources: dict[LabelKey, AmountText] = Field(default_factory=dict)
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    tolerations: tuple[TolerationSettings, ...] = ()
    priority_class: ObjectName | None = None
    service_account: ObjectName | None = None
    pull: Literal["always", "missing", "never"] | None = None
    pull_secrets: tuple[ObjectName, ...] = ()
    secrets: dict[Variable, SecretKey] = Field(default_factory=dict)
    store_secret: ObjectName | None = None
    variables: dict[Variable, ValueText] = Field(default_factory=dict)
    mounts: tuple[MountSettings, ...] = ()
    shared_memory: AmountText | None = None
    spread: Literal["preferred", "required", "none"] = "preferred"
    queue: ObjectName | None = None
    host_network: Boolean = False
    interface: Word | None = None
    user: Count | None = None
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    annotations: dict[LabelKey, Text] = Field(default_factory=dict)
    grace: Seconds = Duration(120, "seconds")
    keep: Seconds = Duration(86400, "seconds")
    wait: Seconds = Duration(3600, "seconds")
    failure_policy: Boolean = False
    autoscaling: Boolean = False

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.power_off:
            yield ("power_off",), "does not apply to pods, which end by themselves; remove it"
        paths = [mount.path for mount in self.mounts]
        for number, path in enumerate(paths):
            if path in paths[:number]:
                yield ("mounts", number, "path"), "is that of another mount"

    def build(self) -> KubernetesFleet:
        return KubernetesFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        access = {} if has_access() else {"kubeconfig": "log in to a cluster, or set KUBECONFIG"}
        return missing_package("kubernetes", "kubernetes") | access

    def variable_fault(self, variable: str) -> str | None:
        if variable in self.secrets or variable in self.variables:
            return None
        advice = f"fleet.kubernetes.secrets: {{{variable}: SECRET/KEY}}"
        return f"{variable} would have to be in the manifest, where others can read it; write {advice}"

    @classmethod
    def providers(cls, places: Sequence[str]) -> Sequence[Provider]:
        """Return one for each of the namespaces, or for that of kubectl's context."""
        return [Namespace(Cluster(namespace=place)) for place in places or (None,)]


class KubernetesFleet(CloudFleet, HasManifests, CancelsQueued):
    formats = FORMATS

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings

    def plan(self, run: Run) -> list[LaunchPlan]:
        check_store(run.store, self._settings)  # for a dry run, too
        where = [f"--context={self._settings.context}"] if self._settings.context else []
        where += [f"--namespace={self._settings.namespace}"] if self._settings.namespace else []
        return [LaunchPlan("kubernetes", ("kubectl", "apply", *where, "-f", "-"), script=self.manifests(run, "job"))]

    def manifests(self, run: Run, form: str) -> str:
        """Return what `kubectl apply` takes, after comments with the rights that its user needs."""
        rights = as_yaml([role(self._settings.namespace or "default", form)], short_lists=True)
        head = f"{run.name}: started by `kubectl apply -f -`. Who starts, watches and deletes runs needs:\n{rights}"
        return "".join(f"# {line}\n" for line in head.splitlines()) + as_yaml(documents(run, self._settings, form))

    def provider(self) -> Namespace:
        return Namespace(self._cluster())

    def _cluster(self) -> Cluster:
        return _connected(self._settings.context, self._settings.namespace, os.environ.get("KUBECONFIG"))

    # Before anything is created.

    def check(self, job: Job, store: Store, say: Say = silent) -> None:
        """Let the API server validate the Job without creating it, and look for nodes that are large enough."""
        settings = self._settings
        check_store(store, settings)
        cluster = self._cluster()
        for document in documents(run_to_check(job, store), settings):
            document["metadata"]["generateName"] = f"{document['metadata'].pop('name')[:40]}-"  # never one in use
            try:
                cluster.ask("POST", JOBS, body=document, query={"dryRun": "All"})
            except RequestRefused as refused:
                if "does not support dry run" not in str(refused):  # a webhook of the cluster
                    raise
        check_named(cluster, settings)
        check_nodes(cluster, settings)
        if not store.is_directory:
            _warn_about_store(store, settings, say)

    # Start and end.

    def create(self, run: Run, plans: Sequence[LaunchPlan], say: Say) -> None:
        cluster = self._cluster()
        before = {lease.node for lease in run.leases()}
        for plan in plans:
            for document in yaml.safe_load_all(plan.script or ""):
                _create(cluster, document, run, say)
        self._look_at_start(cluster, run, before, say)

    def _look_at_start(self, cluster: Cluster, run: Run, before: Collection[str], say: Say) -> None:
        """Wait for the first node, and raise if there will be none; what only waits for machines is left to wait."""
        backoff = Backoff(0.3, 2.0, limit_seconds=_START_SECONDS)
        while True:
            machines = _machines(cluster, run)
            for machine in machines:
                if (fault := stuck(machine.state)) is not None:
                    raise fault
            if any(lease.node not in before for lease in run.leases()):
                return
            if not backoff.wait():
                say(f"{label_of(run)}: {states_of(machines) or 'no pod yet'}")
                return

    def cancel_queued(self, run: Run) -> None:
        """Delete the Job if none of its pods has started."""
        if not any(phase_of(pod) == "Running" for pod in _pods_of(self._cluster(), run)):
            self.end(run)

    # Look.

    def machines(self, run: Run) -> list[Machine]:
        return _machines(self._cluster(), run)

    def state_in_queue(self, run: Run) -> str | None:
        return states_of(self.machines(run)) or None

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        cluster = self._cluster()
        running = [pod for pod in _pods_of(cluster, run) if phase_of(pod) == "Running"]
        if not running:
            raise Mistake(f"{run.name}: no pod is running; `packtrain ls` says what they wait for")
        name = _chosen(run, running, machine)
        context = (f"--context={cluster.context}",) if cluster.context else ()
        where = (*context, f"--namespace={cluster.namespace}")
        if shutil.which("kubectl") is None:
            return (sys.executable, "-P", "-m", __name__, "exec", *where, name)
        return ("kubectl", *where, "exec", "-it", name, "-c", CONTAINER, "--", *_SHELL)

    def checks(self, store: Store | None) -> Iterator[Check]:
        """Yield every check; without an answer of the API server there is nothing else to ask."""
        settings = self._settings
        check, cluster = tried(
            _PLACE, "configuration", self._cluster, lambda reached: f"{reached.name} at {reached.configuration.host}"
        )
        yield check
        if cluster is None:
            return
        check, version = tried(_PLACE, "API server", cluster.version, str)
        yield check
        if version is None:
            return
        yield _exists(cluster, NAMESPACES, cluster.namespace)
        for rule in role(cluster.namespace)["rules"]:  # every verb of the Role that a dry run prints
            [group], [resource], verbs = rule["apiGroups"], rule["resources"], rule["verbs"]
            title = f"{resource}.{group}" if group else resource
            ask = partial(_denied, cluster, group, resource, verbs)
            check, denied = tried(_PLACE, title, ask, ", ".join)
            if check.ok and denied:
                check = Check(_PLACE, title, False, f"may not {check.detail}", ROLE_ADVICE)
            yield replace(check, detail=f"may {', '.join(verbs)}") if check.ok else check
        for kind, name in _named(settings):
            yield _exists(cluster, kind, name)
        check, nodes = tried(_PLACE, "nodes", lambda: check_nodes(cluster, settings), str)
        hidden = Check(_PLACE, "nodes", False, "this user may not list nodes", "pods show if they fit", skipped=True)
        yield hidden if check.ok and nodes is None else check
        if store is not None:
            usable = f"{store.url} is one that pods can use"
            yield tried(_PLACE, "store", lambda: check_store(store, settings), usable)[0]


def _warn_about_store(store: Store, settings: KubernetesSettings, say: Say) -> None:
    """Say what pods will not have: this machine's keys, and what is only reachable from here."""
    host = urlsplit(settings.variables.get("AWS_ENDPOINT_URL") or store.endpoint or "").hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        say(f"the store's endpoint {store.endpoint} is this machine's own; pods may not reach it")
    has_keys = {settings.store_secret, settings.service_account} != {None} or settings.secrets
    if set(passed_variables((), store.url)) - set(PLAIN_VARIABLES) and not has_keys:
        say("pods do not get this machine's keys for the store; set store_secret or service_account if they need any")


@cache
def _connected(context: str | None, namespace: str | None, kubeconfig: str | None) -> Cluster:  # noqa: ARG001
    """Return a cluster that was connected to before: `ls` asks it for every run, and a login may take a second."""
    return Cluster(context, namespace)


def _create(cluster: Cluster, document: Document, run: Run, say: Say) -> None:
    """Create the Job, in place of one of the same run that has ended or is of another client's job or code."""
    name = document["metadata"]["name"]
    backoff = Backoff(0.5, 5.0, limit_seconds=_REPLACE_SECONDS)
    while True:
        with suppress(Exists):
            cluster.ask("POST", JOBS, body=document)
            say(f"created Job {name} in {cluster.name}; see `kubectl describe job {name}`")
            return
        former = cluster.find(JOBS, name)
        if former is None:
            continue  # deleted meanwhile
        if field(former, "metadata", "labels", LABEL) != label_of(run):
            raise Mistake(f"the name {name} is already in use in {cluster.name}; delete that Job, or rename yours")
        same = field(former, "metadata", "annotations", CODE) == run.code_digest
        if same and not is_ending(former):
            say(f"Job {name} is already there; nothing was created")
            return
        if not former["metadata"].get("deletionTimestamp"):
            cluster.delete(JOBS, name, propagationPolicy="Foreground")
        if not backoff.wait():
            raise PacktrainError(f"the previous Job {name} is still there; run `{run.command('down')}`")


def _pods_of(cluster: Cluster, run: Run) -> list[Document]:
    return cluster.objects(PODS, labelSelector=f"{LABEL}={label_of(run)}")


def _machines(cluster: Cluster, run: Run) -> list[Machine]:
    """Return the pods that are or will be there; without any, the Job, which says why or creates others soon."""
    job = cluster.find(JOBS, label_of(run))
    pods = sorted(_pods_of(cluster, run), key=lambda pod: pod["metadata"].get("creationTimestamp") or "")

    def state(pod: Document) -> str:
        return state_of_pod(pod, lambda: _events(cluster, f"involvedObject.name={pod['metadata']['name']}"))

    live = [Machine(pod["metadata"]["name"], state(pod)) for pod in pods if phase_of(pod) not in PHASES_OVER]
    if live or job is None:
        return live
    ended = [state(pod) for pod in pods if phase_of(pod) == "Failed"]
    last = f"; the last one: {ended[-1]}" if ended else ""
    if ending_of(job) is not None:
        machine = job_machine(job, "")
        return [Machine(machine.name, machine.state + last, is_over=True)]
    if field(job, "spec", "suspend"):
        queue = field(job, "metadata", "labels", QUEUE_LABEL)
        return [job_machine(job, f"Suspended (in queue {queue})" if queue else "Suspended")]
    if not pods:  # such as a quota, or a service account that does not exist
        events = _events(cluster, f"involvedObject.name={label_of(run)},reason=FailedCreate")
        if why := next((str(event.get("message")) for event in reversed(events)), None):
            return [job_machine(job, f"FailedCreate ({why})")]
    return [job_machine(job, f"waiting for new pods{last}")]


def _events(cluster: Cluster, selector: str) -> list[Document]:
    """Return events about an object; none if this person may not list them, since they only explain."""
    try:
        return cluster.objects(EVENTS, fieldSelector=selector)
    except Forbidden:
        return []


def _chosen(run: Run, pods: Sequence[Document], machine: str | None) -> str:
    """Return the pod that a person means: by its own name, that of its node of the cluster, or of the run's node."""
    names = [str(pod["metadata"]["name"]) for pod in pods]
    if machine is None:
        return names[0]
    lease = run.lease(machine)
    for name, pod in zip(names, pods, strict=True):
        is_lease_of = lease is not None and lease.address == field(pod, "status", "podIP")
        if machine in (name, pod["spec"].get("nodeName")) or is_lease_of:
            return name
    raise Mistake(f"{run.name}: no pod {machine!r} is running; there are {', '.join(names)}")


# What a run needs of a cluster, without creating anything.


def check_store(store: Store, settings: KubernetesSettings) -> None:
    if store.is_directory and not is_mounted(store.url, settings):
        fault = f"pods cannot write to the store {store.url}; use s3://bucket/prefix, or fleet.kubernetes.mounts"
        raise FieldMistake("store", fault)


def check_named(cluster: Cluster, settings: KubernetesSettings) -> None:
    """Refuse a job that names what is not there, as far as this person may look."""
    for kind, name in _named(settings):
        with suppress(Forbidden):
            if not cluster.has(kind, name):
                raise Mistake(f"there is no {kind.word} {name} in {cluster.name}; create it, or correct the job")


def _named(settings: KubernetesSettings) -> list[tuple[Kind, str]]:
    """Return the objects that the job names and somebody else creates."""
    secrets = [*settings.pull_secrets, *(reference.partition("/")[0] for reference in settings.secrets.values())]
    secrets += [settings.store_secret] if settings.store_secret is not None else []
    objects = [(SECRETS, name) for name in dict.fromkeys(secrets)]
    objects += [(CLAIMS, mount.claim) for mount in settings.mounts if mount.claim is not None]
    return objects + ([(ACCOUNTS, settings.service_account)] if settings.service_account is not None else [])


def check_nodes(cluster: Cluster, settings: KubernetesSettings) -> str | None:
    """Refuse a pod that fits on no node, or say where it fits; None if this person may not list nodes."""
    if settings.autoscaling:
        return "the cluster adds nodes when pods wait"
    selector = ",".join(f"{key}={value}" for key, value in settings.node_selector.items())
    try:
        nodes = cluster.objects(NODES, **({"labelSelector": selector} if selector else {}))
    except Forbidden:
        return None
    suffix = f" with {selector}" if selector else ""
    fits = []
    for name, amount in settings.resources.items():
        amounts = [str(field(node, "status", "allocatable", name) or "0") for node in nodes]
        largest = max(amounts, key=_amount, default="0")
        if _amount(largest) < _amount(amount):
            reason = f"the largest has {largest}" if _amount(largest) else "none has any"
            raise Mistake(
                f"no node of the cluster{suffix} has {amount} of {name}; {reason}; change fleet.kubernetes.resources,"
                " or set autoscaling: true if the cluster adds nodes"
            )
        fits.append(f"a pod asks for {amount} of {name}, the largest node has {largest}")
    return "; ".join([f"{counted(len(nodes), 'node')}{suffix}", *fits])


def _amount(text: str) -> float:
    from kubernetes.utils.quantity import parse_quantity

    return float(parse_quantity(text))


def _exists(cluster: Cluster, kind: Kind, name: str) -> Check:
    title = f"{kind.word} {name}"
    try:
        if not cluster.has(kind, name):
            return Check(_PLACE, kind.word, False, f"there is no {title}", "create it, or correct the job")
    except Forbidden:
        detail, advice = f"this user may not look at {title}", "look at it with kubectl"
        return Check(_PLACE, kind.word, False, detail, advice, skipped=True)
    except RequestRefused as refused:
        return Check(_PLACE, kind.word, False, str(refused), "look at it with kubectl")
    return Check(_PLACE, kind.word, True, f"{name} exists")


def _denied(cluster: Cluster, group: str, resource: str, verbs: Sequence[str]) -> list[str]:
    return [verb for verb in verbs if not cluster.may(verb, group, resource)]


# A shell in a pod, without kubectl.


def open_shell(cluster: Cluster, pod: str) -> int:
    """Hand the terminal over to a shell in a pod, and return its exit code."""
    from kubernetes.client import ApiClient, CoreV1Api
    from kubernetes.stream import stream

    api = CoreV1Api(ApiClient(cluster.configuration))
    connection: Any = stream(
        api.connect_get_namespaced_pod_exec, pod, cluster.namespace, container=CONTAINER, command=[*_SHELL],
        stdin=True, stdout=True, stderr=False, tty=True, _preload_content=False,
    )  # fmt: skip
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard) if os.isatty(keyboard) else None

    def resize(*_: object) -> None:
        size = shutil.get_terminal_size()
        connection.write_channel(4, f'{{"Width":{size.columns},"Height":{size.lines}}}')

    try:
        if before is not None:
            tty.setraw(keyboard, termios.TCSADRAIN)  # keeps what was typed ahead
            signal.signal(signal.SIGWINCH, resize)
            resize()
        inputs = [connection.sock, keyboard]
        while connection.is_open():
            ready, _, _ = select.select(inputs, [], [], 1.0)
            if keyboard in ready:
                typed = os.read(keyboard, 4096)
                inputs = inputs if typed else [connection.sock]
                connection.write_stdin(typed.decode(errors="replace") or "\x04")
            with suppress(BrokenPipeError):
                sys.stdout.write(connection.read_stdout(timeout=0))
                sys.stdout.flush()
    finally:
        if before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
    try:
        return int(connection.returncode)
    except TypeError:  # the server did not say how the shell ended
        raise PacktrainError(f"the connection to pod {pod} was lost; attach again") from None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="packtrain.fleet.kubernetes.fleet")
    parser.add_argument("verb", choices=["exec"])
    parser.add_argument("--context")
    parser.add_argument("--namespace")
    parser.add_argument("pod")
    options = parser.parse_args(words)
    return open_shell(Cluster(options.context, options.namespace), options.pod)


if __name__ == "__main__":
    run_main(main)
