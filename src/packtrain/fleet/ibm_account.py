"""An account of IBM Cloud's classic infrastructure: its virtual servers, listed, ordered and canceled by IBM's SDK.

A server's hostname is the label of its run and a number: IBM sets it with the order itself, while tags are a second
call that a client may not live to make. So servers are found by hostname.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from packtrain.backoff import Backoff
from packtrain.errors import FieldMistake, Mistake, PacktrainError, harmless, nearest
from packtrain.fleet.cloud import Provider, Resource, StillInUse, field
from packtrain.fleet.fleet import Machine
from packtrain.identity import install_command

if TYPE_CHECKING:
    from packtrain.fleet.ibm import IbmSettings

_API_SECONDS = 120.0  # an order takes half a minute at times
_LISTED_SECONDS = 60.0
_SETTLE_SECONDS = 20.0  # for an order whose answer was lost: nobody has waited until it was listed
_SERVER = re.compile(r"(packtrain-[a-z0-9-]+-[0-9a-f]{8})-([0-9]{1,6})")
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MASK = (
    "mask[id,hostname,primaryIpAddress,primaryBackendIpAddress,provisionDate,datacenter[name],powerState[keyName],"
    "activeTransaction[id,transactionStatus[name,friendlyName]],billingItem[id,cancellationDate],userData]"
)
# Patterns of IBM's errors, code and text, and what to do about them.
_ADVICE: Sequence[tuple[str, str]] = (
    ("LoginFailed|Invalid API token|Unauthorized|Access Denied", "check SL_USERNAME and SL_API_KEY, or ~/.softlayer"),
    ("InsufficientCapacity|InsufficientResources|insufficient capacity", "try another datacenter or flavor, or later"),
    ("quota|exceed|maximum number", "cancel other servers (`packtrain down --all`), or ask IBM for a higher quota"),
    ("permission|not authorized", "give the API user the right to order and cancel virtual servers"),
)
_TEMPORARY = "InsufficientCapacity|InsufficientResources|insufficient capacity|quota|exceed|maximum number"
_GONE = "ObjectNotFound|Unable to find object"
_ENDING = "reclaim|cancel"  # in the name of a transaction

Phase = Literal["provisioning", "busy", "ready", "off", "canceled"]
_WORDS: Mapping[Phase, str] = {
    "provisioning": "provisioning",
    "busy": "busy",
    "ready": "provisioned",
    "off": "switched off, still billed",
    "canceled": "being canceled",
}

Answer = TypeVar("Answer")


class IbmRefusal(Mistake):
    """IBM refuses a call. `is_temporary`: for lack of room or quota; other servers may still be had."""

    def __init__(self, code: object, text: str) -> None:
        answer = f"{code} {text}"
        advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, answer, re.IGNORECASE)), None)
        super().__init__(f"IBM Cloud: {harmless(text).strip().rstrip('.')}{f'; {advice}' if advice else ''}")
        self.is_temporary = re.search(_TEMPORARY, answer, re.IGNORECASE) is not None
        self.is_gone = re.search(_GONE, answer) is not None


@dataclass(frozen=True)
class Server:
    """A virtual server as IBM lists it. Its addresses come with provisioning; `doing` is what IBM does with it now."""

    id: int
    hostname: str
    datacenter: str
    address: str | None
    private_address: str | None
    phase: Phase
    doing: str
    notes: Mapping[str, str]

    @property
    def state(self) -> str:
        reason = f" ({self.doing})" if self.doing and self.phase in ("provisioning", "busy") else ""
        return harmless(f"{_WORDS[self.phase]}{reason}")

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    @property
    def is_off(self) -> bool:
        return self.phase == "off"

    @property
    def is_canceled(self) -> bool:
        return self.phase == "canceled"

    @property
    def label(self) -> str:
        match = _SERVER.fullmatch(self.hostname)
        return match[1] if match else ""

    @property
    def number(self) -> int:
        match = _SERVER.fullmatch(self.hostname)
        return int(match[2]) if match else 0

    @property
    def machine(self) -> Machine:
        return Machine(self.hostname, self.state, self.is_canceled or self.is_off)


def _server(listing: Mapping[str, Any]) -> Server:
    return Server(
        id=int(listing["id"]),
        hostname=str(listing.get("hostname") or "").lower(),
        datacenter=str(field(listing, "datacenter", "name") or "?"),
        address=listing.get("primaryIpAddress") or None,
        private_address=listing.get("primaryBackendIpAddress") or None,
        phase=_phase_of(listing),
        doing=str(field(listing, "activeTransaction", "transactionStatus", "friendlyName") or "").strip(),
        notes=_notes(listing.get("userData") or ()),
    )


def _phase_of(listing: Mapping[str, Any]) -> Phase:
    is_provisioned, transaction = bool(listing.get("provisionDate")), listing.get("activeTransaction")
    status = field(listing, "activeTransaction", "transactionStatus") or {}
    # A new server may not be in the bills yet, and one that was canceled is not in them any more.
    is_billed = bool(listing.get("billingItem")) or not is_provisioned
    is_ending = re.search(_ENDING, f"{status.get('name')} {status.get('friendlyName')}", re.IGNORECASE) is not None
    if is_ending or not is_billed or field(listing, "billingItem", "cancellationDate"):
        return "canceled"
    if not is_provisioned:
        return "provisioning"
    if transaction:
        return "busy"
    return "off" if field(listing, "powerState", "keyName") == "HALTED" else "ready"


def _notes(user_data: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the tags that the order wrote down: user data, unlike tags, comes with it and takes all characters.

    Whoever can change a server can change them, too.
    """
    try:
        notes = json.loads(user_data[0]["value"])
        return {str(name): harmless(str(value)) for name, value in notes.items()}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


