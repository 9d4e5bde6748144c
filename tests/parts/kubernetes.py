"""A Kubernetes cluster on three hosts: the last runs the control plane, the others a kubelet and dockerd each.

Its programs are built from Debian's source by tests/parts/kubernetes-build. All of it ends with its hosts. Pods have
addresses of their own, which every host, every pod and this computer reach by plain routes; there are no services.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from parts.hosts import PATIENCE_SECONDS, Host, Network, hosts

IMAGE = "packtrain-tests:1"
NAMESPACE = "training"
_BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
_PACKAGED = ("etcd", "dockerd", "containerd", "runc", "kubectl", "jq", "busybox")
_USERS = {"admin": "system:masters", "trainer": "", "stranger": ""}  # and their groups
_PORT = 6443
# Before the work of the tests: if even the node that is there looks late, the cluster gives up none of them.
_AHEAD = ("nice", "-n", "-10")
_CGROUPS = Path("/sys/fs/cgroup")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_PYTHON = "/opt/packtrain/bin/python"
# The first process of a pod waits for its end, and for processes that nobody else waits for.
_PAUSE = 'trap "exit 0" TERM INT; while :; do /busybox sleep 1000 & wait $!; done'

# Container managers set the OOM score of what they start, which a machine may not allow even to root.
_RUNC = """#!/bin/sh
last=
for word in "$@"; do
  [ "$last" = --bundle ] && bundle=$word
  last=$word
done
if [ -n "$bundle" ] && [ -f "$bundle/config.json" ]; then
  jq 'del(.process.oomScoreAdj, .process.rlimits)' "$bundle/config.json" > "$bundle/changed.json"
  mv "$bundle/changed.json" "$bundle/config.json"
fi
exec runc "$@"
"""


def programs() -> Path:
    """Return the directory of Kubernetes' own programs."""
    default = Path("~/.cache/packtrain-tests/kubernetes-1.20.2").expanduser()
    return Path(os.environ.get("PACKTRAIN_KUBERNETES") or default)


def missing() -> str | None:
    """Return why there can be no cluster here, or None."""
    unbuilt = [name for name in _BUILT if not os.access(programs() / name, os.X_OK)]
    if unbuilt:
        return f"no cluster was started: {programs()} has no {', '.join(unbuilt)}; run `make kubernetes` to build them"
    absent = [name for name in _PACKAGED if shutil.which(name, path=f"{os.defpath}:/usr/sbin:/usr/local/bin") is None]
    return f"Kubernetes needs {', '.join(absent)}: run tests/parts/install" if absent else None


