"""The API of a Kubernetes cluster without machines: kmock over HTTP, with label and field selectors.

It keeps what is created and tells what was asked. Nothing happens by itself: a test plays scheduler and kubelet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kmock
import yaml

NAMESPACE = "training"
_KINDS = (
    "batch/v1/jobs", "v1/pods", "v1/events", "v1/nodes", "v1/secrets", "v1/persistentvolumeclaims",
    "v1/serviceaccounts",
)  # fmt: skip


@dataclass(frozen=True)
class ApiServer:
    handler: kmock.KubernetesEmulator
    url: str
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # verbs and resources, for access reviews

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """Return what there is of a kind, such as `v1/pods`."""
        [wanted] = [resource for resource in self.handler.resources if str(resource) == str(kmock.resource(kind))]
        found = [one for key, one in self.handler.objects.items() if key[0] == wanted and not one.deleted]
        return [dict(one.raw) for one in found if one.raw["metadata"].get("name")]  # a dry run has none

    def put(self, kind: str, name: str, namespace: str | None = NAMESPACE, **fields: Any) -> None:
        metadata = {"name": name, "uid": f"uid-of-{name}", **fields.pop("metadata", {})}
        self.handler.objects[kmock.resource(kind), namespace, name] = {"metadata": metadata, **fields}

    def remove(self, kind: str, name: str, namespace: str | None = NAMESPACE) -> None:
        self.handler.objects[kmock.resource(kind), namespace, name].delete()

    def refuse(self, method: str, kind: str, status: int, message: str, times: int = 1000) -> None:
        """Answer so many requests with an error."""
        left = [kmock.KubernetesError(status=status, message=message)] * times

        def answer() -> None:
            if left:
                raise left.pop()
            raise NotImplementedError  # the next reaction answers

        self.handler[method, kmock.resource(kind)] << answer

    def asked(self) -> list[str]:
        """Return every request so far: `POST /apis/batch/v1/...?dryRun=All`."""
        return [f"{request.method.value.upper()} {request.url.path_qs}" for request in self.handler]


def kubeconfig(path: Path, url: str, namespace: str = NAMESPACE) -> Path:
    cluster, user = {"name": "c", "cluster": {"server": url}}, {"name": "u", "user": {"token": "of-the-test"}}
    context = {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
    kinds = {"apiVersion": "v1", "kind": "Config", "current-context": "here"}
    path.write_text(yaml.safe_dump({**kinds, "clusters": [cluster], "users": [user], "contexts": [context]}))
    return path


def _matches(one: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    labels = one["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, is_equal, value = term.partition("=")
        if key not in labels or (is_equal and labels[key] != value):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        found: Any = one
        for step in path.split("."):
            found = (found or {}).get(step)
        if found != value:
            return False
    return True


@contextmanager
def api_server() -> Iterator[ApiServer]:
    started, over = threading.Event(), asyncio.Event()
    servers: list[ApiServer] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def listing(kind: str) -> Any:
        def answer(request: kmock.Request) -> dict[str, Any]:
            query = dict(request.params)
            return {"metadata": {}, "items": [one for one in servers[0].objects(kind) if _matches(one, query)]}

        return answer

    def delete_kept(request: kmock.Request) -> None:
        assert request.resource is not None
        servers[0].handler.objects[request.resource, request.namespace, None].delete()  # type: ignore[index]

    def forget(request: kmock.Request) -> None:
        """Undo what kmock does even in a dry run, and let the next reaction answer."""
        delete_kept(request)
        raise NotImplementedError

    def review(request: kmock.Request) -> dict[str, Any]:
        wanted = request.data["spec"]["resourceAttributes"]
        assert wanted["namespace"] == NAMESPACE
        delete_kept(request)  # a review is not kept
        return {"status": {"allowed": (wanted["verb"], wanted["resource"]) not in servers[0].forbidden}}

    async def serve() -> None:
        async with kmock.KubernetesEmulator() as handler, kmock.Server(handler) as server:
            dry_run: Any = kmock.params({"dryRun": "All"})
            handler[dry_run] ** 1 << forget
            handler[dry_run] ** -1 << {}
            for kind in _KINDS:
                handler.resources[kind] = kmock.ResourceInfo()
                handler[kmock.action.LIST, kmock.resource(kind)] ** -1 << listing(kind)
            handler["post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"] << review
            servers.append(ApiServer(handler, str(server.url).rstrip("/")))
            loops.append(asyncio.get_running_loop())
            started.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="api server", daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield servers[0]
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join(20)