class IbmAccount(Provider):
    """The account of the user name and API key that the SDK finds: in the environment, or in ~/.softlayer."""

    place = "IBM Cloud"

    @cached_property
    def _client(self) -> Any:
        try:
            import SoftLayer
        except ImportError:
            raise Mistake(f"the ibm fleet needs IBM's SDK; run `{install_command('ibm')}`") from None
        client = SoftLayer.create_client_from_env(timeout=_API_SECONDS)
        if client.auth is None:
            raise Mistake("no IBM Cloud credentials; set SL_USERNAME and SL_API_KEY, or run `slcli setup`")
        if ".softlayer.com" in str(client.transport.endpoint_url):  # any other server lists what it has
            self.settle_seconds = _SETTLE_SECONDS
        return client

    def require_credentials(self) -> None:
        self._client  # noqa: B018 - finds them

    @property
    def endpoint(self) -> str:
        """The address of the API for servers: IBM's on its private network, unless the person has set another one."""
        from SoftLayer import consts

        url = str(self._client.transport.endpoint_url).rstrip("/")
        is_common = url == consts.API_PUBLIC_ENDPOINT.rstrip("/") or "/rest" in url  # a server speaks XML-RPC
        return consts.API_PRIVATE_ENDPOINT if is_common else f"{url}/"

    def _ask(self, work: Callable[[Any], Answer]) -> Answer:
        """Return the answer of the SDK's manager of virtual servers; its errors become one line."""
        client = self._client
        from SoftLayer import VSManager, exceptions

        try:
            return work(VSManager(client))
        except exceptions.TransportError as error:
            if error.faultCode in (401, 403):  # how keys of IBM Cloud's newer kind are refused
                raise IbmRefusal("LoginFailed", "the API key is refused") from None
            fault = harmless(str(error.faultString))
            reason = re.search(r"\[Errno -?[0-9]+\] ([^)\"']+)", fault)  # of the system, inside of the library's own
            fault = reason[1] if reason else fault[:200]
            raise PacktrainError(f"IBM Cloud does not answer ({fault}); try again") from None
        except exceptions.SoftLayerAPIError as error:
            raise IbmRefusal(error.faultCode, str(error.faultString)) from None
        except exceptions.SoftLayerError as error:
            raise IbmRefusal(type(error).__name__, str(error)) from None

    def servers(self, label: str | None) -> list[Server]:
        """Return the servers of a run, or of all runs, by the numbers in their names; also what is being canceled."""
        start = "packtrain-" if label is None else f"{label}-"
        listings = self._ask(lambda manager: manager.list_instances(hostname=f"{start}*", mask=_MASK))
        servers = [_server(listing) for listing in listings]
        of_runs = [server for server in servers if server.label and label in (None, server.label)]
        return sorted(of_runs, key=lambda server: (server.label, server.number, server.id))

    def resources(self, label: str | None) -> list[Resource]:
        return [
            replace(
                Resource.tagged("virtual server", f"{server.hostname} ({server.id})", server.datacenter, server.notes),
                label=server.label,
            )
            for server in self.servers(label)
        ]

    def delete(self, resource: Resource) -> None:
        self.cancel(int(resource.name.rpartition("(")[2].rstrip(")")))

    def cancel(self, server: int) -> None:
        """Cancel a server at once; its disks go with it."""
        try:
            self._ask(lambda manager: manager.cancel_instance(server))
        except IbmRefusal as refused:
            if refused.is_gone:
                return
            remaining = [listed for listed in self.servers(None) if listed.id == server and not listed.is_canceled]
            if not remaining:
                return  # gone by now, or somebody else has canceled it
            if remaining[0].is_ready or remaining[0].is_off:
                raise
            # IBM does not cancel a server in the middle of a transaction, such as its provisioning.
            raise StillInUse(f"{remaining[0].hostname}: {remaining[0].state}") from None

    def switch_on(self, server: int) -> None:
        self._ask(lambda manager: manager.guest.powerOn(id=server))

    def verify(self, order: Mapping[str, Any], settings: IbmSettings) -> None:
        """Have IBM check an order without placing it."""
        try:
            self._ask(lambda manager: manager.verify_create_instance(**order))
        except IbmRefusal as refused:
            with suppress(IbmRefusal):  # what IBM sells cannot be asked either: the first refusal says why
                if mistake := next(filter(None, self.unknown_words(settings).values()), None):
                    raise mistake from None
            raise refused from None

    def user(self) -> str:
        """Return the name of the user whose key this is."""
        user = self._ask(lambda manager: manager.client.call("Account", "getCurrentUser", mask="mask[username]"))
        return harmless(str(user.get("username") or "unknown"))

    def unknown_words(self, settings: IbmSettings) -> dict[str, FieldMistake | None]:
        """Return the mistake, if there is one, in each field that has a word of IBM's price list."""
        options = self._ask(lambda manager: manager.guest.getCreateObjectOptions())
        templates = [
            option.get("template", {}) for kind in options.values() for option in kind if isinstance(option, Mapping)
        ]
        places = {
            "datacenter": ("datacenter", "name"),
            "flavor": ("supplementalCreateObjectOptions", "flavorKeyName"),
            "os": ("operatingSystemReferenceCode",),
        }
        mistakes: dict[str, FieldMistake | None] = {}
        for name, place in places.items():
            word, words = getattr(settings, name), {field(template, *place) for template in templates} - {None, ""}
            if word is None:
                continue
            hint = nearest(word, words)
            hint = hint if hint.startswith("did you") else "see `slcli vs create-options`"
            is_sold = not words or word in words or word.endswith("_LATEST")
            mistakes[name] = None if is_sold else FieldMistake(f"fleet.ibm.{name}", f"IBM sells no {word!r}; {hint}")
        return mistakes

    def key_ids(self, labels: Sequence[str]) -> list[int]:
        from SoftLayer import SshKeyManager

        keys = self._ask(lambda _: SshKeyManager(self._client).list_keys()) if labels else []
        ids = {str(key["label"]): int(key["id"]) for key in keys}
        for label in labels:
            if label not in ids:
                advice = "add it with `slcli sshkey add`"
                raise FieldMistake("fleet.ibm.keys", f"no ssh key {label!r} in the account; {advice}")
        return [ids[label] for label in labels]

    def image_guid(self, image: str) -> str:
        """Return the GUID of an image, which an order needs, by its GUID, id or name."""
        from SoftLayer import ImageManager

        if _GUID.fullmatch(image):
            return image  # IBM checks it with the order

        def find(_: Any) -> list[Any]:
            images = ImageManager(self._client)
            if image.isdigit():
                return [images.get_image(int(image), mask="id,name,globalIdentifier")]
            named = [*images.list_private_images(name=image), *images.list_public_images(name=image)]
            return [candidate for candidate in named if candidate.get("name") == image]  # the filter ignores case

        try:
            candidates = self._ask(find)
        except IbmRefusal as refused:
            if not refused.is_gone:
                raise
            candidates = []
        guids = {str(candidate["globalIdentifier"]) for candidate in candidates if candidate}
        if len(guids) != 1:
            fault = "no such image" if not guids else "several images have that name; use the id"
            raise FieldMistake("fleet.ibm.image", f"{image!r}: {fault}; see `slcli image list`")
        return guids.pop()

    def order(self, order: Mapping[str, Any], label: str, tags: Sequence[str]) -> None:
        """Order a server and return when IBM lists it: what is not listed could not be found again and canceled."""
        server = int(self._ask(lambda manager: manager.create_instance(**order))["id"])
        self._ask(lambda manager: manager.set_tags(",".join(tags), guest_id=server))
        backoff = Backoff(0.5, 5.0, limit_seconds=_LISTED_SECONDS)
        while not any(listed.id == server for listed in self.servers(label)):
            if not backoff.wait():
                self.cancel(server)
                raise PacktrainError(f"IBM does not list server {server}, which it sold just now; it was canceled")