@dataclass(frozen=True)
class KubernetesCluster:
    """`kubeconfig` has a context for each of `tokens`, by user; the first may do everything."""

    network: Network
    place: Path
    tokens: dict[str, str]

    @property
    def nodes(self) -> list[Host]:
        return list(self.network[:-1])

    @property
    def kubeconfig(self) -> Path:
        return self.place / "kubeconfig"

    @property
    def url(self) -> str:
        return f"https://{self.network[-1].address}:{_PORT}"

    def kubectl(
        self, *arguments: str, text: str | None = None, user: str = "admin", seconds: float = PATIENCE_SECONDS
    ) -> str:
        """Run the command as a user and return its output."""
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), "--context", user, *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def items(self, kind: str, *options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json", *options))["items"]
        return found

    def pods(self) -> dict[str, str]:
        """Return the node of every pod that is scheduled and not being deleted, by its name."""
        live = [pod for pod in self.items("pods") if "deletionTimestamp" not in pod["metadata"]]
        running = [pod for pod in live if pod["status"]["phase"] in ("Pending", "Running")]
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in running}

    def is_ready(self, node: Host) -> bool:
        conditions = json.loads(self.kubectl("get", "node", node.name, "-o", "json"))["status"].get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def evict(self, pod: str) -> None:
        """Ask for the pod's eviction, as a drain, an autoscaler or a spot handler does."""
        metadata = {"name": pod, "namespace": NAMESPACE}
        eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))

    def drain(self, node: Host) -> None:
        """Move the node's pods elsewhere; each has the grace of two minutes that the fleet gives it."""
        options = ("--delete-emptydir-data", "--force", "--ignore-daemonsets", "--timeout=150s")
        self.kubectl("drain", node.name, *options, seconds=160)

    def uncordon(self, node: Host) -> None:
        self.kubectl("uncordon", node.name)

    def mounts(self) -> list[str]:
        """Return the directories of a node that pods of `IMAGE` mount: Python is there, and `network.shared`."""
        return [*map(str, _python_directories()), str(self.network.shared)]

    def logs(self) -> str:
        """The last lines of all daemons, for the message of a failed test."""
        found = sorted(self.place.glob("*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-20:]) for path in found)


@contextmanager
def kubernetes(scratch: Path, count: int = 2) -> Iterator[KubernetesCluster]:
    """Start a cluster of so many nodes, and return when all of them are ready."""
    with ExitStack() as stack:
        stack.callback(_delete_orphaned_cgroups)  # when the hosts have ended
        network = stack.enter_context(hosts(scratch, count + 1, [programs(), *_python_directories()]))
        place = network.shared / "kubernetes"
        place.mkdir()
        cluster = KubernetesCluster(network, place, {user: uuid.uuid4().hex for user in _USERS})
        _write_images(place)
        # Dockerd takes seconds to start; the control plane starts meanwhile.
        for number, node in enumerate(cluster.nodes, 1):
            _start_docker(cluster, node, number)
        _start_control_plane(cluster)
        for node in cluster.nodes:
            _start_kubelet(cluster, node)
        _create_namespace(cluster)
        for node in cluster.nodes:
            _wait(cluster, partial(_is_ready, cluster, node), f"{node.name} to be ready")
        yield cluster


def _start_control_plane(cluster: KubernetesCluster) -> None:
    place, host = cluster.place, cluster.network[-1]
    lines = [f"{token},{user},{user},{_USERS[user]}" for user, token in cluster.tokens.items()]
    (place / "tokens.csv").write_text("\n".join(lines))
    subprocess.run(["openssl", "genrsa", "-out", place / "accounts.key", "2048"], check=True, capture_output=True)
    etcd, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    _daemon(
        cluster, host, "etcd", *_AHEAD, "etcd", "--data-dir=/tmp/etcd", "--unsafe-no-fsync",
        f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
    )  # fmt: skip
    _daemon(
        cluster, host, "kube-apiserver", *_AHEAD, programs() / "kube-apiserver", f"--etcd-servers={etcd}",
        f"--bind-address={host.address}", f"--advertise-address={host.address}", f"--secure-port={_PORT}",
        f"--cert-dir={place}/certificates", "--service-cluster-ip-range=10.96.0.0/24", "--authorization-mode=RBAC",
        f"--token-auth-file={place}/tokens.csv", "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default", f"--service-account-key-file={place}/accounts.key",
        f"--service-account-signing-key-file={place}/accounts.key",
    )  # fmt: skip
    cluster.kubeconfig.write_text(json.dumps(_kubeconfig(cluster)))
    cluster.kubeconfig.chmod(0o600)
    _wait(cluster, lambda: _api_is_ready(cluster), "the API server")
    own = [f"--kubeconfig={cluster.kubeconfig}", "--leader-elect=false", "--port=0", "--secure-port=0"]
    # A node that is silent is given up after seconds, not after most of a minute.
    soon = ["--node-monitor-period=1s", "--node-monitor-grace-period=12s", "--node-startup-grace-period=30s"]
    _daemon(
        cluster, host, "kube-controller-manager", *_AHEAD, programs() / "kube-controller-manager", *own, *soon,
        f"--service-account-private-key-file={place}/accounts.key",
        f"--root-ca-file={place}/certificates/apiserver.crt", "--node-eviction-rate=10",
    )  # fmt: skip
    _daemon(cluster, host, "kube-scheduler", programs() / "kube-scheduler", *own)


def _start_docker(cluster: KubernetesCluster, node: Host, number: int) -> None:
    runtime = cluster.place / "runc"
    runtime.write_text(_RUNC)
    runtime.chmod(0o755)
    for other, host in enumerate(cluster.nodes, 1):
        route = ["ip", "route", "replace", _pod_subnet(cluster.network, other), "via", host.address]
        if host is not node:
            _run(node, *route)
        elif subprocess.run([*route, "dev", cluster.network.bridge]).returncode != 0:
            raise RuntimeError(f"no route to the pods of {host.name}")
    gateway = _pod_subnet(cluster.network, number).replace(".0/", ".1/")
    # The root of a host is an overlay, which no other overlay can lie on: images are in /tmp, which is not.
    _daemon(
        cluster, node, f"dockerd-{node.name}", "dockerd", "--data-root=/tmp/docker", f"--bip={gateway}",
        "--iptables=false", "--ip6tables=false", "--ip-masq=false", "--userland-proxy=false",
        f"--cgroup-parent=/{_cgroup(cluster.network)}", "--default-ulimit=nofile=20000:20000",
        f"--add-runtime=allowed={runtime}", "--default-runtime=allowed",
    )  # fmt: skip


def _start_kubelet(cluster: KubernetesCluster, node: Host) -> None:
    _wait(cluster, lambda: node.run(["docker", "info"]).returncode == 0, f"dockerd of {node.name}")
    _import_images(cluster, node)
    configuration = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    # A lease is renewed four times in its duration, and nothing but the lease shows that a node lives.
    (cluster.place / "kubelet.json").write_text(json.dumps({**configuration, "nodeLeaseDurationSeconds": 8}))
    _daemon(
        cluster, node, f"kubelet-{node.name}", *_AHEAD, programs() / "kubelet", f"--kubeconfig={cluster.kubeconfig}",
        f"--node-ip={node.address}", "--cgroups-per-qos=false", "--enforce-node-allocatable=", "--fail-swap-on=false",
        "--pod-infra-container-image=pause:local", "--authorization-mode=AlwaysAllow", "--anonymous-auth=true",
        "--read-only-port=0", "--image-gc-high-threshold=100", "--eviction-hard=", "--resolv-conf=",
        "--cluster-dns=127.0.0.1", "--node-status-update-frequency=2s", "--sync-frequency=2s",
        f"--config={cluster.place}/kubelet.json",
    )  # fmt: skip


def _write_images(place: Path) -> None:
    """Write the roots of two images: one that only sleeps, and one whose Python is that of these tests."""
    busybox = Path(str(shutil.which("busybox"))).read_bytes()
    with tarfile.open(place / "pause.tar", "w") as pause:
        _add_file(pause, "busybox", busybox, 0o755)
    with tarfile.open(place / "image.tar", "w") as image:
        for directory in ("etc", "etc/ssl", "etc/ssl/certs", "opt/packtrain/bin", "tmp", "usr"):
            _add_directory(image, directory, 0o1777 if directory == "tmp" else 0o755)
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path(f"/{name}").is_symlink():  # Debian's are below /usr, which is mounted
                _add_link(image, name, f"usr/{name}")
        _add_file(image, "etc/passwd", b"root:x:0:0::/root:/bin/sh\ntrainer:x:1000:1000::/tmp:/bin/sh\n", 0o644)
        _add_file(image, _CERTIFICATES[1:], Path(_CERTIFICATES).read_bytes(), 0o644)
        _add_file(image, _PYTHON[1:], f'#!/bin/sh\nexec {sys.executable} "$@"\n'.encode(), 0o755)


def _import_images(cluster: KubernetesCluster, node: Host) -> None:
    pause = f"ENTRYPOINT {json.dumps(['/busybox', 'sh', '-c', _PAUSE])}"
    path = f"ENV PATH={Path(_PYTHON).parent}:/usr/local/bin:/usr/bin:/bin"
    for change, archive, image in ((pause, "pause.tar", "pause:local"), (path, "image.tar", IMAGE)):
        _run(node, "docker", "import", "-c", change, str(cluster.place / archive), image)


def _add_directory(archive: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    archive.addfile(entry)


def _add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)


def _add_file(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _python_directories() -> list[Path]:
    """Return this Python, its environment, the repository, and where else it imports from."""
    found = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    found += [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    roots: list[Path] = []
    for path in (one.resolve() for one in found):
        if not any(path.is_relative_to(root) for root in [Path("/usr"), *roots]):
            roots.append(path)
    return [Path("/usr"), *roots]


def _kubeconfig(cluster: KubernetesCluster) -> dict[str, Any]:
    server = {"server": cluster.url, "certificate-authority": str(cluster.place / "certificates" / "apiserver.crt")}
    context = {"cluster": "tests", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": server}],
        "users": [{"name": user, "user": {"token": token}} for user, token in cluster.tokens.items()],
        "contexts": [{"name": user, "context": {**context, "user": user}} for user in cluster.tokens],
        "current-context": next(iter(cluster.tokens)),
    }


def _api_is_ready(cluster: KubernetesCluster) -> bool:
    with suppress(RuntimeError):
        return cluster.kubectl("get", "--raw", "/readyz") == "ok"
    return False


def _create_namespace(cluster: KubernetesCluster) -> None:
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    # Without its account, which a controller creates, the namespace takes no pod.
    _wait(cluster, lambda: cluster.items("serviceaccounts"), "the namespace's service account")


def _is_ready(cluster: KubernetesCluster, node: Host) -> bool:
    with suppress(RuntimeError):  # its kubelet has not registered it
        return cluster.is_ready(node)
    return False


def _pod_subnet(network: Network, number: int) -> str:
    """Return the addresses of the pods on one node, which no other network of these tests has."""
    return f"10.{77 + number}.{network.prefix.rpartition('.')[2]}.0/24"


def _cgroup(network: Network) -> str:
    return f"packtrain-{network.bridge}"


def _delete_orphaned_cgroups() -> None:
    """Delete the cgroups of containers, which outlive them, where the bridge that names them is gone."""
    for top in _CGROUPS.glob("*/packtrain-pt*b"):
        if not Path("/sys/class/net", top.name.removeprefix("packtrain-")).exists():
            for path in [*sorted(top.rglob("*/"), reverse=True), top]:
                path.rmdir()


def _daemon(cluster: KubernetesCluster, host: Host, name: str, *arguments: str | Path) -> None:
    with (cluster.place / f"{name}.log").open("ab") as log:
        host.popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _run(host: Host, *arguments: str) -> None:
    done = host.run(arguments)
    if done.returncode != 0:
        raise RuntimeError(f"{host.name}: {' '.join(arguments)}: {done.stderr}")


def _wait(cluster: KubernetesCluster, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what}: {cluster.logs()}")
        time.sleep(0.1)
