"""Check what a run needs of a cluster, without creating anything: before a start, and one by one for `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from packtrain.errors import FieldMistake, Mistake
from packtrain.fleet.cloud import field
from packtrain.fleet.fleet import Check, tried
from packtrain.fleet.kubernetes.cluster import (
    ACCOUNTS,
    CLAIMS,
    NAMESPACES,
    NODES,
    ROLE_ADVICE,
    SECRETS,
    Cluster,
    Forbidden,
    Kind,
    RequestRefused,
)
from packtrain.fleet.kubernetes.manifests import is_mounted, role
from packtrain.store import Store
from packtrain.units import counted

if TYPE_CHECKING:
    from packtrain.fleet.kubernetes.fleet import KubernetesSettings

_PLACE = "kubernetes"


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


# For doctor.


def launch_checks(connect: Callable[[], Cluster], settings: KubernetesSettings, store: Store | None) -> Iterator[Check]:
    """Yield every check; without an answer of the API server there is nothing else to ask."""
    check, cluster = tried(
        _PLACE, "configuration", connect, lambda reached: f"{reached.name} at {reached.configuration.host}"
    )
    yield check
    if cluster is None:
        return
    check, version = tried(_PLACE, "API server", cluster.version, str)
    yield check
    if version is None:
        return
    yield _exists(cluster, NAMESPACES, cluster.namespace)
    yield from _rights(cluster)
    for kind, name in _named(settings):
        yield _exists(cluster, kind, name)
    check, nodes = tried(_PLACE, "nodes", lambda: check_nodes(cluster, settings), str)
    hidden = Check(_PLACE, "nodes", False, "this user may not list nodes", "pods show if they fit", skipped=True)
    yield hidden if check.ok and nodes is None else check
    if store is not None:
        usable = f"{store.url} is one that pods can use"
        yield tried(_PLACE, "store", lambda: check_store(store, settings), usable)[0]


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


def _rights(cluster: Cluster) -> Iterator[Check]:
    """Ask the cluster about every verb of the Role that a dry run prints, one check for each resource."""
    for rule in role(cluster.namespace)["rules"]:
        [group], [resource], verbs = rule["apiGroups"], rule["resources"], rule["verbs"]
        title = f"{resource}.{group}" if group else resource
        check, denied = tried(_PLACE, title, partial(_denied, cluster, group, resource, verbs), ", ".join)
        if check.ok and denied:
            check = Check(_PLACE, title, False, f"may not {check.detail}", ROLE_ADVICE)
        yield replace(check, detail=f"may {', '.join(verbs)}") if check.ok else check


def _denied(cluster: Cluster, group: str, resource: str, verbs: Sequence[str]) -> list[str]:
    return [verb for verb in verbs if not cluster.may(verb, group, resource)]
