"""A namespace of a Kubernetes cluster: requests to its API server, errors in one line, and the states of pods in words.

Configuration, certificates and logins are those of kubectl, read by the official client. Objects are plain values, as
the server sends them: any version of it may leave fields out, or add some.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from packtrain.backoff import Backoff
from packtrain.errors import Mistake, harmless
from packtrain.fleet.cloud import Provider, Resource, field
from packtrain.fleet.fleet import Machine
from packtrain.fleet.kubernetes.manifests import CONTAINER, EXPIRES, HOPELESS, LABEL, OWNER, RUN, STORE, Document
from packtrain.fleet.remote import last_line
from packtrain.identity import install_command
from packtrain.system import in_home

ROLE_ADVICE = "ask its administrator for the Role that `packtrain run --dry-run` prints"
_ANSWER_SECONDS = (5.0, 20.0)  # to connect, and to answer
_RETRY_SECONDS = 20.0
_FORCE_SECONDS = 30.0  # more than its grace period: then the node of a pod does not answer
_PAGE = 500
_TEXT = 300  # characters of a message that a line repeats
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_STARTING = ("ContainerCreating", "PodInitializing", "Pending")
PHASES_OVER = ("Succeeded", "Failed")
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_VERBS = {"POST": "create", "DELETE": "delete", "GET": "get"}


class RequestRefused(Mistake):
    """The API server refused a request."""


class Missing(RequestRefused):
    """There is no such object, or no such kind of objects in this cluster."""


class Forbidden(RequestRefused):
    """This user may not do that."""


class Exists(RequestRefused):
    """There is an object of that name."""


_REFUSALS = {403: Forbidden, 404: Missing, 409: Exists}  # by the status of HTTP


@dataclass(frozen=True)
class Kind:
    """Objects of one kind, by their place in the API."""

    group: str
    resource: str
    word: str
    is_namespaced: bool = True

    def path(self, namespace: str, name: str | None = None) -> str:
        start = f"/apis/{self.group}/" if "/" in self.group else f"/api/{self.group}/"
        where = f"namespaces/{quote(namespace, safe='')}/" if self.is_namespaced else ""
        return start + where + self.resource + ("" if name is None else f"/{quote(name, safe='')}")

    @property
    def full_name(self) -> str:
        group = self.group.rpartition("/")[0]
        return f"{self.resource}.{group}" if group else self.resource


JOBS = Kind("batch/v1", "jobs", "Job")
PODS = Kind("v1", "pods", "pod")
EVENTS = Kind("v1", "events", "event")
SECRETS = Kind("v1", "secrets", "Secret")
CLAIMS = Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim")
ACCOUNTS = Kind("v1", "serviceaccounts", "ServiceAccount")
NODES = Kind("v1", "nodes", "node", is_namespaced=False)
NAMESPACES = Kind("v1", "namespaces", "namespace", is_namespaced=False)
_REVIEWS = Kind("authorization.k8s.io/v1", "selfsubjectaccessreviews", "access review", is_namespaced=False)
JOBSETS = Kind("jobset.x-k8s.io/v1alpha2", "jobsets", "JobSet")
TRAINJOBS = Kind("trainer.kubeflow.org/v1alpha1", "trainjobs", "TrainJob")
RUNTIMES = Kind("trainer.kubeflow.org/v1alpha1", "trainingruntimes", "TrainingRuntime")
_OPERATORS = (TRAINJOBS, RUNTIMES, JOBSETS)  # each creates what comes after it


class Cluster:
    """A namespace, reached as kubectl would: KUBECONFIG, ~/.kube/config, or else the pod that this process is in."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        try:
            from kubernetes.client.configuration import Configuration
            from kubernetes.client.rest import RESTClientObject
        except ImportError:
            raise Mistake(f"Kubernetes needs its client; run `{install_command('kubernetes')}`") from None
        self.configuration = Configuration()
        configured = _configure(self.configuration, context)
        self.configuration.retries = False  # of urllib3: `ask` does it, with pauses
        self.context, self.namespace = context, namespace or configured
        self.name = f"namespace {self.namespace}" + (f" of {context}" if context else "")
        self._client = RESTClientObject(self.configuration)

    def objects(self, kind: Kind, **query: str) -> list[Document]:
        documents: list[Document] = []
        token = ""
        while True:
            page = {**query, "limit": str(_PAGE), **({"continue": token} if token else {})}
            answer = self.ask("GET", kind, query=page, verb="list")
            documents += answer.get("items") or []
            token = field(answer, "metadata", "continue") or ""
            if not token:
                return documents

    def find(self, kind: Kind, name: str, accept: str = "application/json") -> Document | None:
        try:
            return self.ask("GET", kind, name, accept=accept)
        except Missing:
            return None

    def has(self, kind: Kind, name: str) -> bool:
        """True if there is such an object. Its content is not read: it may be a secret."""
        return self.find(kind, name, _METADATA_ONLY) is not None

    def version(self) -> str:
        """Return the version of the API server, such as `v1.29.1`."""
        status, answer = self._answer("GET", "/version", None, "application/json")
        if status != 200:
            raise self._refusal(status, answer, "get the version", NAMESPACES, None)
        return short(str(answer.get("gitVersion") or "unknown"))

    def may(self, verb: str, group: str, resource: str) -> bool:
        """True if this user may do that in the namespace, as the cluster itself judges."""
        name, _, subresource = resource.partition("/")
        right = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name}
        right["subresource"] = subresource
        review = {"apiVersion": _REVIEWS.group, "kind": "SelfSubjectAccessReview"}
        answer = self.ask("POST", _REVIEWS, body={**review, "spec": {"resourceAttributes": right}})
        return bool(field(answer, "status", "allowed"))

    def delete(self, kind: Kind, name: str, **options: Any) -> None:
        """Ask for the deletion; what is gone already is no error."""
        with suppress(Missing):
            self.ask("DELETE", kind, name, {"apiVersion": "v1", "kind": "DeleteOptions", **options})

    def ask(
        self,
        method: str,
        kind: Kind,
        name: str | None = None,
        body: Document | None = None,
        query: Mapping[str, str] | None = None,
        verb: str | None = None,
        accept: str = "application/json",
    ) -> Document:
        """Return the server's answer. What may only be a bad moment of it is tried again for some seconds."""
        path = kind.path(self.namespace, name) + (f"?{urlencode(query)}" if query else "")
        action = f"{verb or _VERBS[method]} {kind.full_name}"
        backoff = Backoff(0.3, 4.0, limit_seconds=_RETRY_SECONDS)
        while True:
            status, answer = self._answer(method, path, body, accept)
            if 200 <= status < 300:
                return answer
            if not (status in (0, 408, 429) or status >= 500) or not backoff.wait():
                raise self._refusal(status, answer, action, kind, name)

    def _answer(self, method: str, path: str, body: Document | None, accept: str) -> tuple[int, Document]:
        """Return the status, 0 if there was no answer, and the object; an error is an object, too."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": accept, "Content-Type": "application/json", "User-Agent": "packtrain"}
        for login in self.configuration.auth_settings().values():  # asks again for one that expires
            headers[login["key"]] = login["value"]
        url = self.configuration.host.rstrip("/") + path
        try:
            response = self._client.request(method, url, headers=headers, body=body, _request_timeout=_ANSWER_SECONDS)
            data = response.data if response.data is not None else response.read()
            status = int(response.status)
        except ApiException as error:  # older clients raise for a status, all of them for TLS
            data, status = error.body or json.dumps({"message": str(error.reason)}), int(error.status or 0)
        except (HTTPError, OSError) as error:
            return 0, {"message": _cause(error)}
        try:
            answer = json.loads(data or "{}")
        except ValueError:  # a proxy in between
            answer = {"message": data if isinstance(data, str) else data.decode(errors="replace")}
        return status, answer if isinstance(answer, dict) else {}

    def _refusal(self, status: int, answer: Document, action: str, kind: Kind, name: str | None) -> RequestRefused:
        """Return an error of one line: what is wrong, and what to do."""
        message = short(str(answer.get("message") or "")) or f"HTTP status {status}"
        where = f"in {self.name}" if kind.is_namespaced else f"of {self.context or 'the cluster'}"
        host = self.configuration.host
        text = f"the cluster refuses to {action} {where}: {message}"
        if status == 0:
            text = f"the cluster at {host} does not answer ({message}); check the context and the VPN"
        elif status == 401:
            text = f"the cluster at {host} rejects this login; try `kubectl get pods`, and log in"
        elif status == 403 and "cannot" in message:  # otherwise it is a quota or a policy, which says so itself
            user = re.search(r'[Uu]ser "([^"]*)"', message)
            text = f"{user[1] if user else 'this user'} may not {action} {where}; {ROLE_ADVICE}"
        elif status == 404 and name is None and re.search(r"namespaces? .*not found", message):
            text = f"there is no {self.name}; create it, or set fleet.kubernetes.namespace"
        return _REFUSALS.get(status, RequestRefused)(text)


def config_files() -> str:
    # Read now: the client reads KUBECONFIG only when it is imported.
    return os.environ.get("KUBECONFIG") or str(in_home(".kube/config"))


def has_access() -> bool:
    """True if there is a kubeconfig, or this process is in a pod."""
    files = (Path(file) for file in config_files().split(os.pathsep) if file)
    return any(file.exists() for file in files) or bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def _configure(configuration: Any, context: str | None) -> str:
    """Read kubectl's configuration into the client's, and return the namespace that it names."""
    from kubernetes.config import ConfigException, kube_config, load_incluster_config

    files = config_files()
    try:
        if not any(Path(file).exists() for file in files.split(os.pathsep) if file):
            if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
                load_incluster_config(client_configuration=configuration)
                return _NAMESPACE_FILE.read_text("utf-8").strip() if _NAMESPACE_FILE.exists() else "default"
            raise Mistake(f"there is no kubeconfig at {files}; log in to a cluster, or set KUBECONFIG")
        kube_config.load_kube_config(files, context, client_configuration=configuration)
        contexts, active = kube_config.list_kube_config_contexts(files)
    except ConfigException as error:
        raise Mistake(f"{files}: {short(str(error))}; see `kubectl config get-contexts`") from None
    except (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        # The client expects a file as kubectl writes it, and stumbles over any other one.
        fault = "cannot be read" if isinstance(error, OSError) else "is not a kubeconfig"
        raise Mistake(f"{files}: {fault} ({short(str(error))}); see `kubectl config view`") from None
    chosen = active if context is None else next(entry for entry in contexts if entry["name"] == context)
    return str(field(chosen, "context", "namespace") or "default")


def _cause(error: BaseException) -> str:
    """Return the innermost reason, without the objects that the outer ones name."""
    inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
    if isinstance(inner, BaseException) and inner is not error:
        return _cause(inner)
    return short(re.sub(r"^<[^>]*>: |^[A-Za-z]*Connection\([^)]*\): ", "", str(error)) or type(error).__name__)


def short(text: str) -> str:
    """Return a message of the cluster on one line, of some length at most."""
    line = harmless(" ".join(text.split()))
    return line if len(line) <= _TEXT else line[: _TEXT - 3] + "..."


class Namespace(Provider):
    """The Jobs and pods of runs in a namespace, and the objects of operators that created them."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self.cluster, self.place = cluster, cluster.name
        self._clock = clock
        self._ending: dict[str, float] = {}  # by pod: when it is overdue
        self._absent: set[Kind] = set()  # operators that the cluster does not have, or not for this person

    def resources(self, label: str | None) -> list[Resource]:
        selector = LABEL if label is None else f"{LABEL}={label}"
        resources = []
        for kind in (*_OPERATORS, JOBS, PODS):
            if kind in self._absent:
                continue
            try:
                documents = self.cluster.objects(kind, labelSelector=selector)
            except (Forbidden, Missing):
                if kind not in _OPERATORS:
                    raise
                self._absent.add(kind)
                continue
            resources += [self._resource(kind, document["metadata"]) for document in documents]
        return resources

    def _resource(self, kind: Kind, metadata: Document) -> Resource:
        annotations, marks = metadata.get("annotations") or {}, (RUN, STORE, OWNER, EXPIRES)
        if kind is PODS and metadata.get("deletionTimestamp"):
            grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
            self._ending.setdefault(metadata["uid"], self._clock() + grace + _FORCE_SECONDS)
        words = (short(annotations.get(mark, "")) for mark in marks)
        return Resource(kind.word, metadata["name"], self.place, metadata["labels"][LABEL], *words)

    def delete(self, resource: Resource) -> None:
        kind = next(kind for kind in (*_OPERATORS, JOBS, PODS) if kind.word == resource.kind)
        if kind is not PODS:
            # Foreground: it is listed until its pods are gone, and creates no others meanwhile.
            self.cluster.delete(kind, resource.name, propagationPolicy="Foreground")
            return
        pod = self.cluster.find(PODS, resource.name)
        if pod is None:
            return
        due = self._ending.get(pod["metadata"]["uid"])
        if not pod["metadata"].get("deletionTimestamp"):
            self.cluster.delete(PODS, resource.name)
        elif due is not None and self._clock() > due:
            # Its node does not answer, and ends the pod by itself as soon as it does.
            self.cluster.delete(PODS, resource.name, gracePeriodSeconds=0)


