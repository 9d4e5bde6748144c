"""IBM Cloud's classic API: the SDK's own test server, with an account whose orders and cancellations take effect.

Its virtual servers may be played by hosts (parts/hosts.py): IBM switches one on when it provisions a server, and off
when it cancels one. Everything that this account does not know is answered by the SDK's fixtures.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import SoftLayer
from SoftLayer.testing import xmlrpc

from parts.hosts import Host

USER, API_KEY = "someone", "canary-of-the-api-key"
CANCELER, CANCEL_KEY = "canceler", "canary-of-the-cancel-key"  # a user who may do nothing else
GUID = "0d0c9e2e-1111-4222-8333-123456789abc"
FLAVORS = ("B1_2X4X25", "AC1_8X60X25", "AC2_8X60X100")
NO_CAPACITY = (
    "SoftLayer_Exception_Virtual_Host_Pool_InsufficientCapacity",
    "There is insufficient capacity to complete the request.",
)
QUOTA = ("SoftLayer_Exception_Order", "This order would exceed the quota of 20 computing instances.")
BUSY = ("SoftLayer_Exception_Public", "This server has an active transaction.")


@dataclass
class _Guest:
    record: dict[str, Any]
    host: Host | None
    ordered: float = field(default_factory=time.monotonic)
    canceled: float | None = None
    is_provisioned: bool = False


class SoftLayerCloud:
    """An account and its servers; the transport of the SDK's test server."""

    def __init__(self, hosts: Sequence[Host] = ()) -> None:
        self.provision_seconds = self.cancel_seconds = 0.0
        self.room: int | None = None  # how many servers the datacenter still has
        self.cancels_while_busy = True
        self.calls: list[str] = []
        self.tags: dict[int, str] = {}
        self.before: Callable[[str], None] = lambda _: None  # called with each method before it takes effect
        self.after: Callable[[str], None] = lambda _: None  # and after; what it raises is a lost answer
        self._fixtures = SoftLayer.FixtureTransport()
        self._guests: dict[int, _Guest] = {}
        self._ids = itertools.count(1001)
        self._free = list(hosts)
        self._lock = threading.RLock()

    def __call__(self, request: Any) -> Any:
        given = request.headers.get("authenticate", {})
        user = (given.get("username"), given.get("apiKey"))
        if user != (USER, API_KEY) and (user != (CANCELER, CANCEL_KEY) or request.method != "deleteObject"):
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_User_Customer_LoginFailed", "Invalid API token.")
        name = f"{request.service.removeprefix('SoftLayer_')}.{request.method}"
        with self._lock:
            self.calls.append(name)
            self._pass_time()
            self.before(name)
            answer = self._answers.get(name)
            found = self._fixtures(request) if answer is None else answer(self, request)
            self.after(name)
            return found

    @property
    def hostnames(self) -> list[str]:
        """The servers that are billed."""
        with self._lock:
            return [one.record["hostname"] for one in self._guests.values() if one.canceled is None]

    @property
    def orders(self) -> list[dict[str, Any]]:
        """All servers that IBM lists, with what was ordered."""
        with self._lock:
            self._pass_time()
            return [one.record for one in self._guests.values()]

    def switch_off(self, hostname: str) -> None:
        with self._lock:
            for one in self._guests.values():
                if one.record["hostname"] == hostname:
                    one.record["powerState"] = {"keyName": "HALTED", "name": "Halted"}

    def _pass_time(self) -> None:
        now = time.monotonic()
        for number, one in list(self._guests.items()):
            if one.canceled is not None and now - one.canceled >= self.cancel_seconds:
                del self._guests[number]
            elif one.canceled is None and not one.is_provisioned and now - one.ordered >= self.provision_seconds:
                self._provision(one)

    def _provision(self, guest: _Guest) -> None:
        guest.is_provisioned = True
        if guest.host is not None:
            guest.host.kill()
            guest.host.start()
        address = guest.host.address if guest.host is not None else f"192.0.2.{guest.record['id'] % 250}"
        guest.record |= {
            "primaryIpAddress": address,
            "primaryBackendIpAddress": address,
            "provisionDate": "2026-01-01T00:00:00-06:00",
            "powerState": {"keyName": "RUNNING", "name": "Running"},
            "billingItem": {"id": guest.record["id"]},
        }
        del guest.record["activeTransaction"]

    def _create(self, request: Any) -> dict[str, Any]:
        self._verify(request)
        if self.room is not None and len(self.hostnames) >= self.room:
            raise SoftLayer.SoftLayerAPIError(*NO_CAPACITY)
        number = next(self._ids)
        transaction = {"id": number, "transactionStatus": {"friendlyName": "Assign Host", "name": "ASSIGN_HOST"}}
        record = {
            **request.args[0],
            "id": number,
            "globalIdentifier": f"guid-{number}",
            "activeTransaction": transaction,
        }
        self._guests[number] = _Guest(record, self._free.pop(0) if self._free else None)
        return {"id": number, "hostname": record["hostname"], "globalIdentifier": record["globalIdentifier"]}

    def _verify(self, request: Any) -> dict[str, Any]:
        [order] = request.args
        flavor = (order.get("supplementalCreateObjectOptions") or {}).get("flavorKeyName")
        if order["datacenter"]["name"] not in ("dal10", "syd04"):
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_Public", "Invalid value provided for 'datacenter'.")
        if flavor not in (None, *FLAVORS):
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_Public", "Invalid flavor.")
        if flavor == "AC2_8X60X100" and order["datacenter"]["name"] == "syd04":
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_Public", "The flavor is not available in syd04.")
        return {"virtualGuests": [order]}

    def _options(self, request: Any) -> dict[str, Any]:  # noqa: ARG002
        return {
            "datacenters": [{"template": {"datacenter": {"name": name}}} for name in ("dal10", "syd04")],
            "flavors": [{"template": {"supplementalCreateObjectOptions": {"flavorKeyName": one}}} for one in FLAVORS],
            "operatingSystems": [{"template": {"operatingSystemReferenceCode": "DEBIAN_12_64"}}],
        }

    def _power_on(self, request: Any) -> bool:
        self._guests[int(request.identifier)].record["powerState"] = {"keyName": "RUNNING", "name": "Running"}
        return True

    def _set_tags(self, request: Any) -> bool:
        self.tags[int(request.identifier)] = request.args[0]
        return True

    def _delete(self, request: Any) -> bool:
        guest = self._guests.get(int(request.identifier))
        if guest is None:
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_ObjectNotFound", "Unable to find object.")
        if guest.canceled is not None or (not guest.is_provisioned and not self.cancels_while_busy):
            raise SoftLayer.SoftLayerAPIError(*BUSY)
        guest.canceled = time.monotonic()
        reclaim = {"name": "RECLAIM_WAIT", "friendlyName": "Reclaim Wait"}
        guest.record |= {"billingItem": None, "activeTransaction": {"id": 1, "transactionStatus": reclaim}}
        if guest.host is not None:
            guest.host.kill()
            self._free.append(guest.host)
        return True

    def _list(self, request: Any) -> list[dict[str, Any]]:
        wanted = request.filter["virtualGuests"].get("hostname", {}).get("operation", "^= ")
        assert wanted.startswith("^= "), wanted
        found = [one.record for one in self._guests.values()]
        return [one for one in found if one["hostname"].startswith(wanted.removeprefix("^= "))]

    def _user(self, request: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"id": 1, "username": USER}

    def _keys(self, request: Any) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"id": 7, "label": "laptop"}, {"id": 8, "label": "desk"}]

    def _private_images(self, request: Any) -> list[dict[str, Any]]:  # noqa: ARG002
        return [{"id": 2263543, "name": "gpu-image", "globalIdentifier": GUID}]

    def _image(self, request: Any) -> dict[str, Any]:
        if int(request.identifier) != 2263543:
            raise SoftLayer.SoftLayerAPIError("SoftLayer_Exception_ObjectNotFound", "Unable to find object.")
        return {"id": 2263543, "name": "gpu-image", "globalIdentifier": GUID}

    _answers: ClassVar[dict[str, Callable[[SoftLayerCloud, Any], Any]]] = {
        "Virtual_Guest.createObject": _create,
        "Virtual_Guest.generateOrderTemplate": _verify,
        "Virtual_Guest.getCreateObjectOptions": _options,
        "Virtual_Guest.setTags": _set_tags,
        "Virtual_Guest.powerOn": _power_on,
        "Virtual_Guest.deleteObject": _delete,
        "Account.getVirtualGuests": _list,
        "Account.getCurrentUser": _user,
        "Account.getSshKeys": _keys,
        "Account.getPrivateBlockDeviceTemplateGroups": _private_images,
        "Virtual_Guest_Block_Device_Template_Group.getPublicImages": lambda _cloud, _request: [],
        "Virtual_Guest_Block_Device_Template_Group.getObject": _image,
    }


@contextmanager
def served(cloud: SoftLayerCloud, address: str = "127.0.0.1") -> Iterator[str]:
    """Serve the account and return where."""
    server = xmlrpc.create_test_server(cloud, address)
    try:
        yield f"http://{address}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def write_credentials(home: Path, endpoint: str) -> None:
    """Write the SDK's own configuration file into a home directory."""
    home.mkdir(exist_ok=True)
    lines = ["[softlayer]", f"username = {USER}", f"api_key = {API_KEY}", f"endpoint_url = {endpoint}"]
    (home / ".softlayer").write_text("\n".join([*lines, ""]))
    (home / ".softlayer").chmod(0o600)
