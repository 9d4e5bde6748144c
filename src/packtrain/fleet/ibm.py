"""Virtual servers of IBM Cloud's classic infrastructure (SoftLayer), ordered by its SDK and started over ssh.

1. Order what is missing.
2. Wait until IBM has provisioned them and ssh answers.
3. Mount the second disk, if there is one; it is formatted only if it is blank.
4. Start the nodes, as the ssh fleet does.

IBM bills a server until it is canceled, even if it is switched off, and offers no date at which it cancels one by
itself. So the client that sees the end of a run cancels its servers, and `packtrain down` does. A server cancels itself
only if the job names a key for that (`cancel_with`): `python -m packtrain.fleet.ibm ENDPOINT SERVER USER KEY`, with the
names of the variables that have the user and the key.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import xmlrpc.client
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator
from pydantic_core import InitErrorDetails

from packtrain.backoff import Backoff
from packtrain.errors import FieldMistake, Mistake, PacktrainError
from packtrain.fleet.cloud import CloudBuilder, CloudFleet, Provider, StillInUse, label_of, tags_of, wait_until_left
from packtrain.fleet.fleet import (
    Check,
    LaunchPlan,
    Machine,
    Python,
    Releases,
    Say,
    Word,
    fault_and_advice,
    missing_package,
    missing_programs,
    node_arguments,
    passed_variables,
    run_to_check,
    silent,
    states_of,
    tried,
)
from packtrain.fleet.ibm_account import IbmAccount, IbmRefusal, Server
from packtrain.fleet.prices import list_price
from packtrain.fleet.remote import Remote, Unreachable
from packtrain.fleet.scripts import script_text
from packtrain.fleet.ssh import SshFleet, SshSettings, in_parallel
from packtrain.job import Job
from packtrain.job.part import (
    Boolean,
    Location,
    Ordinal,
    Seconds,
    StorePath,
    Variable,
    is_set,
    is_true,
    matching,
    must_be,
    rules_in_schema,
    text_in_schema,
)
from packtrain.node.preemption import OFF_VARIABLE
from packtrain.process import run_main
from packtrain.run.run import Run
from packtrain.store import Store
from packtrain.system import in_home, state_directory
from packtrain.units import BYTES_PATTERN, Duration, Machines, counted, parse_bytes

_CANCEL_SECONDS = 45.0  # less than a node waits for the end of its machine
_LOGIN_SECONDS = 300.0  # for sshd to answer on a server that IBM calls ready
_GPU_FLAVORS = ("AC1_", "AC2_")
_TRANSIENT = {
    "hourly": {"const": True},
    "local_disk": {"const": False},
    "flavor": {"not": {"type": "string", "pattern": f"^({'|'.join(_GPU_FLAVORS)})"}},  # it may be null
}
_GB = 10**9


def _read_gigabytes(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(must_be("a size, such as '100 GB'", value))
    count = parse_bytes(value)
    if count % _GB:
        raise ValueError(f"{value!r} must be a whole number of GB")
    return count // _GB


def _read_image(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise ValueError(must_be("the name, id or GUID of an image", value))
    return str(value).strip()


Gigabytes = Annotated[
    int,
    PlainValidator(_read_gigabytes, json_schema_input_type=text_in_schema(BYTES_PATTERN, "100 GB")),
    PlainSerializer(lambda count: f"{count} GB"),
]
ImageName = Annotated[str, PlainValidator(_read_image, json_schema_input_type=str | int)]
KeyLabel = Annotated[str, matching(r"[^\x00-\x1f\x7f,]{1,128}", "the label of an ssh key")]
Domain = Annotated[str, matching(r"([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63}", "a domain")]
ScriptAddress = Annotated[str, matching(r"https://[^\s\x00-\x1f\x7f]+", "an address that begins with https://")]
MountPoint = Annotated[str, matching(r"(/[A-Za-z0-9._-]+)+", "an absolute path")]


class IbmSettings(CloudBuilder):
    """Virtual servers of IBM Cloud. `disks` begins with the one they boot from; the second is mounted at `mount`.

    `keys` are labels of ssh keys in the account; `provision` is how long IBM may take; with `keep`, the servers stay
    after the end of the run, for the next one or for a look. `cancel_with` names the variables that have the user and
    the API key with which a server cancels itself after its part of the run, or at the end of the budget.
    """

    model_config = rules_in_schema(
        {"oneOf": [is_set("flavor"), {"allOf": [is_set("cpus"), is_set("memory")]}]},
        {"oneOf": [is_set("image"), is_set("os")]},
        {"if": is_true("power_off"), "then": is_set("cancel_with")},
        {"not": {"allOf": [is_true("keep"), is_set("cancel_with")]}},
        {"if": is_true("transient"), "then": {"properties": _TRANSIENT}},
    )

    datacenter: Word
    flavor: Word | None = None
    cpus: Ordinal | None = None
    memory: Gigabytes | None = None
    image: ImageName | None = None
    os: Word | None = None
    hourly: Boolean = True
    transient: Boolean = False
    disks: tuple[Gigabytes, ...] = ()
    local_disk: Boolean = False
    mount: MountPoint = "/data"
    network_mbps: Ordinal | None = None
    private: Boolean = False
    public_vlan: Ordinal | None = None
    private_vlan: Ordinal | None = None
    keys: tuple[KeyLabel, ...] = ()
    user: Word = "root"
    domain: Domain = "example.com"
    post_install: ScriptAddress | None = None
    provision: Seconds = Duration(3600.0, "seconds")
    keep: Boolean = False
    cancel_with: tuple[Variable, Variable] | None = None
    python: Python | None = None
    bundle: StorePath | None = None
    interface: Word | None = None

    @classmethod
    def arrange(cls, fields: dict[str, Any], problems: list[InitErrorDetails]) -> dict[str, Any]:  # noqa: ARG003
        # A node then ends its machine, which here means to cancel it.
        return {**fields, "power_off": True} if fields.get("cancel_with") else fields

    def faults(self) -> Iterator[tuple[Location, str]]:
        if self.flavor is not None and (self.cpus is not None or self.memory is not None):
            yield ("flavor",), "sets the processors and the memory; omit cpus and memory"
        elif self.flavor is None and (self.cpus is None or self.memory is None):
            yield ("flavor",), "is needed, such as AC2_8X60X100, or cpus and memory"
        if (self.image is None) == (self.os is None):
            yield ("image",), "is needed, or os; and only one of them"
        boot = re.search(r"X([0-9]+)$", self.flavor or "")
        if boot and self.disks and self.disks[0] != int(boot[1]):
            yield ("disks",), f"must begin with the boot disk of {self.flavor}, {boot[1]} GB"
        if self.power_off and self.cancel_with is None:
            yield ("power_off",), "has no use: IBM bills a server that is off; use cancel_with, or `packtrain down`"
        if self.keep and self.cancel_with is not None:
            yield ("keep",), "is the opposite of cancel_with; use one of them"
        if self.transient and not self.hourly:
            yield ("transient",), "servers are billed by the hour; omit hourly"
        if self.transient and self.local_disk:
            yield ("transient",), "servers have no local disks; omit local_disk"
        if self.transient and self.flavor is not None and self.flavor.startswith(_GPU_FLAVORS):
            yield ("transient",), "servers have no GPUs: IBM sells no AC1 or AC2 flavor as transient"

    def build(self) -> IbmFleet:
        return IbmFleet(self)

    @classmethod
    def missing_here(cls) -> Mapping[str, str]:
        has_keys = {"SL_USERNAME", "SL_API_KEY"} <= os.environ.keys() or in_home(".softlayer").exists()
        keys = {} if has_keys else {"credentials": "set SL_USERNAME and SL_API_KEY, or run `slcli setup`"}
        return missing_programs(ssh="openssh-client") | missing_package("SoftLayer", "ibm") | keys

    @property
    def rented_types(self) -> Sequence[str]:
        return (self.flavor or f"{self.cpus} CPUs with {self.memory} GB",)

    @property
    def port_mbps(self) -> int | None:
        return self.network_mbps

    def hourly_prices(self) -> Mapping[str, float | None]:
        [name] = self.rented_types
        # The lists are of servers that IBM does not take away, and without more disks than the flavor has.
        is_listed = self.flavor is not None and self.hourly and not self.transient and len(self.disks) <= 1
        return {f"{name} in {self.datacenter}": list_price("ibm", self.datacenter, name) if is_listed else None}

    @classmethod
    def providers(cls, places: Sequence[str]) -> Sequence[Provider]:  # noqa: ARG003
        """Return the account of this user: it has the servers of all datacenters."""
        account = IbmAccount()
        account.require_credentials()
        return [account]


class IbmFleet(CloudFleet, Releases):
    programs = ("ssh",)

    def __init__(self, settings: IbmSettings) -> None:
        self._settings = settings

    def provider(self) -> IbmAccount:
        return IbmAccount()

    def plan(self, run: Run) -> list[LaunchPlan]:
        """Return the order of each server as slcli takes it, and the command that starts the node there."""
        names = passed_variables((*run.job.environment, *(self._settings.cancel_with or ())), run.store.url)
        hosts = [f"{label_of(run)}-{number}" for number in range(1, self._settings.machines.most + 1)]
        orders = [LaunchPlan("IBM Cloud", self._slcli(run, host)) for host in hosts]
        settings = self._settings
        command = shlex.join(node_arguments(run, settings.python or "python", settings, settings.interface))
        nodes = [LaunchPlan(host, ("ssh", "--", f"{settings.user}@{host}", command), names) for host in hosts]
        return [*orders, *nodes]

    def _slcli(self, run: Run, hostname: str) -> tuple[str, ...]:
        settings = self._settings
        options = {
            "--hostname": hostname,
            "--domain": settings.domain,
            "--datacenter": settings.datacenter,
            "--billing": "hourly" if settings.hourly else "monthly",
            "--flavor": settings.flavor,
            "--cpu": settings.cpus,
            "--memory": None if settings.memory is None else settings.memory * 1024,
            "--image": settings.image,
            "--os": settings.os,
            "--network": settings.network_mbps,
            "--vlan-public": settings.public_vlan,
            "--vlan-private": settings.private_vlan,
            "--postinstall": settings.post_install,
            "--userdata": json.dumps(tags_of(run)),
        }
        flags = {"--san": not settings.local_disk, "--private": settings.private, "--transient": settings.transient}
        return (
            *("slcli", "-y", "vs", "create"),
            *(word for name, value in options.items() if value is not None for word in (name, str(value))),
            *(name for name, is_on in flags.items() if is_on),
            *(word for size in settings.disks for word in ("--disk", str(size))),
            *(word for label in settings.keys for word in ("--key", label)),
            *(word for tag in allowed_tags(run) for word in ("--tag", tag)),
        )

    def _order(self, tags: Mapping[str, str], account: IbmAccount) -> dict[str, Any]:
        """Return what all servers of the run have in common, as the SDK takes it."""
        settings = self._settings
        fields = {
            "domain": settings.domain,
            "datacenter": settings.datacenter,
            "hourly": settings.hourly,
            "local_disk": settings.local_disk,
            "flavor": settings.flavor,
            "cpus": settings.cpus,
            "memory": None if settings.memory is None else settings.memory * 1024,
            "os_code": settings.os,
            "image_id": None if settings.image is None else account.image_guid(settings.image),
            "disks": settings.disks or None,
            "nic_speed": settings.network_mbps,
            "private": settings.private or None,
            "public_vlan": settings.public_vlan,
            "private_vlan": settings.private_vlan,
            "ssh_keys": account.key_ids(settings.keys) or None,
            "transient": settings.transient or None,
            "post_uri": settings.post_install,
            "userdata": json.dumps(tags),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def check(self, job: Job, store: Store, say: Say = silent) -> None:
        for name in self._settings.cancel_with or ():
            if name not in os.environ:
                raise FieldMistake("fleet.ibm.cancel_with", f"{name} is not set here; export it before the run")
        if store.is_directory:  # known only when the servers are there, and paid for
            say(f"{store.url} is a directory: the servers have to mount it, by image or post_install; or use a bucket")
        account, first = self.provider(), run_to_check(job, store)
        account.verify({**self._order(tags_of(first), account), "hostname": f"{label_of(first)}-1"}, self._settings)

    def create(self, run: Run, plans: Sequence[LaunchPlan], say: Say) -> None:
        account = self.provider()
        self._order_missing(run, account, say)
        end = "they do that themselves at the end, and " if self._settings.cancel_with else ""
        say(f"IBM bills servers until they are canceled; {end}`{run.command('down')}` does that")
        servers = self._prepared(run, self._until_ready(run, account, say), say)
        by_host = {plan.machine: plan for plan in plans}
        starts = [by_host[server.hostname] for server in servers]
        if self._settings.interface is None:
            # Workers talk over IBM's private network, although ssh may come in at the public address.
            starts = [
                replace(
                    plan, arguments=(*plan.arguments[:-1], f"{plan.arguments[-1]} --address {server.private_address}")
                )
                for plan, server in zip(starts, servers, strict=True)
            ]
        self._over_ssh(run, servers).start(run, starts, tied=False, say=say)

    def _order_missing(self, run: Run, account: IbmAccount, say: Say) -> None:
        settings, label = self._settings, label_of(run)

        def ordered() -> set[int]:
            return {server.number for server in account.servers(label) if not server.is_canceled}

        missing = sorted(set(range(1, settings.machines.most + 1)) - ordered())
        if not missing:
            return
        order = self._order(tags_of(run), account)
        account.verify({**order, "hostname": f"{label}-{missing[0]}"}, settings)
        for number in missing:
            say(f"ordering {settings.flavor or 'a virtual server'} in {settings.datacenter}: {label}-{number}")
            try:
                account.order({**order, "hostname": f"{label}-{number}"}, label, allowed_tags(run))
            except PacktrainError as error:
                # The order may be placed, and only the answer or the tags be missing.
                numbers = ordered()
                if number in numbers:
                    continue
                enough = len(numbers) >= settings.machines.least
                if not enough or not isinstance(error, IbmRefusal) or not error.is_temporary:
                    raise
                say(f"{error}; continuing with {len(numbers)} of {settings.machines.most} servers")
                return

    def _until_ready(self, run: Run, account: IbmAccount, say: Say) -> list[Server]:
        """Return the servers when IBM has provisioned them; after the limit those that it has, if they are enough."""
        machines, states, switched = self._settings.machines, dict[str, str](), set[int]()
        backoff = Backoff(0.5, 15.0, limit_seconds=self._settings.provision.value)
        while True:
            servers = self._only_one_of_each(account.servers(label_of(run)), account)
            for server in servers:
                if states.get(server.hostname) != server.state:
                    states[server.hostname] = server.state
                    say(f"{server.hostname}: {server.state}")
                if server.is_off and server.id not in switched:
                    switched.add(server.id)
                    account.switch_on(server.id)
            late = [
                server
                for server in servers
                if not (server.is_ready and server.private_address and self._address(server))
            ]
            ready = [server for server in servers if server not in late]
            if len(servers) < machines.least:
                raise PacktrainError(f"IBM lists {len(servers)} of the {machines.least} servers; it took the others")
            if not late:
                return ready
            if not backoff.wait():
                break
        if len(ready) < machines.least:
            reasons = states_of([server.machine for server in late])
            raise PacktrainError(f"only {len(ready)} of {machines.least} servers are ready after the limit: {reasons}")
        for server in late:  # nobody would start a node there later
            say(f"{server.hostname} is not ready after the limit; continuing without it, and canceling it")
            with suppress(StillInUse):  # then the end of the run does
                account.cancel(server.id)
        return ready

    def _only_one_of_each(self, servers: Sequence[Server], account: IbmAccount) -> list[Server]:
        """Cancel servers that are too many: the run had more before, or two clients ordered the same one.

        IBM's orders have no tokens that would prevent the latter. The older one stays, for both clients.
        """
        by_host: dict[str, Server] = {}
        for server in servers:  # by number, and then by id
            if server.is_canceled:
                continue
            if server.hostname not in by_host and server.number <= self._settings.machines.most:
                by_host[server.hostname] = server
                continue
            with suppress(StillInUse):  # the next look tries again
                account.cancel(server.id)
        return list(by_host.values())

    def _prepared(self, run: Run, servers: Sequence[Server], say: Say) -> list[Server]:
        """Return the servers that ssh gets into, with their second disk mounted and, if they have a GPU, its driver."""
        settings = self._settings
        # What prepare.sh is told: where to mount the second disk, and whether there has to be a driver; or -.
        mount = settings.mount if len(settings.disks) > 1 else "-"
        gpu = "gpu" if (settings.flavor or "").startswith(_GPU_FLAVORS) else "-"
        limit = settings.provision.value if settings.post_install else _LOGIN_SECONDS

        def prepare(server: Server) -> Server:
            backoff = Backoff(0.5, 10.0, limit_seconds=limit)
            while True:
                try:
                    self._remote(run, server).script(script_text("prepare.sh"), [mount, gpu])
                    return server
                except Unreachable as fault:
                    # A server that answers may still run its post-install script, which may bring what is missing.
                    if (not fault.answers or settings.post_install) and backoff.wait():
                        continue
                    if fault.answers:
                        raise
                    advice = "check fleet.ibm.keys, and that this machine has the private key"
                    raise Unreachable(server.hostname, f"ssh does not get in ({fault.fault}); {advice}") from None

        say(f"connecting to {counted(len(servers), 'server')}")
        ready, faults = in_parallel(prepare, servers)
        if len(ready) < settings.machines.least:
            raise faults[0]
        for fault in faults:  # not canceled: it may only be this client that does not reach it
            say(f"{fault}; continuing without it, billed until the end of the run")
        return ready

    def _address(self, server: Server) -> str | None:
        return server.private_address if self._settings.private else server.address

    def _remote(self, run: Run, server: Server) -> Remote:
        # The file is the run's own, and a key is filed under the server's id: IBM gives addresses to other people's
        # servers, too, and theirs have other keys.
        options = {
            "HostName": self._address(server) or "",
            "User": self._settings.user,
            "HostKeyAlias": f"{server.hostname}.{server.id}",
            "UserKnownHostsFile": '"' + str(known_hosts(run)).replace("%", "%%") + '"',
            "StrictHostKeyChecking": "accept-new",
        }
        words = tuple(word for name, value in options.items() for word in ("-o", f"{name}={value}"))
        variables = {}
        if len(self._settings.disks) > 1:
            # Not PACKTRAIN_CACHE, which would take precedence over the job's fleet.cache.
            variables["XDG_CACHE_HOME"] = self._settings.mount
        if self._settings.cancel_with is not None:
            end = ("packtrain.fleet.ibm", self.provider().endpoint, str(server.id), *self._settings.cancel_with)
            variables[OFF_VARIABLE] = shlex.join(end)
        return Remote(server.hostname, words, tuple(variables.items()))

    def _over_ssh(self, run: Run, servers: Sequence[Server]) -> SshFleet:
        settings, by_host = self._settings, {server.hostname: server for server in servers}
        reached = SshSettings(
            hosts=tuple(by_host),
            machines=Machines(min(settings.machines.least, len(by_host)), len(by_host)),
            python=settings.python,
            bundle=settings.bundle,
            interface=settings.interface,
        )
        return SshFleet(reached, lambda host: self._remote(run, by_host[host]))

    def machines(self, run: Run) -> list[Machine]:
        servers = self.provider().servers(label_of(run))
        ready = [server for server in servers if server.is_ready]
        unready = [server.machine for server in servers if not server.is_ready]
        return [*(self._over_ssh(run, ready).machines(run) if ready else []), *unready]

    def state_in_queue(self, run: Run) -> str:
        return states_of([server.machine for server in self.provider().servers(label_of(run))])

    def down(self, run: Run, say: Say = silent) -> list[str]:
        ended = super().down(run, say)
        known_hosts(run).unlink(missing_ok=True)
        return ended

    def release(self, run: Run, say: Say = silent) -> None:
        wait_until_left(run)
        if self._settings.keep:
            say(f"The servers of {run.name} are kept, and billed until you run `{run.command('down')}`")
        else:
            self.give_back(run, say)
            known_hosts(run).unlink(missing_ok=True)

    def shell(self, run: Run, machine: str | None) -> tuple[str, ...]:
        servers = [server for server in self.provider().servers(label_of(run)) if server.is_ready]
        if not servers:
            raise Mistake(f"{run.name}: no server to open a shell on; `packtrain ls` shows their state")
        addresses = [lease.address for lease in run.leases() if lease.node == machine]
        named = [server.hostname for server in servers if server.private_address in addresses]
        return self._over_ssh(run, servers).shell(run, named[0] if named else machine)

    def checks(self, store: Store | None) -> Iterator[Check]:
        """Ask IBM for everything that an order would need; nothing is ordered."""
        place, settings, account = "ibm", self._settings, self.provider()
        check, user = tried(place, "credentials", account.user, lambda user: f"user {user}")
        yield check
        if user is None:
            return
        check, words = tried(place, "price list", lambda: account.unknown_words(settings), "readable")
        yield check
        for name, mistake in (words or {}).items():
            sold = Check(place, name, True, f"{getattr(settings, name)} is sold")
            yield sold if mistake is None else Check(place, name, False, *fault_and_advice(mistake))
        for label in settings.keys:
            yield tried(place, "key", partial(account.key_ids, [label]), f"{label}: {{0[0]}}".format)[0]
        if settings.image is not None:
            yield tried(place, "image", lambda: account.image_guid(str(settings.image)), str)[0]
        for name in settings.cancel_with or ():
            advice = "" if name in os.environ else "export it before the run"
            yield Check(place, "cancel_with", not advice, f"{name} is {'not ' if advice else ''}set here", advice)

        def verify() -> None:
            account.verify({**self._order({}, account), "hostname": "packtrain-doctor-00000000-1"}, settings)

        yield tried(place, "order", verify, "IBM would accept it")[0]
        yield tried(
            place,
            "leftovers",
            lambda: ", ".join(server.hostname for server in account.servers(None)),
            lambda names: f"servers of runs: {names}; see `packtrain down --all`" if names else "nothing",
        )[0]
        if store is not None and store.is_directory:
            advice = "mount it by image or post_install, or use a bucket"
            yield Check(place, "store", False, f"{store.url}: not known if servers have it", advice, skipped=True)


def known_hosts(run: Run) -> Path:
    """Return the file with the host keys of a run's servers."""
    directory = state_directory() / "known_hosts"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / label_of(run)