# States in words.


def is_ending(job: Document) -> bool:
    """True if a Job creates no more pods: it has ended, is being deleted, or one of its pods has succeeded."""
    succeeded = field(job, "status", "succeeded") or 0
    return ending_of(job) is not None or "deletionTimestamp" in job["metadata"] or succeeded > 0


def ending_of(job: Document) -> str | None:
    """Return how a Job ended; None while it may still create pods."""
    for condition in field(job, "status", "conditions") or ():
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            message = short(condition.get("message") or "")
            reason = condition.get("reason") or ""
            why = f" ({reason}: {message})" if message and condition["type"] == "Failed" else ""
            return f"{condition['type']}{why}"
    return None


def phase_of(pod: Document) -> str:
    return str(field(pod, "status", "phase") or "Pending")


def state_of_pod(pod: Document, events: Callable[[], Sequence[Document]]) -> str:
    """Return the state of a pod in kubectl's words, with the reason. `events` are asked for only if needed."""
    containers = field(pod, "status", "containerStatuses") or ()
    container: Document = next((container for container in containers if container.get("name") == CONTAINER), {})
    conditions = {condition["type"]: condition for condition in field(pod, "status", "conditions") or ()}
    if phase_of(pod) in PHASES_OVER:
        return _end_of(pod, field(container, "state", "terminated") or {})
    word = "Terminating" if pod["metadata"].get("deletionTimestamp") else "Running"
    if field(container, "state", "running"):
        # Pods have no readiness check: one that runs and is not ready is on a node that the cluster has lost.
        is_unready = container.get("ready") and field(conditions, "Ready", "status") == "False"
        is_lost = is_unready or field(pod, "status", "reason") == "NodeLost"
        return f"{word} (its node does not answer)" if is_lost else word
    if word == "Terminating":
        return word
    if field(conditions, "PodScheduled", "status") == "False":
        scheduled = conditions["PodScheduled"]
        return _with(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    waiting = field(container, "state", "waiting") or {"reason": phase_of(pod)}
    reason, message = waiting.get("reason") or "Pending", waiting.get("message")
    if reason in _STARTING:
        message = _warning(events())  # such as a volume that cannot be mounted
    elif reason == "ImagePullBackOff":  # what the registry said is in an event
        message = _warning(events(), "Failed") or message
    return _with(reason, message)


def _end_of(pod: Document, terminated: Document) -> str:
    phase, reason = phase_of(pod), field(pod, "status", "reason")
    if phase == "Succeeded":
        return phase
    if reason:  # Evicted, DeadlineExceeded, NodeLost
        return _with(str(reason), field(pod, "status", "message"))
    if terminated.get("reason") == "OOMKilled":
        return "OOMKilled (its memory limit is too small)"
    if (code := terminated.get("exitCode")) is None:
        return phase
    message = short(last_line(terminated.get("message") or ""))
    return f"Failed (exit code {code}" + (f": {message})" if message else ")")


def _with(word: str, message: str | None) -> str:
    return f"{word} ({short(message)})" if message else word


def _warning(events: Sequence[Document], reason: str | None = None) -> str | None:
    """Return the message of the latest warning that says more than that it is tried again."""
    warnings = [
        event
        for event in events
        if event.get("type") == "Warning" and (reason is None or event.get("reason") == reason)
    ]
    warnings.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    texts = (str(event.get("message") or "") for event in reversed(warnings))
    return next((text for text in texts if text and not text.startswith(("Back-off", "Error: "))), None)


def job_machine(job: Document, waiting: str) -> Machine:
    """Return the Job as a machine, while none of its pods is there to speak for it."""
    ending = ending_of(job)
    return Machine(job["metadata"]["name"], ending or waiting, is_over=ending is not None)


def stuck(state: str) -> Mistake | None:
    """Return the error of pods that will not start until a person changes something; None if they may."""
    word = state.partition(" ")[0]
    if word == "FailedCreate" and not re.search(r"not found|violates PodSecurity|denied", state):
        return None  # a quota, which may be free again at any moment
    if ended := re.search(r"Failed \(exit code (\d+): (.*)\)$", state):
        return Mistake(f"a node ended at its start: {ended[2]}") if int(ended[1]) in HOPELESS else None
    advice = {
        "FailedCreate": "create what is missing, or change the job",
        "ErrImagePull": "check fleet.kubernetes.image, and pull_secrets for a private registry",
        "ImagePullBackOff": "check fleet.kubernetes.image, and pull_secrets for a private registry",
        "InvalidImageName": "correct fleet.kubernetes.image",
        "ErrImageNeverPull": "load the image into the nodes, or change fleet.kubernetes.pull",
        "CreateContainerConfigError": "check the secrets in the job, and `user` if the image's is root or only a name",
        "CreateContainerError": "check fleet.kubernetes.python and the mounts",
        "RunContainerError": "check fleet.kubernetes.python: the image may not have it",
    }.get(word)
    return None if advice is None else Mistake(f"pods do not start: {state}; {advice}")