def allowed_tags(run: Run) -> list[str]:
    """Return the run's tags with the characters that IBM allows in them."""
    return [f"{name}:{re.sub(r'[^A-Za-z0-9 ._:-]', '_', value)}"[:128] for name, value in tags_of(run).items()]


def main(words: Sequence[str]) -> None:
    """Cancel this server, without the SDK, which servers do not have; try for as long as the node waits."""
    endpoint, number, *names = words
    user, key = (os.environ[name] for name in names)
    headers: dict[str, Any] = {"SoftLayer_Virtual_GuestInitParameters": {"id": int(number)}}
    basic = base64.b64encode(f"{user}:{key}".encode()).decode()
    if user != "apikey":  # the name of all users of IBM Cloud's newer keys, which go into HTTP's own header
        headers["authenticate"] = {"username": user, "apiKey": key}
    login = [("Authorization", f"Basic {basic}")] if user == "apikey" else []
    backoff = Backoff(1.0, 10.0, limit_seconds=_CANCEL_SECONDS)
    while True:
        try:
            with xmlrpc.client.ServerProxy(
                f"{endpoint}SoftLayer_Virtual_Guest", headers=login, allow_none=True
            ) as guest:
                guest.deleteObject({"headers": headers})
            return
        except (OSError, xmlrpc.client.Error) as error:
            if not backoff.wait():
                reason = error.faultString if isinstance(error, xmlrpc.client.Fault) else error
                raise PacktrainError(f"cannot cancel server {number}: {reason}") from None


if __name__ == "__main__":
    run_main(main)
